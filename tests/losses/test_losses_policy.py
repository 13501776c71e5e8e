"""Policy losses on statistics of full logits against the oracle and Liger, float64, values and gradients."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from full_stats import Batch, Stats, check, full_stats, make_batch, only
from oracle import policy as oracle
from tiers import crossed, first_of
from torch import Tensor

from chunked_head import losses as library
from chunked_head.losses import Losses, reference_kl

V, S = 17, 7
F64 = torch.float64
TOKEN_LOSSES = ("reinforce", "grpo", "cispo", "sapo")
SEGMENT_LOSSES = ("gspo", "gmpo", "rloo")
# segment 2 has no token, 4 only one that does not count, 5 a single one; ids come in no order
SEGMENTS = [3, 3, 0, 0, 0, -1, 1, 1, 1, 1, 3, 4, 5, 0, 0, -1, 6, 6, 3, 1, 1, 6, 6, 6]
MASKED = [4, 9, 11, 15, 20]


def make_data(spread: float = 0.4) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Logits, targets and fields; nan, inf and 1e30 wherever a token does not count, segment ids out of range too."""
    n = len(SEGMENTS)
    x = torch.randn(n, V, dtype=F64) * 2
    target = torch.randint(V, (n,))
    logprobs = torch.log_softmax(x, -1).gather(-1, target[:, None])[:, 0]
    fields = {
        name: logprobs + spread * torch.randn(n, dtype=F64)
        for name in ("old_logprobs", "ref_logprobs", "rollout_logprobs")
    }
    fields["advantages"] = torch.randn(n, dtype=F64)
    fields["advantages"][[1, 8]] = 0
    fields["segments"] = torch.tensor(SEGMENTS)
    garbage = torch.tensor([math.nan, math.inf, -math.inf, 1e30, math.nan], dtype=F64)
    for name, value in fields.items():
        if name != "segments":
            value[MASKED] = garbage
    fields["segments"][20] = 10**6
    x[MASKED] = garbage[:, None]
    target[MASKED] = -1
    return x, target, fields


def compare(kind: str, spread: float = 0.4, on_policy: bool = False, **options: Any) -> None:
    x, target, fields = make_data(spread)
    if on_policy:
        del fields["old_logprobs"]
    losses = getattr(library, kind)(**options)
    check(losses, getattr(oracle, kind), x, target, fields, S, options)


def on_leaf(losses: Losses, log_ratio: Tensor, advantages: Tensor, **fields: Tensor) -> tuple[Tensor, Tensor]:
    """Values and the gradient of their sum with respect to the log-probabilities; every token its own segment."""
    logprob = torch.linspace(-3.0, -0.1, len(log_ratio), dtype=log_ratio.dtype).requires_grad_()
    fields = {
        "old_logprobs": logprob.detach() - log_ratio,
        "advantages": advantages,
        "segments": torch.arange(len(log_ratio)),
        **fields,
    }
    batch = Batch(fields, torch.zeros(len(log_ratio), dtype=torch.int64), len(log_ratio), V)
    values = only(losses).values(Stats({"logprob": logprob}), batch, {})
    (grad,) = torch.autograd.grad(values.sum(), logprob)
    return values.detach(), grad


OPTIONS: dict[str, list[dict[str, Any]]] = {
    "reinforce": [{}],
    "grpo": [
        {},
        {"clip_low": 0.1, "clip_high": 0.28},
        {"clip_low": 0.0, "clip_high": 0.0},
        {"clip_low": 1.0, "clip_high": 0.2},
        {"delta": 1.3},
        {"delta": 1.1},  # below 1 + clip_high
        {"delta": 0.7},  # below 1 - clip_low too
        {"dual_clip": 1.5},
        {"dual_clip": 1.1},
        {"clip_high": 0.5, "delta": 4.0, "ratio_clamp": None},
        {"ratio_clamp": 0.3},
    ],
    "cispo": [
        {},
        {"clip_high": 0.3},
        {"clip_high": 0.3, "clip_low": 0.2},
        {"clip_high": 1.3, "clip_low": 0.8, "bounds": "raw"},
        {"clip_high": 1.2, "bounds": "raw", "ratio_clamp": None},
        {"clip_high": 0.5, "ratio_clamp": 0.1},
    ],
    "sapo": [{}, {"tau_pos": 3.0, "tau_neg": 0.5}, {"ratio_clamp": None}, {"ratio_clamp": 0.3}],
    "gspo": [
        {"clip_low": low, "clip_high": high, "weighting": weighting, "level": level, "ratio_clamp": clamp}
        for low, high, clamp in ((0.2, 0.2, 20.0), (0.02, 0.03, None), (0.2, 0.1, 0.15))
        for weighting in ("segment", "token")
        for level in ("segment", "token")
    ]
    + [{"delta": delta, "level": level} for delta in (0.7, 1.05, 1.3) for level in ("segment", "token")],
    "gmpo": [{}, {"clip_low": 0.1, "clip_high": 0.2}, {"ratio_clamp": None}, {"ratio_clamp": 0.3}],
    "rloo": [{}, {"clip_low": 0.05, "clip_high": 0.6}, {"ratio_clamp": None}, {"ratio_clamp": 0.1}, {"delta": 1.3}],
    "vespo": [{}, {"k_pos": 0.5, "lambda_pos": 0.2, "k_neg": 1.5, "lambda_neg": 0.3}, {"ratio_clamp": 0.1}],
}


ALL_OPTIONS = [
    pytest.param(kind, one, id=f"{kind}-" + ",".join(f"{k}={v}" for k, v in one.items()))
    for kind, options in OPTIONS.items()
    for one in options
]


@pytest.mark.parametrize("on_policy", [False, True])
@pytest.mark.parametrize(("kind", "options"), ALL_OPTIONS)
def test_against_oracle(kind: str, options: dict[str, Any], on_policy: bool) -> None:
    compare(kind, on_policy=on_policy, **options)


@crossed(
    kind=[*TOKEN_LOSSES, *SEGMENT_LOSSES],
    level=["token", "segment"],
    weights=[
        {"rollout": "truncate"},
        {"rollout": "mask"},
        {"rollout": "truncate", "rollout_max": 1.2, "rollout_min": 0.9},
        {"rollout": "mask", "rollout_max": 1.2, "rollout_min": 0.9},
    ],
    on_policy=[False, True],
)
def test_rollout_weights(kind: str, level: str, weights: dict[str, Any], on_policy: bool) -> None:
    options = {**weights, "rollout_level": level}
    compare(kind, on_policy=on_policy, **options)
    if kind == "gspo":
        compare(kind, on_policy=on_policy, weighting="token", **options)
        compare(kind, on_policy=on_policy, weighting="token", level="token", **options)


def test_rollout_defaults_act() -> None:
    """2 truncates and 3 masks, inclusive; a masked token keeps its place with value 0."""
    ratios = torch.tensor([0.5, 1.9, 2.1, 2.9, 3.1, 1e6], dtype=F64)
    logprob = torch.full((6,), -1.0, dtype=F64)
    fields = {
        "advantages": torch.ones(6, dtype=F64),
        "old_logprobs": logprob,
        "rollout_logprobs": logprob - ratios.log(),
    }
    batch = Batch(fields, torch.zeros(6, dtype=torch.int64), None, V)
    stats = Stats({"logprob": logprob})
    truncated = only(library.reinforce(rollout="truncate")).values(stats, batch, {})
    masked = only(library.reinforce(rollout="mask")).values(stats, batch, {})
    torch.testing.assert_close(truncated, torch.tensor([0.5, 1.9, 2, 2, 2, 2], dtype=F64))
    torch.testing.assert_close(masked, torch.tensor([0.5, 1.9, 2.1, 2.9, 0, 0], dtype=F64))


def test_rollout_weights_stay_finite() -> None:
    for dtype in (torch.float32, F64):
        rollout = torch.tensor([-1e4, -100.0, 100.0, 1e4, -math.inf, math.inf], dtype=dtype)
        ones = torch.ones(6, dtype=dtype)
        for mode, largest in (("truncate", 2.0), ("mask", 0.0)):
            for level in ("token", "segment"):
                losses = library.grpo(rollout=mode, rollout_level=level)
                values, grad = on_leaf(losses, 0 * ones, ones, rollout_logprobs=rollout)
                expected = torch.where(rollout < 0, largest, 0.0).to(dtype)
                torch.testing.assert_close(-grad, expected, rtol=1e-5, atol=1e-6)
                torch.testing.assert_close(-values, expected, rtol=1e-5, atol=1e-6)


@crossed(
    on_policy=[False, True],
    estimator=reference_kl.ESTIMATORS,
    clamps=[{}, {"log_ratio_clamp": None}, {"log_ratio_clamp": 0.3}, {"kl_clamp": 0.05}, {"ratio_clamp": 0.2}],
)
def test_kl_to_reference(estimator: str, clamps: dict[str, Any], on_policy: bool) -> None:
    compare("kl_to_reference", on_policy=on_policy, estimator=estimator, **clamps)
    if not estimator.endswith("+"):
        for level in ("token", "segment"):
            own = {"bias_correction": True, "level": level, **clamps}
            compare("kl_to_reference", on_policy=on_policy, estimator=estimator, **own)


def test_kl_gradients_in_closed_form() -> None:
    d = torch.tensor([-2.0, -0.1, 0.0, 0.1, 2.0], dtype=F64)
    logprob = torch.full((5,), -1.5, dtype=F64)
    batch = Batch({"ref_logprobs": logprob + d}, torch.zeros(5, dtype=torch.int64), None, V)
    expected = {"k1": torch.ones_like(d), "abs": -d.sign(), "k2": -d, "k3": 1 - d.exp()}
    expected |= {"k1+": -d, "abs+": -d, "k3+": -d}
    assert set(expected) == set(reference_kl.ESTIMATORS)
    for estimator, slope in expected.items():
        leaf = logprob.clone().requires_grad_()
        only(library.kl_to_reference(estimator)).values(Stats({"logprob": leaf}), batch, {}).sum().backward()
        torch.testing.assert_close(leaf.grad, slope)
    # on policy the correction makes k3's gradient that of k2
    leaf = logprob.clone().requires_grad_()
    corrected = library.kl_to_reference("k3", bias_correction=True)
    only(corrected).values(Stats({"logprob": leaf}), batch, {}).sum().backward()
    torch.testing.assert_close(leaf.grad, -d)


EXTREME = [-math.inf, -1e4, -100.0, -21.0, 0.0, 21.0, 100.0, 1e4, math.inf]


@pytest.mark.parametrize("dtype", [torch.float32, F64])
@pytest.mark.parametrize("kind", ["reinforce", "grpo", "cispo", "sapo", "gspo", "gspo-token", "gmpo", "rloo"])
def test_extreme_ratios_stay_finite(kind: str, dtype: torch.dtype) -> None:
    options = {"level": "token"} if kind == "gspo-token" else {}
    losses = getattr(library, kind.partition("-")[0])(**options)
    log_ratio = torch.tensor(EXTREME, dtype=dtype)
    for advantage in (-1.0, 0.0, 1.0):
        values, grad = on_leaf(losses, log_ratio, torch.full_like(log_ratio, advantage))
        assert values.isfinite().all() and grad.isfinite().all()
        assert advantage == 0 or values.any()
        if advantage == 0:
            assert not values.any() and not grad.any()
        elif kind not in ("reinforce", "cispo"):
            # clamped: constant in the log-probability (e^-20 is below any lower clip where that acts)
            assert not grad[log_ratio.abs() > 20].any()
            torch.testing.assert_close(grad[4].item(), -advantage, rtol=1e-6, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, F64])
@pytest.mark.parametrize("kind", ["grpo", "cispo", "sapo", "gspo", "gspo-token", "gmpo", "rloo"])
def test_without_clamp_gradients_are_finite_where_values_are(kind: str, dtype: torch.dtype) -> None:
    options: dict[str, Any] = {"level": "token"} if kind == "gspo-token" else {}
    if kind == "grpo":
        options["dual_clip"] = 3.0
    losses = getattr(library, kind.partition("-")[0])(ratio_clamp=None, **options)
    log_ratio = torch.tensor(EXTREME, dtype=dtype)
    for advantage in (-1.0, 0.0, 1.0):
        values, grad = on_leaf(losses, log_ratio, torch.full_like(log_ratio, advantage))
        assert not values.isnan().any()
        assert grad[values.isfinite()].isfinite().all()
        # only a negative advantage without an upper bound has infinite values
        unbounded = advantage < 0 and kind in ("gspo", "gspo-token", "gmpo", "rloo")
        assert bool(values.isinf().any()) == unbounded
        if kind == "grpo" and advantage:
            expected = [0, 0, 0, 0, 1, 1.2, 1.2, 1.2, 1.2] if advantage > 0 else [0.8] * 4 + [1] + [3.0] * 4
            bounded = torch.tensor(expected, dtype=dtype) * -advantage
            torch.testing.assert_close(values, bounded, rtol=1e-6, atol=1e-8)


def test_kl_of_extreme_ratios_is_finite() -> None:
    d = torch.tensor(EXTREME)
    for estimator in reference_kl.ESTIMATORS:
        for bias_correction in (False, True)[: 1 if estimator.endswith("+") else 2]:
            logprob = torch.full_like(d, -1.0).requires_grad_()
            fields = {"ref_logprobs": logprob.detach() + d, "old_logprobs": logprob.detach() - d.flip(0)}
            batch = Batch(fields, torch.zeros(len(d), dtype=torch.int64), None, V)
            losses = library.kl_to_reference(estimator, bias_correction)
            values = only(losses).values(Stats({"logprob": logprob}), batch, {})
            (grad,) = torch.autograd.grad(values.sum(), logprob)
            assert values.isfinite().all() and grad.isfinite().all() and values.any()
            if not bias_correction:
                assert not grad[d.abs() > 20].any()


@pytest.mark.parametrize("estimator", reference_kl.ESTIMATORS)
def test_a_clamp_of_the_kl_alone(estimator: str) -> None:
    """It acts before anything overflows, on the value and on its slope; a "+" keeps the slope of k2."""
    d = torch.tensor([-1e4, -100.0, -1.0, 0.5, 89.0, 100.0, 1e4])
    leaf, far = (torch.full_like(d, -1.0).requires_grad_() for _ in range(2))
    losses = only(library.kl_to_reference(estimator, log_ratio_clamp=None, kl_clamp=10.0))
    batch = Batch({"ref_logprobs": d - 1.0}, torch.zeros(len(d), dtype=torch.int64), None, V)
    values = losses.values(Stats({"logprob": leaf}), batch, {})
    (grad,) = torch.autograd.grad(values.sum(), leaf)
    exact = reference_kl.kl_estimate(d.double(), estimator.removesuffix("+"))
    torch.testing.assert_close(values.double(), exact.clamp(-10.0, 10.0))
    slopes = {"k1": 1.0, "abs": -d.sign(), "k2": -d, "k3": 1.0 - d.exp()}
    slope = -d if estimator.endswith("+") else torch.where(exact.abs() <= 10.0, slopes[estimator], 0.0)
    torch.testing.assert_close(grad, slope)
    infinite = Batch({"ref_logprobs": torch.full_like(d, torch.inf)}, torch.zeros(len(d), dtype=torch.int64), None, V)
    if not estimator.endswith("+"):
        values = losses.values(Stats({"logprob": far}), infinite, {})
        (grad,) = torch.autograd.grad(values.sum(), far)
        assert (values.abs() == 10.0).all() and not grad.any()


@pytest.mark.parametrize("kind", [*TOKEN_LOSSES, *SEGMENT_LOSSES])
def test_impossible_target_without_advantage(kind: str) -> None:
    """A target of probability 0, as under a banned token's logit of -inf."""
    logprob = torch.tensor([-math.inf, -1.0], dtype=F64).requires_grad_()
    fields = {
        "old_logprobs": torch.tensor([-2.0, -1.0], dtype=F64),
        "advantages": torch.tensor([0.0, 1.0], dtype=F64),
        "segments": torch.arange(2),
    }
    batch = Batch(fields, torch.zeros(2, dtype=torch.int64), 2, V)
    values = only(getattr(library, kind)()).values(Stats({"logprob": logprob}), batch, {})
    (grad,) = torch.autograd.grad(values.sum(), logprob)
    assert values[0] == 0 and values[1] and grad.tolist() == [0.0, -1.0]


def test_nan_is_not_hidden() -> None:
    """A log-ratio that is nan at a token that counts shows, unless its advantage is 0."""
    log_ratio, advantages = torch.full((3,), math.nan), torch.tensor([-1.0, 0.0, 1.0])
    for kind in ("grpo", "gspo", "rloo", "sapo", "gmpo"):
        values, _ = on_leaf(getattr(library, kind)(), log_ratio, advantages)
        assert values.isnan().tolist() == [True, False, True], kind


@pytest.mark.parametrize("kind", ["grpo", "gspo", "gspo-token", "rloo"])
def test_gradient_flows_at_the_bound(kind: str) -> None:
    """Bounds that are the ratio itself: the gradient is the unclipped one; an ulp closer and there is none."""
    options = {"level": "token"} if kind == "gspo-token" else {}
    factory = getattr(library, kind.partition("-")[0])
    one = torch.ones(1, dtype=F64)
    for log_ratio, sign in ((0.15, 1.0), (-0.15, -1.0)):
        # of the log-ratio that subtraction leaves, which on_leaf makes again
        logprob = torch.full((1,), -3.0, dtype=F64)
        ratio = (logprob - (logprob - log_ratio)).exp()
        edge = (ratio - 1).abs().item()
        assert (1 + edge if sign > 0 else 1 - edge) == ratio.item()
        side = "clip_high" if sign > 0 else "clip_low"
        _, at = on_leaf(factory(**{side: edge}, **options), log_ratio * one, sign * one)
        values, inside = on_leaf(factory(**{side: edge - 2**-52}, **options), log_ratio * one, sign * one)
        torch.testing.assert_close(at, -sign * ratio)
        assert inside.item() == 0
        torch.testing.assert_close(values, -sign * ratio)
    _, on_policy = on_leaf(factory(0.0, 0.0, **options), 0 * one, -one)
    assert on_policy.item() == 1.0


@pytest.mark.parametrize("bound", [{"delta": None}, {"dual_clip": None}], ids=["delta", "dual_clip"])
def test_gradient_flows_at_the_ceiling(bound: dict[str, Any]) -> None:
    (name,) = bound
    one = torch.ones(1, dtype=F64)
    logprob = torch.full((1,), -3.0, dtype=F64)
    ratio = (logprob - (logprob - 0.6)).exp().item()
    _, at = on_leaf(library.grpo(**{name: ratio}), 0.6 * one, -one)
    values, beyond = on_leaf(library.grpo(**{name: math.nextafter(ratio, 0)}), 0.6 * one, -one)
    assert at.item() == ratio and beyond.item() == 0 and math.isclose(values.item(), ratio)


def test_dual_clip_is_delta_beyond_the_upper_clip() -> None:
    log_ratio = torch.linspace(-2.0, 2.0, 81, dtype=F64)
    for advantage in (-2.0, 0.0, 2.0):
        advantages = torch.full_like(log_ratio, advantage)
        for bound, equal in ((1.2, True), (1.5, True), (3.0, True), (1.1, advantage >= 0)):
            delta = on_leaf(library.grpo(delta=bound), log_ratio, advantages)
            dual = on_leaf(library.grpo(dual_clip=bound), log_ratio, advantages)
            same = all(torch.equal(a, b) for a, b in zip(delta, dual, strict=True))
            # below the upper clip, delta also lowers what a positive advantage can gain
            assert same == (equal and not (bound < 1.2 and advantage > 0)), (bound, advantage)


def test_on_policy_gradients_are_reinforce() -> None:
    advantages = torch.tensor([-1.5, 0.0, 0.5, 2.0], dtype=F64)
    for kind in (*TOKEN_LOSSES, *SEGMENT_LOSSES):
        _, grad = on_leaf(getattr(library, kind)(), torch.zeros(4, dtype=F64), advantages)
        torch.testing.assert_close(grad, -advantages)


def test_gspo_levels_agree_where_advantages_are_constant() -> None:
    x, target, fields = make_data()
    fields["advantages"] = torch.where(target >= 0, fields["segments"].remainder(3) - 1.0, 0.0).to(F64)
    grads, segments = [], []
    for level in ("segment", "token"):
        leaf = torch.nan_to_num(x, 0, 0, 0).requires_grad_()
        losses = only(library.gspo(level=level))
        values = losses.values(full_stats(leaf, target), make_batch(fields, target, V, S), {})
        grads.append(torch.autograd.grad(values.sum(), leaf)[0])
        segments.append(values)
    torch.testing.assert_close(*segments)
    torch.testing.assert_close(*grads)
    assert grads[0].any() and segments[0].any()


@pytest.mark.parametrize("kind", ["gspo", "gspo-token", "gmpo", "rloo"])
def test_segments_without_tokens_are_zero(kind: str) -> None:
    x, target, fields = make_data()
    losses = getattr(library, kind.partition("-")[0])(**({"level": "token"} if "-" in kind else {}))
    values = only(losses).values(full_stats(x, target), make_batch(fields, target, V, S), {})
    assert values.shape == (S,) and values.isfinite().all()
    assert values.eq(0).tolist() == [s in (2, 4) for s in range(S)]


@pytest.mark.parametrize("options", [{"level": "token"}, {"level": "segment"}])
def test_tokens_of_no_segment_are_zero(options: dict[str, Any]) -> None:
    x, target, fields = make_data()
    fields["advantages"][[1, 8]] = 0.5
    leaf = torch.nan_to_num(x, 0, 0, 0).requires_grad_()
    losses = only(library.gspo(weighting="token", **options))
    values = losses.values(full_stats(leaf, target), make_batch(fields, target, V, S), {})
    nowhere = (fields["segments"] < 0) & (target >= 0)
    (grad,) = torch.autograd.grad(values.sum(), leaf)
    assert nowhere.any() and not values[nowhere].any() and not grad[nowhere].any()
    assert values[~nowhere & (target >= 0)].all()


@pytest.mark.parametrize("kind", [*TOKEN_LOSSES, "kl_to_reference"])
def test_slices_equal_the_whole(kind: str) -> None:
    x, target, fields = make_data()
    options: dict[str, Any] = {"bias_correction": True} if kind == "kl_to_reference" else {"rollout": "truncate"}
    losses = only(getattr(library, kind)(**options))
    assert losses.scope == "token"

    def values(rows: slice) -> Tensor:
        part = {name: value[rows] for name, value in fields.items()}
        return losses.values(full_stats(x[rows], target[rows]), make_batch(part, target[rows], V, S), {})

    pieces = [values(slice(0, 1)), values(slice(1, 17)), values(slice(17, None))]
    assert torch.equal(torch.cat(pieces), values(slice(None)))


def test_scope_unit_and_fields() -> None:
    for kind in TOKEN_LOSSES:
        plain, weighted = only(getattr(library, kind)()), only(getattr(library, kind)(rollout="mask"))
        by_segment = only(getattr(library, kind)(rollout="mask", rollout_level="segment"))
        assert (plain.scope, plain.unit, plain.fields) == ("token", "token", ("advantages",))
        assert (weighted.scope, weighted.fields) == ("token", ("advantages", "rollout_logprobs"))
        assert (by_segment.scope, by_segment.unit) == ("segment", "token")
        assert by_segment.fields == ("advantages", "segments", "rollout_logprobs")
        assert weighted.optional_fields == ("old_logprobs",)
    assert only(library.reinforce()).optional_fields == ()
    for kind in SEGMENT_LOSSES:
        summand = only(getattr(library, kind)())
        assert (summand.scope, summand.unit, summand.fields) == ("segment", "segment", ("advantages", "segments"))
    assert only(library.gspo(weighting="token")).unit == "token"
    assert only(library.gspo(weighting="token")).scope == "segment"
    reference = only(library.kl_to_reference())
    assert (reference.fields, reference.optional_fields) == (("ref_logprobs",), ())
    assert only(library.kl_to_reference(bias_correction=True)).optional_fields == ("old_logprobs",)
    assert only(library.grpo(temperature=0.5, name="pg", token_weights="mine")).label == "pg"
    hash(only(library.grpo(rollout="mask")).key)
    assert only(library.grpo(rollout="mask")).key == only(library.grpo(rollout="mask", rollout_max=3.0)).key
    assert only(library.grpo(rollout="mask")).key != only(library.grpo(rollout="truncate")).key


@pytest.mark.parametrize(
    "losses",
    first_of(
        [
            library.reinforce(),
            library.grpo(delta=4.0, rollout="mask"),
            library.grpo(rollout="truncate", rollout_level="segment"),
            library.cispo(rollout="truncate"),
            library.sapo(),
            library.gspo(),
            library.gspo(weighting="token", level="token", rollout="mask", rollout_level="segment"),
            library.gmpo(),
            library.rloo(rollout="mask"),
            library.kl_to_reference("k3", True),
            library.kl_to_reference("k3+", kl_clamp=10.0),
        ],
        3,
    ),
    ids=lambda losses: only(losses).kind,
)
@pytest.mark.parametrize("on_policy", first_of([False, True]))
def test_compiles_whole(losses: Losses, on_policy: bool) -> None:
    x, target, fields = make_data()
    if on_policy:
        del fields["old_logprobs"]
    summand = only(losses)

    def run(logprob: Tensor, fields: dict[str, Tensor], target: Tensor) -> Tensor:
        return summand.values(Stats({"logprob": logprob}), Batch(fields, target, S, V), {}).sum()

    torch.compiler.reset()  # every loss here shares one code object, whose variants are limited
    compiled = torch.compile(torch.func.grad_and_value(run), fullgraph=True, dynamic=True, backend="aot_eager")
    for rows in (slice(None), slice(0, 16)):
        part = {name: value[rows] for name, value in fields.items()}
        clean = make_batch(part, target[rows], V, S).fields
        logprob = full_stats(x[rows], target[rows]).logprob.detach()
        arguments = logprob, dict(clean), target[rows]
        grad, value = compiled(*arguments)
        leaf = logprob.clone().requires_grad_()
        expected = run(leaf, *arguments[1:])
        torch.testing.assert_close(value, expected.detach())
        torch.testing.assert_close(grad, torch.autograd.grad(expected, leaf)[0])
        assert grad.any()


# Liger computes sequences of a rectangle; where it divides, so do we


def rectangle() -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    rows, length = 5, 6
    mask = torch.rand(rows, length) < 0.8
    mask[0], mask[1, 0] = True, True
    mask[3] = False  # a completion without a token that counts
    logprob = -torch.rand(rows, length, dtype=F64) * 3
    fields = {
        name: logprob + 0.4 * torch.randn(rows, length, dtype=F64)
        for name in ("old_logprobs", "ref_logprobs", "rollout_logprobs")
    }
    fields["advantages"] = torch.tensor([1.0, -1.5, 0.0, 2.0, -0.5], dtype=F64)
    return mask, logprob, fields


def ours(losses: Losses, mask: Tensor, logprob: Tensor, fields: dict[str, Tensor]) -> Tensor:
    """Unreduced values of the rows' tokens or of the rows."""
    rows, length = mask.shape
    flat = {name: value.flatten() for name, value in fields.items() if value.dim() == 2}
    flat["advantages"] = fields["advantages"].repeat_interleave(length)
    flat["segments"] = torch.arange(rows).repeat_interleave(length)
    target = torch.where(mask.flatten(), 0, -1)
    batch = make_batch(flat, target, V, rows)
    summand = only(losses)
    values = summand.values(Stats({"logprob": torch.where(mask, logprob, 0.0).flatten()}), batch, {})
    return torch.where(mask, values.view(rows, length), 0.0) if summand.unit == "token" else values


def per_token_mean(values: Tensor, mask: Tensor) -> Tensor:
    return values.sum() / mask.sum()


def per_row_mean(values: Tensor, mask: Tensor) -> Tensor:
    return (values.sum(-1) / mask.sum(-1).clamp(min=1)).mean()


def over_rows(values: Tensor, mask: Tensor) -> Tensor:
    return values.sum() / len(mask)


LIGER: list[tuple[str, Callable[[], Losses], Callable[[Tensor, Tensor], Tensor], dict[str, Any]]] = [
    ("dapo", lambda: library.grpo(0.2, 0.28), per_token_mean, {"epsilon_high": 0.28}),
    ("bnpo", lambda: library.grpo(delta=1.4), per_token_mean, {"delta": 1.4}),
    ("grpo", lambda: library.grpo(delta=1.1), per_row_mean, {"delta": 1.1}),
    ("cispo", lambda: library.cispo(1.3, bounds="raw"), per_token_mean, {"epsilon_high": 1.3}),
    ("sapo", lambda: library.sapo(2.0, 1.5), per_row_mean, {"sapo_temperature_pos": 2.0, "sapo_temperature_neg": 1.5}),
    ("grpo", library.gspo, over_rows, {"importance_sampling_level": "sequence"}),
    ("dapo", lambda: library.gspo(0.1, 0.1, "token"), per_token_mean,
     {"importance_sampling_level": "sequence", "epsilon_low": 0.1, "epsilon_high": 0.1}),
    # a segment's value times its length, over the number of segments
    ("luspo", lambda: library.gspo(weighting="token"), over_rows, {"importance_sampling_level": "sequence"}),
]  # fmt: skip


@pytest.mark.parametrize("on_policy", [False, True])
@pytest.mark.parametrize(
    ("kind", "losses", "reduce", "options"), LIGER, ids=[f"{k[0]}-{i}" for i, k in enumerate(LIGER)]
)
def test_against_liger(kind, losses, reduce, options: dict[str, Any], on_policy: bool) -> None:
    liger = pytest.importorskip("liger_kernel.chunked_loss.grpo_loss").LigerFusedLinearGRPOFunction
    mask, logprob, fields = rectangle()
    if on_policy:
        del fields["old_logprobs"]
    leaf, other = logprob.clone().requires_grad_(), logprob.clone().requires_grad_()
    loss = reduce(ours(losses(), mask, leaf, fields), mask)
    theirs, _ = liger.ppo_loss_fn(
        other, mask.to(F64), fields["advantages"], mask.to(F64), old_per_token_logps=fields.get("old_logprobs"),
        beta=0.0, loss_type=kind, num_items_in_batch=mask.sum(), **options,
    )  # fmt: skip
    torch.testing.assert_close(loss, theirs, rtol=1e-12, atol=0)
    assert theirs.item() != 0
    grads = torch.autograd.grad(loss, leaf) + torch.autograd.grad(theirs, other)
    torch.testing.assert_close(*grads, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("bias_correction", [False, True])
@pytest.mark.parametrize("level", ["token", "segment"])
def test_kl_and_rollout_weights_against_liger(level: str, bias_correction: bool) -> None:
    """The rollout weights multiply the policy gradient and not the KL."""
    liger = pytest.importorskip("liger_kernel.chunked_loss.grpo_loss").LigerFusedLinearGRPOFunction
    mask, logprob, fields = rectangle()
    difference = torch.where(mask, fields["old_logprobs"] - fields["rollout_logprobs"], 0.0)
    difference = difference if level == "token" else difference.sum(-1, keepdim=True)
    leaf, other = logprob.clone().requires_grad_(), logprob.clone().requires_grad_()
    gradient = library.grpo(rollout="truncate", rollout_level=level, rollout_max=1.1)
    parts = [ours(losses, mask, leaf, fields) for losses in (gradient, library.kl_to_reference("k3", bias_correction))]
    loss = per_token_mean(parts[0] + 0.04 * parts[1], mask)
    theirs, (kl, _) = liger.ppo_loss_fn(
        other, mask.to(F64), fields["advantages"], mask.to(F64), fields["ref_logprobs"], fields["old_logprobs"],
        beta=0.04, loss_type="bnpo", vllm_is_ratio=difference.exp().clamp(max=1.1),
        use_bias_correction_kl=bias_correction,
    )  # fmt: skip
    torch.testing.assert_close(per_token_mean(parts[1], mask), kl, rtol=1e-12, atol=0)
    torch.testing.assert_close(loss, theirs, rtol=1e-12, atol=0)
    grads = torch.autograd.grad(loss, leaf) + torch.autograd.grad(theirs, other)
    torch.testing.assert_close(*grads, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize(
    ("wrong", "error", "named"),
    [
        (lambda: library.grpo(clip_low=-0.1), ValueError, "clip_low of losses.grpo"),
        (lambda: library.grpo(clip_high="x"), ValueError, "clip_high of losses.grpo"),
        (lambda: library.grpo(delta=0.0), ValueError, "delta of losses.grpo"),
        (lambda: library.grpo(dual_clip=1.0), ValueError, "dual_clip of losses.grpo"),
        (lambda: library.grpo(delta=4.0, dual_clip=3.0), ValueError, "delta or dual_clip"),
        (lambda: library.grpo(ratio_clamp=0.0), ValueError, "ratio_clamp of losses.grpo"),
        (lambda: library.cispo(0.3, bounds="raw"), ValueError, "clip_high .* of losses.cispo"),
        (lambda: library.cispo(bounds="verl"), ValueError, "bounds of losses.cispo"),
        (lambda: library.cispo(clip_low=1.5), ValueError, "clip_low of losses.cispo"),
        (lambda: library.sapo(tau_pos=0.0), ValueError, "tau_pos of losses.sapo"),
        (lambda: library.gspo(weighting="mean"), ValueError, "weighting of losses.gspo"),
        (lambda: library.gspo(level="row"), ValueError, "level of losses.gspo"),
        (lambda: library.gmpo(clip_low=-1.0), ValueError, "clip_low of losses.gmpo"),
        (lambda: library.rloo(clip_high=-1.0), ValueError, "clip_high of losses.rloo"),
        (lambda: library.reinforce(rollout="clip"), ValueError, "rollout of losses.reinforce"),
        (lambda: library.grpo(rollout="mask", rollout_level="row"), ValueError, "rollout_level of losses.grpo"),
        (lambda: library.grpo(rollout="mask", rollout_min=4.0), ValueError, "rollout_max of losses.grpo"),
        (lambda: library.grpo(rollout_max=4.0), ValueError, "rollout_max .* of losses.grpo go with"),
        (lambda: library.kl_to_reference("k4"), ValueError, "estimator of losses.kl_to_reference"),
        (lambda: library.kl_to_reference("k3+", True), ValueError, "bias_correction of losses.kl_to_reference"),
        (lambda: library.kl_to_reference("k3", 1), TypeError, "bias_correction of losses.kl_to_reference"),
        (lambda: library.kl_to_reference(kl_clamp=-1.0), ValueError, "kl_clamp of losses.kl_to_reference"),
        (lambda: library.gspo(token_weights="w"), ValueError, "token_weights of losses.gspo"),
        (lambda: library.grpo(rollout="mask", rollout_max=2.0, clip=1.0), TypeError, "clip"),
    ],
)
def test_wrong_options(wrong: Callable[[], Losses], error: type, named: str) -> None:
    with pytest.raises(error, match=named):
        wrong()


@pytest.mark.parametrize("rollout", [False, True])
def test_vespo_against_trl(rollout: bool) -> None:
    trainer = pytest.importorskip("trl").GRPOTrainer
    rows, length = 4, 6
    x = torch.randn(rows * length, V, dtype=F64)
    target, mask = torch.randint(V, (rows * length,)), torch.ones(rows, length, dtype=F64)
    logprobs = torch.log_softmax(x, -1).gather(-1, target[:, None])[:, 0]
    old, advantages = logprobs + 0.2 * torch.randn(rows * length, dtype=F64), torch.randn(rows, 1, dtype=F64)
    fields = {"old_logprobs": old, "advantages": advantages.expand(rows, length).flatten()}
    fields |= {"segments": torch.arange(rows).repeat_interleave(length), "rollout_logprobs": old - 0.1}
    weights = torch.full((rows, length), math.exp(0.1), dtype=F64) if rollout else None
    phi = trainer.get_gamma_weights(advantages, (logprobs - old).view(rows, length), mask, weights)
    losses = library.vespo(rollout="truncate") if rollout else library.vespo()
    values = only(losses).values(Stats({"logprob": logprobs}), Batch(fields, target, rows, V), {})
    torch.testing.assert_close(values.view(rows, length), -phi * advantages * logprobs.view(rows, length))


@pytest.mark.parametrize(
    ("kind", "options"),
    [("grpo", {}), ("gspo", {}), ("gspo", {"weighting": "token"}), ("gspo", {"level": "token"}), ("rloo", {}),
     ("gmpo", {"clip_low": math.inf, "clip_high": math.inf})],
)  # fmt: skip
def test_a_rollout_weight_of_0_leaves_nothing_of_an_infinite_ratio(kind: str, options: dict[str, Any]) -> None:
    log_ratio, advantages = torch.tensor([90.0, 0.1, 90.0]), torch.tensor([-1.0, -1.0, -2.0])
    losses = getattr(library, kind)(ratio_clamp=None, rollout="mask", rollout_min=0.5, **options)
    # the first and the last have a weight of e^-2 and of e^90, both outside
    rollout = torch.linspace(-3.0, -0.1, 3) - log_ratio + torch.tensor([2.0, 0.0, -90.0])
    value, grad = on_leaf(losses, log_ratio, advantages, rollout_logprobs=rollout)
    expected = torch.tensor([0.0, math.exp(0.1), 0.0])
    torch.testing.assert_close(value, expected)
    torch.testing.assert_close(grad, expected)


def test_vespo_of_large_exponents() -> None:
    """In fp32 a phi of e^104 beside an advantage of e^-40, and ratios that are infinite or nearly so."""
    log_ratio = torch.tensor([11.5, 11.5, 11.0, 8.0, 87.0, torch.inf, -torch.inf, 0.0])
    advantages = torch.tensor([4e-18, -4e-18, 1e-12, 1.0, 1.0, 1.0, -1.0, 1e-6])
    losses = library.vespo(k_pos=10.0, lambda_pos=0.0, k_neg=10.0, lambda_neg=0.0, ratio_clamp=math.inf)
    value, grad = on_leaf(losses, log_ratio, advantages)
    w = log_ratio.double().clamp(math.log(1e-8), 100.0)
    phi = (10.0 * w + 1e-4 * (1.0 - w.exp())).exp()
    torch.testing.assert_close(grad, (-phi * advantages.double()).float(), rtol=3e-5, atol=0.0)
    logprob = torch.linspace(-3.0, -0.1, len(log_ratio))
    torch.testing.assert_close(value, (-phi * advantages.double() * logprob.double()).float(), rtol=3e-5, atol=0.0)
    assert grad[-1] == -advantages[-1]
