"""The custom operators of logits that exist already: a call, and its gradient once the upstream one is known.

``forward`` returns, of a scalar loss, the loss and the values of parts and metrics in one vector; of values per token
those; then, where a gradient is wanted, the statistics of which ``backward`` makes it.
"""

import math
from typing import Any

import torch
from torch import Tensor

from ...core.stats import RowStats
from ..arithmetic.objective import ScalarObjective
from ..autograd import as_called
from ..logits_call import Call, call_of
from ..prepared import prepare
from ..program import Program
from ..task import Task
from .operators import WITHOUT_GRADIENT, count_packed, empty_values, packed, plainly
from .recipes import recipe_of


def begun(task: Task, program: Program) -> tuple[Tensor, Call]:
    prepared = prepare(task, program)
    return call_of(prepared, task.objective(prepared), inplace=False)


@torch.library.custom_op(
    "chunked_head::logits_forward", mutates_args=(),
    schema="(Tensor logits, Tensor[] others, str key, bool grad) -> Tensor[]",
)  # fmt: skip
@plainly
def forward(logits: Tensor, others: list[Tensor], key: str, grad: bool) -> list[Tensor]:
    with torch.no_grad(), as_called(logits.device):
        task, program = recipe_of(key).task(others, logits)
        rows, call = begun(task, program)
        stats = call.stats(rows)
        outputs = call.objective.outputs(stats)
        if isinstance(call.objective, ScalarObjective):
            outputs = *outputs, packed(task, call.objective, stats)
        return [*outputs, *(stats.named().values() if grad else ())]


@forward.register_fake
def forward_outputs(logits: Tensor, others: list[Tensor], key: str, grad: bool) -> list[Tensor]:
    """Their shapes; raises what is wrong with the arguments."""
    task, program = recipe_of(key).task(others, logits)
    tokens, dtype = math.prod(logits.shape[:-1]), program.statistics_dtype
    if task.per_token:
        made = empty_values(task, program.demand, tokens, dtype, logits)
    else:
        made = [logits.new_empty(shape, dtype=dtype) for shape in ((), (count_packed(task),))]
    named = RowStats.empty(tokens, program.demand, dtype, logits.device).named()
    return [*made, *(named.values() if grad else ())]


@torch.library.custom_op(
    "chunked_head::logits_backward", mutates_args=(),
    schema="(Tensor logits, Tensor[] others, Tensor[] stats, Tensor[] upstream, str key) -> Tensor",
)  # fmt: skip
@plainly
def backward(logits: Tensor, others: list[Tensor], stats: list[Tensor], upstream: list[Tensor], key: str) -> Any:
    with torch.no_grad(), as_called(logits.device):
        task, program = recipe_of(key).task(others, logits)
        rows, call = begun(task, program)
        names = RowStats.empty(0, program.demand, call.objective.dtype, logits.device).named()
        return call.gradient(rows, RowStats(**dict(zip(names, stats, strict=True))), upstream)


@backward.register_fake
def backward_output(
    logits: Tensor, others: list[Tensor], stats: list[Tensor], upstream: list[Tensor], key: str
) -> Tensor:
    return logits.new_empty(logits.shape)


def keep(ctx: Any, inputs: tuple, output: list[Tensor]) -> None:
    """For the gradient."""
    logits, others, key, _ = inputs
    per_token = recipe_of(key).task(others, logits)[0].per_token
    ctx.key, ctx.others, ctx.values = key, len(others), len(per_token) or 1
    gradless = [value for name, value in zip(per_token, output, strict=False) if name in WITHOUT_GRADIENT]
    first = ctx.values if per_token else 2
    ctx.mark_non_differentiable(*gradless, *output[ctx.values :])
    ctx.save_for_backward(logits, *others, *output[first:])


def differentiate(ctx: Any, upstream: list[Tensor]) -> tuple:
    """Gradients of the operator's arguments; traced."""
    logits, *rest = ctx.saved_tensors
    others, stats = rest[: ctx.others], rest[ctx.others :]
    return backward(logits, others, stats, upstream[: ctx.values], ctx.key), [None] * ctx.others, None, None


forward.register_autograd(differentiate, setup_context=keep)
