"""Metrics against their formulas written out, over pieces, micro-batches and ranks."""

import inspect
import math
import re
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import ranks
import torch
from full_stats import Batch, Stats, full_stats
from tiers import crossed
from torch import Tensor

from chunked_head import linear_loss, losses, metrics
from chunked_head.losses import (
    Losses,
    distillation,
    label,
    policy,
    policy_segments,
    preference,
    preference_pairs,
    reference_kl,
    topk,
)
from chunked_head.metrics import Metric, MetricValue, all_reduce, combine, merge, unit_weights
from chunked_head.metrics.values import selected

TOKENS, VOCAB, SEGMENTS = 29, 11, 6
# segments 0 and 3 lie interleaved, segment 4 has no token, segment 5 none that counts, two tokens are of none
IDS = torch.tensor([0, 3, 0, 3, 3, 0, 1, 2, 2, 2, 2, 2, 2, -1, 3, 3, 0, 5, 5, 1, 0, 2, 2, -1, 3, 0, 0, 1, 3])
DOCUMENTS = torch.tensor([0] * 9 + [2] * 13 + [1] * 7)
MASKED = (2, 9, 17, 18, 28)
PIECES = (0, 7, 8, 21, 29)

Values = dict[str, Tensor]


class Data:
    """Random logits and fields in float64; what is masked holds garbage before it is sanitised."""

    def __init__(self, seed: int = 0, counted: bool = True, dtype: torch.dtype = torch.float64):
        g = torch.Generator().manual_seed(seed)
        self.x = torch.randn(TOKENS, VOCAB, generator=g, dtype=dtype) * 2
        self.mask = torch.ones(TOKENS, dtype=torch.bool)
        self.mask[list(MASKED)] = False
        if not counted:
            self.mask[:] = False
        ids = torch.randint(VOCAB, (TOKENS,), generator=g)
        ids[5] = self.x[5].argmax()  # accuracy is neither 0 nor 1
        self.target = torch.where(self.mask, ids, -1)
        logprob = self.x.log_softmax(-1).gather(-1, ids[:, None])[:, 0]
        noise = torch.randn(TOKENS, 4, generator=g, dtype=dtype)
        self.fields = {
            "old_logprobs": logprob + 0.7 * noise[:, 0],
            "ref_logprobs": logprob + 0.4 * noise[:, 1],
            "rollout_logprobs": logprob + 0.2 * noise[:, 2],
            "advantages": noise[:, 3],
        }
        for field in self.fields.values():
            field[list(MASKED)] = 0.0
        self.fields |= {"segments": torch.where(self.mask, IDS, -1), "documents": torch.where(self.mask, DOCUMENTS, -1)}

    def piece(self, start: int, stop: int) -> tuple[Stats, Batch]:
        stats = full_stats(self.x[start:stop], self.target[start:stop])
        fields = {name: value[start:stop] for name, value in self.fields.items()}
        return stats, Batch(fields, self.target[start:stop], SEGMENTS, VOCAB)

    def logprob(self) -> Tensor:
        return self.x.log_softmax(-1).gather(-1, self.target.clamp(min=0)[:, None])[:, 0]


def accumulate(
    metric: Metric, values: Tensor, mask: Tensor, weights: Tensor | None = None, count: Tensor | None = None
) -> MetricValue:
    """Sums, or the extremum, of what a call selects of ``values``; the count is that of ``mask`` unless it is given."""
    kept = selected(metric, values, mask, weights)
    if metric.reduce != "mean":
        nothing = kept.new_full((1,), -math.inf if metric.reduce == "max" else math.inf)
        every = torch.cat([kept, nothing])
        return MetricValue(metric.reduce, extremum=every.amax(0) if metric.reduce == "max" else every.amin(0))
    if count is None:
        count = (mask.to(kept.dtype) if weights is None else torch.where(mask, weights, 0.0).to(kept.dtype)).sum()
    return MetricValue("mean", kept.sum(0), count.to(kept.dtype), finish=metric.finish)


def measure(metric: Metric, data: Data, bounds: tuple[int, ...] = (0, TOKENS)) -> MetricValue:
    """What a call does: units selected by the mask, weights from the whole call, pieces merged."""
    kept = [*metric.fields, *metric.optional_fields]
    if metric.unit == "segment":
        assert metric.scope == "segment"
        stats, batch = data.piece(0, TOKENS)
        batch.fields = {name: batch.fields[name] for name in kept}
        return accumulate(metric, metric.values(stats, batch), batch.segment_count() > 0)
    total, weights, count = None, None, None
    if metric.weighting != "token":
        weights, count = unit_weights(data.fields[metric.ids], data.mask, SEGMENTS, torch.float64)
    for start, stop in pairwise(bounds):
        stats, batch = data.piece(start, stop)
        stats = Stats({name: stats.values[name] for name in {"logprob", "lse"} | metric.needs})
        batch.fields = {name: batch.fields[name] for name in kept}
        part = None if weights is None else weights[start:stop]
        piece = accumulate(metric, metric.values(stats, batch), batch.mask, part)
        total = piece if total is None else merge(total, piece)
    assert total is not None
    if count is not None:
        assert total.count is not None
        assert math.isclose(total.count.item(), count.item(), rel_tol=1e-12)
    return total


# ---- the formulas, token by token


def rows(data: Data) -> list[int]:
    return [t for t in range(TOKENS) if data.mask[t]]


def old_ratio(data: Data, t: int, other: str = "old_logprobs") -> float:
    return math.exp(data.logprob()[t].item() - data.fields[other][t].item())


def segments_of(data: Data, name: str = "segments") -> list[list[int]]:
    groups = [[t for t in rows(data) if data.fields[name][t] == s] for s in range(SEGMENTS)]
    return [group for group in groups if group]


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


def segment_log_ratios(data: Data) -> list[float]:
    return [mean([math.log(old_ratio(data, t)) for t in group]) for group in segments_of(data)]


def segment_advantages(data: Data) -> list[float]:
    return [mean([data.fields["advantages"][t].item() for t in group]) for group in segments_of(data)]


def k3(d: float) -> float:
    return math.exp(d) - d - 1


def softmax(data: Data, t: int) -> list[float]:
    largest = data.x[t].max().item()
    exps = [math.exp(v - largest) for v in data.x[t].tolist()]
    return [e / sum(exps) for e in exps]


def log_ratio(data: Data, t: int) -> float:
    return math.log(old_ratio(data, t))


def to_reference(data: Data, t: int) -> float:
    return data.fields["ref_logprobs"][t].item() - data.logprob()[t].item()


def a(data: Data, t: int) -> float:
    return data.fields["advantages"][t].item()


# metric, value of a token
PER_TOKEN: dict[str, tuple[Callable[..., Metric], Callable[[Data, int], float]]] = {
    "accuracy": (metrics.accuracy, lambda d, t: float(d.x[t].argmax() == d.target[t])),
    "entropy": (metrics.entropy, lambda d, t: -sum(p * math.log(p) for p in softmax(d, t))),
    "lse": (metrics.lse, lambda d, t: math.log(sum(math.exp(v) for v in d.x[t].tolist()))),
    "top_probability": (metrics.top_probability, lambda d, t: max(softmax(d, t))),
    "mean_logit": (metrics.mean_logit, lambda d, t: sum(d.x[t].tolist()) / VOCAB),
    "logprob": (metrics.logprob, lambda d, t: d.logprob()[t].item()),
    "advantage": (metrics.advantage, a),
    "ratio": (metrics.ratio, old_ratio),
    "ratio_reference": (
        lambda **o: metrics.ratio("reference", **o),
        lambda d, t: old_ratio(d, t, "ref_logprobs"),
    ),
    "ratio_rollout": (lambda **o: metrics.ratio("rollout", **o), lambda d, t: old_ratio(d, t, "rollout_logprobs")),
    "kl_old": (metrics.kl_old, lambda d, t: k3(log_ratio(d, t))),
    "kl_old_k1": (lambda **o: metrics.kl_old("k1", **o), lambda d, t: -log_ratio(d, t)),
    "kl_old_abs": (lambda **o: metrics.kl_old("abs", **o), lambda d, t: abs(log_ratio(d, t))),
    "kl_old_k2": (lambda **o: metrics.kl_old("k2", **o), lambda d, t: log_ratio(d, t) ** 2 / 2),
    "kl_reference": (metrics.kl_reference, lambda d, t: k3(to_reference(d, t))),
    "kl_reference_k1": (lambda **o: metrics.kl_reference("k1", **o), lambda d, t: -to_reference(d, t)),
    "kl_reference_abs": (lambda **o: metrics.kl_reference("abs", **o), lambda d, t: abs(to_reference(d, t))),
    "kl_reference_k2": (lambda **o: metrics.kl_reference("k2", **o), lambda d, t: to_reference(d, t) ** 2 / 2),
    "kl_reference_corrected": (
        lambda **o: metrics.kl_reference(bias_correction=True, **o),
        lambda d, t: old_ratio(d, t) * k3(to_reference(d, t)),
    ),
    "clip_fraction": (
        lambda **o: metrics.clip_fraction(0.2, 0.3, **o),
        lambda d, t: float(old_ratio(d, t) < 0.8 or old_ratio(d, t) > 1.3),
    ),
    "clip_fraction_low": (
        lambda **o: metrics.clip_fraction(0.2, 0.3, side="low", **o),
        lambda d, t: float(old_ratio(d, t) < 0.8 and a(d, t) < 0),
    ),
    "clip_fraction_high": (
        lambda **o: metrics.clip_fraction(0.2, 0.3, side="high", **o),
        lambda d, t: float(old_ratio(d, t) > 1.3 and a(d, t) > 0),
    ),
    "clip_fraction_signed": (
        lambda **o: metrics.clip_fraction(0.2, 0.3, side="signed", **o),
        lambda d, t: float((old_ratio(d, t) < 0.8 and a(d, t) < 0) or (old_ratio(d, t) > 1.3 and a(d, t) > 0)),
    ),
}


@crossed(bounds=[(0, TOKENS), PIECES], weighting=["token", "segment", "document"], name=PER_TOKEN)
def test_means_of_tokens(name: str, weighting: str, bounds: tuple[int, ...]) -> None:
    factory, formula = PER_TOKEN[name]
    data = Data()
    metric = factory(weighting=weighting)
    assert metric.label == name
    got = measure(metric, data, bounds)
    if weighting == "token":
        values = [formula(data, t) for t in rows(data)]
    else:
        values = [mean([formula(data, t) for t in group]) for group in segments_of(data, metric.ids)]
    assert len({round(value, 9) for value in values}) > 1  # or the wrong weighting would pass
    assert got.count is not None and got.sum is not None
    assert got.count.item() == pytest.approx(len(values), rel=1e-12)
    assert got.sum.item() == pytest.approx(sum(values), rel=1e-9)
    assert got.value.item() == pytest.approx(mean(values), rel=1e-9)


@pytest.mark.parametrize("reduce", ["max", "min"])
@pytest.mark.parametrize(
    "name",
    ["entropy", "lse", "top_probability", "mean_logit", "logprob", "advantage", "ratio", "kl_old", "kl_reference"],
)
def test_extrema(name: str, reduce: str) -> None:
    factory, formula = PER_TOKEN[name]
    data = Data()
    metric = factory(reduce=reduce)
    assert metric.label == f"{name}_{reduce}"
    expected = {"max": max, "min": min}[reduce](formula(data, t) for t in rows(data))
    for bounds in ((0, TOKENS), PIECES):
        assert measure(metric, data, bounds).value.item() == pytest.approx(expected, rel=1e-9)


def test_perplexity() -> None:
    data = Data()
    logprob = data.logprob()
    whole = math.exp(-mean([logprob[t].item() for t in rows(data)]))
    own = [math.exp(-mean([logprob[t].item() for t in group])) for group in segments_of(data)]
    assert measure(metrics.perplexity(), data, PIECES).value.item() == pytest.approx(whole, rel=1e-9)
    assert measure(metrics.perplexity("segment"), data).value.item() == pytest.approx(mean(own), rel=1e-9)
    assert abs(whole - mean(own)) > 0.1


@pytest.mark.parametrize("against", ["old", "rollout"])
def test_effective_sample_size(against: str) -> None:
    data = Data()
    ratios = [old_ratio(data, t, metrics.AGAINST[against]) for t in rows(data)]
    size = sum(ratios) ** 2 / sum(r * r for r in ratios)
    got = measure(metrics.effective_sample_size(against), data, PIECES)
    assert got.sum is not None and got.sum.shape == (2,)
    assert got.value.item() == pytest.approx(size, rel=1e-9)
    fraction = measure(metrics.effective_sample_size(against, normalized=True), data, PIECES)
    assert fraction.value.item() == pytest.approx(size / len(ratios), rel=1e-9)
    assert fraction.value.item() < 0.999


def test_effective_sample_size_of_equal_weights_is_their_number() -> None:
    data = Data()
    data.fields["old_logprobs"] = torch.where(data.mask, data.logprob(), 0.0)
    assert measure(metrics.effective_sample_size(), data).value.item() == pytest.approx(len(rows(data)))
    assert measure(metrics.effective_sample_size(level="segment"), data).value.item() == pytest.approx(4)


SEGMENT_LEVEL = {
    "ratio_segment": (metrics.ratio, lambda lr, adv: math.exp(lr)),
    "kl_old_segment": (metrics.kl_old, lambda lr, adv: k3(lr)),
    "kl_old_k1_segment": (lambda **o: metrics.kl_old("k1", **o), lambda lr, adv: -lr),
    "clip_fraction_segment": (
        lambda **o: metrics.clip_fraction(0.2, 0.3, **o),
        lambda lr, adv: float(not 0.8 <= math.exp(lr) <= 1.3),
    ),
    "clip_fraction_low_segment": (
        lambda **o: metrics.clip_fraction(0.2, 0.3, side="low", **o),
        lambda lr, adv: float(math.exp(lr) < 0.8 and adv < 0),
    ),
    "clip_fraction_high_segment": (
        lambda **o: metrics.clip_fraction(0.2, 0.3, side="high", **o),
        lambda lr, adv: float(math.exp(lr) > 1.3 and adv > 0),
    ),
}


@pytest.mark.parametrize("name", SEGMENT_LEVEL)
def test_segment_level(name: str) -> None:
    factory, formula = SEGMENT_LEVEL[name]
    metric = factory(level="segment")
    assert metric.label == name and metric.unit == "segment" and "segments" in metric.fields
    sums = []
    for seed in range(6):  # some have clipped segments
        data = Data(seed)
        pairs = zip(segment_log_ratios(data), segment_advantages(data), strict=True)
        values = [formula(lr, adv) for lr, adv in pairs]
        got = measure(metric, data)
        assert got.count is not None and got.count.item() == len(values) == 4  # empty segments are not counted
        assert got.value.item() == pytest.approx(mean(values), rel=1e-9)
        sums.append(sum(values))
    assert len(set(sums)) > 1


# ---- edges


def values_of(metric: Metric, logprob: list[float], **fields: list[float]) -> Tensor:
    """``metric`` per token, where nothing but log-probabilities and fields is read."""
    stats = Stats({"logprob": torch.tensor(logprob), "lse": torch.zeros(len(logprob))})
    target = torch.zeros(len(logprob), dtype=torch.int64)
    return metric.values(stats, Batch({k: torch.tensor(v) for k, v in fields.items()}, target, None, VOCAB))


def test_directions() -> None:
    # a token likelier now than before: k1 of KL(old || new) is negative there, of KL(new || reference) positive
    assert values_of(metrics.kl_old("k1"), [-1.0], old_logprobs=[-1.5]).item() == -0.5
    assert values_of(metrics.kl_reference("k1"), [-1.0], ref_logprobs=[-1.5]).item() == 0.5
    for estimator in ("k1", "k3"):
        p, q = torch.tensor([0.7, 0.2, 0.1]), torch.tensor([0.2, 0.5, 0.3])
        log_p, log_q = p.log().tolist(), q.log().tolist()
        truth = (p * (p.log() - q.log())).sum().item()
        # sampled by p: p is old and q new, or p new and q the reference; the expectation is KL(p || q) either way
        old = (p * values_of(metrics.kl_old(estimator), log_q, old_logprobs=log_p)).sum().item()
        reference = (p * values_of(metrics.kl_reference(estimator), log_p, ref_logprobs=log_q)).sum().item()
        assert old == pytest.approx(truth, rel=1e-5)
        assert reference == pytest.approx(truth, rel=1e-5)


@pytest.mark.parametrize("side", ["unsigned", "low", "high", "signed"])
def test_clip_at_its_bounds(side: str) -> None:
    logs = torch.tensor([0.5, 0.5, 1.5, 1.5, 1.5, 0.49, 0.49, 1.51, 1.51, 0.49]).log()
    ratios = logs.exp().tolist()
    low, high = 1 - ratios[0], ratios[2] - 1  # bounds at which the ratio is exactly
    advantages = [1.0, -1.0, 1.0, -1.0, 0.0, 1.0, -1.0, 1.0, -1.0, 0.0]
    expected = {
        "unsigned": [0, 0, 0, 0, 0, 1, 1, 1, 1, 1],
        "low": [0, 0, 0, 0, 0, 0, 1, 0, 0, 0],
        "high": [0, 0, 0, 0, 0, 0, 0, 1, 0, 0],
        "signed": [0, 0, 0, 0, 0, 0, 1, 1, 0, 0],
    }[side]
    metric = metrics.clip_fraction(low, high, side=side)
    got = values_of(metric, logs.tolist(), old_logprobs=[0.0] * 10, advantages=advantages)
    assert got.tolist() == expected


def test_ratios_stay_finite() -> None:
    logprob, old = [0.0, -1e4, 0.0, -math.inf, -3.0], [-1e4, 0.0, -math.inf, -1.0, -2.0]
    largest = math.exp(20.0)
    ratios = values_of(metrics.ratio(), logprob, old_logprobs=old)
    assert ratios.tolist() == pytest.approx([largest, 1 / largest, largest, 1 / largest, math.exp(-1.0)], rel=1e-5)
    for metric in (metrics.kl_old(), metrics.effective_sample_size(), metrics.clip_fraction()):
        assert values_of(metric, logprob, old_logprobs=old).isfinite().all()
    assert values_of(metrics.kl_old(), logprob, old_logprobs=old)[0].item() == pytest.approx(largest - 21, rel=1e-5)
    assert values_of(metrics.ratio(ratio_clamp=1.0), [0.0], old_logprobs=[-3.0]).item() == pytest.approx(math.e)
    assert values_of(metrics.ratio(ratio_clamp=None), [0.0], old_logprobs=[-1e4]).item() == math.inf


@pytest.mark.parametrize(
    "options", [{}, {"kl_clamp": 0.05}, {"log_ratio_clamp": 0.2}, {"bias_correction": True}], ids=str
)
@pytest.mark.parametrize("estimator", ["k1", "abs", "k2", "k3"])
def test_kl_to_reference_is_what_its_loss_is(estimator: str, options: dict[str, Any]) -> None:
    data = Data()
    ((_, loss),) = reference_kl.kl_to_reference(estimator, **options).terms
    stats, batch = data.piece(0, TOKENS)
    expected = torch.where(data.mask, loss.values(stats, batch, {}), 0.0).sum() / len(rows(data))
    assert measure(metrics.kl_reference(estimator, **options), data).value.item() == pytest.approx(expected.item())


def test_nothing_counts() -> None:
    data = Data(counted=False)
    for factory in (metrics.accuracy, metrics.entropy, metrics.ratio, metrics.clip_fraction):
        for weighting in ("token", "segment"):
            got = measure(factory(weighting=weighting), data)
            assert got.value.item() == 0 and got.count is not None and got.count.item() == 0
    assert measure(metrics.perplexity(), data).value.item() == 1
    for normalized in (True, False):
        assert measure(metrics.effective_sample_size(normalized=normalized), data).value.item() == 0
    assert measure(metrics.advantage("max"), data).value.item() == -math.inf
    assert measure(metrics.advantage("min"), data).value.item() == math.inf
    assert measure(metrics.ratio(level="segment"), data).value.item() == 0
    for reduce, nothing in (("max", -math.inf), ("min", math.inf)):
        got = accumulate(metrics.ratio(reduce=reduce), torch.zeros(0), torch.zeros(0, dtype=torch.bool))
        assert got.value.item() == nothing


def test_what_is_masked_is_selected_away() -> None:
    mask = torch.tensor([True, False, True, False])
    values = torch.tensor([1.0, math.nan, 2.0, math.inf])
    assert accumulate(metrics.ratio(), values, mask).value.item() == 1.5
    assert accumulate(metrics.ratio(reduce="max"), values, mask).value.item() == 2.0
    assert accumulate(metrics.ratio(reduce="min"), values, mask).value.item() == 1.0
    weights, count = unit_weights(torch.tensor([0, 0, 1, 1]), mask, 3)
    assert weights.tolist() == [1.0, 0.0, 1.0, 0.0] and count.item() == 2
    assert accumulate(metrics.ratio(weighting="segment"), values, mask, weights, count).value.item() == 1.5
    every = torch.ones(4, dtype=torch.bool)  # tokens that count, two of them in no segment
    weights, count = unit_weights(torch.tensor([0, -1, 1, -1]), every, 3)
    assert accumulate(metrics.ratio(weighting="segment"), values, every, weights, count).value.item() == 1.5


def test_a_token_of_no_segment_has_no_part_in_a_mean_of_segments() -> None:
    """By selection, in a call too: its weight of 0 times an infinite value would be nan."""
    ids = torch.tensor([0, 0, 1, -1, 2])
    mine = Metric(
        "mine", lambda stats, batch: torch.where(batch["segments"] < 0, torch.inf, stats.lse * 0.0 + 1.0),
        weighting="segment", reads_target=False,
    )  # fmt: skip
    out = linear_loss(
        torch.randn(5, 4), torch.randn(7, 4), torch.arange(5), losses.cross_entropy(), metrics=[mine],
        batch={"segments": ids}, num_segments=4,
    )  # fmt: skip
    assert out.metrics["mine"].value.item() == 1.0


def test_sums_are_fp32_at_least_and_have_no_graph() -> None:
    values = torch.tensor([1.0, 1 / 256], dtype=torch.bfloat16, requires_grad=True)
    got = accumulate(metrics.advantage(), values, torch.ones(2, dtype=torch.bool))
    assert got.sum is not None and got.sum.dtype == torch.float32 and not got.sum.requires_grad
    assert got.sum.item() == 1 + 1 / 256  # not a bf16 number
    assert measure(metrics.entropy(), Data()).value.dtype == torch.float64


def test_temperature_and_names() -> None:
    metric = metrics.entropy(temperature=0.7, name="hot", weighting="document")
    assert (metric.label, metric.temperature, metric.fields) == ("hot", 0.7, ("documents",))
    assert metrics.entropy().key == metrics.entropy(name="other").key != metrics.entropy("max").key
    assert metrics.entropy().key != metrics.lse().key
    assert metrics.clip_fraction(0.1).key == metrics.clip_fraction(0.2).key != metrics.clip_fraction(side="low").key
    assert metrics.ratio(weighting="segment").key != metrics.ratio().key == metrics.ratio(temperature=2.0).key
    assert metrics.ratio().key != metrics.ratio(ratio_clamp=None).key


def test_needs_and_fields() -> None:
    expected = {
        metrics.accuracy: ({"argmax"}, (), True),
        metrics.perplexity: (set(), (), True),
        metrics.entropy: ({"entropy"}, (), False),
        metrics.lse: (set(), (), False),
        metrics.top_probability: ({"top_logprob"}, (), False),
        metrics.mean_logit: ({"mean_logit"}, (), False),
        metrics.ratio: (set(), ("old_logprobs",), True),
        metrics.kl_reference: (set(), ("ref_logprobs",), True),
        metrics.clip_fraction: (set(), ("old_logprobs",), True),
        metrics.advantage: (set(), ("advantages",), False),
    }
    for factory, (needs, fields, reads_target) in expected.items():
        metric = factory()
        assert (metric.needs, metric.fields, metric.reads_target) == (needs, fields, reads_target), metric.kind
    assert metrics.clip_fraction(side="low").fields == ("old_logprobs", "advantages")
    assert metrics.kl_reference(bias_correction=True).fields == ("ref_logprobs", "old_logprobs")


def test_a_metric_of_your_own() -> None:
    metric = Metric("margin", lambda stats, batch, scale: scale * (stats.top_logprob - stats.logprob), {"scale": 2.0})
    data = Data()
    metric = Metric("margin", metric.function, metric.options, needs=frozenset({"top_logprob"}))
    expected = mean([2 * (math.log(max(softmax(data, t))) - data.logprob()[t].item()) for t in rows(data)])
    assert measure(metric, data, PIECES).value.item() == pytest.approx(expected, rel=1e-9)


# ---- micro-batches and ranks

ALL = {
    "accuracy": metrics.accuracy(),
    "ppl": metrics.perplexity(),
    "ess": metrics.effective_sample_size(),
    "low": metrics.advantage("min"),
    "high": metrics.ratio(reduce="max"),
    "clipped": metrics.clip_fraction(weighting="segment"),
}


def together(several: list[Data]) -> dict[str, float]:
    """ALL over the tokens of all, by the formulas."""
    logprobs = [data.logprob()[t].item() for data in several for t in rows(data)]
    ratios = [old_ratio(data, t) for data in several for t in rows(data)]
    groups = [(data, group) for data in several for group in segments_of(data)]
    return {
        "accuracy": mean([PER_TOKEN["accuracy"][1](data, t) for data in several for t in rows(data)]),
        "ppl": math.exp(-mean(logprobs)),
        "ess": sum(ratios) ** 2 / sum(r * r for r in ratios),
        "low": min(a(data, t) for data in several for t in rows(data)),
        "high": max(ratios),
        "clipped": mean([mean([float(not 0.8 <= old_ratio(d, t) <= 1.2) for t in group]) for d, group in groups]),
    }


def test_micro_batches() -> None:
    several = [Data(1), Data(2, counted=False), Data(3)]
    measured = [{name: measure(metric, data) for name, metric in ALL.items()} for data in several]
    combined = combine(measured)
    for name, expected in together(several).items():
        assert combined[name].value.item() == pytest.approx(expected, rel=1e-9), name
    means = {name: mean([m[name].value.item() for m in measured]) for name in ("accuracy", "ppl", "ess", "clipped")}
    assert all(abs(means[name] - combined[name].value.item()) > 1e-3 for name in means)  # the mean of means is another


def test_combining_takes_names_from_anywhere_and_changes_nothing() -> None:
    first, second = measure(ALL["accuracy"], Data(1)), measure(ALL["low"], Data(2))
    before = first.sum
    assert before is not None
    kept = before.clone()
    combined = combine([{"a": first}, {"b": second}, {"a": first}])
    assert list(combined) == ["a", "b"] and combined["b"].value.item() == second.value.item()
    assert combined["a"].value.item() == first.value.item()
    assert combined["a"].count is not None and combined["a"].count.item() == 2 * len(rows(Data(1)))
    assert torch.equal(before, kept)
    assert combine([]) == {}


def test_without_ranks_there_is_nothing_to_do() -> None:
    measured = {name: measure(metric, Data(1)) for name, metric in ALL.items()}
    reduced = all_reduce(measured)
    assert reduced == measured and reduced is not measured


def rank(index: int, world: int, store: str) -> None:
    from torch import distributed

    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=f"file://{store}", rank=index, world_size=world)
    calls: list[int] = []
    plain = metrics.values.all_gather

    def counting(out: Tensor, own: Tensor, group: object) -> None:
        calls.append(own.numel())
        plain(out, own, group)

    metrics.values.all_gather = counting
    try:
        several = [Data(4), Data(5)]
        own = {name: measure(metric, several[index]) for name, metric in ALL.items()}
        if index:  # any order
            own = dict(reversed(own.items()))
        untouched = {name: value.value.item() for name, value in own.items()}
        reduced = all_reduce(own)
        assert list(reduced) == list(own)
        for name, expected in together(several).items():
            assert reduced[name].value.item() == pytest.approx(expected, rel=1e-9), name
            assert reduced[name].value.dtype == torch.float64
            assert own[name].value.item() == untouched[name], name
        # 4 counts, 3 sums of one component and one of two; 2 extrema
        assert calls == [11], calls

        # a rank without tokens, in fp32
        few = Data(6, counted=index == 0, dtype=torch.float32)
        low = all_reduce({"low": measure(ALL["low"], few), "accuracy": measure(ALL["accuracy"], few)})
        truth = together([Data(6, dtype=torch.float32)])
        for name in low:
            assert low[name].value.item() == pytest.approx(truth[name], rel=1e-5), name
        assert low["accuracy"].value.dtype == torch.float32
        mixed = all_reduce({"fp32": low["accuracy"], "fp64": reduced["accuracy"]})
        assert [mixed[name].value.dtype for name in mixed] == [torch.float32, torch.float64]
        assert all_reduce({}) == {} and len(calls) == 3
    finally:
        distributed.destroy_process_group()


def test_ranks(tmp_path: Path) -> None:
    ranks.spawn(rank, (2, str(tmp_path / "store")), 2)


# ---- compiled


def test_functions_compile() -> None:
    data = Data()
    stats, batch = data.piece(0, TOKENS)
    every = [factory() for factory, _ in PER_TOKEN.values()]
    every += [factory(level="segment") for factory, _ in SEGMENT_LEVEL.values()]
    every += [metrics.perplexity(), metrics.perplexity("segment"), metrics.effective_sample_size()]

    def run(values: Values, fields: Values, target: Tensor) -> list[Tensor]:
        stats, batch = Stats(values), Batch(fields, target, SEGMENTS, VOCAB)
        weights, count = unit_weights(fields["documents"], batch.mask, SEGMENTS, torch.float64)
        held = [metric.values(stats, batch) for metric in every]
        by_document = accumulate(metrics.entropy(weighting="document"), held[1], batch.mask, weights, count)
        return [*held, by_document.value, accumulate(metrics.entropy("max"), held[1], batch.mask).value]

    compiled = torch.compile(run, fullgraph=True, dynamic=True, backend="aot_eager")
    arguments = (dict(stats.values), dict(batch.fields), data.target)
    for plain, fast in zip(run(*arguments), compiled(*arguments), strict=True):
        torch.testing.assert_close(fast, plain, rtol=1e-12, atol=1e-12)


# ---- the documentation

MODULES = (
    label, policy, policy_segments, preference, preference_pairs, reference_kl, distillation, topk, metrics.functions,
)  # fmt: skip
INNER = ("paired", "dense", "make", "make_policy")  # what several factories share


def factories() -> list[Callable]:
    found = []
    for module in MODULES:
        own = {n: f for n, f in vars(module).items() if inspect.isfunction(f) and f.__module__ == module.__name__}
        found += [f for n, f in own.items() if n[0] != "_" and n not in INNER and is_factory(f)]
    return found


def is_factory(function: Callable) -> bool:
    return function.__annotations__.get("return") in (Losses, Metric)


def test_docs_name_every_factory_and_option() -> None:
    text = (Path(__file__).resolve().parents[2] / "docs" / "losses.md").read_text()
    words = set(re.findall(r"\w+", text))
    names = {factory.__name__ for factory in factories()}
    assert {"cross_entropy", "grpo", "dpo", "topk_kl", "clip_fraction", "kl_old", "kto", "tvd"} <= names
    assert len(names) > 30
    for factory in factories():
        options = [p.name for p in inspect.signature(factory).parameters.values() if p.kind != p.VAR_KEYWORD]
        missing = {factory.__name__, *options} - words
        assert not missing, f"{factory.__name__}: {missing}"
