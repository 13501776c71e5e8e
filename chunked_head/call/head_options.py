"""The operands of a call with its options, or of one on logits that exist already: checked."""

import functools
import inspect
import sys
from abc import ABC, abstractmethod
from collections.abc import Hashable
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from ..core import checks
from ..core.groups import TokenParallel, VocabParallel
from ..core.options import PACKAGE, nearest
from ..losses.base import FIELDS
from ..parallel.dtensor import local
from ..parallel.shard import CheckedBy, Shard
from ..plan.planner import DEFAULT_REQUEST, Request
from ..stores.gradient_buffer import GradientBuffer
from ..stores.gradient_buffer import resolve as resolve_into
from .execution import CHECKS, Head, check_options


@dataclass(frozen=True, eq=False, kw_only=True)
class OfRanks(ABC):
    """What options of a head and of logits have in common, and the ranks that may share the call."""

    target: Tensor | None
    ignore_index: int = -100
    softcap: float | None = None
    logit_scale: float = 1.0
    temperature: float | Tensor = 1.0
    shift: int = 0
    vocab_size: int | None = None
    backend: str | None = None
    parallel: VocabParallel | TokenParallel | None = None
    holds: ClassVar[str]  # how an error says how many rows of the vocabulary are here
    beyond: ClassVar[str]  # what an error proposes where a target lies beyond the vocabulary and no ranks share it
    checked_without_targets: ClassVar[CheckedBy]  # what ranks compare of their tokens where a call has no targets

    @property
    @abstractmethod
    def first(self) -> Tensor:
        """The operand of which a row is a token's."""

    @property
    @abstractmethod
    def held(self) -> int:
        """How many rows of the vocabulary are here, padding among them."""

    @property
    @abstractmethod
    def whole(self) -> tuple[Tensor | None, ...]:
        """Operands of no token."""

    @property
    def rows(self) -> tuple[Tensor | None, ...]:
        """The others."""
        return self.first, self.target, self.temperatures

    @property
    def operands(self) -> tuple[Tensor | None, ...]:
        return (*self.rows, *self.whole)

    @property
    def leading(self) -> tuple[int, ...]:
        """Shape of the target."""
        return tuple(self.first.shape[:-1])

    @property
    def device(self) -> torch.device:
        """Of all operands."""
        return self.first.device

    @property
    def temperatures(self) -> Tensor | None:
        """One per token, where the call's temperature is no number."""
        return self.temperature if isinstance(self.temperature, Tensor) else None

    @property
    def plain_temperature(self) -> float | None:
        """The call's, None where each token has one."""
        return None if isinstance(self.temperature, Tensor) else self.temperature

    @property
    def numbers(self) -> tuple[Any, ...]:
        """What makes logits of products, but a temperature per token."""
        return self.softcap, self.logit_scale, self.plain_temperature

    def check_numbers(self) -> None:
        """Raises what is wrong with them."""
        check_options({"softcap": self.softcap, "logit_scale": self.logit_scale})
        if self.temperatures is None:
            check_options({"temperature": self.temperature})

    @property
    @abstractmethod
    def options(self) -> tuple[Hashable, ...]:
        """Everything else that is static, as plain values."""

    @property
    def request(self) -> Request:
        """What steers the plan."""
        return DEFAULT_REQUEST

    def in_memory(self) -> Self:
        """The same with the values of all operands in their memory, lazily negated ones copied, differentiably."""
        copies: dict[str, Any] = {
            name: value.resolve_neg()
            for name, value in vars(self).items()
            if isinstance(value, Tensor) and value.is_neg()
        }
        return replace(self, **copies) if copies else self

    def check_each(self) -> None:
        """Raises what is wrong with options by themselves, and with ``shift`` along the target."""
        check_options({name: value for name, value in vars(self).items() if name in CHECKS})
        checks.check_shift_along(self.shift, self.leading)
        if self.temperatures is not None:
            checks.check_temperatures(self.temperatures, self.leading, self.device)
        if self.shard is None and self.vocab > self.held:
            raise ValueError(f"vocab_size is {self.vocab}, and {self.holds.format(self.held)}")

    @functools.cached_property
    def shard(self) -> Shard | None:
        """This rank's part of the vocabulary, where ranks share it."""
        if not isinstance(self.parallel, VocabParallel):
            return None
        split = self.parallel.split(self.held, self.vocab_size)
        return Shard(self.parallel, split, self.checked_without_targets if self.target is None else "targets")

    @property
    def tokens(self) -> TokenParallel | None:
        """How ranks share the batch, where they do."""
        return self.parallel.tokens if isinstance(self.parallel, VocabParallel) else self.parallel

    def refuse_tokens(self, where: str) -> None:
        """Raises where a call has nothing that ranks with other tokens would add to."""
        if self.tokens is not None:
            raise ValueError(
                f"{where} has values per token, which need nothing of other ranks' tokens: TokenParallel has no effect "
                "on them; leave it out of parallel (tokens=None in VocabParallel)"
            )

    def refuse_average(self) -> None:
        """Raises where values per token would have to be multiplied as a loss is."""
        if self.tokens is not None and self.tokens.average:
            raise ValueError(
                'average=True of TokenParallel multiplies the loss, and reduction="none" has no loss but values per '
                "token: multiply yours by the number of ranks, and leave average=False"
            )

    @property
    def vocab(self) -> int:
        """Of the softmax, wherever its rows are."""
        if self.shard is not None:
            return self.shard.split.vocab
        return self.held if self.vocab_size is None else self.vocab_size

    @property
    def columns(self) -> int:
        """Rows that are here and stand for an id."""
        return self.vocab if self.shard is None else self.shard.split.columns


@dataclass(frozen=True, eq=False, kw_only=True)
class HeadOptions(OfRanks):
    """What every public function takes of the head and of how to run it."""

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None = None
    memory_budget: int | str | None = None
    chunk_tokens: int | None = None
    accumulate_dtype: torch.dtype | None = None
    accumulate_into: Tensor | str | None = None
    skip_ignored: bool | str = False
    deterministic: bool = False
    holds = "weight has {} rows"
    beyond = "where weight has one rank's rows of the vocabulary, pass parallel=VocabParallel(group)"
    checked_without_targets = "hidden"

    def check(self) -> torch.dtype:
        """Raises what is wrong with these arguments; the dtype of the matmuls."""
        dtype = checks.check_operands(self.hidden, self.weight, self.target, self.bias)
        self.check_each()
        self.gradient_buffer  # noqa: B018  (raises what is wrong with it)
        if self.shard is not None and self.shard.parallel.sequence_sharded:
            self.check_sequence_sharded()
        if self.shard is not None and self.deterministic:
            self.check_order_of_sums(self.shard.parallel)
        return dtype

    def check_order_of_sums(self, parallel: VocabParallel) -> None:
        """Of two shares there is one sum; the order of more is the library's, by a row's place in the message."""
        summed = parallel.reduce_dhidden and torch.is_grad_enabled() and self.hidden.requires_grad
        if summed and parallel.ranks > 2:
            raise ValueError(
                "deterministic=True goes with VocabParallel of at most 2 ranks where hidden takes a gradient: in which "
                f"order torch.distributed adds up {parallel.ranks} shares of it depends on where a row stands in the "
                "message; use fewer ranks, reduce_dhidden=False and a sum of your own, or deterministic=False"
            )

    def check_sequence_sharded(self) -> None:
        if self.shift:
            raise ValueError(
                "shift does not reach over ranks that each hold their own tokens (sequence_sharded=True); give labels "
                "that are shifted already, see chunked_head.parallel.shift_targets"
            )
        if self.skip_ignored:
            raise ValueError(
                "skip_ignored does not go with sequence_sharded=True: tokens that do not count would be some of one "
                "rank's and more of another's; leave it False"
            )
        if not self.leading:
            raise ValueError("sequence_sharded=True takes hidden states [tokens, hidden] or more dimensions")

    @property
    def first(self) -> Tensor:
        return self.hidden

    @property
    def held(self) -> int:
        return self.weight.shape[0]

    @property
    def whole(self) -> tuple[Tensor | None, ...]:
        return self.weight, self.bias

    @property
    def options(self) -> tuple[Hashable, ...]:
        return (
            self.ignore_index, self.shift, self.memory_budget, self.chunk_tokens, self.accumulate_dtype, self.backend,
            self.accumulate_into is None, self.skip_ignored, self.deterministic, self.vocab_size, self.parallel,
        )  # fmt: skip

    @property
    def request(self) -> Request:
        return Request(self.memory_budget, self.chunk_tokens, self.accumulate_dtype)

    @functools.cached_property
    def gradient_buffer(self) -> GradientBuffer | None:
        """Where the weight's gradient goes instead of back, None where it goes back or is not made."""
        others = {"hidden": self.hidden, "target": self.target, "bias": self.bias}
        return resolve_into(self.accumulate_into, self.weight, others)


# of the keywords of ``Head``, where a call names none
DEFAULTS = {field.name: field.default for field in fields(HeadOptions) if field.name in Head.__annotations__}


def head_of(
    function: str,
    hidden: Tensor,
    weight: Tensor,
    target: Tensor | None,
    options: Head,
    temperature: float | Tensor = 1.0,
) -> HeadOptions:
    """The head of a call of a public function; a TypeError for keywords that are none of ``Head``'s."""
    unknown = options.keys() - DEFAULTS.keys()
    if unknown:
        first = min(unknown)
        field = function == "linear_loss" and first in FIELDS
        # of the public function, which spells out its keywords and these
        known = inspect.signature(getattr(sys.modules[PACKAGE], function)).parameters
        hint = f'; it is a field: batch={{"{first}": ...}}' if field else nearest(first, known)
        raise TypeError(f"{function} has no option {first!r}{hint}")
    given = options.copy()
    hidden, weight, target, given["bias"], given["vocab_size"], given["parallel"] = local(
        hidden, weight, target, given.get("bias"), given.get("vocab_size"), given.get("parallel")
    )
    return HeadOptions(hidden=hidden, weight=weight, target=target, temperature=temperature, **given)


@dataclass(frozen=True, eq=False, kw_only=True)
class LogitsOptions(OfRanks):
    """The same for logits that exist already."""

    logits: Tensor
    holds = "logits have {} columns"
    beyond = (
        "where these are hidden states, pass them to linear_loss with the head's weight; where they have one rank's "
        "columns of the vocabulary, pass parallel=VocabParallel(group)"
    )
    checked_without_targets = "nothing"

    def check(self) -> torch.dtype:
        """Raises what is wrong with these arguments; the dtype of the arithmetic."""
        dtype = checks.check_logits(self.logits, self.target)
        self.check_each()
        if self.shard is not None:
            self.check_split(self.shard.parallel)
        return torch.promote_types(dtype, torch.float32)

    def check_split(self, parallel: VocabParallel) -> None:
        if parallel.sequence_sharded:
            raise ValueError(
                "sequence_sharded=True is of hidden states: logits of this rank's tokens and ids lack those of other "
                "ranks' tokens; give logits of all tokens, or hidden and weight to linear_loss"
            )
        if not parallel.reduce_dhidden:
            raise ValueError(
                "reduce_dhidden=False is of hidden states, and logits' gradient needs no sum over ranks; leave it True"
            )

    @property
    def first(self) -> Tensor:
        return self.logits

    @property
    def held(self) -> int:
        return self.logits.shape[-1]

    @property
    def whole(self) -> tuple[Tensor | None, ...]:
        return ()

    @property
    def options(self) -> tuple[Hashable, ...]:
        return self.ignore_index, self.shift, self.backend, self.vocab_size, self.parallel
