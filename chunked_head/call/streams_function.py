"""The autograd.Function of several streams: the weight's gradient is one buffer that all of them add to."""

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..stores.gradient_buffer import StreamsBuffer
from .function import Forward, as_called, forward_of, handed_over, only_once, with_recompute_plan
from .sweep import Call, recompute


class StreamCalls(NamedTuple):
    """What runs: a call for each stream, and of which dtype their common gradient of the weight is."""

    calls: Sequence[Call]
    buffer_dtype: torch.dtype | None  # None: the caller's buffer is added to, or the weight takes no gradient

    def buffer(self, weight: Tensor) -> StreamsBuffer | None:
        vocab, dtype = self.calls[0].plan.sizes.vocab, self.buffer_dtype
        return None if dtype is None else StreamsBuffer(weight, vocab, dtype)


class StreamsLoss(torch.autograd.Function):
    """Of a weight, a bias or None and each stream's hidden states [tokens, hidden]: the sum of the streams' losses;
    ``found`` receives what each stream's forward pass has made."""

    @staticmethod
    def forward(
        ctx: Any, streams: StreamCalls, found: list[Forward], weight: Tensor, bias: Tensor | None, *hidden: Tensor
    ) -> Tensor:
        now = [call.plan.schedule == "forward" for call in streams.calls]
        with as_called(weight.device):
            buffer, calls = streams.buffer(weight) if any(now) else None, streams.calls
            if buffer is not None:
                calls = [replace(c, gradient_buffer=buffer) if n else c for c, n in zip(calls, now, strict=True)]
            for call, rows in zip(calls, hidden, strict=True):
                made = forward_of(call, rows, weight, bias)
                found.append(made)
                if buffer is not None and made.grads is not None:
                    buffer.fresh &= call.plan.sizes.tokens == 0
                    # finished once, for all streams
                    made.grads.weight = None
                    made.grads.padded.pop("weight", None)
        if any(one.plan.sizes.any_grad for one in found):
            ctx.save_for_backward(weight, bias, *hidden, *(tensor for one in found for tensor in one.saved))
            ctx.saved_until = [*itertools.accumulate((len(one.saved) for one in found), initial=2 + len(found))]
            ctx.streams, ctx.buffer, ctx.made = streams, buffer, [one.bare() for one in found]
            ctx.grads = [one.grads for one in found]
        ctx.set_materialize_grads(False)
        first, *others = (one.outputs[0] for one in found)
        return sum(others, first)

    @staticmethod
    def backward(ctx: Any, given: Tensor | None) -> tuple[Tensor | None, ...]:
        if given is None:
            return None, None, None, None, *[None] * len(ctx.made)
        given = given.resolve_neg()
        made, grads, buffer = ctx.made, ctx.grads, ctx.buffer
        ctx.grads, ctx.buffer = [None] * len(made), None
        for one in made:
            if one.gradient_buffer is not None:
                one.gradient_buffer.check_there()
        late = [i for i, one in enumerate(made) if grads[i] is None and one.plan.sizes.any_grad]
        # once: an activation checkpoint gives them no second time. Where ranks exchange, as ``HeadLoss`` does
        saved: Sequence[Tensor] = ctx.saved_tensors if late or any(one.exchanges for one in made) else ()
        found: list[tuple[Tensor | None, ...]] = [(None, None, None)] * len(made)
        with torch.no_grad(), as_called(given.device):
            for i, one in enumerate(made):
                if grads[i] is not None:
                    found[i] = handed_over(one, grads[i], given)
            if buffer is not None and late:
                expected = next(one.expected for i, one in enumerate(made) if i not in late)
                made[0].backend.scale_([buffer.buffer], expected.factors(given))
            for i in late:
                buffer = buffer or ctx.streams.buffer(saved[0])
                own = saved[slice(*ctx.saved_until[i : i + 2])]
                found[i] = made_late(made[i], [saved[2 + i], *saved[:2], *own], buffer, given)
            of_hidden, of_weight, of_bias = zip(*found, strict=True)
            if buffer is None:
                d_weight = next((one for one in of_weight if one is not None), None)
            else:
                d_weight = finished(buffer, made, given, scaled=bool(late))
        return None, None, *only_once(ctx, (d_weight, added(of_bias), *of_hidden))


def added(parts: Sequence[Tensor | None]) -> Tensor | None:
    """The streams' gradients of the bias, rounded once more."""
    there = [part for part in parts if part is not None]
    if len(there) < 2:
        return there[0] if there else None
    dtype = there[0].dtype
    return torch.stack(there).sum(0, dtype=torch.promote_types(dtype, torch.float32)).to(dtype)


def made_late(
    made: Forward, saved: Sequence[Tensor], buffer: StreamsBuffer | None, given: Tensor
) -> tuple[Tensor | None, ...]:
    """A stream's gradients once the upstream gradient is known: its own logits are computed again."""
    call, stats = made.later(saved)
    hidden, weight, bias = saved[:3]
    if buffer is not None:
        # blocks of tokens add to it, and there may be many of them
        sizes = replace(call.plan.sizes, buffer_dtype=buffer.buffer.dtype)
        call = replace(call, gradient_buffer=buffer, plan=replace(call.plan, sizes=sizes))
    coefficients = call.objective.late(stats, (given,))
    call = with_recompute_plan(call)
    found = recompute(call, hidden, call.head(weight, bias), stats, coefficients)
    if buffer is not None:
        buffer.fresh &= call.plan.sizes.tokens == 0
    return found


def finished(buffer: StreamsBuffer, made: Sequence[Forward], given: Tensor, scaled: bool) -> Tensor:
    """The weight's gradient in its own dtype; nan where an id of any stream was out of range."""
    if buffer.fresh:
        buffer.buffer.zero_()
    first, *others = (one.expected for one in made if one.expected is not None)
    one_or_nan = first.one_or_nan
    for other in others:
        one_or_nan = one_or_nan * other.one_or_nan
    factors = (one_or_nan,) if scaled else (*first.factors(given)[:1], one_or_nan)
    dtype, backend, sums = buffer.weight.dtype, made[0].backend, buffer.taken()
    if sums.dtype == dtype:
        backend.scale_([sums], factors)
        return sums
    return backend.scale(sums, factors, dtype)
