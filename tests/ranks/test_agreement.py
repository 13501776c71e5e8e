"""Ranks whose calls differ, where the host does not wait for each call: nan or an error, and an error at the next."""

import math
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import ranks
import torch
import torch.distributed as dist
from torch import Tensor

from chunked_head import (
    TokenParallel,
    VocabParallel,
    linear_cross_entropy,
    linear_logprobs,
    linear_loss,
    losses,
    metrics,
)
from chunked_head.parallel import agreement

TOKENS, HIDDEN, VOCAB = 24, 16, 64
Step = Callable[[], Tensor]


class Setting:
    """A group of its own, which no other case has left out of step, and this rank's operands."""

    last: Any = None  # the last case's group, which is closed: NCCL's take memory

    def __init__(self, device: str):
        if Setting.last is not None:
            dist.destroy_process_group(Setting.last)
        made, rank, count = torch.Generator().manual_seed(1), dist.get_rank(), dist.get_world_size()
        self.group, self.rank = dist.new_group(timeout=timedelta(seconds=30)), rank  # NCCL ends what hangs
        Setting.last = self.group
        self.shared, self.spread = VocabParallel(self.group), TokenParallel(self.group)
        self.sharded = VocabParallel(self.group, sequence_sharded=True)
        self.hidden = torch.randn(TOKENS, HIDDEN, generator=made).to(device).requires_grad_()
        self.whole = torch.randn(VOCAB - VOCAB % count, HIDDEN, generator=made).to(device)
        self.weight = self.whole.chunk(count)[rank].clone().requires_grad_()
        self.target = torch.randint(0, VOCAB // 2, (TOKENS,), generator=made).to(device)

    def head(self, tokens: int = TOKENS) -> tuple[Tensor, Tensor, Tensor]:
        return self.hidden[:tokens], self.weight, self.target[:tokens]

    def cross_entropy(self, tokens: int = TOKENS, **options: Any) -> Step:
        return lambda: linear_cross_entropy(*self.head(tokens), **{"parallel": self.shared, **options})

    def sequence(self, tokens: int) -> Step:
        return self.cross_entropy(tokens, parallel=self.sharded)

    def frozen(self) -> Step:
        return lambda: linear_cross_entropy(self.hidden.detach(), self.weight, self.target, parallel=self.shared)

    def mixed(self, coefficient: Any = 0.5, *asked: Any, **options: Any) -> Step:
        loss = losses.cross_entropy() + coefficient * losses.z_loss()
        return lambda: linear_loss(*self.head(), loss, metrics=asked, parallel=self.shared, **options).loss

    def logprobs(self, **options: Any) -> Step:
        return lambda: linear_logprobs(*self.head(), lse=True, parallel=self.shared, **options).logprobs.sum()

    def evaluated(self) -> Tensor:
        with torch.no_grad():
            asked = [metrics.accuracy(), metrics.entropy()]
            return linear_loss(*self.head(), losses.cross_entropy(), metrics=asked, parallel=self.shared).loss

    def of_tokens(self, loss: Any = None, segments: int = 0, **options: Any) -> Step:
        batch = {"segments": torch.arange(TOKENS, device=self.target.device) // 8} if segments else {}
        batch |= dict.fromkeys(("old_logprobs", "advantages"), self.hidden.detach()[:, 0] - 4) if segments else {}
        options |= {"batch": batch, "num_segments": segments} if segments else {}
        head = self.hidden, self.whole, self.target
        return lambda: linear_loss(*head, loss or losses.cross_entropy(), parallel=self.spread, **options).loss


# what rank 0 calls and what the others do, and what is said of it
DIFFERENT: dict[str, tuple[Callable[[Setting], tuple[Step, Step]], str]] = {
    "chunks": (lambda s: (s.cross_entropy(chunk_tokens=6), s.cross_entropy(chunk_tokens=12)), "chunk_tokens is 6"),
    "metrics": (lambda s: (s.mixed(), s.mixed(0.5, metrics.entropy())), "metrics.entropy: reduce is missing"),
    "a metric": (
        lambda s: (s.mixed(0.5, metrics.lse()), s.mixed(0.5, metrics.entropy())), "metrics.lse: reduce is 'mean'"),
    "reduction": (lambda s: (s.cross_entropy(), s.cross_entropy(reduction="sum")), "reduction is 'mean' on rank 0"),
    "smoothing": (lambda s: (s.cross_entropy(), s.cross_entropy(label_smoothing=0.1)), "label_smoothing is None"),
    "hidden's gradient": (lambda s: (s.cross_entropy(), s.frozen()), "sizes.hidden_grad is True on rank 0"),
    "statistics": (lambda s: (s.logprobs(), s.logprobs(entropy=True)), "sizes.demand.statistics is ((),)"),
    "tokens": (lambda s: (s.cross_entropy(), s.cross_entropy(23)), "tokens is (24,) on rank 0 and (23,)"),
    "tokens of sequences": (lambda s: (s.sequence(24), s.sequence(20)), "tokens is 24 on rank 0 and 20"),
    "function": (lambda s: (s.cross_entropy(), s.logprobs()), "function is "),
    "an evaluation": (lambda s: (s.mixed(), s.evaluated), "losses.z_loss: reduction is None on rank 0 and"),
    "segments": (
        lambda s: (s.of_tokens(losses.gspo(), 3), s.of_tokens(losses.gspo(), 5)), "num_segments is 3 on rank 0 and 5"),
    "metrics of tokens": (
        lambda s: (s.of_tokens(), s.of_tokens(metrics=[metrics.entropy()])), "metrics.entropy: reduce is missing"),
}  # fmt: skip
# numbers, with which no message is another
DRIFTING: dict[str, tuple[Callable[[Setting, float], Step], str]] = {
    "softcap": (lambda s, x: s.cross_entropy(softcap=10 + x), "softcap is 10.2 on rank 0 and 10.3"),
    "temperature": (lambda s, x: s.mixed(temperature=1 + x), "temperature is 1.2 on rank 0 and 1.3"),
    "temperature of a loss": (
        lambda s, x: lambda: linear_loss(
            *s.head(), losses.cross_entropy() + losses.z_loss(temperature=2 + x), parallel=s.shared).loss,
        "temperature is 2.2 on rank 0 and 2.3"),
    "coefficient": (lambda s, x: s.mixed(x), "losses.z_loss: coefficient is 0.2 on rank 0 and 0.3"),
    "smoothing": (lambda s, x: s.cross_entropy(label_smoothing=x), "label_smoothing is 0.2 on rank 0 and 0.3"),
    "temperature of tokens": (lambda s, x: s.of_tokens(temperature=1 + x), "temperature is 1.2 on rank 0 and 1.3"),
    "clip of tokens": (
        lambda s, x: s.of_tokens(losses.gspo(clip_high=x), 3), "losses.gspo: max_ratio is 1.2 on rank 0 and 1.3"),
}  # fmt: skip
# calls before: of rank 0 (0), of the others (1), of none (2)
BEFORE = {
    "nothing is known": "", "the first is known": "00", "the other is known": "11",
    "both are known": "1100", "both are known, the other last": "0011", "neither is expected": "022",
    "in turns": "010101", "in a period": "000100010",
}  # fmt: skip


def said(step: Step) -> str:
    return ranks.said(lambda: float(step().detach()))


def different(device: str, name: str, before: str) -> list[str]:
    """What is said of a call that differs, of the next one and of the one after that."""
    s = Setting(device)
    steps = *DIFFERENT[name][0](s), s.cross_entropy(2)
    for letter in before:
        assert steps[int(letter)]().isfinite()
    return [said(steps[min(s.rank, 1)]), said(steps[0]), said(steps[0])]


def drifting(device: str, name: str) -> dict[str, Any]:
    """A schedule, for which the host waits at its first two steps at most, and where one rank leaves it."""
    s, waits = Setting(device), list[Tensor]()
    step = DRIFTING[name][0]

    def wait(every: Tensor) -> Tensor:
        waits.append(every)
        return every.cpu()

    with mock.patch.object(agreement, "read_agreements", wait):
        values = [said(step(s, 0.01 * i)) for i in range(1, 5)]
    loss = step(s, 0.3 if s.rank else 0.2)()
    grads = torch.autograd.grad(loss, s.hidden)
    apart = [said(lambda: loss), said(step(s, 0.5)), said(step(s, 0.6))]
    return {"waits": len(waits), "values": values, "apart": apart, "nan": bool(grads[0].isnan().all())}


def backward(device: str) -> list[str]:
    """A backward with messages of its own, of a call that another rank has not made."""
    s = Setting(device)
    late = lambda: linear_cross_entropy(*s.head(), reduction="none", parallel=s.shared).sum()  # noqa: E731
    for _ in range(2):
        late().backward()
    if s.rank:
        return [said(s.cross_entropy()), said(late)]
    loss = late()
    return [said(lambda: loss), ranks.said(loss.backward), said(late)]


def groups_of_both(device: str) -> list[str]:
    """Tokens over one group and the vocabulary over another, in which calls differ: the first stays in step."""
    s = Setting(device)
    alone = [dist.new_group([rank]) for rank in range(dist.get_world_size())][s.rank]
    both = VocabParallel(s.group, tokens=TokenParallel(alone))
    steps = [s.cross_entropy(parallel=both, chunk_tokens=n) for n in (6, 12)]
    for i in (0, 0):
        steps[i]()
    return [said(steps[min(s.rank, 1)]), said(steps[0])]


def captured(device: str) -> None:
    """A call in a CUDA graph, replayed: the message is recorded, the host looks at none."""
    s = Setting(device)
    step = s.cross_entropy()
    with torch.no_grad():
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            expected = float(step())
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=stream):
                out = step()
        graph.replay()
        assert float(out) == pytest.approx(expected)
    with pytest.raises(RuntimeError, match="run it once before"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        s.cross_entropy(chunk_tokens=5)()


def without_synchronising(device: str) -> None:
    """A schedule on a GPU waits for nothing."""
    s = Setting(device)
    for i in range(6):
        torch.cuda.set_sync_debug_mode("error" if i > 2 else "default")
        try:
            (s.mixed(0.1 * i)() + s.of_tokens()()).backward()
        finally:
            torch.cuda.set_sync_debug_mode("default")


def work(rank: int, device: str) -> dict[str, Any]:
    def made() -> dict[str, Any]:
        found = {f"{n}, {b}": ranks.outcome(different, device, n, BEFORE[b]) for n in DIFFERENT for b in BEFORE}
        found |= {f"drift of {name}": ranks.outcome(drifting, device, name) for name in DRIFTING}
        found |= {each.__name__: ranks.outcome(each, device) for each in (backward, groups_of_both)}
        if device != "cpu":
            found |= {each.__name__: ranks.outcome(each, device) for each in (captured, without_synchronising)}
        return found

    return made() if device != "cpu" else ranks.as_on_a_gpu(made)


def three(rank: int, device: str) -> dict[str, Any]:
    """One rank does what is expected, two others differ from it and from each other."""

    def apart() -> list[str]:
        s = Setting(device)
        steps = [s.cross_entropy(chunk_tokens=n) for n in (6, 8, 12)]
        for i in (0, 1, 2, 0, 0):
            steps[i]()
        return [said(steps[rank]), said(steps[0])]

    return {"apart": ranks.outcome(ranks.as_on_a_gpu, apart)}


DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.multigpu)]


@pytest.fixture(scope="module", params=DEVICES)
def of_two(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return ranks.run_once(work, 2, tmp_path_factory, f"agreement-{request.param}", request.param)


def hold(outcome: Any, words: str, nan: bool = True) -> None:
    """The call that differs is nan or says why; the next one says why."""
    assert isinstance(outcome, list), outcome
    first, *others = outcome
    assert (nan and first == "nan") or ("make different calls: " in first and words in first), first
    assert all("make different calls: " in each and words in each for each in others), others


@pytest.mark.parametrize("before", BEFORE)
@pytest.mark.parametrize("name", DIFFERENT)
def test_different_calls(of_two: list[dict[str, Any]], name: str, before: str) -> None:
    outcomes = [rank[f"{name}, {before}"] for rank in of_two]
    waits = before in ("nothing is known", "neither is expected")
    for outcome in outcomes:
        if waits and isinstance(outcome, list):  # all ranks have waited, and go on in step
            outcome, after = outcome[:1], outcome[1:]
            assert all(math.isfinite(float(each)) for each in after), after
        hold(outcome, DIFFERENT[name][1], nan=not waits)


@pytest.mark.parametrize("name", DRIFTING)
def test_a_schedule_is_no_new_kind(of_two: list[dict[str, Any]], name: str) -> None:
    for rank in of_two:
        found = rank[f"drift of {name}"]
        assert isinstance(found, dict), found
        assert found["waits"] == 1 and all(math.isfinite(float(value)) for value in found["values"]), found
        hold(found["apart"][:2], DRIFTING[name][1])
        assert found["apart"][0] == "nan" and found["nan"] and math.isfinite(float(found["apart"][2])), found


def test_backward(of_two: list[dict[str, Any]]) -> None:
    for rank in of_two:
        hold(rank["backward"], "reduction is 'none' on rank 0")


def test_two_groups(of_two: list[dict[str, Any]]) -> None:
    for rank in of_two:
        hold(rank["groups_of_both"], "chunk_tokens is 6")


@pytest.mark.multigpu
@pytest.mark.parametrize("name", ["captured", "without_synchronising"])
@pytest.mark.parametrize("of_two", ["cuda"], indirect=True)
def test_on_gpus(of_two: list[dict[str, Any]], name: str) -> None:
    for rank in of_two:
        assert rank[name] is None, rank[name]


def test_three_ranks(tmp_path: Path) -> None:
    for rank in ranks.run(three, 3, tmp_path):
        hold(rank["apart"], "chunk_tokens is 6 on rank 0 and 8 on rank 1")
