"""Numbers are arguments: another value of a loss's, a metric's or a head's number compiles and traces nothing."""

import inspect
import typing
from collections.abc import Callable
from typing import Any

import pytest
import torch
from budget import assert_within_budget
from cases import GPU, TRITON, Place
from compiled_for import record_launches
from loss_cases import DENSE_HIDDEN, FACTORIES, PAIRED, POLICY, LossCase, case, inputs_of, run_reference, run_step

from chunked_head import losses, metrics
from chunked_head.arithmetic import evaluate, vectors
from chunked_head.arithmetic.demand import Structure, structure_of
from chunked_head.arithmetic.evaluate import Inputs
from chunked_head.core.stats import Demand, RowStats, layout_of
from chunked_head.losses import FIELDS
from chunked_head.metrics import Metric

TOKENS, VOCAB = 7, 41
VALUES = (0.2, 0.3, 0.45, 0.6)
ROLLOUT = POLICY + " rollout_logprobs"

# by option, the step that a value of it makes
CHANGED: dict[str, Callable[[float], LossCase]] = {
    "label_smoothing": lambda x: case("", ("cross_entropy", {"label_smoothing": x})),
    "clip_low": lambda x: case("", ("grpo", {"clip_low": x}), batch=POLICY),
    "clip_high": lambda x: case("", ("grpo", {"clip_high": x}), batch=POLICY),
    "rollout_max": lambda x: case("", ("grpo", {"rollout": "mask", "rollout_max": x + 1}), batch=ROLLOUT),
    "kl_clamp": lambda x: case("", ("kl_to_reference", {"kl_clamp": x}), batch="ref_logprobs"),
    "gamma": lambda x: case("", ("focal", {"gamma": 4 * x})),
    "entropy_scaling": lambda x: case("", ("cross_entropy", {"entropy_scaling": x})),
    "temperature of a summand": lambda x: case("", ("cross_entropy",), (0.1, "entropy", {"temperature": x})),
    "beta of dpo": lambda x: case("", ("dpo", {"beta": x}), batch=PAIRED),
    "beta of jsd": lambda x: case("", ("jsd", {"beta": x}), batch="teacher_logits"),
    "teacher_temperature": lambda x: case("", ("forward_kl", {"teacher_temperature": x}), batch=DENSE_HIDDEN),
    "normalizer": lambda x: case("", ("cross_entropy", {"normalizer": 10 * x})),
    "coefficient": lambda x: case("", ("cross_entropy",), (x, "z_loss")),
    "upstream": lambda x: case("", ("cross_entropy",)),
    "logit_scale": lambda x: case("", ("cross_entropy",), head={"logit_scale": x}),
    "softcap": lambda x: case("", ("cross_entropy",), head={"softcap": 10 * x}),
    "temperature": lambda x: case("", ("cross_entropy",), (0.1, "entropy"), head={"temperature": x}),
    "softcap of tempered tokens": lambda x: case("", ("z_loss",), head={"softcap": 10 * x, "temperature": "each"}),
}  # fmt: skip


def compilations(patch: pytest.MonkeyPatch) -> Callable[[], tuple[int, ...]]:
    """How many traces have been made, and of how many kinds launches have been."""
    traces, trace, launched = [], vectors.trace, record_launches(patch)
    patch.setattr(vectors, "trace", lambda *given: traces.append(given) or trace(*given))
    return lambda: (len(traces), len(launched), len(evaluate.KERNELS))


@pytest.mark.parametrize("place", [*TRITON, *GPU[:1]])
@pytest.mark.parametrize("option", CHANGED)
def test_other_values_compile_nothing(option: str, place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    made, found = compilations(monkeypatch), []
    for value in VALUES:
        of_value = CHANGED[option](value)
        inputs = inputs_of(of_value, torch.float32, place.device, tokens=19, vocab=67)
        declared = {"declared": value} if option == "upstream" else {}
        measured = [metrics.clip_fraction(value)] if option.startswith("clip") else []
        _, ours = run_step(of_value, inputs, measured, value, **declared, backend="triton")
        found.append(made())
        eager, _, plain = run_reference(of_value, inputs)
        truth, _, exact = run_reference(of_value, inputs.to(torch.float64))
        assert_within_budget(ours["loss"], eager, truth, torch.float32, "loss")
        for name, mine, other, true in zip(("hidden", "weight"), ours["grads"], plain, exact, strict=True):
            assert_within_budget(mine, value * other, value * true, torch.float32, f"gradient of {name}")
    # on a GPU the second step of a kind finds what the first has compiled
    assert found[0] == found[-1], found


# what an option needs beside it
BESIDE: dict[str, dict[str, Any]] = {
    "rollout_max": {"rollout": "truncate"}, "rollout_min": {"rollout": "mask"}, "lk eta": {"form": "hybrid"},
    "divergence_alpha": {"divergence": "alpha"}, "discopop_tau": {"variant": "discopop"},
    "topk_kl beta": {"divergence": "jsd"},
}  # fmt: skip
ABOVE_ONE = ("delta", "dual_clip", "rollout_max")
OF_TEACHERS = metrics.acceptance, metrics.agreement  # which take no temperature
MORE = {
    "summand": ("temperature", "normalizer"), "common": ("temperature",),
    "policy": ("temperature", "rollout_max", "rollout_min"),
    "teacher": ("temperature", "teacher_temperature", "teacher_logit_scale", "teacher_softcap"),
}  # fmt: skip


def float_options() -> list[Any]:
    found = []
    for factory in FACTORIES:
        for name, parameter in inspect.signature(factory).parameters.items():
            kinds = typing.get_args(parameter.annotation) or (parameter.annotation,)
            own = (name,) if float in kinds else MORE.get(name, ()) if factory not in OF_TEACHERS else ()
            found += [pytest.param(factory, option, id=f"{factory.__name__}-{option}") for option in own]
    return found


def needs(factory: Callable[..., Any], options: dict[str, Any]) -> tuple[tuple[Structure, Demand], Any]:
    """What a call of the loss or the metric needs, and itself."""
    made, beside = factory(**options), losses.z_loss(name="beside")
    if isinstance(made, Metric):
        return structure_of(beside, [made], 1.0, VOCAB), made
    ((_, summand),) = made.terms
    return structure_of(made + beside, [], 1.0, VOCAB, columns=3, teacher_vocab=VOCAB), summand


@pytest.mark.parametrize(("factory", "option"), float_options())
def test_losses_and_metrics_have_one_kernel_for_all_numbers(factory: Callable[..., Any], option: str) -> None:
    """A loss that branched on a number would fail to be traced, and a number left in the trace would be in the key."""
    beside = BESIDE.get(option, BESIDE.get(f"{factory.__name__} {option}", {}))
    values = (1.5, 2.5) if option in ABOVE_ONE else (0.3, 0.6)
    (one, first), (other, second) = (needs(factory, {option: value, **beside}) for value in values)
    assert first.signature == second.signature and one[0].split[0] == other[0].split[0]
    if option != "normalizer":
        assert first.number_key != second.number_key
        # a number of a sum over the vocabulary is an argument of the kernels that make it
        of_sums = [[each._replace(numbers=()) for each in demand.sums] for _, demand in (one, other)]
        assert of_sums[0] == of_sums[1]
        others = one[0].split[1] != other[0].split[1] or one[1].sums != other[1].sums
        # what sees all tokens runs in PyTorch, of no kernel
        assert others or option.startswith("teacher_") or one[0].segment_metrics
    if first.scope == "token" and "topk_logprobs" not in first.needs:
        kernel, again = arithmetic(one), arithmetic(other)
        assert kernel is not None and kernel is again


def arithmetic(made: tuple[Structure, Demand]) -> Any:
    """The kernel of a call's arithmetic."""
    structure, demand = made
    parts = [part for part, _ in (*structure.summands, *structure.metrics)]
    names = {name for part in parts for name in (*part.fields, *part.optional_fields) if FIELDS[name].kind == "token"}
    fields = {name: torch.zeros(TOKENS) for name in sorted(names)}
    inputs = Inputs(
        torch.zeros(TOKENS, dtype=torch.int64), fields, None, torch.ones(len(structure.summands)),
        [{} for _ in structure.summands], {}, frozenset(fields),
    )  # fmt: skip
    leaves = RowStats.empty(TOKENS, layout_of(demand), torch.float32, torch.device("cpu")).by_name
    return evaluate.arithmetic_of(structure, leaves, inputs)[0]
