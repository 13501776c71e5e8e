"""In which dtype gradients leave a graph's forward, to wait for the upstream gradient: as they do outside of graphs."""

import bisect
import functools
import math
from dataclasses import replace

import torch

from ...program.planner import Request, make_plan
from ...program.sizes import Sizes
from ..call import Placed, Wants, sizes_of
from ..head_options import HeadOptions
from ..program import Program
from ..task import Task

Pair = tuple[torch.dtype, torch.dtype]
OCTAVES = 21  # numbers of tokens up to the last power of two; beyond it nothing changes any more


def deferred(task: Task, program: Program, wants: Wants) -> tuple[torch.dtype, torch.dtype, torch.dtype]:
    """Dtypes of the gradients of hidden states, weight and bias.

    A function of sizes, dtypes and options: the same for tensors without data as for those that come later. Of the
    number of tokens a graph learns no more than the range in which the answer holds.
    """
    head, dtype = task.head, program.dtype
    assert isinstance(head, HeadOptions)
    hidden, weight, bias = head.hidden.dtype, head.weight.dtype, torch.promote_types(dtype, torch.float32)
    if hidden.itemsize > 2 and weight.itemsize > 2:
        return hidden, weight, bias
    if dtype == torch.float16:
        # of order 1 before denominators and upstream have come: as fp16 they might not survive those
        return torch.promote_types(hidden, torch.float32), torch.promote_types(weight, torch.float32), bias
    tokens = math.prod(head.leading)
    *table, (_, last) = ranges(few_sizes(task, program, wants), program.request)
    return *next((pair for most, pair in table if tokens <= most), last), bias


def few_sizes(task: Task, program: Program, wants: Wants) -> Sizes:
    """The call's sizes for no tokens, its tensors taken to be aligned."""
    placed = Placed(
        tokens=0, wants=wants, again=False, skips=False, by_segments=False, copied=False, plain_weight=True,
        plain_rows=True, buffer_dtype=None,
    )  # fmt: skip
    sizes = sizes_of(task.head, program, placed, None)
    # while a graph is made they may be symbols
    sizes = replace(sizes, hidden=int(sizes.hidden), vocab=int(sizes.vocab), padding=int(sizes.padding))
    if "teacher_hidden" not in program.wanted or task.batch is None:
        return sizes
    return replace(sizes, teacher_width=int(task.batch["teacher_hidden"].shape[-1]), teacher_store="logits")


@functools.lru_cache(maxsize=256)
def ranges(sizes: Sizes, request: Request) -> list[tuple[int, Pair]]:
    """(most tokens, dtypes of the gradients of hidden states and weight), in order.

    Where the plans of two neighbouring powers of two differ, the place between them is sought. Should plans change
    there more than once, a graph's gradients are cast to what stands here: right, if with a copy.
    """

    def kept(tokens: int) -> Pair:
        try:
            plan = make_plan(replace(sizes, tokens=tokens), request)
        except ValueError:  # so many tokens are refused, when they come
            return sizes.hidden_dtype, sizes.weight_dtype
        if plan.schedule == "forward":
            return plan.hidden_accumulate, plan.weight_accumulate
        return sizes.hidden_dtype, sizes.weight_dtype

    found = [(1, kept(1))]
    for power in range(1, OCTAVES):
        (low, before), high = found.pop(), 1 << power
        if kept(high) != before:

            def differs(tokens: int, before: Pair = before) -> bool:
                return kept(tokens) != before

            found.append((low + bisect.bisect_left(range(low + 1, high), True, key=differs), before))
        found.append((high, kept(high)))
    return found
