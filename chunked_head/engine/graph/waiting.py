"""In which dtype gradients leave a graph's forward, to wait for the upstream gradient: as they do outside of graphs."""

import functools
import math
from dataclasses import replace
from typing import NamedTuple

import torch

from ...backends import Layout
from ...program.planner import Request, make_plan
from ...program.sizes import Sizes
from ..call import Task, Wants, coupling
from ..head_options import HeadOptions

OCTAVES = 21  # numbers of tokens up to the last power of two; beyond it nothing changes any more


class Waiting(NamedTuple):
    """Dtypes of gradients."""

    hidden: torch.dtype
    weight: torch.dtype
    bias: torch.dtype


def waiting(task: Task, wants: Wants) -> Waiting:
    """A function of sizes, dtypes and options: the same for tensors without data as for those that come later.

    Of the number of tokens a graph learns no more than the range in which the answer holds.
    """
    head, dtype = task.checked.head, task.checked.dtype
    assert isinstance(head, HeadOptions)
    own = Waiting(head.hidden.dtype, head.weight.dtype, torch.promote_types(dtype, torch.float32))
    if own.hidden.itemsize > 2 and own.weight.itemsize > 2:
        return own
    if dtype == torch.float16:
        # of order 1 before denominators and upstream have come: as fp16 they might not survive those
        return Waiting(*(torch.promote_types(each, torch.float32) for each in own))
    tokens = math.prod(head.leading)
    table = ranges(few_sizes(task, wants), task.request)
    for most, hidden, weight in table[:-1]:
        if tokens <= most:
            return Waiting(hidden, weight, own.bias)
    return Waiting(*table[-1][1:], own.bias)


def few_sizes(task: Task, wants: Wants) -> Sizes:
    """The call's sizes for no tokens, its tensors taken to be aligned."""
    checked = task.checked
    head = checked.head
    assert isinstance(head, HeadOptions)
    demand, pairing = task.demand, task.demand.pairing
    layout = Layout(
        head.device, checked.dtype, int(head.weight.shape[1]), plain_weight=True, plain_rows=True,
        capped=head.softcap is not None, bias_grad=wants.bias, demand=demand,
    )  # fmt: skip
    from_hidden = "teacher_hidden" in checked.wanted
    return Sizes(
        0, int(head.weight.shape[1]), int(head.vocab), checked.dtype,
        hidden_dtype=head.hidden.dtype, weight_dtype=head.weight.dtype,
        hidden_grad=wants.hidden, weight_grad=wants.weight,
        bias_grad=wants.bias, bias_dtype=None if head.bias is None else head.bias.dtype,
        coupled=coupling(checked.losses, checked.dtype)[1], demand=demand,
        teacher_columns=0 if pairing is None else pairing.columns,
        teacher_width=int(checked.batch["teacher_hidden"].shape[-1]) if from_hidden else 0,
        teacher_store="logits" if from_hidden else None,
        store=checked.backend.store(layout), **checked.backend.traits(head.device),
    )  # fmt: skip


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
