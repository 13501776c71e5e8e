"""Preference losses against the oracle: values and gradients, in float64 on whole logits."""

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from full_stats import Batch, Stats, full_stats
from oracle import preference as oracle
from tiers import first_of
from torch import Tensor

from chunked_head import losses as library
from chunked_head.losses import Losses, Summand
from chunked_head.losses.preference import log_odds
from chunked_head.losses.preference_pairs import DPO_VARIANTS
from chunked_head.losses.user.checks import check_over_ranks

VOCAB, SEGMENTS = 13, 9
EMPTY = 4  # the segment without a token
PAIRS = torch.tensor([[0, 1], [3, 2], [5, 7], [8, 0]])

CASES: list[tuple[str, dict[str, Any]]] = [
    ("dpo", {}),
    ("dpo", {"beta": 0.7}),
    ("dpo", {"label_smoothing": 0.2}),
    ("dpo", {"reference_free": True}),
    ("dpo", {"average": True}),
    ("dpo", {"variant": "ipo", "average": False}),
    ("dpo", {"variant": "sigmoid_norm", "label_smoothing": 0.1, "beta": 2.0}),
    ("dpo", {"variant": "robust", "label_smoothing": 0.3}),
    ("dpo", {"variant": "exo_pair", "label_smoothing": 1e-3}),
    ("dpo", {"variant": "discopop", "discopop_tau": 0.3}),
    *[("dpo", {"variant": variant}) for variant in DPO_VARIANTS if variant != "exo_pair"],
    ("dpo", {"variant": "aot", "label_smoothing": 0.1}),
    ("dpo", {"variant": "aot", "reference_free": True, "average": True}),
    *[("dpo", {"divergence": kind, "variant": "hinge"}) for kind in ("forward_kl", "js", "alpha")],
    ("dpo", {"divergence": "alpha", "divergence_alpha": 1.7, "average": True}),
    ("dpo", {"ld_alpha": 0.3}),
    ("dpo", {"ld_alpha": 0.1, "variant": "ipo", "divergence": "js"}),
    ("simpo", {"alpha": 0.25}),
    ("cpo", {"alpha": -0.5, "average": True}),
    ("simpo", {}),
    ("simpo", {"beta": 2.0, "gamma": 1.4}),
    ("simpo", {"beta": 2.0, "label_smoothing": 0.1}),
    ("cpo", {}),
    ("cpo", {"label_smoothing": 0.25, "average": True}),
    ("cpo", {"variant": "hinge", "beta": 0.3}),
    ("cpo", {"variant": "ipo"}),
    ("cpo", {"variant": "ipo", "average": False}),
    ("orpo", {}),
    ("orpo", {"beta": 1.0}),
    ("kto", {}),
    ("kto", {"beta": 0.4, "desirable_weight": 1.5, "undesirable_weight": 0.3}),
    ("kto", {"average": True, "beta": 1.0}),
    ("kto", {"reference_free": True}),
]


def only(losses: Losses) -> Summand:
    ((_, summand),) = losses.terms
    return summand


class Data:
    """Packed tokens in no order, some of no segment, some masked with garbage; segment 4 has none, 5 has one."""

    def __init__(self, tokens: int = 60, dtype: torch.dtype = torch.float64):
        self.x = torch.randn(tokens, VOCAB, dtype=dtype) * 2
        self.target = torch.randint(VOCAB, (tokens,))
        self.segments = torch.randint(-1, SEGMENTS, (tokens,))
        self.segments[(self.segments == EMPTY) | (self.segments == 5)] = 6
        self.segments[10] = 5
        self.counts = torch.rand(tokens) > 0.2
        self.counts[10] = True
        self.ref = full_stats(self.x + 0.3 * torch.randn_like(self.x), self.target).logprob
        self.labels = torch.arange(SEGMENTS) % 3 != 0

    def fields(self, **more: Any) -> dict[str, Any]:
        return {
            "segments": self.segments, "ref_logprobs": self.ref, "pairs": PAIRS, "segment_labels": self.labels, **more
        }  # fmt: skip

    def ours(self, losses: Losses, x: Tensor, **more: Any) -> Tensor:
        """As the framework calls it: what does not count is taken out of fields and statistics."""
        summand = only(losses)
        target = torch.where(self.counts, self.target, -1)
        fields = self.fields(**more)
        fields["segments"] = torch.where(self.counts, fields["segments"], -1)
        fields["ref_logprobs"] = torch.where(self.counts, fields["ref_logprobs"], 0.0)
        fields = {name: fields[name] for name in (*summand.fields, *summand.optional_fields) if name in fields}
        batch = Batch(fields, target, SEGMENTS, VOCAB)
        return summand.values(full_stats(x, target), batch, {})

    def theirs(self, kind: str, options: dict[str, Any], x: Tensor, **more: Any) -> Tensor:
        fields = self.fields(**more) | {"num_segments": SEGMENTS}
        fields |= {name: fields[name][self.counts] for name in ("segments", "ref_logprobs")}
        return getattr(oracle, kind)(x[self.counts], self.target[self.counts], fields, **options)


def with_gradient(values: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """Values, and their gradient under a different weight each."""
    weights = torch.linspace(0.5, 2.0, values.numel(), dtype=values.dtype)
    return values.detach(), torch.autograd.grad((values * weights).sum(), x, retain_graph=True)[0]


def assert_same(mine: Tensor, true: Tensor, x: Tensor, rtol: float = 1e-9) -> None:
    (a, da), (b, db) = with_gradient(mine, x), with_gradient(true, x)
    assert db.abs().max() > 1e-6  # or there is nothing to compare
    torch.testing.assert_close(a, b, rtol=rtol, atol=1e-11)
    torch.testing.assert_close(da, db, rtol=rtol, atol=1e-11)


@pytest.mark.parametrize(("kind", "options"), CASES, ids=str)
def test_against_oracle(kind: str, options: dict[str, Any]) -> None:
    data = Data()
    garbage = data.x.clone()
    garbage[~data.counts] = torch.nan
    data.ref[~data.counts] = torch.nan
    x = garbage.requires_grad_()
    losses = getattr(library, kind)(**options)
    mine = data.ours(losses, x)
    assert mine.shape == ((SEGMENTS,) if kind == "kto" else (len(PAIRS),))
    assert_same(mine, data.theirs(kind, options, x), x)
    assert not torch.autograd.grad(data.ours(losses, x).sum(), x)[0][~data.counts].any()


@pytest.mark.parametrize("baseline", [0.8, -0.8, "each"], ids=str)
def test_kto_baseline(baseline: float | str) -> None:
    data = Data()
    x = data.x.requires_grad_()
    value = torch.randn(SEGMENTS).double() if baseline == "each" else torch.tensor(baseline)
    value.requires_grad_()
    mine = data.ours(library.kto(beta=0.5), x, kl_baseline=value)
    assert_same(mine, data.theirs("kto", {"beta": 0.5}, x, kl_baseline=value), x)
    (gradient,) = torch.autograd.grad(data.ours(library.kto(), x, kl_baseline=value).sum(), value, allow_unused=True)
    assert gradient is None
    without = data.ours(library.kto(beta=0.5), x)
    assert torch.equal(without, mine) == (baseline == -0.8)  # below 0 it is 0


@pytest.mark.parametrize(
    "options",
    [one for kind, one in CASES if kind == "dpo" and not {"reference_free", "divergence", "ld_alpha"} & set(one)],
    ids=str,
)
def test_policy_is_reference(options: dict[str, Any]) -> None:
    """Equal policies: each loss has the value of a difference of 0."""
    data = Data()
    data.ref = full_stats(data.x, data.target).logprob
    mine = data.ours(library.dpo(**options), data.x)
    beta, eps, log2 = options.get("beta", 0.1), options.get("label_smoothing", 0.0), math.log(2)
    expected = {
        "sigmoid": log2, "sigmoid_norm": log2, "robust": log2, "nca_pair": 2 * log2, "bco_pair": 2 * log2,
        "hinge": 1.0, "ipo": 0.25 / beta**2, "sppo_hard": 0.5 / beta**2, "apo_zero": 1.0, "apo_down": 1.0,
        "exo_pair": -0.5 * math.log(4 * eps * (1 - eps)) if eps else None, "discopop": 0.5 * log2 + 0.5,
        "aot": log2, "aot_unpaired": log2,
    }[options.get("variant", "sigmoid")]  # fmt: skip
    torch.testing.assert_close(mine, torch.full_like(mine, expected), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(("kind", "options"), CASES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_empty_segments_and_empty_calls(kind: str, options: dict[str, Any], dtype: torch.dtype) -> None:
    """A pair with a segment without tokens is finite, with finite gradients; so are calls of no token and no pair."""
    data = Data(dtype=dtype)
    losses = getattr(library, kind)(**options)
    pairs = torch.tensor([[0, EMPTY], [EMPTY, 1], [EMPTY, EMPTY]])
    x = data.x.requires_grad_()
    values, gradient = with_gradient(data.ours(losses, x, pairs=pairs), x)
    assert values.isfinite().all() and gradient.isfinite().all()
    assert gradient.any()
    data.counts[:] = False
    values, gradient = with_gradient(data.ours(losses, x), x)
    assert values.isfinite().all() and not gradient.any()
    nothing = data.ours(losses, x, pairs=pairs[:0])
    assert nothing.shape == ((SEGMENTS,) if kind == "kto" else (0,))


@pytest.mark.parametrize(("kind", "options"), CASES, ids=str)
@pytest.mark.parametrize("shift", [-40.0, 40.0])
def test_far_from_the_reference(kind: str, options: dict[str, Any], shift: float) -> None:
    """Log-ratios of hundreds of nats: values and gradients stay finite in float32, and near those of float64."""
    results = []
    for dtype in (torch.float32, torch.float64):
        torch.manual_seed(5)
        data = Data(dtype=torch.float64)
        # chosen segments are far above or below their reference
        data.ref = data.ref + shift * torch.isin(data.segments, PAIRS[:, 0])
        data.x, data.ref = data.x.to(dtype), data.ref.to(dtype)
        x = data.x.requires_grad_()
        results.append(with_gradient(data.ours(getattr(library, kind)(**options), x), x))
    (values, gradient), (true_values, true_gradient) = results
    assert values.isfinite().all() and gradient.isfinite().all()
    torch.testing.assert_close(values.double(), true_values, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(gradient.double(), true_gradient, rtol=1e-3, atol=1e-4)


def test_long_sequences_keep_the_difference() -> None:
    """Scores of 10^5 nats that differ by less than their sums' rounding: the reference goes off token by token."""
    tokens = 40_000
    logprob = -5.0 * torch.rand(tokens) - 1.0
    ref = logprob + 1e-3 * torch.rand(tokens)
    segments = torch.arange(tokens) // (tokens // 2)
    batch = Batch(
        {"segments": segments, "ref_logprobs": ref, "pairs": torch.tensor([[0, 1]])},
        torch.zeros(tokens).long(),
        2,
        VOCAB,
    )
    value = only(library.dpo(beta=1.0)).values(Stats({"logprob": logprob}), batch, {})
    difference = logprob.double() - ref.double()
    u, v = difference[segments == 0].sum(), difference[segments == 1].sum()
    torch.testing.assert_close(value.double(), F.softplus(v - u)[None], rtol=1e-4, atol=0.0)


def of_tokens(losses: Losses, u: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Values of pairs of single tokens with these log-probabilities, and the gradient of their sum."""
    n, logprob = len(u), torch.cat([u, v]).requires_grad_()
    fields = {"segments": torch.arange(2 * n), "pairs": torch.arange(2 * n).view(2, n).t()}
    fields["segment_labels"] = torch.arange(2 * n) < n
    batch = Batch(fields, torch.zeros(2 * n).long(), 2 * n, VOCAB)
    values = only(losses).values(Stats({"logprob": logprob}), batch, {})
    return values, torch.autograd.grad(values.sum(), logprob)[0]


@pytest.mark.parametrize("variant", ["exo_pair", "apo_zero", "apo_down", "kto"])
def test_saturated_sigmoids_keep_their_gradient(variant: str) -> None:
    """1 - s(x) rounds to 0 in float32 where s(x) is nearly 1, and the slope s(x) * (1 - s(x)) with it."""
    u, v = -torch.tensor([20.0, 40.0, 17.0, 0.5]), -torch.tensor([41.0, 0.1, 30.0, 17.0])
    options: dict[str, Any] = {"beta": 1.0, "reference_free": True}
    losses = library.kto(**options) if variant == "kto" else None
    if losses is None:
        smoothing = 1e-3 if variant == "exo_pair" else 0.0
        losses = library.dpo(variant=variant, label_smoothing=smoothing, **options)
    _, gradient = of_tokens(losses, u, v)
    u, v = u.double(), v.double()

    def slope(x: Tensor) -> Tensor:
        return torch.exp(-x.abs()) / (1 + torch.exp(-x.abs())) ** 2

    d = u - v
    true = {
        "exo_pair": (pair := slope(d) * (d + math.log(1e-3) - math.log1p(-1e-3)), -pair),
        "apo_zero": (-slope(u), slope(v)),
        "apo_down": (slope(u) - slope(d), slope(d)),
        "kto": (-slope(u), slope(v)),
    }[variant]
    torch.testing.assert_close(gradient.double(), torch.cat(true), rtol=1e-4, atol=0.0)


@pytest.mark.parametrize("make", [
    lambda: library.dpo(variant="ipo", reference_free=True, divergence="forward_kl"),
    lambda: library.cpo(variant="ipo", alpha=1.0),
])  # fmt: skip
def test_ipo_squares_no_infinite_rewards(make: Any) -> None:
    values, gradient = of_tokens(make(), -torch.tensor([300.0, 39.0]), -torch.tensor([1.0, 300.0]))
    assert values.isfinite().all() and gradient.isfinite().all()
    u, v = torch.tensor([-40.0, -39.0]).double(), torch.tensor([-1.0, -40.0]).double()
    slope = 2 * ((-v).exp() - (-u).exp() - 5.0)
    true = torch.cat([slope * (-u).exp(), -slope * (-v).exp()]) * torch.tensor([0.0, 1.0, 1.0, 0.0])
    torch.testing.assert_close(gradient.double(), true, rtol=1e-5, atol=0.0)


def test_discopop_far_below() -> None:
    """Differences at which exp(-d) alone overflows."""
    summand = only(library.dpo(beta=1.0, variant="discopop"))
    logprob = torch.tensor([-150.0, -1.0], requires_grad=True)
    fields = {"segments": torch.arange(2), "ref_logprobs": torch.zeros(2), "pairs": torch.tensor([[0, 1]])}
    value = summand.values(Stats({"logprob": logprob}), Batch(fields, torch.zeros(2).long(), 2, VOCAB), {})
    torch.testing.assert_close(value, torch.tensor([149.0]))
    torch.testing.assert_close(torch.autograd.grad(value.sum(), logprob)[0], torch.tensor([-1.0, 1.0]))


def test_order_of_tokens_changes_nothing() -> None:
    data = Data()
    mine = data.ours(library.dpo(beta=1.0), data.x)
    order = torch.randperm(len(data.x))
    for name in ("x", "target", "segments", "counts", "ref"):
        setattr(data, name, getattr(data, name)[order])
    torch.testing.assert_close(data.ours(library.dpo(beta=1.0), data.x), mine, rtol=1e-12, atol=1e-12)
    assert mine.unique().numel() == len(PAIRS)


def test_log_odds() -> None:
    a = torch.tensor([-1e-6, -1e-3, -0.3, -0.69, -0.7, -3.0, -200.0]).double().requires_grad_()
    p = a.detach().exp()
    torch.testing.assert_close(log_odds(a), (p / -torch.expm1(a.detach())).log(), rtol=1e-10, atol=1e-10)
    (gradient,) = torch.autograd.grad(log_odds(a).sum(), a)
    torch.testing.assert_close(gradient, -1 / torch.expm1(a.detach()), rtol=1e-10, atol=1e-10)
    assert torch.autograd.gradcheck(log_odds, a.detach()[1:].requires_grad_())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_log_odds_at_the_ends(dtype: torch.dtype) -> None:
    """Probabilities that round to 1 or 0: finite where the truth is, else large and of its sign; gradients finite."""
    a = torch.tensor([0.0, -torch.finfo(dtype).eps / 2, -1e30, -torch.inf], dtype=dtype, requires_grad=True)
    values = log_odds(a)
    (gradient,) = torch.autograd.grad(values.sum(), a)
    assert values[:3].isfinite().all() and values[3] == -torch.inf
    assert (values[:2] > 15).all() and values[2] == torch.tensor(-1e30, dtype=dtype)
    assert gradient.isfinite().all()
    assert (gradient[:2] > 1e6).all() and (gradient[2:] == 1).all()


def test_sure_segments_are_finite() -> None:
    """ORPO of segments whose probability rounds to 1."""
    x = torch.zeros(4, VOCAB)
    x[:2, 0] = 200.0
    x.requires_grad_()
    target = torch.zeros(4).long()
    fields = {"segments": torch.tensor([0, 0, 1, 1]), "pairs": torch.tensor([[0, 1], [1, 0], [0, 0]])}
    values = only(library.orpo(1.0)).values(full_stats(x, target), Batch(fields, target, 2, VOCAB), {})
    (gradient,) = torch.autograd.grad(values.sum(), x)
    assert values.isfinite().all() and gradient.isfinite().all()
    assert values[0] < 1e-5 and values[1] > 10
    torch.testing.assert_close(values[2], torch.tensor(0.5).log().neg())


@pytest.mark.parametrize("variant", first_of(DPO_VARIANTS, 2))
def test_compiles_and_differentiates(variant: str) -> None:
    """Under torch.func.grad, and as one graph with dynamic shapes."""
    data = Data(dtype=torch.float32)
    summand = only(library.dpo(variant=variant, label_smoothing=0.1 if variant == "exo_pair" else 0.0))
    target = torch.where(data.counts, data.target, -1)

    def total(logprob: Tensor) -> Tensor:
        batch = Batch(data.fields(), target, SEGMENTS, VOCAB)
        return summand.values(Stats({"logprob": logprob}), batch, {}).sum()

    logprob = full_stats(data.x, data.target).logprob
    torch._dynamo.reset()  # each variant is a compilation of the same code
    eager = torch.func.grad(total)(logprob)
    compiled = torch.compile(torch.func.grad(total), fullgraph=True, dynamic=True, backend="eager")(logprob)
    assert eager.any()
    torch.testing.assert_close(compiled, eager)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: library.dpo(beta=0.0), "beta of losses.dpo must be a number in"),
        (lambda: library.dpo(variant="kto"), "variant of losses.dpo must be one of 'sigmoid'"),
        (lambda: library.dpo(variant="exo_pair"), "must be between 0 and 1 for 'exo_pair'"),
        (lambda: library.dpo(variant="robust", label_smoothing=0.5), "must be below 0.5 for 'robust'"),
        (lambda: library.dpo(variant="hinge", label_smoothing=0.1), "does not apply to variant 'hinge'"),
        (lambda: library.dpo(variant="discopop", discopop_tau=0.0), "discopop_tau of losses.dpo"),
        (lambda: library.dpo(token_weights="token_weights"), "values are per pair"),
        (lambda: library.cpo(variant="robust"), "variant of losses.cpo must be one of"),
        (lambda: library.simpo(gamma="1"), "gamma of losses.simpo must be a number"),
        (lambda: library.orpo(beta=-1.0), "beta of losses.orpo must be a number"),
        (lambda: library.kto(desirable_weight=-1.0), "desirable_weight of losses.kto must be a number"),
    ],
)
def test_errors(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_fields() -> None:
    assert only(library.dpo()).fields == ("segments", "pairs", "ref_logprobs")
    assert only(library.dpo(reference_free=True)).fields == ("segments", "pairs")
    assert only(library.kto()).fields == ("segments", "segment_labels", "ref_logprobs")
    for losses in (library.dpo(), library.simpo(), library.cpo(), library.orpo()):
        assert (only(losses).unit, only(losses).scope) == ("pair", "segment")
    assert (only(library.kto()).unit, only(library.kto()).scope) == ("segment", "segment")


class Rectangular:
    """Liger's layout: chosen sequences [P, L], then rejected ones, with ignored positions."""

    def __init__(self) -> None:
        pairs, length, width = 3, 7, 6
        self.hidden = torch.randn(2 * pairs, length, width).double().requires_grad_()
        self.ref_hidden = self.hidden.detach() + 0.5 * torch.randn_like(self.hidden)
        self.weight = torch.randn(VOCAB, width).double()
        self.target = torch.randint(VOCAB, (2 * pairs, length))
        self.target[torch.rand(self.target.shape) < 0.25] = -100
        self.target[:, 0] = 1  # Liger's means of nothing are no numbers
        self.pairs = torch.stack([torch.arange(pairs), torch.arange(pairs) + pairs], 1)
        self.labels = torch.tensor([True, False, True, True, False, False])

    def ours(self, losses: Losses, **more: Tensor) -> Tensor:
        target = self.target.flatten()
        target = torch.where(target == -100, -1, target)
        x, ref = ((h @ self.weight.T).flatten(0, 1) for h in (self.hidden, self.ref_hidden))
        segments = torch.arange(len(self.target)).repeat_interleave(self.target.shape[1])
        fields = {
            "segments": segments, "ref_logprobs": full_stats(ref, target).logprob, "pairs": self.pairs,
            "segment_labels": self.labels, **more,
        }  # fmt: skip
        batch = Batch(fields, target, len(self.target), VOCAB)
        return only(losses).values(full_stats(x, target), batch, {}).mean()

    def assert_same(self, mine: Tensor, theirs: Tensor) -> None:
        (a,) = torch.autograd.grad(mine, self.hidden)
        (b,) = torch.autograd.grad(theirs, self.hidden)
        assert b.abs().max() > 1e-5
        torch.testing.assert_close(mine, theirs.double(), rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)  # Liger's softmax is float32


@pytest.mark.parametrize("variant", sorted(set(DPO_VARIANTS) - {"ipo", "sigmoid_norm", "aot", "aot_unpaired"}))
def test_liger_dpo(variant: str) -> None:
    """IPO is not in Liger; its sigmoid ignores label smoothing."""
    liger = pytest.importorskip("liger_kernel.chunked_loss")
    data, smoothing = Rectangular(), 0.1 if variant in ("robust", "exo_pair") else 0.0
    theirs = liger.LigerFusedLinearDPOLoss(beta=0.3, loss_type=variant, label_smoothing=smoothing, compiled=False)
    loss = theirs(data.weight, data.hidden, data.target, ref_input=data.ref_hidden, ref_weight=data.weight)[0]
    data.assert_same(data.ours(library.dpo(0.3, variant, label_smoothing=smoothing)), loss)


@pytest.mark.parametrize("kind", ["SimPO", "CPO", "ORPO"])
def test_liger_without_reference(kind: str) -> None:
    """The pair terms; Liger's NLL is switched off, for it is a summand of its own here."""
    liger = pytest.importorskip("liger_kernel.chunked_loss")
    data = Rectangular()
    more = {} if kind == "ORPO" else {"label_smoothing": 0.1}
    theirs = getattr(liger, f"LigerFusedLinear{kind}Loss")(beta=0.3, compute_nll_loss=False, compiled=False, **more)
    loss = theirs(data.weight, data.hidden, data.target)[0]
    data.assert_same(data.ours(getattr(library, kind.lower())(0.3, **more)), loss)


def test_liger_kto() -> None:
    """Liger has no weights of desirable and undesirable segments, and does not bound the baseline."""
    liger = pytest.importorskip("liger_kernel.chunked_loss")
    data = Rectangular()
    theirs = liger.LigerFusedLinearKTOLoss(beta=0.3, use_ref_model=True, compiled=False)
    loss = theirs(
        data.hidden, data.weight, data.target, preference_labels=data.labels, ref_input=data.ref_hidden,
        ref_weight=data.weight, kl=torch.tensor(0.4),
    )[0]  # fmt: skip
    data.assert_same(data.ours(library.kto(0.3), kl_baseline=torch.tensor(0.4)), loss)


@pytest.mark.parametrize("variant", ["sigmoid", "hinge", "ipo", "simpo"])
def test_alphapo_against_trl(variant: str) -> None:
    trainer = pytest.importorskip("trl.experimental.cpo").CPOTrainer
    u, v = -torch.rand(2, 5, dtype=torch.float64)
    given = {"alpha": 0.3, "loss_type": variant, "beta": 0.4, "label_smoothing": 0.0, "simpo_gamma": 0.5}
    theirs, *_ = trainer.cpo_loss(SimpleNamespace(**given, accelerator=SimpleNamespace(device="cpu")), u, v)
    ours = library.simpo(0.4, 0.5, alpha=0.3) if variant == "simpo" else library.cpo(0.4, variant, alpha=0.3)
    pairs, segments = torch.arange(10).view(2, 5).t(), torch.arange(10)
    batch = Batch({"segments": segments, "pairs": pairs}, torch.zeros(10, dtype=torch.int64), 10, VOCAB)
    values = only(ours).values(Stats({"logprob": torch.cat([u, v])}), batch, {})
    torch.testing.assert_close(values, theirs)


def test_places_in_a_segment_are_refused_over_ranks() -> None:
    with pytest.raises(ValueError, match="needs each token's place in its segment"):
        check_over_ranks(only(library.dpo(ld_alpha=0.5)), "loss", frozenset(), {})
