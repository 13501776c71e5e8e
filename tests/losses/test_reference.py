"""``chunked_head.reference`` against full logits and autograd in float64, and the library against it."""

import ast
import sys
from collections.abc import Callable, Mapping
from functools import partial, reduce
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from oracle import label, policy
from torch import Tensor
from tracking import Tracker

from chunked_head import linear_loss, losses, metrics, reference

TOKENS, HIDDEN, VOCAB = 37, 19, 53
SCHEDULES = [(1, 1), (7, 3), (16, VOCAB), (1000, 2)]  # tokens of a chunk, pieces of the vocabulary
Full = Callable[[Tensor, Tensor, Mapping[str, Tensor]], Tensor]  # logits [n, V], target [n], fields -> values [n]


class Case(NamedTuple):
    """A mix as the reference takes it, the same on full logits, and options of the call; functions make tensors."""

    mix: dict[str, tuple[float, reference.Loss]]
    full: dict[str, Full]
    options: dict[str, Any] = {}  # noqa: RUF012


def squared(stats: Any, batch: Any) -> Tensor:
    """A user's function of three statistics and a field; the library takes it as it is."""
    return (stats.logprob * stats.entropy + batch["advantages"]).square() + 0.1 * stats.lse * stats.logprob


def full_squared(x: Tensor, target: Tensor, fields: Mapping[str, Tensor]) -> Tensor:
    logprob, entropy = policy.logprobs(x, target), label.entropy(x, target, fields)
    return squared(SimpleNamespace(logprob=logprob, entropy=entropy, lse=x.logsumexp(-1)), fields)


def random(*shape: int, like: Callable[..., Tensor] = torch.randn) -> Callable[[torch.Generator], Tensor]:
    return lambda made: like(*shape, generator=made)


CE: dict[str, Any] = {"ce": (1.0, reference.cross_entropy)}
SMOOTH: dict[str, Any] = {"ce": (0.7, partial(reference.cross_entropy, label_smoothing=0.3))}
SUM: dict[str, Any] = CE | {"z": (0.01, reference.z_loss), "entropy": (-0.2, reference.entropy)}
GRPO: dict[str, Any] = {"grpo": (1.0, partial(reference.grpo, clip_low=0.1, clip_high=0.3))}
FULL_CE: dict[str, Full] = {"ce": label.cross_entropy}
FULL_SMOOTH: dict[str, Full] = {"ce": partial(label.cross_entropy, label_smoothing=0.3)}
FULL_SUM = FULL_CE | {"z": label.z_loss, "entropy": label.entropy}
FULL_GRPO: dict[str, Full] = {"grpo": partial(policy.grpo, clip_low=0.1, clip_high=0.3, ratio_clamp=None)}
CASES = {
    "cross-entropy": Case(CE, FULL_CE),
    "smoothing": Case(SMOOTH, FULL_SMOOTH),
    "class-weights": Case(SMOOTH, FULL_SMOOTH, {"class_weights": random(VOCAB, like=torch.rand)}),
    "sum": Case(SUM, FULL_SUM, {"reduction": "sum", "token_weights": random(TOKENS, like=torch.rand)}),
    "normalizer": Case(SUM, FULL_SUM, {"normalizer": 12.5}),
    "normalizer-0": Case(SUM, FULL_SUM, {"normalizer": 0.0}),
    "softcap": Case(SUM, FULL_SUM, {"softcap": 2.0, "logit_scale": 0.7, "bias": random(VOCAB)}),
    "temperature": Case(SUM, FULL_SUM, {"softcap": 5.0, "temperature": 0.6}),
    "temperatures": Case(GRPO, FULL_GRPO, {"temperature": lambda made: 0.5 + random(TOKENS, like=torch.rand)(made)}),
    "grpo": Case(GRPO | SUM, FULL_GRPO | FULL_SUM, {"bias": random(VOCAB)}),
    "user": Case({"user": (0.3, squared)}, {"user": full_squared}, {"token_weights": random(TOKENS, like=torch.rand)}),
}


class Inputs(NamedTuple):
    hidden: Tensor
    weight: Tensor
    target: Tensor
    fields: dict[str, Tensor]
    options: dict[str, Any]

    def to(self, dtype: torch.dtype) -> "Inputs":
        """With operands of matmuls in ``dtype``."""
        options = self.options | {name: self.options[name].to(dtype) for name in ("bias",) if name in self.options}
        return self._replace(hidden=self.hidden.to(dtype), weight=self.weight.to(dtype), options=options)


def inputs_of(case: Case, dtype: torch.dtype = torch.float64) -> Inputs:
    """Operands that are the same numbers in every dtype, with nan and ids out of range where a token does not count."""
    made = torch.Generator().manual_seed(5)
    hidden, weight = torch.randn(TOKENS, HIDDEN, generator=made), torch.randn(VOCAB, HIDDEN, generator=made) * 0.5
    target = torch.randint(VOCAB, (TOKENS,), generator=made)
    old = (hidden @ weight.T).log_softmax(-1).gather(1, target[:, None])[:, 0] + 0.3 * random(TOKENS)(made)
    fields = {"advantages": random(TOKENS)(made), "old_logprobs": old, "mask": random(TOKENS)(made) > -1.0}
    options = {name: value(made) if callable(value) else value for name, value in case.options.items()}
    ignored = random(TOKENS)(made) > 1.0
    for value in (hidden, fields["advantages"], old):
        value[ignored | ~fields["mask"]] = torch.nan
    target = torch.where(ignored, -100, torch.where(fields["mask"], target, 10**9))
    wide = torch.promote_types(dtype, torch.float32)
    fields = {name: value.to(wide) if name != "mask" else value for name, value in fields.items()}
    options = {name: value.to(wide) if isinstance(value, Tensor) else value for name, value in options.items()}
    return Inputs(hidden, weight, target, fields, options).to(dtype)


def by_reference(case: Case, inputs: Inputs, **more: Any) -> reference.Result:
    hidden, weight, target, fields, options = inputs
    return reference.linear_loss(hidden, weight, target, case.mix, batch=fields, **options, **more)


def on_full_logits(case: Case, inputs: Inputs) -> reference.Result:
    """Every logit of the tokens that count, and autograd through it."""
    counts = (inputs.target != -100) & inputs.fields["mask"]
    options = {"bias": None, "softcap": None, "logit_scale": 1.0, "temperature": 1.0} | inputs.options
    leaves = [t.detach().clone().requires_grad_() for t in (inputs.hidden, inputs.weight)]
    bias = options["bias"]
    if bias is not None:
        leaves.append(bias := bias.detach().clone().requires_grad_())
    x = F.linear(leaves[0][counts], leaves[1], bias)
    x = x.to(torch.promote_types(x.dtype, torch.float32)) * options["logit_scale"]
    if options["softcap"] is not None:
        x = options["softcap"] * torch.tanh(x / options["softcap"])
    t = options["temperature"]
    x = x / (t[counts][:, None] if isinstance(t, Tensor) else t)
    target, fields = inputs.target[counts], {name: field[counts] for name, field in inputs.fields.items()}
    omega = options.get("class_weights", torch.ones(VOCAB)).to(x.dtype)
    divisor = 1.0 if options.get("reduction") == "sum" else options.get("normalizer", omega[target].sum())
    factor = options.get("token_weights", torch.ones(TOKENS))[counts].to(x.dtype)
    given = {"class_weights": omega} if "class_weights" in options else {}
    raw = {name: full(x, target, fields, **(given if name == "ce" else {})) for name, full in case.full.items()}
    parts = {name: (value * factor).sum() / divisor if divisor else 0 * value.sum() for name, value in raw.items()}
    loss = sum((c * parts[name] for name, (c, _) in case.mix.items()), start=0 * x.sum())
    grads = [*torch.autograd.grad(loss, leaves), None]
    values = {
        name: torch.zeros(TOKENS, dtype=x.dtype).masked_scatter(counts, value.detach()) for name, value in raw.items()
    }
    means = {
        "accuracy": (x.argmax(-1) == target).to(x.dtype).mean(), "entropy": label.entropy(x, target, fields).mean(),
        "logprob": policy.logprobs(x, target).mean(),
    }  # fmt: skip
    parts, means = ({name: value.detach() for name, value in found.items()} for found in (parts, means))
    return reference.Result(loss.detach(), parts, values, means, *grads[:3])


def assert_same(ours: Any, theirs: Any) -> None:
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize(("chunk_tokens", "shards"), SCHEDULES)
@pytest.mark.parametrize("name", CASES)
def test_is_full_logits(name: str, chunk_tokens: int, shards: int) -> None:
    case = CASES[name]
    inputs = inputs_of(case)
    ours, full = by_reference(case, inputs, chunk_tokens=chunk_tokens, shards=shards), on_full_logits(case, inputs)
    assert_same(ours._asdict(), full._asdict())
    assert full.dweight.any() or name == "normalizer-0"
    assert not ours.dhidden[inputs.hidden.isnan()].any()


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
    inputs, out = inputs_of(CASES["grpo"]), torch.arange(VOCAB) < 7
    bias = inputs.options["bias"].masked_fill(out, -torch.inf)
    target = torch.where(inputs.target.abs() < VOCAB, inputs.target.clamp(min=7), inputs.target)
    given = {"batch": inputs.fields, "mix": GRPO | SUM}
    ours = reference.linear_loss(inputs.hidden, inputs.weight, target, bias=bias, shards=11, **given)
    fewer = reference.linear_loss(
        inputs.hidden, inputs.weight[7:], target - 7, bias=bias[7:], ignore_index=-107, **given
    )
    assert_same((ours.loss, ours.metrics, ours.dhidden), (fewer.loss, fewer.metrics, fewer.dhidden))
    assert_same((ours.dweight[7:], ours.dbias[7:]), (fewer.dweight, fewer.dbias))
    assert not ours.dweight[:7].any() and not ours.dbias[:7].any()


def test_no_token_counts() -> None:
    case = CASES["grpo"]
    inputs = inputs_of(case)
    for count in (0, TOKENS):
        fields = {name: value[:count] for name, value in inputs.fields.items()}
        none = inputs._replace(hidden=inputs.hidden[:count], target=torch.full((count,), -100), fields=fields)
        ours = by_reference(case, none, shards=2)
        assert ours.loss == 0 and not ours.dweight.any() and not ours.dhidden.any() and not ours.dbias.any()


KINDS = {"ce": "cross_entropy", "z": "z_loss", "entropy": "entropy", "grpo": "grpo"}


def by_library(case: Case, inputs: Inputs, **more: Any) -> reference.Result:
    """The call of ``chunked_head.linear_loss`` on the torch backend, in the reference's terms but for values."""
    terms = []
    for name, (coefficient, function) in case.mix.items():
        given = dict(getattr(function, "keywords", {})) | ({"ratio_clamp": None} if name == "grpo" else {})
        if name == "ce" and "class_weights" in inputs.options:
            given["class_weights"] = inputs.options["class_weights"]
        kind = getattr(losses, KINDS[name]) if name in KINDS else partial(losses.custom, squared, scope="token")
        terms.append(coefficient * kind(**given, name=name))
    fields = dict(inputs.fields)
    options = {name: value for name, value in inputs.options.items() if name != "class_weights"}
    if "token_weights" in options:
        fields["token_weights"] = options.pop("token_weights")
    leaves = [t.detach().clone().requires_grad_() for t in (inputs.hidden, inputs.weight)]
    if "bias" in options:
        leaves.append(options["bias"].detach().clone().requires_grad_())
        options["bias"] = leaves[2]
    measured = [metrics.accuracy(), metrics.entropy(), metrics.logprob()]
    out = linear_loss(
        leaves[0], leaves[1], inputs.target, sum(terms[1:], start=terms[0]), batch=fields, metrics=measured,
        backend="torch", **options, **more,
    )  # fmt: skip
    grads = [*torch.autograd.grad(out.loss, leaves), None]
    means = {name: metric.value for name, metric in out.metrics.items()}
    return reference.Result(out.loss.detach(), dict(out.parts), {}, means, *grads[:3])


@pytest.mark.parametrize("name", CASES)
def test_the_library_is_the_reference(name: str) -> None:
    case = CASES[name]
    inputs = inputs_of(case)
    theirs = by_reference(case, inputs, chunk_tokens=5, shards=4)
    ours = by_library(case, inputs, chunk_tokens=16)
    torch.testing.assert_close(ours._asdict(), theirs._replace(values={})._asdict(), rtol=1e-11, atol=1e-12)


def test_one_chunk_of_logits() -> None:
    """Beside the buffer of one chunk no tensor has as many elements, where the vocabulary is in pieces."""
    tokens, width, vocab, chunk_tokens = 96, 8, 1024, 16
    hidden, weight, target = torch.randn(tokens, width), torch.randn(vocab, width), torch.arange(tokens)
    with Tracker(hidden, weight, target, large=chunk_tokens * vocab) as tracker:
        reference.linear_loss(hidden, weight, target, SUM, chunk_tokens=chunk_tokens, shards=4)
    assert tracker.most_large == 1


def test_one_file() -> None:
    """Imports of torch and the standard library only, in as many lines as a reader was promised."""
    text = Path(reference.__file__).read_text()
    named = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Import | ast.ImportFrom)]
    modules = {node.module if isinstance(node, ast.ImportFrom) else node.names[0].name for node in named}
    assert {module.partition(".")[0] for module in modules} - {"torch"} <= sys.stdlib_module_names
    assert not any(getattr(node, "level", 0) for node in named) and len(text.splitlines()) <= 300
