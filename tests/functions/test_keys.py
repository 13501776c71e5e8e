"""Keys of caches: whatever making a value reads of a call, its key has read too, or the reason why not stands here."""

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from typing import Any
from unittest import mock

import fuzz
import pytest
import test_recording
import torch
from sequences import Sequenced, of_losses, of_metrics, plain_seed
from tables import Emptying
from torch import Tensor

import chunked_head
from chunked_head import losses, metrics
from chunked_head.arithmetic import evaluate
from chunked_head.arithmetic.demand import Structure
from chunked_head.arithmetic.evaluate import Inputs
from chunked_head.arithmetic.objective import ScalarObjective
from chunked_head.call import recording, run, spec
from chunked_head.call.options import Call
from chunked_head.call.sweep import HeadWork
from chunked_head.compile import operation, recipes
from chunked_head.core.stats import Demand
from chunked_head.functions import cross_entropy
from chunked_head.losses import Losses, base, user_checks
from chunked_head.losses.base import Summand
from chunked_head.metrics import Metric
from chunked_head.plan.sizes import Request, Sizes

Names = set[tuple[str, str]]  # of classes, and of fields of their objects


class Reads:
    """Fields of objects of some classes that are read: ``before`` a cache is asked, and while a value is ``made``."""

    def __init__(self) -> None:
        self.before, self.made = set[tuple[str, str]](), set[tuple[str, str]]()
        self.now: Names | None = None

    @contextlib.contextmanager
    def of(self, *kinds: type) -> Iterator["Reads"]:
        """Watches the block, which begins before the key is made."""
        with contextlib.ExitStack() as stack:
            for kind in kinds:
                stack.enter_context(mock.patch.object(kind, "__getattribute__", self.watching(kind)))
            self.now = self.before
            yield self
        self.now = None

    def watching(self, kind: type) -> Callable[[Any, str], Any]:
        names = {each.name for each in fields(kind)} if hasattr(kind, "__dataclass_fields__") else {*kind._fields}
        plain = kind.__getattribute__

        def read(one: Any, name: str) -> Any:
            frame = sys._getframe(1)  # a copy reads all fields, and checks them
            copied = frame.f_globals.get("__name__") == "dataclasses" or frame.f_code.co_name == "__post_init__"
            if self.now is not None and name in names and not copied:
                self.now.add((kind.__name__, name))
            return plain(one, name)

        return read

    def missing(self, known: dict[str, str]) -> Names:
        """What a value is made of and its key lacks; ``known``: reasons for some, by class and field."""
        lacking = {each for each in self.made - self.before if ".".join(each) not in known}
        self.before.clear()
        self.made.clear()
        return lacking


class Asked:
    """In the place of a cache that has nothing: the key is complete where it is asked."""

    def __init__(self, reads: Reads):
        self.reads, self.keys = reads, list[Any]()

    def get(self, key: Any) -> None:
        self.keys.append(key)
        if self.reads.now is not None:
            self.reads.now = self.reads.made

    def get_or_make(self, key: Any, make: Callable[[], Any]) -> Any:
        self.get(key)
        value = make()
        self.reads.now = None
        return value

    def __setitem__(self, key: Any, value: Any) -> None:
        self.reads.now = None


NO_KERNEL = "what has several tokens' sums has no kernel: its parts are of scope segment, which the key has"
OF_KERNELS = {
    "Inputs.num_segments": NO_KERNEL, "Inputs.rank_sums": NO_KERNEL,
    "Inputs.withheld": "names of fields that raise when they are read, and raise in no trace that ends",
    "Structure.weighted": "which summand's class weights a statistic is of: the statistic is an input",
    "Summand.needs": "leaves out what the function does not read, which is no line of its trace",
    "Metric.needs": "leaves out what the function does not read, which is no line of its trace",
}  # fmt: skip


def fresh(structure: Structure) -> Structure:
    """The structure with nothing found out about its parts."""
    parts = {
        name: tuple([(replace(part), view) for part, view in getattr(structure, name)])
        for name in ("summands", "metrics")
    }
    return replace(structure, **parts)


@pytest.mark.parametrize("kind", ["losses", "metrics"])
def test_kernels_of_the_arithmetic(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each loss and each metric; the trace is left out for those that only differ in numbers."""
    reads, seen, lacking = Reads(), set[Any](), set[tuple[str, str]]()
    plain = evaluate.arithmetic_of
    monkeypatch.setattr(evaluate, "KERNELS", Asked(reads))

    def watched(structure: Structure, *inputs: Any) -> Any:
        code = structure.split[0]
        if structure.is_builtin and code not in seen:
            seen.add(code)
            anew = fresh(structure)
            with reads.of(Structure, Summand, Metric, Inputs):
                plain(anew, *inputs)
            lacking.update(reads.missing(OF_KERNELS))
        return None, []

    monkeypatch.setattr(evaluate, "arithmetic_of", watched)
    steps = (of_metrics if kind == "metrics" else of_losses)(plain_seed(0), "cpu")
    for step in steps[:: 5 if kind == "metrics" else 3]:
        step()
    assert len(seen) > 5
    assert not lacking, sorted(lacking)


# read while a Spec is made, with the reason why its key does not
OF_SPECS = {
    "Call.temperature": "plain_temperature, which is in the key, or one per token, which is a field of the batch",
    "Call.normalizer": "checked again at each call", "Call.upstream": "checked again at each call",
    **{f"{kind}.label": "the name or the kind, which are in the key" for kind in ("Summand", "Metric")},
    **{f"{kind}.width": "of the unit, and of how a metric is finished" for kind in ("Summand", "Metric")},
    "Metric.components": "of how a metric is finished",
}  # fmt: skip


def calls() -> list[Callable[[], Any]]:
    """Calls of several kinds, of all public functions but those that only make others'."""
    given = test_recording.made(1, "cpu")
    half = [functools.partial(call, given) for call in test_recording.CALLS.values()]
    seeds = [seed for seed in range(66) if fuzz.FUNCTIONS[seed % len(fuzz.FUNCTIONS)] != "gathered_topk_kl"]

    def drawn(seed: int) -> None:
        call = fuzz.Call(seed)
        with contextlib.suppress(ValueError):
            getattr(call, call.function)()[0]()

    return [*half[:4], *[functools.partial(drawn, seed) for seed in seeds[::3]]]


def test_specs(monkeypatch: pytest.MonkeyPatch) -> None:
    reads, lacking = Reads(), set[tuple[str, str]]()
    plain = spec.spec_of
    monkeypatch.setattr(spec, "SPECS", Asked(reads))

    def watched(call: Call[Any]) -> Any:
        terms = tuple([(factor, replace(one)) for factor, one in call.losses.terms])
        call.losses, call.metrics = Losses(terms), tuple([replace(metric) for metric in call.metrics])
        with reads.of(Call, Summand, Metric):
            found = plain(call)
        lacking.update(reads.missing(OF_SPECS))
        return found

    monkeypatch.setattr(operation, "spec_of", watched)
    for call in calls():
        call()
    assert not lacking, sorted(lacking)


def test_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of a Spec: what they read of a call is in the Spec's key, or asked for beside it."""
    reads, lacking, plain, of_spec = Reads(), set[tuple[str, str]](), run.planned, set[tuple[str, str]]()

    def found(call: Call[Any]) -> Any:
        with reads.of(Call):
            made = spec.spec_of(call)
        of_spec.update(reads.before | reads.made)
        reads.missing({})
        object.__setattr__(made, "plans", Asked(reads))
        return made

    def watched(tokens: Any, *others: Any) -> Any:
        with reads.of(Call):
            planned = plain(tokens, *others)
        lacking.update(reads.missing(OF_PLANS) - of_spec)
        return planned

    monkeypatch.setattr(operation, "spec_of", found)
    monkeypatch.setattr(run, "planned", watched)
    for call in calls():
        Emptying()()
        call()
    assert of_spec and not lacking, sorted(lacking)


OF_PLANS: dict[str, str] = {}


@pytest.mark.parametrize("kind", [Sizes, Request, Demand])
def test_plans_are_equal_for_equal_sizes_only(kind: type) -> None:
    """``PLANS`` and ``OF_DEMAND`` have all that their values are made of as keys: every field is compared."""
    if kind is not Demand:
        assert all(each.compare and each.hash is None for each in fields(kind))
        assert kind.__dataclass_params__.eq and kind.__dataclass_params__.frozen  # type: ignore[attr-defined]
    assert kind.__eq__ is not object.__eq__ and kind.__hash__ is not None


OF_RECORDINGS = {
    "HeadWork.backend": "the Spec's", "HeadWork.request": "the Spec's",
    "HeadWork.shard": "None: is_recordable", "HeadWork.packing": "None where sweeps are recorded",
    "HeadWork.spans": "None: without segments", "HeadWork.fp8_weight": "None: is_recordable",
    "ScalarObjective.backend": "the Spec's", "ScalarObjective.demand": "the Spec's",
    "ScalarObjective.dtype": "the Spec's", "ScalarObjective.columns": "None: is_recordable",
    "ScalarObjective.column_sets": "None: is_recordable", "ScalarObjective.teacher": "None: is_recordable",
    "ScalarObjective.keeps_coefficients": "False: is_recordable", "ScalarObjective.exchanges": "is_recordable",
    "ScalarObjective.coupled": "False: is_recordable", "ScalarObjective.structure": "the Spec's, and its numbers",
    "ScalarObjective.class_weights": "the head's, which is an input",
    "ScalarObjective.unit_values": "made by the sweep",
    "ScalarObjective.table": "asked for before",
    "Inputs.num_segments": NO_KERNEL, "Inputs.rank_sums": NO_KERNEL, "Inputs.withheld": "the Spec's",
    "Inputs.token_fields": "the Spec's", "Inputs.target": "the objective's",
}  # fmt: skip


def test_recordings(monkeypatch: pytest.MonkeyPatch) -> None:
    reads, lacking, keys = Reads(), set[tuple[str, str]](), list[Any]()

    def watched(work: HeadWork, hidden: Tensor, head: Any) -> Any:
        asked = Asked(reads)
        with reads.of(HeadWork, ScalarObjective, Inputs):
            found = recording.run_recorded(replace(work, recordings=asked), hidden, head)  # type: ignore[arg-type]
        keys.extend(asked.keys)
        return found

    plain = HeadWork.sweep

    def swept(work: HeadWork, *args: Any) -> Any:
        if not isinstance(vars(work)["recordings"], Asked):
            return plain(work, *args)
        reads.now = reads.made  # the cache has been asked, and set, before
        found = plain(work, *args)
        reads.now = None
        lacking.update(reads.missing(OF_RECORDINGS))
        return found

    from chunked_head.call import sweep

    monkeypatch.setattr(sweep, "run_recorded", watched)
    monkeypatch.setattr(HeadWork, "sweep", swept)
    given = test_recording.made(1, "cpu")
    for call in list(test_recording.CALLS.values())[:12]:
        call(given)
    assert len(keys) > 8 and not lacking, sorted(lacking)


def test_recipes() -> None:
    """Every field that makes a loss or a metric, the function and autocast's dtype make another recipe."""
    ((_, summand),) = losses.grpo(clip_low=0.25).terms

    def key_of(loss: Summand, metric: Metric, function: str = "linear_loss", autocast: Any = None) -> str:
        described = recipes.described({"loss": Losses(((1.0, loss),)), "metrics": (metric,)}, [])
        return recipes.store_recipe(function, described, autocast)

    metric, others = metrics.entropy(), {"function": test_recipes, "options": {"other": 1}, "needs": frozenset({"x"})}
    keys = [key_of(summand, metric), key_of(summand, metric, "another"), key_of(summand, metric, autocast=torch.half)]
    for part in (summand, metric):
        for each in [field for field in fields(part) if field.init]:  # others follow from these
            changed = replace(part)
            value = others.get(each.name, {"another": 1} if isinstance(getattr(part, each.name), dict) else "another")
            if each.name == "function":
                value = base.split_numbers  # a function of the library
            object.__setattr__(changed, each.name, value)
            keys.append(key_of(changed, metric) if part is summand else key_of(summand, changed))  # type: ignore[arg-type]
    assert "" not in keys and len(set(keys)) == len(keys)


OF_CHECKS = {"Summand.kind": "in words of errors", "Metric.kind": "in words of errors", "Summand.name": "in words",
             "Metric.name": "in words"}  # fmt: skip


def test_what_is_found_out_about_functions(monkeypatch: pytest.MonkeyPatch) -> None:
    reads, lacking = Reads(), set[tuple[str, str]]()
    asked = Asked(reads)
    monkeypatch.setattr(user_checks, "CHECK_RESULTS", asked)
    plain = user_checks.reads_of

    def watched(where: str, summand: Summand, extra: Any) -> Any:
        with reads.of(Summand):
            found = plain(where, replace(summand), extra)
        lacking.update(reads.missing(OF_CHECKS))
        return found

    from chunked_head.losses import user

    monkeypatch.setattr(user, "reads_of", watched)
    for scope in ("token", "segment"):
        losses.custom(lambda stats, batch, by: by * stats.lse, scope=scope, options={"by": 2.0})
    assert len(set(asked.keys)) == 2 and not lacking, sorted(lacking)


def test_losses_by_their_numbers() -> None:
    """Equal options give one object, and every option another."""
    made = [base.FACTORY_RESULTS, cross_entropy.LOSS_CACHE]
    for cache in made:
        cache.clear()
    assert cross_entropy.unweighted_loss(0.1, 0.0) is cross_entropy.unweighted_loss(0.1, 0.0)
    several = [cross_entropy.unweighted_loss(*numbers) for numbers in ((0.0, 0.0), (0.1, 0.0), (0.0, 0.1), (0.1, 0.1))]
    several += [losses.grpo(0.1), losses.grpo(clip_low=0.1), losses.grpo(clip_low=0.2), losses.grpo(dual_clip=2.0)]
    assert len({id(each) for each in several}) == len(several)
    assert all(len(cache) for cache in made)


def test_plans_and_recordings_of_one_spec() -> None:
    """Calls of equal options whose tensors have other sizes, strides or places, each three times and in turns."""

    def step(rows: int, strided: bool, offset: int) -> list[Tensor]:
        given = test_recording.made(1, "cpu")
        hidden, weight, target, _ = given
        if strided:
            hidden = torch.cat([hidden, hidden], 1)[:, : hidden.shape[1]]
        if offset:
            memory = torch.zeros(weight.numel() + offset, dtype=weight.dtype)
            weight = memory[offset:].copy_(weight.detach().flatten()).view(weight.shape).requires_grad_()
        loss = test_recording.cross_entropy(given._replace(hidden=hidden[:rows], weight=weight, target=target[:rows]))
        return [loss.detach(), *torch.autograd.grad(loss, (given.hidden, weight))]

    kinds = [(24, False, 0), (24, True, 0), (16, False, 0), (24, False, 1)]
    steps = [functools.partial(step, *kind) for kind in kinds]
    order = [i for i in range(len(steps)) for _ in range(3)]
    assert Sequenced().check(steps, [*order, *order[::-3]]) == ""


def test_plans_of_requests() -> None:
    several = [chunked_head.plan(64, 16, 99, torch.float32, chunk_tokens=tokens, device="cpu") for tokens in (16, 32)]
    assert [each.chunk_tokens for each in several] == [16, 32]
