"""Every loss with every option against the oracle's formula on full logits, in float64: value and gradients.

Tokens lie in any order; nan, inf and ids out of range stand wherever one does not count.
"""

import inspect
import re
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from loss_cases import DENSE_HIDDEN, FACTORIES, SEGMENTED, LossCase, LossInputs, case, inputs_of
from oracle import reference as oracle
from oracle.reference import kind_of
from oracle.rows import CLASS_WEIGHTS, DENSE, ROWS, Options, Row
from tiers import crossed
from torch import Tensor

from chunked_head import linear_loss
from chunked_head.losses.batch import Batch, Stats
from chunked_head.metrics import Metric, MetricValue

TOKENS, VOCAB = 41, 23
CLASSES = torch.where(torch.arange(VOCAB) % 4 > 0, torch.linspace(0.1, 1.1, VOCAB), 0.0).double()
RATIOS = {kind: row for kind, row in ROWS.items() if "old_logprobs" in row.fields}
TEACHERS = {kind: row for kind, row in ROWS.items() if DENSE in row.fields}
OTHERS = {kind: row for kind, row in ROWS.items() if kind not in RATIOS | TEACHERS}


def rows(table: dict[str, Row]) -> list[Any]:
    """Each loss with each of its options, and again with fields that may be missing; of no field, with weights."""
    found = []
    for kind, row in table.items():
        for more in dict.fromkeys([(), row.optional]):
            batch = " ".join([row.batch() or "token_weights", *more, "mask"])
            found += [
                pytest.param(case("", (kind, of_sizes(options)), batch=batch), id="-".join([kind, str(i), *more]))
                for i, options in enumerate(row.options)
            ]  # fmt: skip
    return found


def of_sizes(options: Options) -> dict[str, Any]:
    return {name: CLASSES if value is CLASS_WEIGHTS else value for name, value in options.items()}


def hold(one: LossCase, changed: dict[str, Tensor] | None = None, without: str = "") -> None:
    """The call on garbage where nothing counts, beside the oracle on what counts."""
    order = torch.randperm(TOKENS)

    def made(garbage: bool) -> LossInputs:
        inputs = inputs_of(one, torch.float64, "cpu", garbage, tokens=TOKENS, vocab=VOCAB)
        batch = inputs.batch | (changed or {})
        batch.pop(without, None)
        if "advantages" in batch:
            batch["advantages"][[1, 8]] = 0.0
        if "teacher_ids" in batch and "teacher_mask" in batch:
            spoil(batch)
        batch = {name: value if kind_of(name) == "other" else value[order] for name, value in batch.items()}
        batch = {name: value.double() if value.is_floating_point() else value for name, value in batch.items()}
        target = None if inputs.target is None else inputs.target[order]
        return replace(inputs, hidden=inputs.hidden[order], target=target, batch=batch)

    found = []
    for inputs, call in ((made(garbage=True), ours), (made(garbage=False), oracle.linear_loss)):
        hidden, weight = inputs.hidden.requires_grad_(), inputs.weight.requires_grad_()
        terms = one.losses if call is ours else one.terms
        loss, *_ = call(hidden, weight, inputs.target, terms, batch=inputs.batch, num_segments=inputs.num_segments)
        found.append((loss, *torch.autograd.grad(loss, (hidden, weight))))
    assert all(gradient.abs().amax() > 1e-6 for gradient in found[1][1:])  # or there is nothing to compare
    torch.testing.assert_close(*found, rtol=1e-11, atol=1e-12)


def ours(*given: Any, **fields: Any) -> tuple[Tensor]:
    return (linear_loss(*given, **fields).loss,)


def spoil(batch: dict[str, Tensor]) -> None:
    """Entries that name an outcome twice, with another probability or the same, padding, rows without a known entry."""
    ids, logprobs, mask = batch["teacher_ids"], batch["teacher_logprobs"], batch["teacher_mask"]
    logprobs[2, 3:], ids[2, 3:] = -1e9, 0
    logprobs[3, 4:], ids[3, 4:] = -torch.inf, 0
    ids[4, 3] = ids[4, 0]
    ids[5, 3], logprobs[5, 3] = ids[5, 1], logprobs[5, 1]
    ids[6, 1:] = ids[6, 0]
    ids[7, 2:], mask[7, 2:] = ids[7, 0], False
    logprobs[8, 0], ids[8, 0], ids[8, 1] = -1e9, 0, 0
    mask[9], logprobs[10] = False, -torch.inf


@pytest.mark.parametrize("one", rows(OTHERS))
def test_formulas(one: LossCase) -> None:
    hold(one)


@pytest.mark.parametrize("on_policy", [False, True])
@pytest.mark.parametrize("one", rows(RATIOS))
def test_ratios(one: LossCase, on_policy: bool) -> None:
    hold(one, without="old_logprobs" if on_policy else "")


@crossed(
    # VESPO's exponents leave next to nothing of a weight of 0
    kind=[kind for kind, row in RATIOS.items() if "advantages" in row.fields and kind != "vespo"],
    level=["token", "segment"],
    weights=[
        {"rollout": "truncate"}, {"rollout": "mask"}, {"rollout": "truncate", "rollout_max": 1.2, "rollout_min": 0.9},
        {"rollout": "mask", "rollout_max": 1.2, "rollout_min": 0.9},
    ],
    on_policy=[False, True],
)  # fmt: skip
def test_rollout_weights(kind: str, level: str, weights: dict[str, Any], on_policy: bool) -> None:
    levels: list[dict[str, Any]] = [{}]
    if kind == "gspo":
        levels += [{"weighting": "token"}, {"weighting": "token", "level": "token"}]
    for more in levels:
        options = weights | {"rollout_level": level} | more
        one = case("", (kind, options), batch=SEGMENTED + " rollout_logprobs mask")
        hold(one, without="old_logprobs" if on_policy else "")


@pytest.mark.parametrize("baseline", [torch.tensor(0.8), torch.tensor(-0.8), torch.linspace(-1.0, 1.0, 9)], ids=str)
def test_a_baseline(baseline: Tensor) -> None:
    fields = ROWS["kto"].batch() + " kl_baseline mask"
    hold(case("", ("kto", {"beta": 0.5}), batch=fields), {"kl_baseline": baseline})


@crossed(
    teacher=["teacher_logits", DENSE_HIDDEN], vocab=[VOCAB, VOCAB - 1, VOCAB + 1],
    loss=[
        pytest.param((kind, one), id=f"{kind}-{i}")
        for kind, row in TEACHERS.items() for i, one in enumerate(row.options)
    ],
)  # fmt: skip
def test_dense_teachers(loss: tuple[str, dict[str, Any]], vocab: int, teacher: str) -> None:
    of_table = 331 + vocab - VOCAB  # as inputs_of sizes a teacher
    hold(case("", loss, batch=teacher + " mask", teacher_vocab=of_table, target=False))


class Words(dict):
    """Names that a docstring's formula is made of: fields, statistics, options, and what it says ``with``."""

    definitions: dict[str, str]

    def __missing__(self, name: str) -> Any:
        return self.value(self.definitions[name])

    def value(self, formula: str) -> Any:
        return eval(formula, {"torch": torch, "F": F}, self)


@pytest.mark.parametrize(
    "factory", FACTORIES, ids=lambda factory: f"{factory.__module__.split('.')[1]}.{factory.__name__}"
)
def test_a_docstring_opens_with_the_formula(factory: Any) -> None:
    """In PyTorch, of the default options: names are those of the module's docstring and of the fields."""
    made = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=made, dtype=torch.float64)

    x, teacher, y = normal(12, 7), normal(12, 7), torch.randint(7, (12,), generator=made)
    p, q, logs = x.softmax(-1), teacher.softmax(-1), x.log_softmax(-1)
    m, ids = 0.5 * q + 0.5 * p, torch.stack([y, (y + 3) % 7], 1)
    logprob, ratios = logs.gather(1, y[:, None])[:, 0], {}
    for name in ("old_logprobs", "ref_logprobs", "rollout_logprobs"):
        ratios[name] = logprob + 0.3 * normal(12)
    fields = ratios | {
        "advantages": normal(12), "segments": torch.arange(12) % 4, "pairs": torch.tensor([[0, 1], [3, 2], [1, 3]]),
        "segment_labels": torch.tensor([True, False, True, False]), "kl_baseline": torch.tensor(0.2).double(),
        "teacher_ids": ids, "teacher_logprobs": teacher.log_softmax(-1).gather(1, ids),
    }  # fmt: skip
    batch = Batch(fields, y, 4, 7)
    stats = {
        "logprob": logprob, "lse": x.logsumexp(-1), "entropy": -(p * logs).sum(-1), "mean_logit": x.mean(-1),
        "forward_kl": (q * (q / p).log()).sum(-1), "reverse_kl": (p * (p / q).log()).sum(-1),
        "jsd": 0.5 * (q * (q / m).log() + p * (p / m).log()).sum(-1), "tvd": 0.5 * (p - q).abs().sum(-1),
        "overlap": torch.minimum(p, q).sum(-1), "argmax": x.argmax(-1), "teacher_argmax": q.argmax(-1),
        "top_logprob": logs.amax(-1), "runner_up_logprob": logs.topk(2)[0][:, 1], "topk_logprobs": logs.gather(1, ids),
    }  # fmt: skip
    text = " ".join(inspect.cleandoc(factory.__doc__).partition("\n\n")[0].split())
    assert text.startswith("``")
    formula, *more = re.findall("``(.*?)``", text)
    words = Words({name: each.default for name, each in inspect.signature(factory).parameters.items()} | fields | stats)
    words.definitions = {name: each for name, _, each in (span.partition(" = ") for span in more) if each}
    words |= {
        "x": x, "p": p, "q": q, "y": y, "target": y, "A": fields["advantages"], "kl": 0.2,
        "r": (logprob - fields["old_logprobs"]).exp(), "chosen": fields["pairs"][:, 0],
        "rejected": fields["pairs"][:, 1], "desirable": fields["segment_labels"], "segment_mean": batch.segment_mean,
        "segment_sum": batch.segment_sum, "per_token": batch.per_token, "s": p.gather(1, ids), "t": q.gather(1, ids),
    }  # fmt: skip
    part, said = factory(), words.value(formula).double()
    if isinstance(part, Metric):
        values = part.values(Stats(stats), batch).double()
        total = torch.stack([values, values.square()], 1).sum(0) if part.components == 2 else values.sum(0)
        count = torch.tensor(float(len(values)))
        found, said = MetricValue("mean", total, count, finish=part.finish).value, said.mean()
    else:
        ((_, summand),) = part.terms
        found = summand.values(Stats(stats), batch)
    torch.testing.assert_close(found, said, rtol=1e-6, atol=1e-6)
