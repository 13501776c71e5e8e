"""Metrics against their formulas written out, over pieces, micro-batches and ranks."""

import inspect
import math
import pickle
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import ranks
import torch
import torch.distributed as dist
from loss_cases import FACTORIES
from test_extremes import logits
from tiers import crossed
from torch import Tensor

from chunked_head import TokenParallel, linear_loss, logits_logprobs, logits_loss, losses, metrics
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
        self.mask[list(MASKED) if counted else slice(None)] = False
        self.target = torch.randint(VOCAB, (TOKENS,), generator=g)
        self.target[5] = self.x[5].argmax()  # accuracy is neither 0 nor 1
        self.p = self.x.softmax(-1)
        self.logprob = self.p.log().gather(-1, self.target[:, None])[:, 0]
        noise = torch.randn(TOKENS, 4, generator=g, dtype=dtype)
        self.advantages = noise[:, 3]
        others = {"old_logprobs": 0.7, "ref_logprobs": 0.4, "rollout_logprobs": 0.2}
        fields = {
            name: (self.logprob + size * noise[:, i]).clamp(max=0.0) for i, (name, size) in enumerate(others.items())
        }
        self.fields = fields | {"advantages": self.advantages}
        for field in self.fields.values():
            field[list(MASKED)] = math.nan
        self.fields |= {"segments": IDS, "documents": DOCUMENTS, "mask": self.mask}

    def log_ratio(self, other: str = "old") -> Tensor:
        return self.logprob - self.fields[f"{other}_logprobs"]

    def groups(self, values: Tensor, name: str) -> list[Tensor]:
        """Values of the tokens that count of each segment that has some."""
        ids = self.fields[name]
        found = [values[self.mask & (ids == s)] for s in range(SEGMENTS)]
        return [group for group in found if len(group)]

    def weighted(self, values: Tensor, weighting: str = "token") -> Tensor:
        """Values of the tokens that count, or their means in segments or documents."""
        if weighting == "token":
            return values[self.mask].double()
        return torch.stack([group.double().mean() for group in self.groups(values, f"{weighting}s")])


def measure(metric: Metric, data: Data, chunk: int | None = None, **options: Any) -> MetricValue:
    """A metric of one call, in chunks of so many tokens."""
    found = linear_loss(
        data.x, torch.eye(VOCAB, dtype=data.x.dtype), data.target, losses.z_loss(), batch=data.fields,
        num_segments=SEGMENTS, metrics=[metric], chunk_tokens=chunk, **options,
    )  # fmt: skip
    return found.metrics[metric.label]


# ---- the formulas

ESTIMATORS: dict[str, Callable[[Tensor], Tensor]] = {
    "": lambda d: d.exp() - d - 1, "_k1": lambda d: -d, "_abs": lambda d: d.abs(), "_k2": lambda d: d**2 / 2,
}  # fmt: skip


def of_estimator(make: Callable[..., Metric], name: str) -> Callable[..., Metric]:
    return partial(make, name[1:]) if name else make


def clipped(ratio: Tensor, advantages: Tensor, side: str) -> Tensor:
    low, high = ratio < 0.8, ratio > 1.3
    sides = {"low": low & (advantages < 0), "high": high & (advantages > 0), "unsigned": low | high}
    return (sides["low"] | sides["high"] if side == "signed" else sides[side]).double()


# metric, values of tokens
PER_TOKEN: dict[str, tuple[Callable[..., Metric], Callable[[Data], Tensor]]] = {
    "accuracy": (metrics.accuracy, lambda d: d.x.argmax(-1) == d.target),
    "entropy": (metrics.entropy, lambda d: -(d.p * d.p.log()).sum(-1)),
    "lse": (metrics.lse, lambda d: d.x.exp().sum(-1).log()),
    "top_probability": (metrics.top_probability, lambda d: d.p.amax(-1)),
    "mean_logit": (metrics.mean_logit, lambda d: d.x.sum(-1) / VOCAB),
    "logprob": (metrics.logprob, lambda d: d.logprob),
    "advantage": (metrics.advantage, lambda d: d.advantages),
    "ratio": (metrics.ratio, lambda d: d.log_ratio().exp()),
    "ratio_reference": (partial(metrics.ratio, "reference"), lambda d: d.log_ratio("ref").exp()),
    "ratio_rollout": (partial(metrics.ratio, "rollout"), lambda d: d.log_ratio("rollout").exp()),
    "kl_reference_corrected": (
        partial(metrics.kl_reference, bias_correction=True),
        lambda d: d.log_ratio().exp() * ESTIMATORS[""](-d.log_ratio("ref")),
    ),
    "clip_fraction": (
        partial(metrics.clip_fraction, 0.2, 0.3), lambda d: clipped(d.log_ratio().exp(), d.advantages, "unsigned")
    ),
}  # fmt: skip
for estimator, value in ESTIMATORS.items():
    PER_TOKEN[f"kl_old{estimator}"] = of_estimator(metrics.kl_old, estimator), lambda d, f=value: f(d.log_ratio())
    kl_reference = of_estimator(metrics.kl_reference, estimator)
    PER_TOKEN[f"kl_reference{estimator}"] = kl_reference, lambda d, f=value: f(-d.log_ratio("ref"))
for side in ("low", "high", "signed"):
    PER_TOKEN[f"clip_fraction_{side}"] = (
        partial(metrics.clip_fraction, 0.2, 0.3, side=side),
        lambda d, side=side: clipped(d.log_ratio().exp(), d.advantages, side),
    )


@crossed(chunk=CHUNKS, weighting=["token", "segment", "document"], name=PER_TOKEN)
def test_means_of_tokens(name: str, weighting: str, chunk: int | None) -> None:
    factory, formula = PER_TOKEN[name]
    data, metric = Data(), factory(weighting=weighting)
    assert metric.label == name
    values, got = data.weighted(formula(data), weighting), measure(metric, data, chunk)
    assert len(values.unique()) > 1  # or the wrong weighting would pass
    torch.testing.assert_close((got.count.double(), got.sum), (torch.tensor(len(values)).double(), values.sum()))
    torch.testing.assert_close(got.value, values.mean())


@pytest.mark.parametrize("reduce", ["max", "min"])
@pytest.mark.parametrize(
    "name",
    ["entropy", "lse", "top_probability", "mean_logit", "logprob", "advantage", "ratio", "kl_old", "kl_reference"],
)
def test_extrema(name: str, reduce: str) -> None:
    factory, formula = PER_TOKEN[name]
    data, metric = Data(), factory(reduce=reduce)
    assert metric.label == f"{name}_{reduce}"
    expected = getattr(data.weighted(formula(data)), f"a{reduce}")()
    for chunk in CHUNKS:
        torch.testing.assert_close(measure(metric, data, chunk).value, expected)


def test_perplexity() -> None:
    data = Data()
    whole = (-data.weighted(data.logprob).mean()).exp()
    own = (-data.weighted(data.logprob, "segment")).exp().mean()
    torch.testing.assert_close(measure(metrics.perplexity(), data, 7).value, whole)
    torch.testing.assert_close(measure(metrics.perplexity("segment"), data).value, own)
    assert abs(whole - own) > 0.1


@pytest.mark.parametrize("against", ["old", "rollout"])
def test_effective_sample_size(against: str) -> None:
    data = Data()
    ratios = data.weighted(data.log_ratio(against).exp())
    size = ratios.sum() ** 2 / ratios.square().sum()
    got = measure(metrics.effective_sample_size(against), data, 7)
    assert got.sum is not None and got.sum.shape == (2,) and size / len(ratios) < 0.999
    torch.testing.assert_close(got.value, size)
    fraction = measure(metrics.effective_sample_size(against, normalized=True), data, 7)
    torch.testing.assert_close(fraction.value, size / len(ratios))


# of a segment's mean log-ratio and its mean advantage
SEGMENT_LEVEL: dict[str, tuple[Callable[..., Metric], Callable[[Tensor, Tensor], Tensor]]] = {
    "ratio_segment": (metrics.ratio, lambda lr, adv: lr.exp()),
    "kl_old_segment": (metrics.kl_old, lambda lr, adv: ESTIMATORS[""](lr)),
    "kl_old_k1_segment": (partial(metrics.kl_old, "k1"), lambda lr, adv: -lr),
    "clip_fraction_segment": (
        partial(metrics.clip_fraction, 0.2, 0.3), lambda lr, adv: clipped(lr.exp(), adv, "unsigned")
    ),
    **{
        f"clip_fraction_{side}_segment": (
            partial(metrics.clip_fraction, 0.2, 0.3, side=side),
            lambda lr, adv, side=side: clipped(lr.exp(), adv, side),
        )
        for side in ("low", "high")
    },
}  # fmt: skip


@pytest.mark.parametrize("name", SEGMENT_LEVEL)
def test_segment_level(name: str) -> None:
    factory, formula = SEGMENT_LEVEL[name]
    metric = factory(level="segment")
    assert metric.label == name
    sums = []
    for seed in range(6):  # some have clipped segments
        data = Data(seed)
        values = formula(data.weighted(data.log_ratio(), "segment"), data.weighted(data.advantages, "segment"))
        got = measure(metric, data)
        assert got.count == len(values) == 4  # empty segments are not counted
        torch.testing.assert_close(got.value, values.mean())
        sums.append(float(values.sum()))
    assert len(set(sums)) > 1


# ---- edges


def values_of(metric: Metric, logprob: list[float], **fields: list[float]) -> Tensor:
    """``metric`` of one token a call, where nothing but log-probabilities and fields is read."""
    x, target, found = logits(torch.tensor(logprob, dtype=torch.float64)), torch.zeros(1, dtype=torch.int64), []
    for i, row in enumerate(x.split(1)):
        batch = {name: torch.tensor([float(values[i])], dtype=torch.float64) for name, values in fields.items()}
        out = logits_loss(row, target, losses.z_loss(), batch=batch, metrics=[metric])
        found.append(out.metrics[metric.label].value)
    return torch.stack(found)


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
    expected = data.weighted(2 * (data.p.amax(-1).log() - data.logprob)).mean()
    torch.testing.assert_close(measure(metric, data, 7).value, expected)


def test_a_metric_of_a_field_of_your_own() -> None:
    """Declared by its kind, as ``losses.custom`` takes it, beside one of the library's."""
    mine = torch.randn(5)
    metric = Metric("product", lambda stats, batch: batch.mine * batch.advantages,
                    fields={"mine": "token", "advantages": "token"}, reads_target=False)  # fmt: skip
    out = linear_loss(
        torch.randn(5, 4), torch.randn(7, 4), torch.arange(5), losses.cross_entropy(), metrics=[metric],
        batch={"mine": mine, "advantages": torch.full((5,), 2.0)},
    )  # fmt: skip
    torch.testing.assert_close(out.metrics["product"].value, 2 * mine.mean())


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

    def of_all(values: Callable[[Data], Tensor]) -> Tensor:
        return torch.cat([values(data) for data in several])

    ratios = of_all(lambda d: d.weighted(d.log_ratio().exp()))
    advantages = of_all(lambda d: d.weighted(d.advantages))
    outside = of_all(lambda d: d.weighted((d.log_ratio().exp() - 1).abs() > 0.2, "segment"))
    found = {
        "accuracy": of_all(lambda d: d.weighted(d.x.argmax(-1) == d.target)).mean(),
        "ppl": (-of_all(lambda d: d.weighted(d.logprob))).mean().exp(),
        "ess": ratios.sum() ** 2 / ratios.square().sum(),
        "low": advantages.amin(), "high": ratios.amax(), "clipped": outside.mean(),
    }  # fmt: skip
    return {name: float(value) for name, value in found.items()}


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
    for name, expected in together([several[0], several[2]]).items():
        assert combined[name].value.item() == pytest.approx(expected, rel=1e-9), name
        mean = sum(one[name].value.item() for one in measured) / 3
        assert abs(mean - expected) > 1e-3 or name in ("low", "high"), name  # the mean of means is another


def of_rank(rank: int, device: str) -> dict[str, Any]:
    calls: list[int] = []
    plain = torch.distributed.all_gather_into_tensor

    def counting(out: Tensor, own: Tensor, group: object) -> None:
        calls.append(own.numel())
        plain(out, own, group=group)

    several = [Data(4), Data(5)]
    own = {name: measure(metric, several[rank]) for name, metric in ALL.items()}
    own = dict(reversed(own.items())) if rank else own  # any order
    untouched = {name: value.value.item() for name, value in own.items()}
    with mock.patch("torch.distributed.all_gather_into_tensor", counting):
        reduced = all_reduce(own)
        assert list(reduced) == list(own)
        # 4 counts, 3 sums of one component and one of two; 2 extrema
        assert calls == [11], calls
        # a rank without tokens, in fp32
        few = Data(6, counted=rank == 0, dtype=torch.float32)
        low = all_reduce({"low": measure(ALL["low"], few), "accuracy": measure(ALL["accuracy"], few)})
        mixed = all_reduce({"fp32": low["accuracy"], "fp64": reduced["accuracy"]})
        assert all_reduce({}) == {} and len(calls) == 3
    for name, expected in together(several).items():
        assert reduced[name].value.item() == pytest.approx(expected, rel=1e-9), name
        assert reduced[name].value.dtype == torch.float64 and own[name].value.item() == untouched[name], name
    truth = together([Data(6, dtype=torch.float32)])
    assert {name: one.value.item() for name, one in low.items()} == pytest.approx({n: truth[n] for n in low}, rel=1e-5)
    assert [mixed[name].value.dtype for name in mixed] == [torch.float32, torch.float64]
    return {}


def test_ranks(tmp_path: Path) -> None:
    ranks.run(of_rank, 2, tmp_path)


def test_a_group_is_known_by_more_than_its_name() -> None:
    """Which another one has, once torch.distributed was shut down: of other ranks, perhaps."""
    found, names = list[dict[str, MetricValue]](), set[str]()
    data = Data(7)
    for _ in range(2):
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        try:
            names.add(dist.group.WORLD.group_name)
            for _ in range(2):
                out = logits_loss(
                    data.x, data.target, losses.cross_entropy(), metrics=[metrics.entropy()], parallel=TokenParallel()
                )
                found.append(out.metrics)
            last = found[-1]["entropy"]
            copied = pickle.loads(pickle.dumps(last))
            assert all_reduce({"entropy": copied, "alone": measure(metrics.lse(), data)})["entropy"] is copied
            assert combine(found[-2:])["entropy"].count == 2 * TOKENS
            if len(found) == 4:
                with pytest.raises(ValueError, match="cannot be merged"):
                    combine(found[1:3])
                with pytest.raises(ValueError, match=r"'entropy' is of a process group '.*' that is no longer there"):
                    all_reduce(found[0])
        finally:
            dist.destroy_process_group()
    assert len(names) == 1 and len(found) == 4


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
