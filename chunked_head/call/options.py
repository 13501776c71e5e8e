"""The request of a user, ``Call``, and the table of its options."""

import functools
import inspect
import math
import sys
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass, field, fields
from operator import attrgetter
from typing import Any, Generic, Literal, NoReturn, TypedDict, TypeVar

import torch
from torch import Tensor, nn

from ..core import checks
from ..core.checks import PACKAGE, flag, remedy_for
from ..core.statistics import WITHOUT_SLOPE
from ..losses.base import FIELDS, Losses
from ..metrics import Metric
from ..parallel.dtensor import PLAIN_TYPES, local_operands, local_part
from ..parallel.groups import TokenParallel, VocabParallel
from ..parallel.shard import Shard
from ..plan.segments import Lengths, Pairs
from ..plan.sizes import Request
from ..stores.gradients import GradientBuffer, check_accumulate_into, gradient_buffer_of
from ..stores.quantised import QuantisedWeight

Result = TypeVar("Result")
# what changes with an option's value: "spec": the Spec; "numbers": the Spec's numbers only; "call": neither
Decides = Literal["spec", "numbers", "call"]
NO_LOSSES = Losses(())


def check_options(options: Mapping[str, Any]) -> None:
    """Raises for a bad value among ``options``, values by name; the checks need no operand."""
    for name, value in options.items():
        CHECKS[name](value)


class OptionsModule(nn.Module):
    """A module with an attribute for each option, like modules of torch's losses. Each forward reads the attributes
    again, so that a user may set them between two calls."""

    names: tuple[str, ...]  # of the options

    def keep(self, options: Mapping[str, Any]) -> None:
        """Makes each option an attribute, and notes the options' names."""
        self.names = tuple(options)
        for name, value in options.items():
            setattr(self, name, value)

    def options(self) -> dict[str, Any]:
        """The options' present values by name."""
        return {name: getattr(self, name) for name in self.names}

    def extra_repr(self) -> str:
        return ", ".join(f"{name}={value!r}" for name, value in self.options().items())


def check_skip_ignored(skip_ignored: bool | str) -> None:
    """Raises ValueError for a value other than True, False and "wait"."""
    if not (isinstance(skip_ignored, bool) or (isinstance(skip_ignored, str) and skip_ignored == "wait")):
        raise ValueError(f'skip_ignored must be True, False or "wait", got {skip_ignored!r}')


def check_parallel(parallel: VocabParallel | TokenParallel | None) -> None:
    """Raises TypeError for a value that describes no layout of ranks."""
    if parallel is not None and not isinstance(parallel, VocabParallel | TokenParallel):
        raise TypeError(f"parallel must be a VocabParallel, a TokenParallel or None, got {type(parallel).__name__}")


def check_fp8_weight(fp8_weight: QuantisedWeight | None) -> None:
    """Raises TypeError for a value that ``quantise`` has not made."""
    if fp8_weight is not None and not isinstance(fp8_weight, QuantisedWeight):
        raise TypeError(f"fp8_weight must be what chunked_head.quantise made, or None, got {type(fp8_weight).__name__}")


def number(argument: str, least: float, most: float = math.inf) -> Callable[[Any], Any]:
    """A check for the option ``argument``: raises for a value that is no finite number in ``[least, most]``."""
    return lambda value: checks.number(None, argument, value, least, most)


def choice(argument: str, *allowed: str | None) -> Callable[[Any], Any]:
    """A check for the option ``argument``: raises for a value that is not one of ``allowed``."""
    return lambda value: checks.choice(None, argument, value, allowed)


class Execution(TypedDict, total=False):
    """Keywords of every function on hidden states: memory, order of sums, ranks.

    Attributes:
        memory_budget: most bytes that the call may allocate beside the gradients (and the weight's copy that autocast
            makes): a number, or a string such as "512MiB". None: 1.25 GiB, or the bytes of a chunk of 2048 tokens if
            those are more; an fp32 accumulator comes on top where a 16-bit weight's gradient would else add up over
            more than 8 chunks. Ranks that share the vocabulary have less each: docs/guides/memory.md.
        chunk_tokens: most tokens in a chunk, instead of the number that the budget gives. Chunks are of equal size. It
            holds for the forward pass and for a backward that makes gradients.
        accumulate_dtype: dtype in which the weight's gradient adds up over chunks: ``torch.float32`` or the weight's
            dtype. None: float32 where the budget holds it, else the weight's dtype over few chunks. Under
            ``torch.compile``, 16-bit gradients of a forward pass are kept in float32 until backward only with
            ``torch.float32`` here.
        accumulate_into: the buffer that the weight's gradient is added to: a contiguous [vocab, hidden] tensor, float32
            or, for a float64 weight, float64; or the name of the weight's attribute that holds the buffer (``"grad"``,
            ``"main_grad"``), looked up at each call. Backward then gives ``weight`` no gradient. The gradient is added
            in the forward pass, and you promise one backward, whose upstream gradient equals ``upstream`` (default 1).
            Any other upstream gradient makes the gradient of ``hidden`` and the buffer nan. Clearing the buffer between
            forward and backward loses the gradient unnoticed. Gradients made in backward (``reduction="none"``, second
            backwards, activation checkpoints) are added in backward, for any upstream gradient. Without gradients, or
            with a frozen weight, nothing is written. If a call raises after it has added a part of its gradient, the
            next call with that buffer raises too, until the buffer is zeroed (docs/guides/sft.md).
        skip_ignored: True leaves tokens that do not count out of the matmuls, and the host waits for nothing (16-bit
            operands on GPUs that docs/gpus.md lists, and anything on a CPU; ValueError elsewhere). ``"wait"`` leaves
            them out for any operands, and the host waits for the number of tokens that count, which a CUDA graph cannot
            do. The gradient of hidden states is copied. In losses, tokens that count come before all others.
        deterministic: True: results are bit-identical from run to run. A token's log-probability and its row of
            ``hidden``'s gradient do not depend on other tokens or on their number (docs/inference.md). For bfloat16 on
            GPUs of docs/gpus.md; ValueError elsewhere, for top_k, and for losses that sum over segments on a GPU.
        precision: ``"fp8"``: logits, and gradients that the forward pass makes, are products of e4m3 operands, at most
            twice as fast. Targets and ids with a probability above 1/256 keep the operands' dtype, in logits, loss and
            gradients (docs/fp8.md says how exact results are). For bfloat16 and float16, on GPUs from sm_89 on;
            emulated on a CPU. Not with top_k and dense teachers. None: the operands' dtype.
        fp8_weight: the weight in e4m3 by ``chunked_head.quantise``, for several calls between two steps. None: each
            call with ``precision="fp8"`` makes an e4m3 weight, in the call's memory budget.
        vocab_size: the number of ids, where the last rows of ``weight`` are padding. None: all its rows.
        backend: ``"triton"`` or ``"torch"``; None: the device's own.
        parallel: the layout of a call over ranks, a ``TokenParallel`` or ``VocabParallel``; None: this process alone.
    """

    memory_budget: int | str | None
    chunk_tokens: int | None
    accumulate_dtype: torch.dtype | None
    accumulate_into: Tensor | str | None
    skip_ignored: bool | str
    deterministic: bool
    vocab_size: int | None
    precision: str | None
    fp8_weight: QuantisedWeight | None
    backend: str | None
    parallel: VocabParallel | TokenParallel | None


class HeadOptions(Execution, total=False):
    """Keywords of every function of a head, as ``linear_cross_entropy`` documents them."""

    bias: Tensor | None
    ignore_index: int
    softcap: float | None
    logit_scale: float
    shift: int


class LogitsOptions(TypedDict, total=False):
    """Keywords of every function of logits that exist already, as ``logits_loss`` documents them."""

    ignore_index: int
    softcap: float | None
    logit_scale: float
    shift: int
    vocab_size: int | None
    backend: str | None
    parallel: VocabParallel | TokenParallel | None


def option(check: Callable[[Any], Any], default: Any = None, decides: Decides = "spec") -> Any:
    """A field of ``Call`` that is an option. ``check`` raises for a bad value; it gets no operands."""
    return field(default=default, metadata={"check": check, "decides": decides})


@dataclass(eq=False, kw_only=True)
class Call(Generic[Result]):
    """The request of a user, made by any public function: operands, options, losses, metrics, batch.

    ``result(outputs, call, work)`` is the public function's return value, from the outputs of the call and the
    ``LocalWork`` that has run. If the call returns values per token, ``result`` refers to no tensor of the call.
    """

    function: str  # name of the public function
    rows: Tensor  # hidden states [..., hidden], or logits [..., vocab] where there is no weight
    target: Tensor | None
    weight: Tensor | None = None
    bias: Tensor | None = None
    # the logits
    ignore_index: int = option(functools.partial(checks.check_int, "ignore_index"), -100)
    softcap: float | None = option(checks.check_softcap, decides="numbers")
    logit_scale: float = option(number("logit_scale", -math.inf), 1.0, "numbers")
    temperature: float | Tensor = option(checks.check_temperature, 1.0, "numbers")  # noqa: RUF009
    shift: int = option(lambda x: checks.check_int("shift", x, 0), 0)
    vocab_size: int | None = option(lambda x: checks.check_int("vocab_size", 1 if x is None else x, 1))
    # how the call runs
    memory_budget: int | str | None = option(lambda x: Request(memory_budget=x))
    chunk_tokens: int | None = option(lambda x: Request(chunk_tokens=x))
    accumulate_dtype: torch.dtype | None = option(lambda x: Request(accumulate_dtype=x))  # noqa: RUF009
    accumulate_into: Tensor | str | GradientBuffer | None = option(check_accumulate_into, decides="call")  # noqa: RUF009
    skip_ignored: bool | str = option(check_skip_ignored, False)
    deterministic: bool = option(functools.partial(flag, "deterministic"), False)
    precision: str | None = option(choice("precision", None, "fp8"))
    fp8_weight: QuantisedWeight | None = option(check_fp8_weight, decides="call")  # noqa: RUF009
    backend: str | None = option(choice("backend", *checks.BACKENDS))
    parallel: VocabParallel | TokenParallel | None = option(check_parallel)  # noqa: RUF009
    inplace: bool = option(functools.partial(flag, "inplace"), False)
    # the loss
    reduction: str = option(choice("reduction", "mean", "sum", "none"), "mean")
    normalizer: float | Tensor | None = option(functools.partial(checks.check_factor, "normalizer"), decides="call")  # noqa: RUF009
    upstream: float | Tensor | None = option(functools.partial(checks.check_factor, "upstream"), decides="call")  # noqa: RUF009
    kept_everywhere: bool = option(functools.partial(flag, "kept_everywhere"), False)
    losses: Losses = NO_LOSSES
    metrics: tuple[Metric, ...] = ()
    batch: Mapping[str, Tensor] | None = None
    num_segments: int | None = None
    segments: tuple[Lengths, Pairs] | None = None  # where the host knows the lengths of segments
    shares_denominator: bool = False  # all losses are divided by the first one's denominator
    # what is returned
    outputs: tuple[str, ...] = ()  # names of the values that are returned for each token; empty for one loss
    unplanned_outputs: tuple[str, ...] = ()  # names of outputs whose gradients are made from recomputed logits
    top_k: int | None = option(lambda x: None if x is None else checks.check_int("top_k", x))
    result: Callable[..., Result]

    def __post_init__(self) -> None:
        """Sets attributes that follow from the operands."""
        rows, weight, parallel = self.rows, self.weight, self.parallel
        if not isinstance(rows, Tensor):
            checks.check_tensor("logits" if weight is None else "hidden", rows, optional=False)
        if self.batch is not None and not isinstance(self.batch, Mapping):
            raise TypeError(
                "batch must be a mapping of names to tensors, such as {'advantages': advantages}, or None, got "
                f"{type(self.batch).__name__}"
            )
        shape = rows.shape[::-1] if weight is None else weight.shape
        self.token_shape, self.device = tuple(rows.shape[:-1]), rows.device  # of the target; of all operands
        self.local_vocab = shape[0] if shape else 0  # rows on this rank, padding included
        if isinstance(self.temperature, Tensor):
            self.temperatures: Tensor | None = self.temperature  # [...] one per token
            self.plain_temperature: float | None = None
        else:
            self.temperatures, self.plain_temperature = None, self.temperature
        if self.reduction == "none":
            self.outputs = ("values",)
        # the layout of ranks; ``shard`` and ``vocab`` are cached properties where they share the vocabulary
        if isinstance(parallel, VocabParallel):
            self.token_parallel = parallel.tokens
        else:
            self.token_parallel, self.shard = parallel, None
            self.vocab = self.local_vocab if self.vocab_size is None else self.vocab_size

    @functools.cached_property
    def shard(self) -> Shard | None:
        """This rank's part of the vocabulary."""
        assert isinstance(self.parallel, VocabParallel)
        vocab, rows = self.parallel.split(self.local_vocab, self.vocab_size)
        return Shard(self.parallel, vocab, rows, compares_hidden=self.target is None and self.weight is not None)

    @functools.cached_property
    def vocab(self) -> int:
        """Number of ids of the softmax, over all ranks."""
        assert self.shard is not None
        return self.shard.vocab

    @property
    def local_width(self) -> int:
        """Number of the weight's rows (or logits' columns) on this rank that stand for an id."""
        return self.vocab if self.shard is None else self.shard.num_columns

    @property
    def differentiable(self) -> tuple[str, ...]:
        """Names of the outputs that take a gradient. They stand before all other names in ``outputs``."""
        return tuple([name for name in self.outputs if name not in WITHOUT_SLOPE])

    @property
    def planned_outputs(self) -> tuple[str, ...]:
        """Names of the outputs whose gradients the plan provides for: all but ``unplanned_outputs``."""
        return tuple([name for name in self.differentiable if name not in self.unplanned_outputs])

    @functools.cached_property
    def gradient_buffer(self) -> GradientBuffer | None:
        """The caller's buffer for the weight's gradient; None without a buffer, or where the weight takes no
        gradient."""
        assert self.weight is not None
        operands = {"hidden": self.rows, "target": self.target, "bias": self.bias}
        return gradient_buffer_of(self.accumulate_into, self.weight, operands)

    @property
    def sequence_sharded(self) -> bool:
        """True if ranks share the vocabulary, and each rank holds hidden states of different tokens."""
        return self.shard is not None and self.shard.parallel.sequence_sharded

    def check_arguments(self) -> torch.dtype:
        """Raises for wrong operands and options. Returns the dtype of the matmuls; for logits that exist, the dtype in
        which their statistics are computed."""
        dtype = checks.check_operands(self.rows, self.weight, self.target, self.bias)
        dtype = torch.promote_types(dtype, torch.float32) if self.weight is None else dtype
        check_options({name: getattr(self, name) for name in OPTIONS})
        if self.shift and not self.token_shape:
            raise ValueError(f"shift={self.shift} needs a target with a dimension to shift along, got a 0-d target")
        if self.shard is None and self.vocab > self.local_vocab:
            description = "logits have {} columns" if self.weight is None else "weight has {} rows"
            raise ValueError(
                f"vocab_size is {self.vocab}, and {description.format(self.local_vocab)}, padding included; pass "
                "at most that"
            )
        if self.weight is not None:
            self.gradient_buffer  # noqa: B018  (raises what is wrong with it)
        self.check_ranks()
        return dtype

    def check_ranks(self) -> None:
        """Raises for options that do not go with ``VocabParallel`` or ``TokenParallel``."""
        is_on_logits, rank_count, sums_dhidden, token_parallel = self.weight is None, 1, True, self.token_parallel
        if self.shard is not None:
            rank_count, sums_dhidden = self.shard.parallel.ranks, self.shard.parallel.reduce_dhidden
        is_sharded, sums_over_ranks = (
            self.sequence_sharded,
            sums_dhidden and torch.is_grad_enabled() and self.rows.requires_grad,
        )
        checks.refuse({
            "sequence_sharded=True is of hidden states; give logits of all tokens": is_on_logits and is_sharded,
            "reduce_dhidden=False is of hidden states; leave it True": is_on_logits and not sums_dhidden,
            "shift reaches over no ranks (sequence_sharded=True); use chunked_head.parallel.shift_targets":
                is_sharded and self.shift,
            "skip_ignored does not go with sequence_sharded=True; leave it False": is_sharded and self.skip_ignored,
            "sequence_sharded=True takes hidden states [tokens, hidden] or more dimensions":
                is_sharded and not self.token_shape,
            # a + b = b + a, but torch.distributed adds more shares in an order that depends on a row's place
            "deterministic=True goes with VocabParallel of at most 2 ranks where hidden takes a gradient; use "
            "reduce_dhidden=False and a sum of your own, or deterministic=False":
                self.deterministic and sums_over_ranks and rank_count > 2,
            f"{self.function} has values per token, on which TokenParallel has no effect; leave it out of parallel":
                self.outputs and token_parallel is not None and self.reduction != "none",
            'average=True of TokenParallel multiplies the loss, of which reduction="none" has none; leave it False':
                self.outputs and token_parallel is not None and token_parallel.average,
        })  # fmt: skip


# fields of ``Call`` that are options, by name
OPTIONS = {row.name: row for row in fields(Call) if "check" in row.metadata}
# values of the options that decide the Spec, as a tuple, from a ``Call``
STATIC_VALUES = attrgetter(*[name for name, row in OPTIONS.items() if row.metadata["decides"] == "spec"])
# checks by argument's name: of the options, and of arguments that become a loss or a field
CHECKS: dict[str, Callable[[Any], Any]] = {name: row.metadata["check"] for name, row in OPTIONS.items()} | {
    "label_smoothing": number("label_smoothing", 0.0, 1.0),
    "z_loss": number("z_loss", 0.0),
    "class_weights": lambda x: checks.check_tensor("class_weights", x, optional=True),
    "token_weights": lambda x: checks.check_tensor("token_weights", x, optional=True),
    "mask": lambda x: checks.check_tensor("mask", x, optional=True),
}
# defaults of the keywords of ``HeadOptions``
DEFAULTS = {row.name: row.default for row in fields(Call) if row.name in HeadOptions.__annotations__}


def call_of(
    function: str, hidden: Tensor, weight: Tensor, target: Tensor | None, options: HeadOptions, **call_fields: Any
) -> Call[Any]:
    """A call on hidden states. ``call_fields``: further fields of ``Call``. TypeError for ``options`` that
    ``HeadOptions`` lacks."""
    if options.keys() - DEFAULTS.keys():
        refuse_names(function, options.keys() - DEFAULTS.keys())
    if not PLAIN_TYPES.issuperset((type(hidden), type(weight), type(target), type(options.get("bias")))):
        (hidden, weight, target), options = local_operands(hidden, weight, target, options)
    if not isinstance(weight, Tensor):
        checks.check_tensor("weight", weight, optional=False)
    return Call(function=function, rows=hidden, weight=weight, target=target, **options, **call_fields)


def logits_call_of(
    function: str,
    logits: Tensor,
    target: Tensor | None,
    options: LogitsOptions,
    inplace: bool = False,
    **call_fields: Any,
) -> Call[Any]:
    """A call on logits that exist already. ``call_fields``: further fields of ``Call``. TypeError for ``options`` that
    ``LogitsOptions`` lacks."""
    if options.keys() - LogitsOptions.__annotations__.keys():
        refuse_names(function, options.keys() - LogitsOptions.__annotations__.keys())
    for argument, tensor in (("logits", logits), ("target", target)):
        checks.check_tensor(argument, tensor, optional=argument == "target")
    logits, target = local_part(logits), local_part(target)
    check_inplace(logits, inplace)
    return Call(function=function, rows=logits, target=target, inplace=inplace, **options, **call_fields)


def refuse_names(function: str, unknown: Set[str]) -> NoReturn:
    """Raises TypeError for the first of the keywords ``unknown``, which ``function`` does not take."""
    first_name = min(unknown)
    is_field = function in ("linear_loss", "logits_loss") and first_name in FIELDS
    # parameters of the public function, whose signature lists all keywords
    parameters = inspect.signature(getattr(sys.modules[PACKAGE], function)).parameters
    hint = f'; it is a field: batch={{"{first_name}": ...}}' if is_field else remedy_for(first_name, parameters)
    raise TypeError(f"{function} has no option {first_name!r}{hint}")


def check_inplace(logits: Tensor, inplace: bool) -> None:
    """Raises ValueError if ``inplace`` is true and a gradient cannot overwrite these logits."""
    if not (flag("inplace", inplace) and logits.requires_grad):
        return
    base = logits if logits._base is None else logits._base
    is_expanded = any(stride == 0 and size > 1 for stride, size in zip(logits.stride(), logits.shape, strict=True))
    checks.refuse({
        "inplace=True overwrites logits, and these are a leaf (or a view of one); pass computed ones, or inplace=False":
            logits.is_leaf or (base.is_leaf and base.requires_grad),
        "inplace=True overwrites logits, and the memory of these belongs to a tensor that autograd does not see behind "
        "them (as DTensor.to_local() gives); pass inplace=False": logits._base is not None and base.grad_fn is None,
        "inplace=True needs logits with memory of their own, these are expanded; use inplace=False":
            is_expanded and logits.numel(),
    })  # fmt: skip
