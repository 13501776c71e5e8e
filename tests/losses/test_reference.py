"""``chunked_head.reference`` against the oracle on full logits, in float64, and what it promises of itself."""

import ast
import sys
from functools import reduce
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from loss_cases import LOSS_CASES, LossCase, by_oracle, by_reference, has_reference, inputs_of
from torch import Tensor
from tracking import Tracker

from chunked_head import reference

TOKENS, HIDDEN, VOCAB = 37, 19, 53
SUM: dict[str, Any] = {"ce": (1.0, reference.cross_entropy), "z": (0.01, reference.z_loss)}
SUM |= {"entropy": (-0.2, reference.entropy), "grpo": (1.0, reference.grpo)}


def operands() -> tuple[Tensor, Tensor, Tensor, dict[str, Tensor]]:
    """Hidden states, weight, targets of which some do not count, and fields."""
    made = torch.Generator().manual_seed(5)
    hidden, weight = (torch.randn(rows, HIDDEN, generator=made).double() for rows in (TOKENS, VOCAB))
    target = torch.randint(VOCAB, (TOKENS,), generator=made).masked_fill(torch.arange(TOKENS) % 5 == 1, -100)
    own = (hidden @ weight.T).log_softmax(-1).gather(1, target.clamp(min=0)[:, None])[:, 0]
    fields = {"advantages": torch.randn(TOKENS, generator=made).double()}
    return hidden, weight, target, fields | {"old_logprobs": own + 0.3 * torch.randn(TOKENS, generator=made)}


def assert_same(ours: Any, theirs: Any) -> None:
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize(("chunk_tokens", "shards"), [(1, 1), (7, 3), (16, 131), (1000, 2)])
@pytest.mark.parametrize("case", [case for case in LOSS_CASES if has_reference(case)], ids=lambda case: case.name)
def test_is_full_logits(case: LossCase, chunk_tokens: int, shards: int) -> None:
    """With nan and ids out of range where a token does not count."""
    garbage, clean = (inputs_of(case, torch.float64, "cpu", given, tokens=37, vocab=131) for given in (True, False))
    ours = by_reference(case, garbage, chunk_tokens=chunk_tokens, shards=shards)
    torch.testing.assert_close(ours, by_oracle(case, clean), rtol=1e-10, atol=1e-12)
    assert not ours[2][0][garbage.hidden.isnan()].any()


def test_values_and_metrics() -> None:
    """Of a user's function of three statistics and a field, beside a loss; both are of chunks and shards."""

    def squared(stats: Any, batch: Any) -> Tensor:
        return (stats.logprob * stats.entropy + batch["advantages"]).square() + 0.1 * stats.lse * stats.logprob

    hidden, weight, target, fields = operands()
    mix = {"ce": SUM["ce"], "user": (0.3, squared)}
    found = reference.linear_loss(hidden, weight, target, mix, batch=fields, chunk_tokens=5, shards=3)
    x, counts = hidden @ weight.T, target >= 0
    logs = x.log_softmax(-1)
    logprob, entropy = logs.gather(1, target.clamp(min=0)[:, None])[:, 0], -(logs.exp() * logs).sum(1)
    user = (logprob * entropy + fields["advantages"]).square() + 0.1 * x.logsumexp(1) * logprob
    assert_same(found.values, {name: v.where(counts, 0.0) for name, v in (("ce", -logprob), ("user", user))})
    right = (x.argmax(1) == target).double()
    means = {"accuracy": right, "entropy": entropy, "logprob": logprob}
    assert_same(found.metrics, {name: values[counts].mean() for name, values in means.items()})
    assert_same(found.loss, (0.3 * user - logprob)[counts].mean())


def test_merge_is_associative() -> None:
    """Statistics of five pieces, one of them of no probability, in three orders of merges and in one piece."""
    made = torch.Generator().manual_seed(1)
    x, omega = torch.randn(11, 23, generator=made, dtype=torch.float64) * 20, torch.rand(23, dtype=torch.float64)
    x[:, 7:9] = -torch.inf
    x[:4, [2, 12, 20]] = 100.0  # ties, of which the first id is the largest
    omega[7:9] = 1.0
    target, ids = torch.randint(9, 23, (11,), generator=made), torch.arange(23)

    def of(start: int, stop: int) -> reference.PieceStatistics:
        return reference.piece_statistics(x[:, start:stop], ids[start:stop], target, omega[start:stop])

    merge, whole = reference.merge, of(0, 23)
    a, b, c, d, e = (of(*ends) for ends in pairwise((0, 1, 7, 9, 16, 23)))
    right, both = merge(a, merge(b, merge(c, merge(d, e)))), merge(merge(a, b), merge(merge(c, d), e))
    for merged in (reduce(merge, (a, b, c, d, e)), right, both):
        assert_same(merged._asdict(), whole._asdict())


def test_ids_of_no_probability() -> None:
    """A bias of -inf takes ids out of the vocabulary, a piece of them included: as if their rows were not there."""
    hidden, weight, target, fields = operands()
    target = torch.where(target >= 0, target.clamp(min=7), target)
    bias = torch.linspace(-1.0, 1.0, VOCAB).double().masked_fill(torch.arange(VOCAB) < 7, -torch.inf)
    given: dict[str, Any] = {"batch": fields, "mix": SUM}
    ours = reference.linear_loss(hidden, weight, target, bias=bias, shards=11, **given)
    fewer = reference.linear_loss(hidden, weight[7:], target - 7, bias=bias[7:], ignore_index=-107, **given)
    assert_same((ours.loss, ours.metrics, ours.dhidden), (fewer.loss, fewer.metrics, fewer.dhidden))
    assert ours.dbias is not None and fewer.dbias is not None
    assert_same((ours.dweight[7:], ours.dbias[7:]), (fewer.dweight, fewer.dbias))
    assert not ours.dweight[:7].any() and not ours.dbias[:7].any()


@pytest.mark.parametrize("count", [0, TOKENS])
def test_no_token_counts(count: int) -> None:
    hidden, weight, _, fields = operands()
    batch = {name: value[:count] for name, value in fields.items()}
    ours = reference.linear_loss(hidden[:count], weight, torch.full((count,), -100), SUM, batch=batch, shards=2)
    assert ours.loss == 0 and not ours.dweight.any() and not ours.dhidden.any()


def test_one_chunk_of_logits() -> None:
    """Beside the buffer of one chunk no tensor has as many elements, where the vocabulary is in pieces."""
    tokens, width, vocab, chunk_tokens = 96, 8, 1024, 16
    hidden, weight, target = torch.randn(tokens, width), torch.randn(vocab, width), torch.arange(tokens)
    mix = {name: SUM[name] for name in ("ce", "z", "entropy")}
    with Tracker(hidden, weight, target, large=chunk_tokens * vocab) as tracker:
        reference.linear_loss(hidden, weight, target, mix, chunk_tokens=chunk_tokens, shards=4)
    assert tracker.most_large == 1


def test_one_file() -> None:
    """Imports of torch and the standard library only, in as many lines as a reader was promised."""
    text = Path(reference.__file__).read_text()
    named = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Import | ast.ImportFrom)]
    modules = {node.module if isinstance(node, ast.ImportFrom) else node.names[0].name for node in named}
    assert {module.partition(".")[0] for module in modules} - {"torch"} <= sys.stdlib_module_names
    assert not any(getattr(node, "level", 0) for node in named) and len(text.splitlines()) <= 300
