"""Losses where exponentials overflow, sigmoids saturate and bounds are met exactly: one token, or one pair, a call.

A row of two logits, [log(p / (1 - p)), 0], has any log-probability of its target; its gradient divided by 1 - p is the
slope of the loss in that log-probability.
"""

import math
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from loss_cases import case, inputs_of
from oracle.policy import ESTIMATORS
from oracle.rows import ROWS
from test_formulas import of_sizes
from torch import Tensor

from chunked_head import linear_loss, logits_logprobs, logits_loss, losses
from chunked_head.losses import Losses

F64 = torch.float64
# rows of the oracle, and GSPO's other level
RATIO_LOSSES: dict[str, dict[str, Any]] = {
    kind: {} for kind, row in ROWS.items() if {"old_logprobs", "advantages"} <= {*row.fields}
} | {"gspo-token": {"level": "token"}}
LABEL_LOSSES = [(kind, options) for kind, row in ROWS.items() if not row.fields for options in row.options]
PREFERENCES = [
    (kind, options) for kind, row in ROWS.items() for options in row.options
    if "segments" in row.fields and "old_logprobs" not in row.fields
]  # fmt: skip
SCORED = ("reinforce", "cispo", "vespo")  # the log-probability times a factor that is detached: has a slope everywhere
EXTREME = [-1e4, -100.0, -21.0, 0.0, 21.0, 100.0, 1e4, math.inf]


def logits(logprob: Tensor) -> Tensor:
    """Two logits [n, 2] for each log-probability of the first."""
    return torch.stack([logprob - torch.log(-torch.expm1(logprob)), torch.zeros_like(logprob)], -1)


def units(loss: Losses, x: Tensor, **fields: Tensor) -> tuple[Tensor, Tensor]:
    """By units of some tokens, one call each: values [n], and slopes in the log-probability of each token.

    ``x`` is [n, 2] for tokens that are segments by themselves, [n, 2, 2] for pairs of such segments.
    """
    values, slopes = [], []
    for i, row in enumerate(x):
        rows = row.view(-1, 2).detach().requires_grad_()
        n = len(rows)
        batch = {name: field[i].view(-1) for name, field in fields.items()} | {"segments": torch.arange(n)}
        if n == 2:
            batch |= {"pairs": torch.tensor([[0, 1]]), "segment_labels": torch.tensor([True, False])}
        needed = {name for _, one in loss.terms for name in (*one.fields, *one.optional_fields)}
        batch = {name: field for name, field in batch.items() if name in needed}
        target = torch.zeros(n, dtype=torch.int64)
        value = logits_loss(rows, target, loss, batch=batch, num_segments=n, reduction="sum").loss
        values.append(value.detach())
        slopes.append(torch.autograd.grad(value, rows)[0][:, 0] / rows.detach().softmax(-1)[:, 1])
    return torch.stack(values), torch.stack(slopes).view(x.shape[:-1])


def ratios(loss: Losses, log_ratio: Tensor, advantages: Tensor, rollout: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Values and slopes of tokens of these log-ratios to the old policy, and of the old to the rollout's."""
    far = -log_ratio if rollout is None else -torch.minimum(log_ratio, rollout)
    x = logits(torch.linspace(-3.0, -0.1, len(log_ratio), dtype=log_ratio.dtype) - far.clamp(min=0))
    old = logits_logprobs(x, torch.zeros(len(x), dtype=torch.int64)) - log_ratio
    more = {} if rollout is None else {"rollout_logprobs": old - rollout}
    return units(loss, x, old_logprobs=old, advantages=advantages, **more)


def loss_of(kind: str, **options: Any) -> Losses:
    return getattr(losses, kind.partition("-")[0])(**RATIO_LOSSES.get(kind, {}), **options)


@pytest.mark.parametrize("dtype", [torch.float32, F64])
@pytest.mark.parametrize("kind", RATIO_LOSSES)
def test_extreme_ratios_stay_finite(kind: str, dtype: torch.dtype) -> None:
    log_ratio = torch.tensor(EXTREME, dtype=dtype)
    for advantage in (-1.0, 0.0, 1.0):
        values, slopes = ratios(loss_of(kind), log_ratio, torch.full_like(log_ratio, advantage))
        assert values.isfinite().all() and slopes.isfinite().all()
        assert values.any() == slopes.any() == (advantage != 0)
        if advantage and kind not in SCORED:
            # clamped: constant in the log-probability (e^-20 is below any lower clip where that acts)
            assert not slopes[log_ratio.abs() > 20].any()
            torch.testing.assert_close(slopes[3].item(), -advantage, rtol=1e-6, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, F64])
@pytest.mark.parametrize("kind", [kind for kind in RATIO_LOSSES if kind not in ("reinforce", "vespo")])
def test_without_clamp_gradients_are_finite_where_values_are(kind: str, dtype: torch.dtype) -> None:
    loss = loss_of(kind, ratio_clamp=None, **({"dual_clip": 3.0} if kind == "grpo" else {}))
    log_ratio = torch.tensor(EXTREME, dtype=dtype)
    for advantage in (-1.0, 0.0, 1.0):
        values, slopes = ratios(loss, log_ratio, torch.full_like(log_ratio, advantage))
        assert not values.isnan().any() and slopes[values.isfinite()].isfinite().all()
        # only a negative advantage without an upper bound has infinite values
        assert bool(values.isinf().any()) == (advantage < 0 and kind in ("gspo", "gspo-token", "gmpo", "rloo"))
        if kind == "grpo" and advantage:
            expected = [0, 0, 0, 1, 1.2, 1.2, 1.2, 1.2] if advantage > 0 else [0.8] * 3 + [1] + [3.0] * 4
            bounded = torch.tensor(expected, dtype=dtype) * -advantage
            torch.testing.assert_close(values, bounded, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("kind", RATIO_LOSSES)
def test_an_impossible_target_without_advantage(kind: str) -> None:
    """A target of probability 0, as under a banned token's logit of -inf."""
    x = torch.tensor([[-math.inf, 0.0], [-1.0, 0.0]], dtype=F64)
    old = torch.stack([torch.tensor(-2.0, dtype=F64), logits_logprobs(x[1:], torch.zeros(1, dtype=torch.int64))[0]])
    values, slopes = units(loss_of(kind), x, old_logprobs=old, advantages=torch.tensor([0.0, 1.0], dtype=F64))
    assert values[0] == 0 and values[1] and slopes[0] == 0
    torch.testing.assert_close(slopes[1].item(), -1.0)


def test_nan_is_not_hidden() -> None:
    """A log-ratio that is nan at a token that counts shows, unless its advantage is 0."""
    log_ratio, advantages = torch.full((3,), math.nan), torch.tensor([-1.0, 0.0, 1.0])
    for kind in ("grpo", "gspo", "rloo", "sapo", "gmpo"):
        values, _ = ratios(loss_of(kind), log_ratio, advantages)
        assert values.isnan().tolist() == [True, False, True], kind


@pytest.mark.parametrize("kind", ["grpo", "gspo", "gspo-token", "rloo"])
def test_gradients_flow_at_the_bound(kind: str) -> None:
    """Bounds that are the ratio itself: the gradient is the unclipped one; an ulp closer and there is none."""
    x, one = logits(torch.full((1,), -3.0, dtype=F64)), torch.ones(1, dtype=F64)
    logprob = logits_logprobs(x, torch.zeros(1, dtype=torch.int64))
    for log_ratio, sign in ((0.15, 1.0), (-0.15, -1.0)):
        fields = {"old_logprobs": logprob - log_ratio, "advantages": sign * one}
        ratio = (logprob - fields["old_logprobs"]).exp()
        edge, side = (ratio - 1).abs().item(), "clip_high" if sign > 0 else "clip_low"
        _, at = units(loss_of(kind, **{side: edge}), x, **fields)
        values, inside = units(loss_of(kind, **{side: edge - 2**-52}), x, **fields)
        torch.testing.assert_close(at, -sign * ratio)
        torch.testing.assert_close(values, -sign * ratio)
        assert inside.item() == 0
    _, on_policy = units(loss_of(kind, clip_low=0.0, clip_high=0.0), x, old_logprobs=logprob, advantages=-one)
    torch.testing.assert_close(on_policy.item(), 1.0)


@pytest.mark.parametrize("name", ["delta", "dual_clip"])
def test_gradients_flow_at_the_ceiling(name: str) -> None:
    x, one = logits(torch.full((1,), -3.0, dtype=F64)), torch.ones(1, dtype=F64)
    logprob = logits_logprobs(x, torch.zeros(1, dtype=torch.int64))
    fields = {"old_logprobs": logprob - 0.6, "advantages": -one}
    ratio = (logprob - fields["old_logprobs"]).exp().item()
    _, at = units(losses.grpo(**{name: ratio}), x, **fields)
    values, beyond = units(losses.grpo(**{name: math.nextafter(ratio, 0)}), x, **fields)
    torch.testing.assert_close(at.item(), ratio)
    assert beyond.item() == 0 and math.isclose(values.item(), ratio)


@pytest.mark.parametrize("dtype", [torch.float32, F64])
def test_rollout_weights_stay_finite(dtype: torch.dtype) -> None:
    rollout, ones = torch.tensor([1e4, 100.0, -100.0, -1e4, math.inf], dtype=dtype), torch.ones(5, dtype=dtype)
    for mode, largest in (("truncate", 2.0), ("mask", 0.0)):
        for level in ("token", "segment"):
            loss = losses.grpo(rollout=mode, rollout_level=level)
            expected = torch.where(rollout > 0, largest, 0.0).to(dtype)
            for found in ratios(loss, 0 * ones, ones, rollout):
                torch.testing.assert_close(-found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("kind", "options"),
    [("grpo", {}), ("gspo", {}), ("gspo", {"weighting": "token"}), ("gspo", {"level": "token"}), ("rloo", {}),
     ("gmpo", {"clip_low": math.inf, "clip_high": math.inf})],
)  # fmt: skip
def test_a_rollout_weight_of_0_leaves_nothing_of_an_infinite_ratio(kind: str, options: dict[str, Any]) -> None:
    log_ratio, advantages = torch.tensor([90.0, 0.1, 90.0]), torch.tensor([-1.0, -1.0, -2.0])
    loss = getattr(losses, kind)(ratio_clamp=None, rollout="mask", rollout_min=0.5, **options)
    # the first and the last have a weight of e^-2 and of e^90, both outside
    for found in ratios(loss, log_ratio, advantages, torch.tensor([-2.0, 0.0, 90.0])):
        torch.testing.assert_close(found, torch.tensor([0.0, math.exp(0.1), 0.0]))


def test_vespo_of_large_exponents() -> None:
    """In fp32 a phi of e^104 beside an advantage of e^-40, and ratios that are infinite or nearly so."""
    log_ratio = torch.tensor([11.5, 11.5, 11.0, 8.0, 87.0, torch.inf, 0.0])
    advantages = torch.tensor([4e-18, -4e-18, 1e-12, 1.0, 1.0, 1.0, 1e-6])
    loss = losses.vespo(k_pos=10.0, lambda_pos=0.0, k_neg=10.0, lambda_neg=0.0, ratio_clamp=math.inf)
    values, slopes = ratios(loss, log_ratio, advantages)
    w = log_ratio.double().clamp(math.log(1e-8), 100.0)
    phi = (10.0 * w + 1e-4 * (1.0 - w.exp())).exp() * -advantages.double()
    torch.testing.assert_close(slopes, phi.float(), rtol=3e-5, atol=0.0)
    logprob = torch.linspace(-3.0, -0.1, len(log_ratio)).double()
    torch.testing.assert_close(values, (phi * logprob).float(), rtol=3e-5, atol=0.0)


# ---- KL to a reference


def to_reference(loss: Losses, d: Tensor, **fields: Tensor) -> tuple[Tensor, Tensor]:
    """Values and slopes of tokens whose reference is likelier by ``d`` nats."""
    x = logits(-1.5 - d.clamp(min=0))
    logprob = logits_logprobs(x, torch.zeros(len(d), dtype=torch.int64))
    return units(loss, x, ref_logprobs=logprob + d, **fields)


def test_kl_of_extreme_ratios_is_finite() -> None:
    d = torch.tensor([*EXTREME[:-1], -math.inf])
    for estimator in ESTIMATORS:
        for correction in (False, True)[: 1 if estimator.endswith("+") else 2]:
            loss = losses.kl_to_reference(estimator, correction)
            values, slopes = to_reference(loss, d, old_logprobs=-1.5 - d.flip(0).abs())
            assert values.isfinite().all() and slopes.isfinite().all() and values.any()
            assert correction or not slopes[d.abs() > 20].any()


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_a_clamp_of_the_kl_alone(estimator: str) -> None:
    """It acts before anything overflows, on the value and on its slope; a "+" keeps the slope of k2."""
    d = torch.tensor([-1e4, -100.0, -1.0, 0.5, 89.0, 100.0, 1e4])
    loss, kind = losses.kl_to_reference(estimator, log_ratio_clamp=None, kl_clamp=10.0), estimator.removesuffix("+")
    values, slopes = to_reference(loss, d)
    e = d.double()
    exact = {"k1": -e, "abs": e.abs(), "k2": e * e / 2, "k3": torch.expm1(e) - e}[kind]
    torch.testing.assert_close(values.double(), exact.clamp(-10.0, 10.0), rtol=1e-5, atol=1e-5)
    slope = {"k1": 1.0, "abs": -d.sign(), "k2": -d, "k3": 1.0 - d.exp()}[kind]
    slope = -d if estimator.endswith("+") else torch.where(exact.abs() <= 10.0, slope, 0.0)
    torch.testing.assert_close(slopes, slope)


# ---- pairs and labels


def pairs(loss: Losses, u: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Values of pairs of single tokens with these log-probabilities, and the slopes in u, then in v."""
    values, slopes = units(loss, torch.stack([logits(u), logits(v)], 1), ref_logprobs=torch.zeros(len(u), 2))
    return values, slopes.t().flatten()


@pytest.mark.parametrize("variant", ["exo_pair", "apo_zero", "apo_down", "kto"])
def test_saturated_sigmoids_keep_their_gradient(variant: str) -> None:
    """1 - s(x) rounds to 0 in float32 where s(x) is nearly 1, and the slope s(x) * (1 - s(x)) with it."""
    u, v = -torch.tensor([20.0, 40.0, 17.0, 0.5]), -torch.tensor([41.0, 0.1, 30.0, 17.0])
    smoothing = {"label_smoothing": 1e-3} if variant == "exo_pair" else {}
    loss = losses.kto(beta=1.0) if variant == "kto" else losses.dpo(beta=1.0, variant=variant, **smoothing)
    _, slopes = pairs(loss, u, v)
    u, v = u.double(), v.double()

    def slope(x: Tensor) -> Tensor:
        return torch.exp(-x.abs()) / (1 + torch.exp(-x.abs())) ** 2

    d = u - v
    true = {
        "exo_pair": (pair := slope(d) * (d + math.log(1e-3) - math.log1p(-1e-3)), -pair),
        "apo_zero": (-slope(u), slope(v)), "apo_down": (slope(u) - slope(d), slope(d)), "kto": (-slope(u), slope(v)),
    }[variant]  # fmt: skip
    torch.testing.assert_close(slopes.double(), torch.cat(true), rtol=1e-4, atol=0.0)


@pytest.mark.parametrize("make", [
    lambda: losses.dpo(variant="ipo", divergence="forward_kl"), lambda: losses.cpo(variant="ipo", alpha=1.0),
])  # fmt: skip
def test_ipo_squares_no_infinite_rewards(make: Callable[[], Losses]) -> None:
    values, slopes = pairs(make(), -torch.tensor([300.0, 39.0]), -torch.tensor([1.0, 300.0]))
    assert values.isfinite().all() and slopes.isfinite().all()
    u, v = torch.tensor([-40.0, -39.0]).double(), torch.tensor([-1.0, -40.0]).double()
    slope = 2 * ((-v).exp() - (-u).exp() - 5.0)
    true = torch.cat([slope * (-u).exp(), -slope * (-v).exp()]) * torch.tensor([0.0, 1.0, 1.0, 0.0])
    torch.testing.assert_close(slopes.double(), true, rtol=1e-5, atol=0.0)


def test_discopop_far_below() -> None:
    """Differences at which exp(-d) alone overflows."""
    values, slopes = pairs(losses.dpo(beta=1.0, variant="discopop"), torch.tensor([-150.0]), torch.tensor([-1.0]))
    torch.testing.assert_close(values, torch.tensor([149.0]))
    torch.testing.assert_close(slopes, torch.tensor([-1.0, 1.0]))


def test_odds_of_probabilities_near_0_and_1() -> None:
    u = torch.tensor([-1e-6, -1e-3, -0.3, -0.69, -0.7, -3.0, -200.0], dtype=F64)
    values, slopes = pairs(losses.orpo(1.0), u, u.flip(0))
    a, b = (logprob.requires_grad_() for logprob in (u.clone(), u.flip(0)))
    true = F.softplus((b - torch.log(-torch.expm1(b))) - (a - torch.log(-torch.expm1(a))))
    torch.testing.assert_close(values, true.detach(), rtol=1e-8, atol=0.0)
    torch.testing.assert_close(slopes, torch.cat(torch.autograd.grad(true.sum(), (a, b))), rtol=1e-8, atol=0.0)
    # probabilities that round to 1: finite, and of the right sign
    for dtype in (torch.float32, F64):
        sure, even = torch.tensor([200.0, 0.0], dtype=dtype), torch.zeros(2, dtype=dtype)
        rows = torch.stack([torch.stack(pair) for pair in ((sure, even), (even, sure), (sure, sure))])
        values, slopes = units(losses.orpo(1.0), rows)
        assert values.isfinite().all() and values[0] < 1e-5 and values[1] > 10
        torch.testing.assert_close(values[2].item(), math.log(2.0))


@pytest.mark.parametrize("chosen", [False, True])
@pytest.mark.parametrize(("kind", "options"), PREFERENCES, ids=str)
def test_far_from_the_reference(kind: str, options: dict[str, Any], chosen: bool) -> None:
    """Log-ratios of hundreds of nats: values and gradients stay finite in float32, and near those of float64."""
    found = []
    for dtype in (torch.float32, F64):
        fields = " ".join(dict.fromkeys(("ref_logprobs", *ROWS[kind].fields)))
        given = inputs_of(case("", (kind, options), batch=fields), torch.float32, "cpu", tokens=41, vocab=23)
        moved = torch.isin(given.batch["segments"], torch.tensor([0, 2, 4, 7])) == chosen
        batch = given.batch | {"ref_logprobs": (given.batch["ref_logprobs"].double() - 40.0 * moved).to(dtype)}
        hidden = given.hidden.to(dtype).requires_grad_()
        loss = getattr(losses, kind)(**options)
        out = linear_loss(hidden, given.weight.to(dtype), given.target, loss, batch=batch, num_segments=9)
        found.append((out.loss.double(), torch.autograd.grad(out.loss, hidden)[0].double()))
    assert all(one.isfinite().all() for one in found[0])
    torch.testing.assert_close(found[0][0], found[1][0], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(found[0][1], found[1][1], rtol=1e-3, atol=1e-4)


def test_long_sequences_keep_the_difference() -> None:
    """Scores of 10^5 nats that differ by less than their sums' rounding: the reference goes off token by token."""
    tokens = 40_000
    x = logits(-5.0 * torch.rand(tokens) - 1.0)
    target, segments = torch.zeros(tokens, dtype=torch.int64), torch.arange(tokens) // (tokens // 2)
    logprob = logits_logprobs(x, target)
    batch = {"segments": segments, "ref_logprobs": logprob + 1e-3 * torch.rand(tokens), "pairs": torch.tensor([[0, 1]])}
    value = logits_loss(x, target, losses.dpo(beta=1.0), batch=batch, num_segments=2).loss
    difference = logprob.double() - batch["ref_logprobs"].double()
    u, v = difference[segments == 0].sum(), difference[segments == 1].sum()
    torch.testing.assert_close(value.double(), F.softplus(v - u), rtol=1e-4, atol=0.0)


def plain(value: Any) -> str:
    """Text without addresses, in which processes would differ."""
    return re.sub(r"<function (\w+) at \w+>", r"\1", str(value))


@pytest.mark.parametrize(("kind", "options"), LABEL_LOSSES, ids=plain)
def test_certain_and_impossible_targets(kind: str, options: dict[str, Any]) -> None:
    """Targets from a probability of e^-10000 to one that rounds to 1: finite in float32, and near float64's numbers."""
    x = torch.tensor(
        [[-1e4, 0.0], [-90.0, 0.0], [-40.0, 0.0], [-3.0, 0.0], [0.0, 0.0], [3.0, 0.0], [40.0, 0.0], [1e4, 0.0]]
    )
    options, found = of_sizes(options), []
    if "class_weights" in options:
        options["class_weights"] = options["class_weights"][:2] + 0.1
    for dtype in (torch.float32, F64):
        rows = x.to(dtype).requires_grad_()
        loss = getattr(losses, kind)(**options)
        value = logits_loss(rows, torch.zeros(len(x), dtype=torch.int64), loss, reduction="none").loss
        found.append((value.double(), torch.autograd.grad(value.sum(), rows)[0].double()))
    assert all(each.isfinite().all() for each in found[0])
    torch.testing.assert_close(found[0][0], found[1][0], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(found[0][1], found[1][1], rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("gamma", [0.5, 2.0])
def test_focal_of_a_certain_target(gamma: float) -> None:
    """p_y rounds to 1: value 0 and gradient 0, where the formula's power has an infinite slope."""
    x = torch.tensor([[2000.0, 0.0], [4.0, 0.0]], dtype=F64, requires_grad=True)
    values = logits_loss(x, torch.zeros(2, dtype=torch.int64), losses.focal(gamma), reduction="none").loss
    (grad,) = torch.autograd.grad(values.sum(), x)
    assert values[0] == 0 and values[1] > 0 and not grad[0].any() and grad.isfinite().all() and grad[1, 0] < 0


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("nats", "coefficient", "least", "most"),
    [(59, 1e-8, 0.0, 3e-3), (59, 1e-9, 5e-3, 2e-2), (59, 1e-10, 0.04, 0.2), (59, 1e-12, 0.9, 1.1),
     (55, 1e-10, 0.0, 4e-3), (55, 1e-11, 5e-3, 4e-2), (50, 1e-12, 0.0, 4e-3)],
)  # fmt: skip
def test_range_of_bf16_factors(nats: int, coefficient: float, least: float, most: float) -> None:
    """What docs/limits.md says of tiny coefficients: errors of a row of the weight's gradient that is no target's."""
    hidden = torch.randn(256, 256, generator=torch.Generator().manual_seed(0)).bfloat16()
    hidden[:, 0] = 1.0
    weight = torch.zeros(512, 256, dtype=torch.bfloat16)
    weight[0, 0] = nats  # id 0 has all of the probability
    h, w = (tensor.cuda().requires_grad_() for tensor in (hidden, weight))
    target = torch.randint(1, 512, (256,), device="cuda")
    linear_loss(h, w, target, coefficient * losses.cross_entropy(), normalizer=8192).loss.backward()
    assert w.grad is not None and h.grad is not None
    expected = hidden.double().sum(0) * coefficient / 8192
    error = (w.grad[0].double().cpu() - expected)[1:].norm() / expected[1:].norm()  # the first is one number 256 times
    assert least <= error <= most, error
    # hidden's gradient: the coefficient times the difference of two rows
    slopes = h.grad[:, 0].double().cpu() * 8192 / coefficient
    torch.testing.assert_close(slopes, torch.full_like(slopes, nats), rtol=1e-2, atol=0)
