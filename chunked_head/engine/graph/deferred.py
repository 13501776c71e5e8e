"""In which dtype gradients leave a graph's forward, to wait for the upstream gradient: as they do outside of graphs."""

import functools
import math
from dataclasses import replace
from typing import NamedTuple

import torch

from ...program.planner import Request, make_plan
from ...program.sizes import Sizes
from ..call import Placed, Wants, sizes_of
from ..head_options import HeadOptions
from ..program import Program
from ..task import Task

OCTAVES = 21  # numbers of tokens up to the last power of two; beyond it nothing changes any more


class Deferred(NamedTuple):
    """Dtypes of gradients."""

    hidden: torch.dtype
    weight: torch.dtype
    bias: torch.dtype


def deferred(task: Task, program: Program, wants: Wants) -> Deferred:
    """A function of sizes, dtypes and options: the same for tensors without data as for those that come later.

    Of the number of tokens a graph learns no more than the range in which the answer holds.
    """
    head, dtype = task.head, program.dtype
    assert isinstance(head, HeadOptions)
    own = Deferred(head.hidden.dtype, head.weight.dtype, torch.promote_types(dtype, torch.float32))
    if own.hidden.itemsize > 2 and own.weight.itemsize > 2:
        return own
    if dtype == torch.float16:
        # of order 1 before denominators and upstream have come: as fp16 they might not survive those
        return Deferred(*(torch.promote_types(each, torch.float32) for each in own))
    tokens = math.prod(head.leading)
    table = ranges(few_sizes(task, program, wants), program.request)
    for most, hidden, weight in table[:-1]:
        if tokens <= most:
            return Deferred(hidden, weight, own.bias)
    return Deferred(*table[-1][1:], own.bias)


def few_sizes(task: Task, program: Program, wants: Wants) -> Sizes:
    """The call's sizes for no tokens, its tensors taken to be aligned."""
    placed = Placed(
        0,
        wants,
        again=False,
        skips=False,
        by_segments=False,
        copied=False,
        plain_weight=True,
        plain_rows=True,
        buffer_dtype=None,
    )
    sizes = sizes_of(task.head, program, placed, None)
    # while a graph is made they may be symbols
    sizes = replace(sizes, hidden=int(sizes.hidden), vocab=int(sizes.vocab), padding=int(sizes.padding))
    if "teacher_hidden" not in program.wanted or task.batch is None:
        return sizes
    return replace(sizes, teacher_width=int(task.batch["teacher_hidden"].shape[-1]), teacher_store="logits")


@functools.lru_cache(maxsize=256)
def ranges(sizes: Sizes, request: Request) -> list[tuple[int, torch.dtype, torch.dtype]]:
    """(most tokens, dtype of hidden's gradient, of the weight's), in order.

    Where the plans of two neighbouring powers of two differ, the place between them is sought. Should plans change
    there more than once, a graph's gradients are cast to what stands here: right, if with a copy.
    """

    def kept(tokens: int) -> tuple[torch.dtype, torch.dtype]:
        try:
            plan = make_plan(replace(sizes, tokens=tokens), request)
        except ValueError:  # so many tokens are refused, when they come
            return sizes.hidden_dtype, sizes.weight_dtype
        if plan.schedule == "forward":
            return plan.hidden_accumulate, plan.weight_accumulate
        return sizes.hidden_dtype, sizes.weight_dtype

    found: list[tuple[int, torch.dtype, torch.dtype]] = []
    for power in range(OCTAVES):
        most, dtypes = 1 << power, kept(1 << power)
        if found and found[-1][1:] != dtypes:
            low, high = found[-1][0], most  # the last that is as before, the first that is known to differ
            while high - low > 1:
                middle = (low + high) // 2
                low, high = (middle, high) if kept(middle) == found[-1][1:] else (low, middle)
            found[-1] = low, *found[-1][1:]
        elif found:
            found.pop()
        found.append((most, *dtypes))
    return found
