"""Metrics against their formulas written out, over pieces, micro-batches and ranks."""

import inspect
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import ranks
import torch
from loss_cases import FACTORIES
from test_extremes import logits
from tiers import crossed
from torch import Tensor

from chunked_head import linear_loss, logits_logprobs, logits_loss, losses, metrics
from chunked_head.metrics import Metric, MetricValue, all_reduce, combine

TOKENS, VOCAB, SEGMENTS = 29, 11, 6
# segments 0 and 3 lie interleaved, segment 4 has no token, segment 5 none that counts, two tokens are of none
IDS = torch.tensor([0, 3, 0, 3, 3, 0, 1, 2, 2, 2, 2, 2, 2, -1, 3, 3, 0, 5, 5, 1, 0, 2, 2, -1, 3, 0, 0, 1, 3])
DOCUMENTS = torch.tensor([0] * 9 + [2] * 13 + [1] * 7)
MASKED = (2, 9, 17, 18, 28)
CHUNKS = (None, 7)


class Data:
    """Random logits and fields in float64; garbage where a token does not count."""

    def __init__(self, seed: int = 0, counted: bool = True, dtype: torch.dtype = torch.float64):
        g = torch.Generator().manual_seed(seed)
        self.x = torch.randn(TOKENS, VOCAB, generator=g, dtype=dtype) * 2
        self.mask = torch.ones(TOKENS, dtype=torch.bool)
        self.mask[list(MASKED)] = False
        if not counted:
            self.mask[:] = False
        self.target = torch.randint(VOCAB, (TOKENS,), generator=g)
        self.target[5] = self.x[5].argmax()  # accuracy is neither 0 nor 1
        logprob = self.logprob()
        noise = torch.randn(TOKENS, 4, generator=g, dtype=dtype)
        self.fields = {
            "old_logprobs": (logprob + 0.7 * noise[:, 0]).clamp(max=0.0),
            "ref_logprobs": (logprob + 0.4 * noise[:, 1]).clamp(max=0.0),
            "rollout_logprobs": (logprob + 0.2 * noise[:, 2]).clamp(max=0.0),
            "advantages": noise[:, 3],
        }
        for field in self.fields.values():
            field[list(MASKED)] = math.nan
        self.fields |= {"segments": IDS, "documents": DOCUMENTS, "mask": self.mask}

    def logprob(self) -> Tensor:
        return self.x.log_softmax(-1).gather(-1, self.target[:, None])[:, 0]


def measure(metric: Metric, data: Data, chunk: int | None = None, **options: Any) -> MetricValue:
    """A metric of one call, in chunks of so many tokens."""
    found = linear_loss(
        data.x, torch.eye(VOCAB, dtype=data.x.dtype), data.target, losses.z_loss(), batch=data.fields,
        num_segments=SEGMENTS, metrics=[metric], chunk_tokens=chunk, **options,
    )  # fmt: skip
    return found.metrics[metric.label]


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
    "ratio_reference": (lambda **o: metrics.ratio("reference", **o), lambda d, t: old_ratio(d, t, "ref_logprobs")),
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


@crossed(chunk=CHUNKS, weighting=["token", "segment", "document"], name=PER_TOKEN)
def test_means_of_tokens(name: str, weighting: str, chunk: int | None) -> None:
    factory, formula = PER_TOKEN[name]
    data = Data()
    metric = factory(weighting=weighting)
    assert metric.label == name
    got = measure(metric, data, chunk)
    if weighting == "token":
        values = [formula(data, t) for t in rows(data)]
    else:
        values = [mean([formula(data, t) for t in group]) for group in segments_of(data, f"{weighting}s")]
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
    for chunk in CHUNKS:
        assert measure(metric, data, chunk).value.item() == pytest.approx(expected, rel=1e-9)


def test_perplexity() -> None:
    data = Data()
    logprob = data.logprob()
    whole = math.exp(-mean([logprob[t].item() for t in rows(data)]))
    own = [math.exp(-mean([logprob[t].item() for t in group])) for group in segments_of(data)]
    assert measure(metrics.perplexity(), data, 7).value.item() == pytest.approx(whole, rel=1e-9)
    assert measure(metrics.perplexity("segment"), data).value.item() == pytest.approx(mean(own), rel=1e-9)
    assert abs(whole - mean(own)) > 0.1


@pytest.mark.parametrize("against", ["old", "rollout"])
def test_effective_sample_size(against: str) -> None:
    data = Data()
    ratios = [old_ratio(data, t, metrics.AGAINST[against]) for t in rows(data)]
    size = sum(ratios) ** 2 / sum(r * r for r in ratios)
    got = measure(metrics.effective_sample_size(against), data, 7)
    assert got.sum is not None and got.sum.shape == (2,)
    assert got.value.item() == pytest.approx(size, rel=1e-9)
    fraction = measure(metrics.effective_sample_size(against, normalized=True), data, 7)
    assert fraction.value.item() == pytest.approx(size / len(ratios), rel=1e-9)
    assert fraction.value.item() < 0.999


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
    assert metric.label == name
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
    """``metric`` of one token a call, where nothing but log-probabilities and fields is read."""
    x = logits(torch.tensor(logprob, dtype=torch.float64))
    target = torch.zeros(1, dtype=torch.int64)

    def one(i: int) -> Tensor:
        batch = {name: torch.tensor([float(values[i])], dtype=torch.float64) for name, values in fields.items()}
        return (
            logits_loss(x[i : i + 1], target, losses.z_loss(), batch=batch, metrics=[metric])
            .metrics[metric.label]
            .value
        )

    return torch.stack([one(i) for i in range(len(logprob))])


@pytest.mark.parametrize("side", ["unsigned", "low", "high", "signed"])
def test_clip_at_its_bounds(side: str) -> None:
    given = torch.full((10,), -3.0, dtype=torch.float64)
    own = logits_logprobs(logits(given), torch.zeros(10, dtype=torch.int64))
    old = own - torch.tensor([0.6, 0.6, 1.5, 1.5, 1.5, 0.59, 0.59, 1.51, 1.51, 0.59], dtype=torch.float64).log()
    ratios = (own - old).exp().tolist()
    low, high = 1 - ratios[0], ratios[2] - 1  # bounds at which the ratio is exactly
    advantages = [1.0, -1.0, 1.0, -1.0, 0.0, 1.0, -1.0, 1.0, -1.0, 0.0]
    expected = {
        "unsigned": [0, 0, 0, 0, 0, 1, 1, 1, 1, 1],
        "low": [0, 0, 0, 0, 0, 0, 1, 0, 0, 0],
        "high": [0, 0, 0, 0, 0, 0, 0, 1, 0, 0],
        "signed": [0, 0, 0, 0, 0, 0, 1, 1, 0, 0],
    }[side]
    metric = metrics.clip_fraction(low, high, side=side)
    got = values_of(metric, given.tolist(), old_logprobs=old.tolist(), advantages=advantages)
    assert got.tolist() == expected


def test_ratios_stay_finite() -> None:
    logprob, old = [-1.0, -1e4, -1.0, -math.inf, -3.0], [-1e4, 0.0, -math.inf, -1.0, -2.0]
    largest = math.exp(20.0)
    ratios = values_of(metrics.ratio(), logprob, old_logprobs=old)
    assert ratios.tolist() == pytest.approx([largest, 1 / largest, largest, 1 / largest, math.exp(-1.0)], rel=1e-5)
    for metric in (metrics.kl_old(), metrics.effective_sample_size(), metrics.clip_fraction()):
        assert values_of(metric, logprob, old_logprobs=old).isfinite().all()
    assert values_of(metrics.kl_old(), logprob, old_logprobs=old)[0].item() == pytest.approx(largest - 21, rel=1e-5)
    assert values_of(metrics.ratio(ratio_clamp=1.0), [-1.0], old_logprobs=[-4.0]).item() == pytest.approx(math.e)
    assert values_of(metrics.ratio(ratio_clamp=None), [-1.0], old_logprobs=[-1e4]).item() == math.inf


@pytest.mark.parametrize(
    "options", [{}, {"kl_clamp": 0.05}, {"log_ratio_clamp": 0.2}, {"bias_correction": True}], ids=str
)
@pytest.mark.parametrize("estimator", ["k1", "abs", "k2", "k3"])
def test_kl_to_reference_is_what_its_loss_is(estimator: str, options: dict[str, Any]) -> None:
    data = Data()
    loss = losses.kl_to_reference(estimator, **options)
    eye = torch.eye(VOCAB, dtype=torch.float64)
    expected = linear_loss(data.x, eye, data.target, loss, batch=data.fields, num_segments=SEGMENTS).loss
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


def test_a_metric_of_your_own() -> None:
    def margin(stats: Any, batch: Any, scale: float) -> Tensor:
        return scale * (stats.top_logprob - stats.logprob)

    data, metric = Data(), Metric("margin", margin, {"scale": 2.0}, needs=frozenset({"top_logprob"}))
    expected = mean([2 * (math.log(max(softmax(data, t))) - data.logprob()[t].item()) for t in rows(data)])
    assert measure(metric, data, 7).value.item() == pytest.approx(expected, rel=1e-9)


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


def test_results_that_are_changed_in_place_change_no_other() -> None:
    """As ``torch.distributed.all_reduce`` of every metric's sum and count does."""
    data = Data()
    measured = [
        metrics.entropy(),
        metrics.perplexity(),
        metrics.accuracy(),
        metrics.entropy(weighting="segment", name="a"),
    ]
    measured += [metrics.perplexity(weighting="segment", name="b")]
    out = logits_loss(
        data.x.requires_grad_(), data.target, losses.cross_entropy() + losses.z_loss(), batch=data.fields,
        num_segments=SEGMENTS, metrics=measured,
    )  # fmt: skip
    found = [out.loss, *out.parts.values(), *(each for one in out.metrics.values() for each in (one.sum, one.count))]
    before = [value.detach().clone() for value in found]
    for value in found:
        value.detach().mul_(2.0)
    for value, was in zip(found, before, strict=True):
        torch.testing.assert_close(value.detach(), 2.0 * was, rtol=0, atol=0)


def test_micro_batches() -> None:
    several = [Data(1), Data(2, counted=False), Data(3)]
    measured = [{name: measure(metric, data) for name, metric in ALL.items()} for data in several]
    combined = combine(measured)
    for name, expected in together(several).items():
        assert combined[name].value.item() == pytest.approx(expected, rel=1e-9), name
    means = {name: mean([m[name].value.item() for m in measured]) for name in ("accuracy", "ppl", "ess", "clipped")}
    assert all(abs(means[name] - combined[name].value.item()) > 1e-3 for name in means)  # the mean of means is another


def rank(index: int, world: int, store: str) -> None:
    from torch import distributed

    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=f"file://{store}", rank=index, world_size=world)
    calls: list[int] = []
    plain = distributed.all_gather_into_tensor

    def counting(out: Tensor, own: Tensor, group: object) -> None:
        calls.append(own.numel())
        plain(out, own, group=group)

    distributed.all_gather_into_tensor = counting
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


# ---- the documentation


def test_docs_name_every_factory_and_option() -> None:
    text = (Path(__file__).resolve().parents[2] / "docs" / "losses.md").read_text()
    words = set(re.findall(r"\w+", text))
    names = {factory.__name__ for factory in FACTORIES}
    assert {"cross_entropy", "grpo", "dpo", "topk_kl", "clip_fraction", "kl_old", "kto", "tvd"} <= names
    assert len(names) > 30
    for factory in FACTORIES:
        options = [p.name for p in inspect.signature(factory).parameters.values() if p.kind != p.VAR_KEYWORD]
        missing = {factory.__name__, *options} - words
        assert not missing, f"{factory.__name__}: {missing}"
