"""Matrices in e4m3 (``Quantised``), a byte per element, made by torch operations; and ``QuantisedWeight``, a weight in
e4m3 that the caller keeps."""

import functools
import math
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook

from ..core.gpus import GPUS
from ..core.memory import empty
from ..core.private import breaks_graph
from ..core.tiles import LARGEST_E4M3, LEAST_SCALE, SAMPLED_ROWS, Quantised, cdiv
from ..plan.sizes import cast_rows, slices

WORD = (1 << 32) - 1  # mask of the bits of a 32-bit word
SAMPLED = 16384  # number of rows of a weight whose mean is its direction


def empty_quantised(rows: int, columns: int, device: torch.device, each_row: bool) -> Quantised:
    """Uninitialised memory of a matrix in e4m3. ``each_row``: it has a scale per row; else one scale."""
    values = empty(rows, columns, dtype=torch.float8_e4m3fn, device=device)
    scale, common = (empty(n, dtype=torch.float32, device=device) for n in (rows if each_row else 1, rows))
    return Quantised(values, scale if each_row else scale[0], common)


@dataclass(frozen=True, eq=False)
class QuantisedWeight:
    """A weight in e4m3, which ``chunked_head.quantise`` makes, for ``fp8_weight`` of calls on that weight.

    ``matrix``: the rows that stand for ids. ``direction`` [hidden] fp32: hidden states are rounded without their part
    along it. ``weight``: the tensor that was rounded, ``version`` its version then. ``prints``: by the dtype of the
    matmuls, fingerprints of the rows in that dtype. They show writes that no version shows: a call reads all of the
    weight for its products with the direction, and compares on the way.
    """

    matrix: Quantised
    direction: Tensor
    weight: Tensor
    version: int
    prints: dict[torch.dtype, Tensor]  # [rows] int32 each
    cached: dict[str, Quantised] = field(default_factory=dict)  # what later calls have made of it

    def __post_init__(self) -> None:
        watch_optimizers()
        CURRENT.add(self)

    def transposed(self, make: Callable[[Tensor], Quantised]) -> Quantised:
        """[hidden, padded rows] e4m3, for products of gradients: made once, by the first call that has some."""
        transposed = self.cached.get("transposed")
        if transposed is None:
            transposed = make(self.matrix.values)
            # the memory of a graph that is captured is not ours to keep
            if not (self.weight.is_cuda and torch.cuda.is_current_stream_capturing()):
                self.cached["transposed"] = transposed
        return transposed

    def checked(self, weight: Tensor, rows: int) -> Self:
        """The copy itself, if it is of ``weight`` and its first ``rows`` rows, which stand for ids. ValueError if it
        is of another weight, or if the weight has changed."""
        quantised_rows = len(self.matrix.values)
        if memory_of(weight) != memory_of(self.weight):
            source, operand = (f"{list(t.shape)} {t.dtype}, strides {t.stride()}" for t in (self.weight, weight))
            raise ValueError(
                f"fp8_weight was made of another weight, {source}; the call's is {operand}, or lies elsewhere: "
                "make one by chunked_head.quantise(weight)"
            )
        if quantised_rows != rows:
            raise ValueError(
                f"fp8_weight was made of {quantised_rows} rows, and {rows} of the call's weight stand for ids here: "
                f"make one by chunked_head.quantise(weight, vocab_size={rows}), where ranks share the vocabulary by "
                "the call's own vocab_size and parallel"
            )
        # of its own tensor: another view of that memory may count otherwise
        if version_of(self.weight) != self.version or self not in CURRENT:
            raise ValueError(
                "weight has changed since fp8_weight was made of it, or an optimizer has stepped: call "
                "chunked_head.quantise(weight) after each step"
            )
        return self


def memory_of(tensor: Tensor) -> tuple[Any, ...]:
    """A key of the memory of a tensor: equal for tensors with the same elements in the same memory."""
    strides = [stride for stride, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1]
    return tensor.data_ptr(), tensor.shape, strides, tensor.dtype, tensor.device


CURRENT: "weakref.WeakSet[QuantisedWeight]" = weakref.WeakSet()  # those that no optimizer's step has outdated


@functools.cache
def watch_optimizers() -> None:
    """Registers ``outdate`` as a hook of all optimizers' steps, since a fused optimizer does not change a weight's
    version."""
    register_optimizer_step_post_hook(outdate)


@breaks_graph
def outdate(*_: Any) -> None:
    """Makes all copies invalid: an optimizer may have written to a shard of a weight, or to its copy in another
    dtype."""
    CURRENT.clear()


class RoundedHead(NamedTuple):
    """The weight in e4m3, and the direction that is taken out of hidden states before they are rounded."""

    weight: Quantised
    direction: Tensor  # [hidden] fp32, as ``direction_of`` makes it
    transposed: Quantised | None = None  # [hidden, padded vocab]: the weight's numbers, by a scale of 1, for dhidden

    @property
    def tensors(self) -> list[Tensor]:
        matrices = [self.direction], self.weight, self.transposed or ()
        return [tensor for matrix in matrices for tensor in matrix if tensor is not None]

    def columns(self, tile: slice) -> "RoundedHead":
        values, scale, common = self.weight
        return self._replace(weight=Quantised(values[tile], scale, None if common is None else common[tile]))


def e4m3_missing(traits: Mapping[str, Any], device: torch.device) -> str:
    """The reason why a backend of these ``Backend.traits`` cannot multiply e4m3 there, or "". Torch operations multiply
    its numbers in fp32."""
    if "gpu" not in traits or (traits["gpu"] is not None and traits["gpu"].fp8):
        return ""
    gpu_names = ", ".join(name for name, gpu in GPUS.items() if gpu.fp8)
    gpu = traits["gpu"] or "none of ours"
    return f'precision="fp8" needs a GPU that multiplies e4m3 ({gpu_names}), and {device} is {gpu}'


def version_of(weight: Tensor) -> int:
    """The number of changes that autograd has seen of a tensor; 0 for inference tensors."""
    return 0 if weight.is_inference() else weight._version


def direction_of(rows: Tensor) -> Tensor:
    """[hidden] fp32: the direction of the mean of some rows, rounded to bf16; 0 where that is 0.

    A weight's mean row is what hidden states share where logits tell how frequent ids are."""
    mean = rows[:: cdiv(max(len(rows), 1), SAMPLED)].mean(0, dtype=torch.float32)
    return torch.nn.functional.normalize(mean, dim=0).bfloat16().float()


def quantise_(
    out: Quantised | None,
    matrix: Tensor,
    direction: Tensor | None = None,
    dots: Tensor | None = None,
    prints: Tensor | None = None,
    expected: Tensor | None = None,
) -> None:
    """Does what ``kernels.e4m3.launch.quantise`` does, by operations of torch."""
    each_row = out is None or out.scale.dim() == 1
    divisor = matrix.new_empty(()) if each_row else divisor_of(matrix)
    squares = torch.zeros(2, len(matrix), dtype=torch.float32, device=matrix.device)
    for block in slices(len(matrix), cast_rows(matrix.shape[1])):
        exact = matrix[block].float()
        if direction is not None and dots is not None:
            torch.mv(exact, direction, out=dots[block])
            if expected is not None:
                dots[block].masked_fill_(fingerprints(matrix[block]) != expected[block], torch.nan)
            if out is not None and each_row:
                dots[block].view(torch.int32).bitwise_and_(-65536)  # 8 bits, whose product is exact
                exact = exact - dots[block, None] * direction
        if prints is not None:
            prints[block] = fingerprints(matrix[block])
        if out is None:
            continue
        if each_row:
            largest = exact.abs().amax(1)
            out.scale[block] = divisor = (largest / LARGEST_E4M3).clamp(min=LEAST_SCALE) + largest * 0.0
        exact = exact * torch.reciprocal(divisor).unsqueeze(-1)
        out.values[block] = exact.to(torch.float8_e4m3fn)
        squares[0, block] = exact.square_().sum(1)
        squares[1, block] = exact.copy_(out.values[block]).square_().sum(1)
    if out is not None:
        exact_squares, rounded_squares = (squares if each_row else squares.sum(1)) + 1.0  # of zeros
        torch.mul(out.scale if each_row else divisor, (exact_squares / rounded_squares).sqrt_(), out=out.scale)


def fingerprints(matrix: Tensor) -> Tensor:
    """Fingerprints [rows] int32 of a 16-bit matrix, which ``kernels/e4m3/quantise.py`` defines."""
    factor = torch.arange(matrix.shape[1], device=matrix.device) * 2654435769 & WORD
    factor = (factor ^ (factor >> 15)) * 2246822519 & WORD
    total = (matrix.view(torch.int16).long() * (factor ^ (factor >> 13) | 1)).sum(1) & WORD
    return (total - (total >> 31 << 32)).int()


def divisor_of(weight: Tensor) -> Tensor:
    """[] a power of 2 that divides a weight: the longest of a few rows gets a root mean square of 2 to 4, or less if
    its largest number would be over e4m3's."""
    sample = torch.stack([weight[i * len(weight) // SAMPLED_ROWS] for i in range(SAMPLED_ROWS)]).float()
    square = sample.square().mean(1).amax().clamp(min=LEAST_SCALE)
    divisor, largest = (0.5 * square.log2()).floor().sub(1.0).exp2(), torch.linalg.vector_norm(weight, math.inf)
    return divisor * (largest / divisor / LARGEST_E4M3).clamp(min=1.0).log2().ceil().exp2()
