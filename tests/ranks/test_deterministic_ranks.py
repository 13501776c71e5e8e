"""``deterministic=True``: the same bits of log-probabilities however many ranks share the vocabulary."""

from pathlib import Path
from typing import Any

import pytest
import ranks
import torch
import torch.distributed as dist
from cases import GPU, TRITON, Place
from torch import Tensor

from chunked_head import VocabParallel, linear_cross_entropy, linear_logprobs, plan

OURS = [*TRITON, *GPU[:1]]
EVERYTHING = ("entropy", "lse", "argmax", "mean_logit", "log_sum_sq_probs")


def block_of(vocab: int) -> int:
    """Rows of a block, of which a vocabulary has eight."""
    frozen = {"weight_grad": False, "hidden_grad": False}
    made = plan(64, 4096, vocab, torch.bfloat16, deterministic=True, device="sm_90", **frozen)
    assert made.vocab_block is not None
    return made.vocab_block


class Operands:
    """Of a vocabulary in eight blocks, the last one smaller than the others; its padding is nan."""

    def __init__(self, place: Place):
        gpu = place.device != "cpu"
        self.tokens, self.vocab, width = (300, 8000 - 24, 4096) if gpu else (20, 600, 64)
        self.block = block_of(self.vocab)
        made = torch.Generator().manual_seed(5)
        hidden = torch.randn(self.tokens, width, generator=made)
        weight = torch.randn(8 * self.block, width, generator=made) * 2.4 / width**0.5
        weight[self.vocab :] = torch.nan
        self.hidden, self.weight = (each.to(place.device, torch.bfloat16) for each in (hidden, weight))
        self.bias = torch.randn(8 * self.block, generator=made).to(place.device, torch.bfloat16)
        # each block has targets, its first and its last column among them
        edges = torch.arange(0, self.vocab, self.block)
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


def of_ranks(rank: int, device: str) -> dict[str, Any]:
    """Values of one rank and of all of them, of two and of three with blocks of their own, and refusals."""
    given, found = Operands(Place("triton", device)), dict[str, Any]()
    size, block = dist.get_world_size(), given.block
    counts = {size: [8 * block // size] * size, 3: [3 * block, 3 * block, 2 * block], 2: [4 * block] * 2}
    kinds = ("plain", "everything")
    if device == "cpu":  # interpreted; two ranks are those of test_calls.py
        counts, kinds = {count: counts[count] for count in (size, 3)}, ("everything",)
    with torch.no_grad():
        alone = {kind: given.values(given.options(kind)) for kind in kinds if rank == 0 or device != "cpu"}
    for count, rows in counts.items():
        if count > size:
            continue
        group = dist.new_group(list(range(count)))
        if rank >= count:
            continue
        own, parallel = slice(sum(rows[:rank]), sum(rows[: rank + 1])), VocabParallel(group, rows=rows)
        for kind in kinds:
            with torch.no_grad():
                ours = given.values(given.options(kind) | {"parallel": parallel}, own)
            found[f"{count} {kind}"] = [alone[kind], ours] if kind in alone else [ours]
    rows = [block + 1, *([(7 * block - 1) // (size - 1)] * (size - 2))]
    rows.append(8 * block - sum(rows))
    parallel, own = VocabParallel(rows=rows), slice(sum(rows[:rank]), sum(rows[: rank + 1]))

    def losses(reduction: str) -> Any:
        weight = given.weight[own].clone().requires_grad_(reduction == "mean")
        options = given.common | {"parallel": parallel, "reduction": reduction}
        return linear_cross_entropy(given.hidden, weight, given.target, **options).item()

    sets = {"kept_ids": torch.zeros(given.tokens, 2, dtype=torch.int64, device=device), "parallel": VocabParallel()}
    part = slice(8 * block // size * rank, 8 * block // size * (rank + 1))
    found["not whole"] = ranks.said(lambda: losses("none"))
    found["mean"] = ranks.said(lambda: losses("mean"))  # a sum of what ranks have, which blocks need not fit
    found["sets"] = ranks.said(lambda: given.values(given.common | sets, part))
    return found


@pytest.mark.parametrize("count, device", [
    (4, "cpu"), *(pytest.param(count, "cuda", marks=pytest.mark.multigpu) for count in (2, 4)),
])  # fmt: skip
def test_any_number_of_ranks(count: int, device: str, tmp_path: Path) -> None:
    ranks.need_gpus(device, count)
    every = ranks.run(of_ranks, count, tmp_path, device)
    for found in every:
        assert "in blocks of" in found["not whole"] and "hold them whole; they hold [" in found.pop("not whole")
        assert 0.0 < float(found.pop("mean")) < 100.0 and "kept_ids'] and candidates do not go" in found.pop("sets")
        assert found
        for name, values in found.items():
            for ours in values:
                torch.testing.assert_close(ours, every[0][name][0], rtol=0, atol=0)
                assert all(torch.isfinite(each.float()).all() for each in ours)


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
    """Whatever the other tokens are, how many, in which order, in which chunks, with a gradient and without; and
    whatever else is asked for."""
    given = Operands(place)
    options = given.options("plain")
    with torch.no_grad():
        (alone,) = given.values(options)
    every = torch.arange(given.tokens, device=place.device)
    # NumPy's products, which the interpreter takes, depend on where a row stands
    batches = [every[:1], every[:7], every] if place.device == "cpu" else [every[7:8], every[3:10], every.flip(0)] * 3
    for tokens in batches:
        for chunk in (None, 16) if place.device == "cuda" else (None,):
            for gradient in (False, True):
                with torch.set_grad_enabled(gradient):
                    given.weight.requires_grad_(gradient)
                    (values,) = given.values(options | {"chunk_tokens": chunk}, tokens=tokens)
                    assert values.requires_grad == gradient and torch.equal(values, alone[tokens])
    with torch.no_grad():
        # a small number shows the last bits of the sum
        given.target.copy_(torch.where(given.target >= 0, given.values(options | {"argmax": True})[1], given.target))
        (alone,) = given.values(options)
        for asked in (("entropy",), ("argmax", "mean_logit"), EVERYTHING):
            assert torch.equal(given.values(options | dict.fromkeys(asked, True))[0], alone), asked


def test_blocks() -> None:
    """They follow from the vocabulary alone; two, four and eight ranks with equal parts hold them whole where a head is
    padded to a multiple of 64."""
    for vocab in (64, 600, 50257, 128256, 151936, 256000):
        padded = -(-vocab // 64) * 64
        assert block_of(padded) == block_of(vocab) == padded // 8
    options = {"hidden_grad": False, "weight_grad": False, "deterministic": True, "device": "sm_90"}
    sizes = {"tokens": 64, "hidden": 4096, "dtype": torch.bfloat16}
    assert plan(vocab=128256, ranks=4, **sizes, **options).vocab_block == 16032
    with pytest.raises(ValueError, match="Pad the head to 50304 rows"):
        plan(vocab=50257, ranks=2, **sizes, **options)
    with pytest.raises(ValueError, match="deterministic=True does not go with top_k"):
        given = Operands(Place("torch", "cpu"))
        given.values(given.common | {"top_k": 3})
