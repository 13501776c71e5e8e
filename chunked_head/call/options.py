"""Options of a call, each with its check and its default, and the operands of a head or of logits that they go with."""

import functools
import inspect
import math
import sys
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field, fields, replace
from operator import attrgetter
from typing import Any, ClassVar, Self, TypedDict

import torch
from torch import Tensor, nn

from ..core import checks
from ..core.checks import PACKAGE, flag, nearest
from ..losses.base import FIELDS
from ..parallel.dtensor import local
from ..parallel.groups import TokenParallel, VocabParallel
from ..parallel.shard import CheckedBy, Shard
from ..plan.sizes import DEFAULT_REQUEST, Request
from ..stores import check_name
from ..stores.gradient_buffer import GradientBuffer, check_kind
from ..stores.gradient_buffer import resolve as resolve_into


def check_options(options: Mapping[str, Any]) -> None:
    """Raises what is wrong with options of a head by themselves, whatever tensors they will come with."""
    for name, value in options.items():
        CHECKS[name](value)


class OptionsModule(nn.Module):
    """A module whose options are its attributes, as those of what it stands for: one that is changed counts."""

    names: tuple[str, ...]

    def keep(self, options: Mapping[str, Any]) -> None:
        self.names = tuple(options)
        for name, value in options.items():
            setattr(self, name, value)

    def options(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.names}

    def extra_repr(self) -> str:
        return ", ".join(f"{name}={value!r}" for name, value in self.options().items())


def check_skip_ignored(skip_ignored: bool | str) -> None:
    if not (isinstance(skip_ignored, bool) or (isinstance(skip_ignored, str) and skip_ignored == "wait")):
        raise ValueError(f'skip_ignored must be True, False or "wait", got {skip_ignored!r}')


def check_parallel(parallel: VocabParallel | TokenParallel | None) -> None:
    if parallel is not None and not isinstance(parallel, VocabParallel | TokenParallel):
        raise TypeError(f"parallel must be a VocabParallel, a TokenParallel or None, got {type(parallel).__name__}")


class Execution(TypedDict, total=False):
    """Keywords of every function on hidden states: memory, order of sums, ranks.

    Attributes:
        memory_budget: bytes, or a string such as "512MiB", that everything beside the gradients (and under autocast the
            cast weight) may take. None: 640 MiB, or what a chunk of 2048 tokens takes where its logits alone, in the
            operands' dtype and with those of a teacher that gives hidden states, are more; and where that would mean
            more than 8 chunks of a 16-bit weight's gradient, an fp32 accumulator of it on top. On each of several ranks
            that share the vocabulary 640 MiB over the square root of their number, or of 16, where that leaves chunks
            of 2048 tokens. See ``chunked_head.plan``.
        chunk_tokens: at most so many tokens in a chunk (equal chunks), instead of what the budget gives.
        accumulate_dtype: of the weight's gradient over chunks: None (float32 where the budget holds it, else the
            weight's own over few chunks), ``torch.float32`` or the weight's dtype. Under ``torch.compile`` 16-bit
            gradients wait for the upstream gradient in float32 where it is named here, and else in their own dtype,
            which an upstream gradient that is no power of two rounds again.
        accumulate_into: a contiguous [vocab, hidden] tensor that the weight's gradient is added to, or the name of the
            weight's attribute that is one (``"grad"``, ``"main_grad"``), looked up at each call. float32, or float64
            for a float64 weight. The gradient is then held nowhere else, and backward gives ``weight`` none. It is
            added in the forward pass, and you promise one backward whose upstream gradient is ``upstream``, or 1: with
            any other, ``hidden``'s gradient and the buffer become nan. The buffer must not be cleared between the two:
            that would lose the gradient unnoticed. Where gradients are made in backward (``reduction="none"``, a second
            backward, an activation checkpoint's) they are added there, whatever the upstream gradient is. Without
            gradients, or with a frozen weight, nothing is written. One that does not begin on 16 bytes takes all
            tokens' product, also under ``skip_ignored``.
        skip_ignored: True leaves tokens that do not count out of the matmuls, and the host waits for nothing (16-bit
            operands on GPUs that docs/gpus.md lists, and anything on a CPU; ValueError elsewhere). Where every token
            counts it costs next to nothing on Hopper, but up to 5 % where BLAS's product for the weight's gradient is
            better than ours (see ``plan``); on other GPUs our products for the gradients are slower than BLAS's, which
            makes all rows. ``"wait"`` does it for any operands and waits for their number, which a CUDA graph cannot.
            Hidden states and their gradient are copied. Losses see the tokens that count first, in their order.
        deterministic: bit-identical from run to run, and neither a token's log-probability nor its row of ``hidden``'s
            gradient depends on the other tokens or their number: one tile for every size, no product in parts. Values
            per token (of ``linear_logprobs``, and losses with ``reduction="none"``) do not depend either on how many
            ranks share the vocabulary: they are sums of eight blocks of it, which ranks hold whole (docs/inference.md).
            For bfloat16 on GPUs of docs/gpus.md, ValueError elsewhere (BLAS chooses by the number of rows), for top_k,
            and for losses that sum over segments on a GPU.
        vocab_size: the number of ids, where the last rows of ``weight`` are padding. None: all its rows.
        backend: ``"triton"`` or ``"torch"``; None: the device's own.
        parallel: what ranks of a process group share; each function says what that means for its result.
    """

    memory_budget: int | str | None
    chunk_tokens: int | None
    accumulate_dtype: torch.dtype | None
    accumulate_into: Tensor | str | None
    skip_ignored: bool | str
    deterministic: bool
    vocab_size: int | None
    backend: str | None
    parallel: VocabParallel | TokenParallel | None


class Head(Execution, total=False):
    """Keywords of every function of a head, as ``linear_cross_entropy`` documents them."""

    bias: Tensor | None
    ignore_index: int
    softcap: float | None
    logit_scale: float
    shift: int


class PerTokenOptions(Head, total=False):
    """Keywords of ``linear_logprobs`` but those that name its results."""

    temperature: float | Tensor  # [...], indexed like the target
    mask: Tensor | None
    kept_ids: Tensor | None
    kept_offsets: Tensor | None
    kept_everywhere: bool
    candidates: Tensor | None
    candidate_bias: Tensor | None


def option(check: Callable[[Any], Any], default: Any = None, static: bool = True) -> Any:
    """A row of the table of options: a field of ``HeadOptions`` or ``LogitsOptions``. ``check`` raises what is wrong
    with a value, whatever tensors it comes with. ``static``: the value is part of a Spec's key."""
    return field(default=default, metadata={"check": check, "static": static})


@dataclass(eq=False, kw_only=True)
class OfRanks:
    """The arguments that calls on hidden states and on logits have in common, and the ranks that may share the call."""

    target: Tensor | None
    ignore_index: int = option(checks.check_ignore_index, -100)
    softcap: float | None = option(checks.check_softcap, static=False)
    logit_scale: float = option(lambda x: checks.check_number("logit_scale", x, -math.inf, math.inf), 1.0, static=False)
    temperature: float | Tensor = option(checks.check_temperature, 1.0, static=False)  # noqa: RUF009
    shift: int = option(lambda x: checks.check_int("shift", x, 0), 0)
    vocab_size: int | None = option(lambda x: checks.check_int("vocab_size", 1 if x is None else x, 1))
    backend: str | None = option(check_name)
    parallel: VocabParallel | TokenParallel | None = option(check_parallel)  # noqa: RUF009
    holds: ClassVar[str]  # how an error says how many rows of the vocabulary are here
    beyond: ClassVar[str]  # what an error proposes where a target lies beyond the vocabulary and no ranks share it
    rows_name: ClassVar[str]  # of the operand of which a row is a token's
    shared_names: ClassVar[tuple[str, ...]] = ()  # of the operands of no token
    checked_without_targets: ClassVar[CheckedBy]  # what ranks compare of their tokens where a call has no targets
    static: ClassVar["attrgetter[tuple[Hashable, ...]]"]  # values of options that are part of a Spec's key

    def __post_init__(self) -> None:
        """Attributes that follow from the operands."""
        rows, self.shared_operands = getattr(self, self.rows_name), tuple([getattr(self, n) for n in self.shared_names])
        if not isinstance(rows, Tensor):
            checks.check_tensor(self.rows_name, rows, optional=False)
        self.leading, self.device = tuple(rows.shape[:-1]), rows.device  # the target's shape; of all operands
        shape = getattr(self.shared_operands[0], "shape", ()) if self.shared_operands else rows.shape[::-1]
        local_vocab = self.local_vocab = shape[0] if shape else 0  # rows on this rank, padding included
        given = self.temperature
        self.temperatures = given if isinstance(given, Tensor) else None  # [...] one per token
        self.plain_temperature = None if isinstance(given, Tensor) else given
        self.per_token_operands = rows, self.target, self.temperatures
        # what makes logits of products, but a temperature per token
        self.numbers = self.softcap, self.logit_scale, self.plain_temperature
        # how ranks share the batch, where they do
        self.tokens = self.parallel.tokens if isinstance(self.parallel, VocabParallel) else self.parallel
        if not isinstance(self.parallel, VocabParallel):
            self.shard, self.vocab = None, local_vocab if self.vocab_size is None else self.vocab_size

    def check_numbers(self) -> None:
        """Raises what is wrong with ``numbers``."""
        check_options({"softcap": self.softcap, "logit_scale": self.logit_scale})
        if self.temperatures is None:
            check_options({"temperature": self.temperature})

    @property
    def request(self) -> Request:
        """The options that steer the plan."""
        return DEFAULT_REQUEST

    def in_memory(self) -> Self:
        """These arguments with the values of all operands in memory: lazily negated ones copied, differentiably."""
        copies: dict[str, Any] = {
            name: value.resolve_neg()
            for name in self.__dataclass_fields__
            if isinstance(value := getattr(self, name), Tensor) and value.is_neg()
        }
        return replace(self, **copies) if copies else self

    def check_each(self) -> None:
        """Raises what is wrong with options by themselves, and with ``shift`` along the target."""
        check_options({name: value for name, value in vars(self).items() if name in CHECKS})
        checks.check_shift_along(self.shift, self.leading)
        if self.temperatures is not None:
            checks.check_temperatures(self.temperatures, self.leading, self.device)
        if self.shard is None and self.vocab > self.local_vocab:
            raise ValueError(f"vocab_size is {self.vocab}, and {self.holds.format(self.local_vocab)}")

    @functools.cached_property
    def shard(self) -> Shard | None:
        """This rank's part of the vocabulary, where ranks share it."""
        assert isinstance(self.parallel, VocabParallel)
        split = self.parallel.split(self.local_vocab, self.vocab_size)
        return Shard(self.parallel, split, self.checked_without_targets if self.target is None else "targets")

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

    @functools.cached_property
    def vocab(self) -> int:
        """Ids of the softmax, on whichever rank they are."""
        assert self.shard is not None
        return self.shard.split.vocab

    @property
    def columns(self) -> int:
        """Rows that are here and stand for an id."""
        return self.vocab if self.shard is None else self.shard.split.columns


@dataclass(eq=False, kw_only=True)
class HeadOptions(OfRanks):
    """The arguments of a call on hidden states: the head, and how the call runs."""

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None = None
    memory_budget: int | str | None = option(lambda x: Request(memory_budget=x))
    chunk_tokens: int | None = option(lambda x: Request(chunk_tokens=x))
    accumulate_dtype: torch.dtype | None = option(lambda x: Request(accumulate_dtype=x))  # noqa: RUF009
    accumulate_into: Tensor | str | None = option(check_kind, static=False)  # noqa: RUF009
    skip_ignored: bool | str = option(check_skip_ignored, False)
    deterministic: bool = option(functools.partial(flag, "deterministic"), False)
    rows_name, shared_names, holds = "hidden", ("weight", "bias"), "weight has {} rows"
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
        """Raises for three ranks or more: two shares have one sum, the order of more is torch.distributed's."""
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
    def request(self) -> Request:
        return Request(self.memory_budget, self.chunk_tokens, self.accumulate_dtype)

    @functools.cached_property
    def gradient_buffer(self) -> GradientBuffer | None:
        """The caller's buffer that the weight's gradient is added to; None without a gradient or buffer."""
        others = {"hidden": self.hidden, "target": self.target, "bias": self.bias}
        return resolve_into(self.accumulate_into, self.weight, others)


# of the keywords of ``Head``, where a call names none
DEFAULTS = {one.name: one.default for one in fields(HeadOptions) if one.name in Head.__annotations__}


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


@dataclass(eq=False, kw_only=True)
class LogitsOptions(OfRanks):
    """The arguments of a call on logits that exist already."""

    logits: Tensor
    rows_name, holds = "logits", "logits have {} columns"
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


for table in (HeadOptions, LogitsOptions):
    table.static = attrgetter(*[one.name for one in fields(table) if one.metadata.get("static")])
# of options by name: those of the two tables, and those that only some functions have
CHECKS: dict[str, Callable[[Any], Any]] = {
    one.name: one.metadata["check"] for one in fields(HeadOptions) if "check" in one.metadata
} | {
    "inplace": functools.partial(flag, "inplace"),
    "reduction": checks.check_reduction,
    "normalizer": functools.partial(checks.check_factor, "normalizer"),
    "upstream": functools.partial(checks.check_factor, "upstream"),
    "label_smoothing": lambda x: checks.check_number("label_smoothing", x, 0.0, 1.0),
    "z_loss": lambda x: checks.check_number("z_loss", x, 0.0, math.inf),
    "class_weights": lambda x: checks.check_tensor("class_weights", x, optional=True),
    "token_weights": lambda x: checks.check_tensor("token_weights", x, optional=True),
}
