"""Calls that have run before with tensors alike, done again from a tape (``tape.py``): what remains of the host's
work is launches and memory.

The first call of a kind (``kinds.py``) runs as it is, the second is recorded, later ones replay.
"""

import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ..call.function import Forward, Loss, as_called
from ..call.options import Call, Result
from ..call.run import Outcome, run
from ..call.spec import Spec, own_matmuls, spec_of
from ..call.streams import Streams
from ..call.sweep import HeadCall
from ..core.private import under_hooks
from ..core.stats import RowStats, all_at_targets
from ..kernels.common.cache import Cache
from ..kernels.common.recording import RECORDING
from ..plan.plans import Plan
from ..stores.gradients import Gradients, Scaling
from .kinds import Arguments, Kind, with_even_sets
from .recorder import NotRecordedError, Recorder
from .steps import Place
from .tape import Tape
from .template import Template

ATTEMPTS = 3  # to record one: where a kernel is compiled there is no tape


# from outputs, what the slots hold and the leading shape to a function's result
Finish = Callable[[tuple[Tensor, ...], list[Any], tuple[int, ...]], Any]


@dataclass(frozen=True, eq=False)
class Replay:
    """What was recorded of a call, and where in it lies what the call returns and its backward needs."""

    tape: Tape
    operands: tuple[int | None, ...]  # hidden, weight, bias: which of the call's tensors they are
    outputs: tuple[Place, ...]
    differentiable: int
    grads: tuple[Place | None, ...] | None  # of hidden, weight, bias
    expected: Template
    stats: dict[str, Place]
    saved: bool  # whether autograd saves ``stats`` for backward
    call: Template
    kept: set[int]  # slots of what ``call`` is made of beside the operands, and of ``stats`` that are not saved
    finish: Finish
    scaled: "Scaled"
    plan: Plan
    padded: bool

    def stats_of(self, memory: Any) -> list[Tensor]:
        return [place.tensor(memory) for place in self.stats.values()]


class Scaled:
    """A backend's scaling of a call's gradients, which is done again from a tape as well."""

    def __init__(self, backend: Scaling):
        self.backend = backend
        self.scale = backend.scale
        self.tapes: dict[tuple[int, int], Tape | None] = {}

    def scale_(self, sources: Sequence[Tensor], factors: Sequence[Tensor]) -> None:
        tensors, kind = [*sources, *factors], (len(sources), len(factors))  # all else is as in the recorded call
        tape = self.tapes.get(kind)
        if tape is not None and tape.usable():
            tape(tensors)
        elif kind in self.tapes:
            self.backend.scale_(sources, factors)
        else:
            with Recorder(tensors) as recorder:
                self.backend.scale_(sources, factors)
            self.tapes[kind] = recorder.tape(set()) if recorder.failure is None else None


# by kind; of calls that run at their own number of tokens alone, by kind and leading shape
REPLAYS: Cache[Kind, Replay] = Cache(256)
SEEN: Cache[Kind, int] = Cache(4096)  # how often a call without one has run


def execute(
    function: Callable[..., Call[Result] | Streams[Result]],
    names: Sequence[str],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> Result:
    """Does what a public function's task says, at once and differentiable. ``names``: of its parameters."""
    if "batch" in kwargs or "kept_offsets" in kwargs:
        kwargs = with_even_sets(kwargs)
    arguments = Arguments(function, dict(zip(names, args, strict=False)), kwargs)
    kind = arguments.kind
    replay = None if kind is None else REPLAYS.get(kind) or REPLAYS.get((kind, arguments.leading))
    if replay is not None and replay.tape.usable():
        return replayed(replay, arguments)
    task = function(*args, **kwargs)
    if isinstance(task, Streams):
        return task.run()
    spec = spec_of(task)
    rows = None
    if spec.pads and arguments.rows is not None:
        rows = arguments.rows if own_matmuls(task, spec) else None
    if kind is not None and rows is None:
        kind = kind, arguments.leading
    times = 0 if kind is None else SEEN.get(kind) or 0
    hooked = times > 0 and under_hooks()  # hooks on what autograd saves would be recorded as well
    if kind is None or replay is not None or times > ATTEMPTS or hooked:
        return task.result(run(task, spec, rows))
    SEEN[kind], RECORDING.never = times + 1, False
    try:
        return recorded(task, spec, arguments, kind, rows) if times else task.result(run(task, spec, rows))
    finally:
        if RECORDING.never:
            SEEN[kind] = ATTEMPTS + 1


def recorded(task: Call[Result], spec: Spec, arguments: Arguments, kind: Kind, rows: int | None) -> Result:
    with Recorder(arguments.tensors) as recorder:
        ran = run(task, spec, rows)
        result = None if task.outputs else task.result(ran)
    replay = None
    if recorder.failure is None and ran.objective.recordable:
        try:
            replay = replay_of(task, recorder, ran, result, () if rows is None else arguments.of_tokens)
        except NotRecordedError as error:
            recorder.failure = str(error)
    if replay is not None:
        REPLAYS[kind] = replay
        SEEN.pop(kind)  # once it is forgotten the call is recorded again
    return task.result(ran) if result is None else result


def replay_of(task: Call[Result], recorder: Recorder, ran: Outcome, result: Any, of_tokens: Sequence[int]) -> Replay:
    """``of_tokens``: slots whose shapes differ between the calls that it is for: kernels alone may read them."""
    forward, call, place = ran.forward, ran.call, recorder.place
    assert forward is not None and call is not None
    plan = call.plan
    moved = call.packing is not None
    copied = call.plan.sizes.copied and not (moved and task.rows.is_contiguous())
    if call.plan.sizes.padding or copied or (task.outputs and moved):
        raise NotRecordedError("what happens around the forward pass")
    outputs = tuple(map(place, forward.outputs))
    grads, made = None, forward.grads
    if made is not None:
        grads = tuple([None if grad is None else place(grad) for grad in (made.hidden, made.weight, made.bias)])
    operands = [None if one is None else place(one).slot for one in (task.rows, task.weight, task.bias)]
    expected = Template(forward.expected, place)
    stats = {name: place(value) for name, value in ran.stats.named().items()}
    template = Template(replace(call, gradient_buffer=None), place)
    finish, of_result = finish_of(task, ran, result, place)
    of_stats = {at.slot for at in stats.values()}
    at_once = {at.slot for at in (*outputs, *(grads or ())) if at is not None}.union(expected.slots, of_result)
    differentiable = forward.any_grad
    saved = differentiable and len(forward.saved) > 0
    later = template.slots.difference(operands).union(() if saved else of_stats) if differentiable else set()
    tape = recorder.tape(at_once.union(of_stats if saved else ()), later)
    seen = recorder.operated.union(at_once, of_stats, template.slots - {operands[0]})
    if seen.intersection(of_tokens):
        raise NotRecordedError("what depends on the number of tokens")
    return Replay(
        tape, tuple(operands), outputs, forward.differentiable, grads, expected, stats, saved, template, later, finish,
        Scaled(forward.backend), plan, forward.padded,
    )  # fmt: skip


def finish_of(task: Call[Any], ran: Outcome, result: Any, place: Callable[[Tensor], Place]) -> tuple[Finish, set[int]]:
    """What makes the function's result, and of which slots."""
    first, function, shift = ran.outputs[0], task.result, task.shift
    if task.outputs:
        plan = ran.plan  # and nothing else of what was recorded
        return lambda outputs, held, leading: function(Outcome(all_at_targets(outputs, leading, shift), plan)), set()
    if result is first:
        return lambda outputs, held, leading: outputs[0], set()
    # the loss itself has a gradient: it comes after all that the slots hold
    again = Template(result, place, {id(first): operator.itemgetter(-1)}, Place.tensor)
    return lambda outputs, held, leading: again.build([*held, outputs[0]]), again.slots


def replayed(replay: Replay, arguments: Arguments) -> Any:
    tensors, leading, held = arguments.tensors, arguments.leading, list[Any]()
    hidden, weight, bias = [None if at is None else tensors[at] for at in replay.operands]
    assert hidden is not None and weight is not None
    forward = functools.partial(forward_again, replay, arguments, held)
    if replay.plan.sizes.any_grad:
        rows = hidden if hidden.dim() == 2 else hidden.reshape(-1, hidden.shape[-1])
        return replay.finish(Loss.apply(forward, [], rows, weight, bias), held, leading)
    with torch.no_grad(), as_called(hidden.device):
        made = forward(hidden, weight, bias)
    outputs, count = made.outputs, arguments.sizes[0]
    if made.padded:
        outputs = tuple([output[:count] if output.dim() else output for output in outputs])
    return replay.finish(outputs, held, leading)


def forward_again(
    replay: Replay,
    arguments: Arguments,
    held: list[Any],
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
) -> Forward:
    """``forward_of`` from a tape; ``held`` receives what its slots hold."""
    gradient_buffer = arguments.gradient_buffer
    held += replay.tape(arguments.tensors, arguments.sizes)
    grads = None
    if replay.grads is not None:
        of_hidden, of_weight, of_bias = [None if at is None else at.tensor(held) for at in replay.grads]
        grads = Gradients(of_hidden, of_weight, of_bias, gradient_buffer)
    # as the call that was recorded saves them: an activation checkpoint compares the two
    saved = replay.stats_of(held) if replay.saved else []
    kept = replay.tape.part(held, replay.kept)

    def later(saved: Sequence[Tensor]) -> tuple[HeadCall, RowStats]:
        memory = replay.tape.memory(kept, replay.kept)
        call = replay.call.build(memory | dict(zip(replay.operands, saved, strict=False)))
        vectors = saved[3:] if replay.saved else replay.stats_of(memory)
        return replace(call, gradient_buffer=gradient_buffer), RowStats(**dict(zip(replay.stats, vectors, strict=True)))

    return Forward(
        tuple([output.tensor(held) for output in replay.outputs]), replay.differentiable, None, grads,
        replay.expected.build(held), False, replay.scaled, replay.plan, gradient_buffer, replay.padded, saved, later,
    )  # fmt: skip
