"""Metrics against their formulas written out, over pieces, micro-batches and ranks."""

import inspect
import math
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import ranks
import torch
import torch.distributed as dist
from oracle.metrics import METRICS, Options
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
        self.q = (self.x + torch.randn(TOKENS, VOCAB, generator=g, dtype=dtype)).softmax(-1)
        others = {"old_logprobs": 0.7, "ref_logprobs": 0.4, "rollout_logprobs": 0.2}
        fields = {
            name: (self.logprob + size * noise[:, i]).clamp(max=0.0) for i, (name, size) in enumerate(others.items())
        }
        self.fields = fields | {"advantages": self.advantages}
        for field in self.fields.values():
            field[list(MASKED)] = math.nan
        self.teacher = torch.where(self.mask[:, None], self.q.log(), math.nan)
        self.fields |= {"segments": IDS, "documents": DOCUMENTS, "mask": self.mask}
        # segment 0 is in two pairs; two pairs have a segment without a token that counts
        self.fields |= {"pairs": torch.tensor([[0, 1], [2, 3], [3, 0], [4, 2], [1, 5]])}
        self.fields |= {"segment_labels": torch.tensor([True, False, True, False, True, False])}

    def log_ratio(self, against: str = "old") -> Tensor:
        return self.logprob - self.fields[metrics.AGAINST[against]]

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


class OfSegments:
    """Means of segments."""

    def __init__(self, data: Data):
        self.data, self.advantages = data, data.weighted(data.advantages, "segment")

    def log_ratio(self, against: str = "old") -> Tensor:
        return self.data.weighted(self.data.log_ratio(against), "segment")


def measure(metric: Metric, data: Data, chunk: int | None = None, **options: Any) -> MetricValue:
    """A metric of one call, in chunks of so many tokens."""
    has_teacher = metric.kind in METRICS and METRICS[metric.kind].has_teacher
    batch = data.fields | ({"teacher_logits": data.teacher} if has_teacher else {})
    found = linear_loss(
        data.x, torch.eye(VOCAB, dtype=data.x.dtype), data.target, losses.lk() if has_teacher else losses.z_loss(),
        batch=batch, num_segments=SEGMENTS, metrics=[metric], chunk_tokens=chunk, **options,
    )  # fmt: skip
    return found.metrics[metric.label]


# ---- the formulas


def label_of(kind: str, options: Options, *more: str) -> str:
    """The name by default: it says what of the options is not the usual."""
    words = [value for value in options.values() if isinstance(value, str)]
    return "_".join([kind, *words, *(["corrected"] if options.get("bias_correction") else []), *more])


def means(*asked: str) -> dict[str, tuple[str, Options]]:
    """Metrics that are means and have these options, with each of their own options."""
    known = {kind: inspect.signature(getattr(metrics, kind)).parameters for kind, row in METRICS.items() if row.is_mean}
    return {
        f"{kind}-{i}": (kind, options)
        for kind in known if {*asked} <= {*known[kind]} for i, options in enumerate(METRICS[kind].options)
    }  # fmt: skip


MEANS = means()


@crossed(chunk=CHUNKS, weighting=["token", "segment", "document"], name=MEANS)
def test_means_of_tokens(name: str, weighting: str, chunk: int | None) -> None:
    kind, options = MEANS[name]
    data, metric = Data(), getattr(metrics, kind)(weighting=weighting, **options)
    assert metric.label == label_of(kind, options)
    values = data.weighted(METRICS[kind].formula(data, **options), weighting)
    got = measure(metric, data, chunk)
    assert len(values.unique()) > 1  # or the wrong weighting would pass
    torch.testing.assert_close((got.count.double(), got.sum), (torch.tensor(len(values)).double(), values.sum()))
    torch.testing.assert_close(got.value, values.mean())


@pytest.mark.parametrize("reduce", ["max", "min"])
@pytest.mark.parametrize("name", means("reduce"))
def test_extrema(name: str, reduce: str) -> None:
    kind, options = MEANS[name]
    data, metric = Data(), getattr(metrics, kind)(reduce=reduce, **options)
    assert metric.label == label_of(kind, options, reduce)
    expected = getattr(data.weighted(METRICS[kind].formula(data, **options)), f"a{reduce}")()
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


@pytest.mark.parametrize("chunk", CHUNKS)
@pytest.mark.parametrize("options", METRICS["reward"].options, ids=str)
def test_rewards(options: Options, chunk: int | None) -> None:
    """Of micro-batches too; one of them without a pair, or without a segment, that counts."""
    metric, found, expected = metrics.reward(**options), [], []
    for seed in range(3):
        data = Data(seed)
        found.append(measure(metric, data, chunk))
        expected.append(METRICS["reward"].formula(data, **options)[0])
        torch.testing.assert_close(found[-1].value, expected[-1])
    nothing = measure(metric, Data(counted=False), chunk)
    assert nothing.value == 0 and nothing.count == 0
    combined = combine([{"reward": value} for value in (*found, nothing)])["reward"]
    torch.testing.assert_close(combined.value, torch.stack(expected).mean())  # each has as many pairs
    assert len({float(value) for value in expected}) > 1 or options.get("quantity") == "accuracy"


PREFERENCE = {
    "dpo": losses.dpo(0.3), "ipo": losses.dpo(0.3, "ipo"), "ld": losses.dpo(ld_alpha=0.5, divergence="js"),
    "free": losses.dpo(reference_free=True), "simpo": losses.simpo(2.0, alpha=0.2), "cpo": losses.cpo(variant="ipo"),
    "orpo": losses.orpo() + losses.cross_entropy(), "kto": losses.kto(0.4),
}  # fmt: skip


@pytest.mark.parametrize("name", PREFERENCE)
def test_metrics_of_a_preference_loss(name: str) -> None:
    loss = PREFERENCE[name]
    found, kept = metrics.preference(loss), loss.terms[0][1].options
    quantities = ["chosen", "rejected", "margins"] + ["accuracies"] * (name != "kto")
    assert [metric.label for metric in found] == [f"rewards/{each}" for each in quantities] + [
        "logps/chosen", "logps/rejected"
    ]  # fmt: skip
    assert found[0].options["beta"] == kept["beta"] and found[-1].options["beta"] == 1.0
    averages = name in ("simpo", "cpo", "orpo")
    assert found[0].options["average"] == found[-1].options["average"] == averages
    assert ("ref_logprobs" in found[0].fields) == (name in ("dpo", "ipo", "ld", "kto"))
    assert found[0].options["power"] == (-0.2 if name == "simpo" else 0.0) and found[-1].options["power"] == 0.0
    assert all(metric.options["ld_alpha"] == (0.5 if name == "ld" else None) for metric in found)


def test_a_loss_without_preference() -> None:
    with pytest.raises(ValueError, match=r"takes a sum with one of losses\.cpo, dpo, kto, orpo, simpo, got Losses"):
        metrics.preference(losses.cross_entropy())
    with pytest.raises(ValueError, match="is of pairs: leave paired=True"):
        metrics.reward("accuracy", paired=False)
    with pytest.raises(ValueError, match="weighs the tokens of pairs"):
        metrics.reward("chosen", paired=False, ld_alpha=0.1)
    with pytest.raises(ValueError, match=r"finish='share' of metrics\.mine is of several numbers per unit"):
        Metric("mine", lambda stats, batch: stats.lse, finish="share")


@pytest.mark.parametrize("name", means("level"))
def test_segment_level(name: str) -> None:
    kind, options = MEANS[name]
    metric = getattr(metrics, kind)(level="segment", **options)
    assert metric.label == label_of(kind, options, "segment")
    sums = []
    for seed in range(6):  # some have clipped segments
        data = Data(seed)
        values, got = METRICS[kind].formula(OfSegments(data), **options), measure(metric, data)
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
