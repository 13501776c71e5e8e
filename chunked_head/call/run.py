"""The run of a call: its tokens, its plan, its objective, in this order for every public function."""

import functools
from typing import Any, NamedTuple

from torch import Tensor

from ..core.private import in_backward
from ..core.stats import all_at_targets
from ..plan.plans import Plan
from .function import Forward, Loss, forward_of
from .head_call import HeadCall, head_call, planned, wanted_of
from .logits_call import call_of as logits_call_of
from .objectives import objective_of
from .options import Call
from .spec import Spec
from .tokens import tokens_of


class Outcome(NamedTuple):
    """A call that ran, and its results."""

    outputs: tuple[Tensor, ...]
    # what follows is there for calls that have run themselves; of a replay there are the outputs alone
    plan: Plan | None = None  # None for logits that exist already too, which leave nothing to plan
    tokens: Any = None  # ``Tokens``
    objective: Any = None
    stats: Any = None  # ``RowStats``
    call: HeadCall | None = None
    forward: Forward | None = None


def run(call: Call[Any], spec: Spec, rows: int | None = None) -> Outcome:
    """Runs the call at once, differentiable. ``rows``: how many, where rows that do not count follow its own."""
    tokens, found = tokens_of(call, spec, rows), list[Forward]()
    if call.weight is None:
        objective = objective_of(tokens)
        logits, on_logits = logits_call_of(tokens, objective)
        outputs = Loss.apply(functools.partial(forward_of, on_logits), found, logits)
        if call.outputs:
            outputs = all_at_targets(outputs, call.leading, call.shift)
        return Outcome(outputs, None, tokens, objective, found[0].stats)
    tokens, hidden, plan, spans = planned(tokens, wanted_of(tokens.call), in_backward())
    # the first that ranks with other tokens send each other: what one of them refuses is known by now
    objective = objective_of(tokens)
    made = head_call(tokens, hidden, plan, spans, objective, padded=rows is not None)
    outputs = Loss.apply(functools.partial(forward_of, made), found, hidden, tokens.call.weight, tokens.call.bias)
    if call.outputs:
        if tokens.packing is not None:
            outputs = tuple(map(tokens.packing.unpack, outputs))
        if call.shard is not None:
            outputs = tuple(map(call.shard.own_tokens, outputs))
        outputs = all_at_targets(outputs, call.leading, call.shift)
    return Outcome(outputs, plan, tokens, objective, found[0].stats, made, found[0])
