"""Calls that have run before with tensors alike, done again from a tape (``tape.py``): what remains of the host's
work is launches and memory.

The first call of a kind runs as it is, the second is recorded, later ones replay. A kind is a program, the numbers
among the arguments, and of every tensor shape, strides, dtype and alignment: whatever a call's Python depends on.
"""

import functools
import operator
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ...backends import Backend
from ...backends.gradients import Gradients
from ...core.private import under_hooks
from ...core.shift import in_backward
from ...core.stats import RowStats
from ...kernels.common.recording import RECORDING
from ...program.gradient_buffer import GradientBuffer
from ...program.plans import Plan
from ..autograd import Forward, HeadLoss
from ..call import Outcome, run
from ..head_options import HeadOptions
from ..loop import Call
from ..program import Program, program_of
from ..task import Result, Task
from .tape import NotRecordedError, Place, Recorder, Tape
from .template import Template

Kind = tuple[Hashable, ...]
MOST_TAPES, MOST_SEEN = 256, 4096
ATTEMPTS = 3  # to record one: where a kernel is compiled there is no tape
DEVICES = {"cuda"}  # where the device would wait for the host


@dataclass(frozen=True, eq=False)
class Replay:
    """What was recorded of a call, and where in it lies what the call returns and its backward needs."""

    tape: Tape
    outputs: tuple[Place, ...]
    differentiable: int
    grads: tuple[Place | None, ...] | None  # of hidden, weight, bias
    expected: Template
    target: Place
    stats: dict[str, Place]
    call: Template
    result: Template | None  # what the function returns, None where that is made of the outputs alone
    backend: Backend
    plan: Plan


REPLAYS: dict[Kind, Replay] = {}
SEEN: dict[Kind, int] = {}  # how often a call without one has run


def execute(task: Task[Result]) -> Result:
    """Runs the task at once, differentiable."""
    program = program_of(task)
    kind, tensors = kind_of(task, program)
    if kind is None:
        return task.result(run(task, program))
    replay = REPLAYS.get(kind)
    if replay is not None and replay.tape.usable():
        return replayed(task, replay, tensors)
    times = SEEN.get(kind, 0)
    if times > ATTEMPTS or replay is not None or (times and under_hooks()):
        return task.result(run(task, program))  # hooks on what autograd saves would be recorded as well
    if len(SEEN) >= MOST_SEEN:
        SEEN.clear()
    SEEN[kind], RECORDING.never = times + 1, False
    try:
        return recorded(task, program, kind, tensors) if times else task.result(run(task, program))
    finally:
        if RECORDING.never:
            SEEN[kind] = ATTEMPTS + 1


def kind_of(task: Task, program: Program) -> tuple[Kind | None, list[Tensor]]:
    """What a replay is good for, None where there is to be none; and all tensors that the call reads, the operands
    first."""
    head, scalars = task.head, task.scalars
    replayable = isinstance(head, HeadOptions) and head.parallel is None and head.device.type in DEVICES
    if not (program.lasting and replayable) or scalars is None:
        return None, []
    assert isinstance(head, HeadOptions)
    buffer = None if head.into is None else head.into.buffer
    given: list[Any] = [head.hidden, head.weight, head.bias, head.target, buffer, *scalars]
    given += (task.batch or {}).values()
    for coefficient, summand in task.losses.terms:
        given += [coefficient, summand.normalizer, summand.token_weights, *summand.tensors.values()]
    tensors = [value for value in given if isinstance(value, Tensor)]
    numbers = tuple([Tensor if isinstance(value, Tensor) else value for value in given])
    addresses = [tensor.data_ptr() for tensor in tensors]
    kinds = tuple([
        (type(tensor), tensor.shape, tensor.stride(), tensor.dtype, address & 15)
        for tensor, address in zip(tensors, addresses, strict=True)
    ])  # fmt: skip
    shared = tuple(map(addresses.index, addresses)) if len(set(addresses)) < len(addresses) else ()
    current = torch.cuda.current_device() if head.device.type == "cuda" else None
    return (program, in_backward(), task.num_segments, head.device, current, numbers, shared, kinds), tensors


def recorded(task: Task[Result], program: Program, kind: Kind, tensors: Sequence[Tensor]) -> Result:
    with Recorder(tensors) as recorder:
        ran = run(task, program)
        result = None if task.per_token else task.result(ran)
    replay = None
    if recorder.failure is None and ran.objective.recordable:
        try:
            replay = replay_of(task, recorder, ran, result)
        except NotRecordedError as error:
            recorder.failure = str(error)
    if replay is not None:
        if len(REPLAYS) >= MOST_TAPES:
            oldest, *_ = REPLAYS
            REPLAYS.pop(oldest, None)
            SEEN.pop(oldest, None)
        REPLAYS[kind] = replay
    return task.result(ran) if result is None else result


def replay_of(task: Task, recorder: Recorder, ran: Outcome, result: Any) -> Replay:
    forward, call, place = ran.forward, ran.call, recorder.place
    assert forward is not None and call is not None
    if call.plan.sizes.padding or call.plan.sizes.copied or (task.per_token and call.packing is not None):
        raise NotRecordedError("what happens around the forward pass")
    outputs = tuple(map(place, forward.outputs))
    grads, made = None, forward.grads
    if made is not None:
        grads = tuple([None if grad is None else place(grad) for grad in (made.hidden, made.weight, made.bias)])
    expected = Template(forward.expected, place)
    stats = {name: place(value) for name, value in ran.stats.named().items()}
    template = Template(replace(call, into=None), place)
    again = None
    if result is not None and result is not ran.outputs[0]:
        # the loss itself has a gradient: it comes after all that the slots hold
        again = Template(result, place, {id(ran.outputs[0]): operator.itemgetter(-1)})
    target = place(call.own_target)
    places = [target, *outputs, *stats.values(), *(at for at in grads or () if at is not None)]
    of_templates = [each.slots for each in (expected, template, again) if each is not None]
    tape = recorder.tape({at.slot for at in places}.union(*of_templates))
    return Replay(
        tape, outputs, forward.differentiable, grads, expected, target, stats, template, again, forward.backend,
        forward.plan,
    )  # fmt: skip


def replayed(task: Task[Result], replay: Replay, tensors: Sequence[Tensor]) -> Result:
    head, held = task.head, list[Any]()
    assert isinstance(head, HeadOptions)
    forward = functools.partial(forward_again, replay, tensors, head.into, held)
    rows = head.hidden.reshape(-1, head.hidden.shape[-1])
    outputs = HeadLoss.apply(rows, head.weight, head.bias, forward, [])
    if replay.result is None:
        return task.result(Outcome(outputs, replay.plan))
    held.append(outputs[0])
    return replay.result.build(held)


def forward_again(
    replay: Replay,
    tensors: Sequence[Tensor],
    into: GradientBuffer | None,
    held: list[Any],
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
) -> Forward:
    """``forward_of`` from a tape; ``held`` receives what its slots hold."""
    added_to = None if replay.grads is None else into
    if added_to is not None:
        added_to.before_adding()
    held += replay.tape(tensors)
    grads, operands = None, 2 if bias is None else 3
    if replay.grads is not None:
        of_hidden, of_weight, of_bias = [None if at is None else at.tensor(held) for at in replay.grads]
        grads = Gradients(of_hidden, of_weight, of_bias, into)
    canary = None if added_to is None else added_to.canary(replay.target.tensor(held))
    # saved as the call that was recorded saves them: an activation checkpoint compares the two
    saved = [at.tensor(held) for at in replay.stats.values()] if replay.plan.sizes.any_grad else []
    kept = {slot: held[slot] for slot in replay.call.slots if slot >= operands}

    def later(saved: Sequence[Tensor]) -> tuple[Call, RowStats]:
        call = replay.call.build({**kept, **dict(enumerate(saved[:operands]))})
        return replace(call, into=into), RowStats(**dict(zip(replay.stats, saved[3:], strict=True)))

    return Forward(
        tuple([output.tensor(held) for output in replay.outputs]), replay.differentiable, None, grads,
        replay.expected.build(held), False, replay.backend, replay.plan, into, canary,
        saved, later,
    )  # fmt: skip
