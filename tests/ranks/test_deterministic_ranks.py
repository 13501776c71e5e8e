"""``deterministic=True``: the same bits of log-probabilities however many ranks share the vocabulary.

Ranks take turns in one process: their messages are noted in a first round of calls and handed to all in a second.
"""

from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import ranks
import torch
import torch.distributed as dist
from cases import GPU, TRITON, Place
from torch import Tensor

from chunked_head import VocabParallel, linear_cross_entropy, linear_logprobs, plan
from chunked_head.parallel.groups import block_of

OURS = [*TRITON, *GPU[:1]]
EVERYTHING = ("entropy", "lse", "argmax", "mean_logit", "log_sum_sq_probs")


@pytest.fixture(scope="module", autouse=True)
def group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Of this process alone."""
    meeting = tmp_path_factory.mktemp("group") / "meeting"
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class Turns:
    """Calls of ranks with so many rows each, one after the other."""

    def __init__(self, rows: list[int]):
        self.rows, self.rank, self.place, self.complete = rows, 0, 0, False
        self.sent: list[list[Tensor]] = [[] for _ in rows]

    def gather(self, out: Tensor, own: Tensor, group: Any) -> None:
        if self.complete:
            out.copy_(torch.cat([messages[self.place] for messages in self.sent]))
        else:
            self.sent[self.rank].append(own.clone())
            out.zero_()
        self.place += 1

    def run(self, call: Callable[[slice, VocabParallel], Any]) -> list[Any]:
        """What ``call(the rank's rows, parallel)`` returns on each rank."""
        turns, found = self, []

        class OfTurn(VocabParallel):
            ranks = property(lambda _: len(turns.rows))
            rank = property(lambda _: turns.rank)

        # whether all make the same call each knows by itself, and nobody here looks at sums over ranks
        module = "chunked_head.parallel"
        agreed = mock.patch(f"{module}.groups.all_gather", lambda out, own, group: out.copy_(own))
        summed = mock.patch(f"{module}.shard.distributed.all_reduce")
        with mock.patch(f"{module}.shard.all_gather", self.gather), agreed, summed:
            for self.complete in (False, True):
                found.clear()
                for rank, count in enumerate(self.rows):
                    self.rank, self.place, first = rank, 0, sum(self.rows[:rank])
                    found.append(call(slice(first, first + count), OfTurn(rows=self.rows)))
        assert all(len(messages) == len(self.sent[0]) > 0 for messages in self.sent)
        return found


class Operands:
    """Of a vocabulary in eight blocks, the last one smaller than the others; its padding is nan."""

    def __init__(self, place: Place):
        gpu = place.device != "cpu"
        self.tokens, self.vocab, width = (300, 8000 - 24, 4096) if gpu else (20, 600, 64)
        self.padded = 8 * block_of(self.vocab)
        made = torch.Generator().manual_seed(5)
        hidden = torch.randn(self.tokens, width, generator=made)
        weight = torch.randn(self.padded, width, generator=made) * 2.4 / width**0.5
        weight[self.vocab :] = torch.nan
        self.hidden, self.weight = (each.to(place.device, torch.bfloat16) for each in (hidden, weight))
        self.bias = torch.randn(self.padded, generator=made).to(place.device, torch.bfloat16)
        # each block has targets, its first and its last column among them
        edges = torch.arange(0, self.vocab, block_of(self.vocab))
        target = torch.randint(0, self.vocab, (self.tokens,), generator=made)
        target[:8], target[8:15], target[15] = edges, edges[1:] - 1, self.vocab - 1
        target[17] = -100
        self.target = target.to(place.device)
        self.temperature = torch.rand(self.tokens, generator=made).to(place.device) + 0.5
        self.common = {"vocab_size": self.vocab, "deterministic": True, "backend": place.backend}

    def options(self, kind: str) -> dict[str, Any]:
        if kind == "plain":
            return dict(self.common)
        scaled = {"softcap": 20.0, "logit_scale": 0.8, "temperature": self.temperature}
        return self.common | scaled | dict.fromkeys(EVERYTHING, True)

    def values(self, options: dict[str, Any], rows: slice = slice(None), tokens: Any = slice(None)) -> list[Tensor]:
        """Log-probabilities, and what else is asked for, as rows of the head and tokens have them."""
        given = dict(options)
        if "temperature" in options:
            given |= {"bias": self.bias[rows].clone(), "temperature": options["temperature"][tokens]}
        found = linear_logprobs(self.hidden[tokens], self.weight[rows].clone(), self.target[tokens], **given)
        return [found] if isinstance(found, Tensor) else list(found)


def assert_same(found: list[Tensor], expected: list[Tensor]) -> None:
    assert len(found) == len(expected)
    for ours, other in zip(found, expected, strict=True):
        assert torch.equal(ours, other) and torch.isfinite(ours.float()).all()


@pytest.mark.parametrize("place", OURS)
@pytest.mark.parametrize("kind", ["plain", "everything"])
def test_any_number_of_ranks(place: Place, kind: str) -> None:
    """One, two, four and eight ranks, and three that hold whole blocks, as one GPU alone."""
    given = Operands(place)
    options, block = given.options(kind), block_of(given.vocab)
    with torch.no_grad():
        alone = given.values(options)
        for count in (1, 2, 3, 4, 8) if place.device == "cuda" else (8,) if kind == "plain" else (3,):
            rows = [given.padded // count] * count if count != 3 else [3 * block, 3 * block, 2 * block]
            for values in Turns(rows).run(lambda own, parallel: given.values(options | {"parallel": parallel}, own)):
                assert_same(values, alone)


@pytest.mark.parametrize("place", OURS)
def test_exact(place: Place) -> None:
    given = Operands(place)
    options = given.options("everything")
    logits = given.hidden.double() @ given.weight.double().T + given.bias.double()
    logits = 20.0 * torch.tanh(0.8 * logits[:, : given.vocab] / 20.0) / given.temperature.double()[:, None]
    log_p, counts = logits.log_softmax(1), given.target >= 0
    expected = [
        log_p.gather(1, given.target.clamp(min=0)[:, None])[:, 0], -(log_p.exp() * log_p).sum(1), logits.logsumexp(1),
        logits.mean(1), (2 * log_p).logsumexp(1), logits.argmax(1),
    ]  # fmt: skip
    with torch.no_grad():
        for ours, exact in zip(given.values(options), expected, strict=True):
            torch.testing.assert_close(ours.double(), exact.double().where(counts, 0.0), rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("place", OURS)
def test_any_batch(place: Place) -> None:
    """Whatever the other tokens are, how many, in which order, in which chunks, with a gradient and without."""
    given = Operands(place)
    options = given.options("plain")
    with torch.no_grad():
        (alone,) = given.values(options)
    every = torch.arange(given.tokens, device=place.device)
    # NumPy's products, which the interpreter takes, depend on where a row stands; a GPU's third call is a replay
    batches = [every[:1], every[:7], every] if place.device == "cpu" else [every[7:8], every[3:10], every.flip(0)] * 3
    for tokens in batches:
        for chunk in (None, 16) if place.device == "cuda" else (None,):
            for gradient in (False, True):
                with torch.set_grad_enabled(gradient):
                    given.weight.requires_grad_(gradient)
                    (values,) = given.values(options | {"chunk_tokens": chunk}, tokens=tokens)
                    assert values.requires_grad == gradient and torch.equal(values, alone[tokens])


@pytest.mark.parametrize("place", OURS)
def test_whatever_else_is_asked_for(place: Place) -> None:
    given = Operands(place)
    options = given.options("plain")
    with torch.no_grad():
        # a small number shows the last bits of the sum
        given.target.copy_(torch.where(given.target >= 0, given.values(options | {"argmax": True})[1], given.target))
        (alone,) = given.values(options)
        for asked in (("entropy",), ("argmax", "mean_logit"), EVERYTHING):
            assert torch.equal(given.values(options | dict.fromkeys(asked, True))[0], alone), asked


def of_gpus(rank: int, device: str) -> dict[str, Any]:
    """Alone, and as one of the ranks, on GPUs of their own."""
    given, parallel = Operands(Place("triton", device)), VocabParallel()
    own = slice(given.padded // parallel.ranks * rank, given.padded // parallel.ranks * (rank + 1))
    found = {}
    for kind in ("plain", "everything"):
        options = given.options(kind)
        with torch.no_grad():
            found[kind] = given.values(options), given.values(options | {"parallel": parallel}, own)
    return found


@pytest.mark.multigpu
@pytest.mark.parametrize("count", [2, 4])
def test_gpus(count: int) -> None:
    found = ranks.run_in_a_folder(of_gpus, count, "cuda")
    for rank in found:
        for kind, (alone, ours) in rank.items():
            assert_same(ours, alone)
            assert_same(alone, found[0][kind][0])


@pytest.mark.parametrize("place", OURS)
def test_where_blocks_are_not_whole(place: Place) -> None:
    given = Operands(place)
    third, block = given.padded // 3, block_of(given.vocab)
    rows = [third, given.padded - third]

    def losses_of(own: slice, parallel: VocabParallel, reduction: str) -> Tensor:
        weight = given.weight[own].clone().requires_grad_(reduction == "mean")
        options = given.common | {"parallel": parallel, "reduction": reduction}
        return linear_cross_entropy(given.hidden, weight, given.target, **options)

    with pytest.raises(ValueError, match=rf"in blocks of {block}, .* hold them whole; they hold \[{third}"):
        Turns(rows).run(lambda own, parallel: losses_of(own, parallel, "none"))
    # where gradients are made with the loss, it is a sum of what ranks have
    found = Turns(rows).run(lambda own, parallel: losses_of(own, parallel, "mean"))
    assert all(torch.equal(value, found[0]) for value in found)
    sets = {"kept_ids": torch.zeros(given.tokens, 2, dtype=torch.int64, device=place.device)}
    with pytest.raises(ValueError, match=r"kept_ids'\] and candidates do not go with deterministic=True over ranks"):
        Turns([given.padded // 2] * 2).run(lambda own, of: given.values(given.common | sets | {"parallel": of}, own))
    with pytest.raises(ValueError, match="deterministic=True does not go with top_k"):
        given.values(given.common | {"top_k": 3})


def test_blocks() -> None:
    """They follow from the vocabulary alone, and two, four and eight ranks with equal parts hold them whole where a
    head is padded to a multiple of 64."""
    for vocab in (64, 600, 50257, 128256, 151936, 256000):
        padded = -(-vocab // 64) * 64
        assert block_of(padded) == block_of(vocab) == padded // 8
    options = {"hidden_grad": False, "weight_grad": False, "deterministic": True, "device": "sm_90"}
    sizes = {"tokens": 64, "hidden": 4096, "dtype": torch.bfloat16}
    assert plan(vocab=128256, ranks=4, **sizes, **options).vocab_block == 16032
    with pytest.raises(ValueError, match="Pad the head to 50304 rows"):
        plan(vocab=50257, ranks=2, **sizes, **options)
