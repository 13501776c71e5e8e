"""Rounding of matrices to e4m3 by torch operations, and ``QuantisedWeight``, a weight in e4m3 that the caller keeps."""

import functools
import math
import weakref
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook

from ..core.gpus import GPUS
from ..core.memory import empty
from ..core.private import breaks_graph
from ..core.tiles import LARGEST_E4M3, LEAST_SCALE, SAMPLED_ROWS, Quantised, cdiv
from ..plan.sizes import cast_rows, slices

WORD_MASK = (1 << 32) - 1  # the bits of a 32-bit word
DIRECTION_ROWS = 16384  # most rows of a weight whose mean gives its direction


def empty_quantised(rows: int, columns: int, device: torch.device, has_row_scales: bool) -> Quantised:
    """Returns uninitialised memory for a matrix [rows, columns] in e4m3, with a scale per row or one scale."""
    values = empty(rows, columns, dtype=torch.float8_e4m3fn, device=device)
    scale, common = (empty(n, dtype=torch.float32, device=device) for n in (rows if has_row_scales else 1, rows))
    return Quantised(values, scale if has_row_scales else scale[0], common)


class QuantisedWeight:
    """A copy in e4m3 of a weight, which ``chunked_head.quantise`` makes, for the argument ``fp8_weight`` of calls on
    that weight."""

    def __init__(
        self,
        matrix: Quantised,  # the rows that stand for ids
        direction: Tensor,  # [hidden] fp32: hidden states are rounded without their component along it
        weight: Tensor,  # the tensor that was rounded
        version: int,  # its version when it was rounded
        # by the dtype of the matmuls: fingerprints [rows] int32 of the weight's rows in that dtype. They show writes
        # that do not change the version; a call compares them while it reads the weight for ``Quantised.common``
        prints: dict[torch.dtype, Tensor],
    ):
        self.matrix, self.direction, self.weight = matrix, direction, weight
        self.version, self.prints = version, prints
        self.transposed: Quantised | None = None
        watch_optimizers()
        CURRENT.add(self)

    def transpose(self, make: Callable[[Tensor], Quantised]) -> Quantised:
        """Returns the transpose [hidden, padded rows] in e4m3, which the first call that needs it makes by ``make``."""
        transposed = self.transposed
        if transposed is None:
            transposed = make(self.matrix.values)
            # memory that a CUDA graph's capture allocates belongs to the graph
            if not (self.weight.is_cuda and torch.cuda.is_current_stream_capturing()):
                self.transposed = transposed
        return transposed

    def checked(self, weight: Tensor, rows: int) -> Self:
        """Returns ``self`` if it is a copy of the first ``rows`` rows of ``weight``, which stand for ids. Raises
        ValueError if it is a copy of another weight, or if the weight has changed."""
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
    """Returns a key that is equal for two tensors of the same address, shape, strides, dtype and device."""
    strides = [stride for stride, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1]
    return tensor.data_ptr(), tensor.shape, strides, tensor.dtype, tensor.device


CURRENT: "weakref.WeakSet[QuantisedWeight]" = weakref.WeakSet()  # copies that no optimizer's step has outdated


@functools.cache
def watch_optimizers() -> None:
    """Registers ``outdate`` as a hook of all optimizers' steps. A fused optimizer changes a weight, but not its
    version."""
    register_optimizer_step_post_hook(outdate)


@breaks_graph
def outdate(*_: Any) -> None:
    """Makes all copies invalid. An optimizer's step may have changed any weight, since the optimizer may hold a shard
    of the weight, or a copy in another dtype."""
    CURRENT.clear()


class RoundedHead(NamedTuple):
    """A head's weight in e4m3, and the direction whose component is subtracted from hidden states before rounding."""

    weight: Quantised
    direction: Tensor  # [hidden] fp32, which ``direction_of`` makes
    transposed: Quantised | None = None  # [hidden, padded vocab] the weight's transpose, for dhidden; None: not needed

    @property
    def tensors(self) -> list[Tensor]:
        """All tensors of the record."""
        matrices = [self.direction], self.weight, self.transposed or ()
        return [tensor for matrix in matrices for tensor in matrix if tensor is not None]

    def columns(self, tile: slice) -> "RoundedHead":
        """Returns the head of a slice of the vocabulary, in the same memory."""
        values, scale, common = self.weight
        return self._replace(weight=Quantised(values[tile], scale, None if common is None else common[tile]))


def e4m3_missing(traits: Mapping[str, Any], device: torch.device) -> str:
    """Returns the reason why a backend with the ``traits`` cannot multiply e4m3 matrices on ``device``, or "". Torch
    operations, whose traits have no ``gpu``, multiply them in fp32."""
    if "gpu" not in traits or (traits["gpu"] is not None and traits["gpu"].fp8):
        return ""
    gpu_names = ", ".join(name for name, gpu in GPUS.items() if gpu.fp8)
    gpu = traits["gpu"] or "none of ours"
    return f'precision="fp8" needs a GPU that multiplies e4m3 ({gpu_names}), and {device} is {gpu}'


def version_of(weight: Tensor) -> int:
    """Returns autograd's count of changes of a tensor; 0 for an inference tensor, which has no count."""
    return 0 if weight.is_inference() else weight._version


def direction_of(rows: Tensor) -> Tensor:
    """Returns the direction [hidden] fp32 of the mean of a weight's rows, in numbers of bf16; 0 if the mean is 0.

    If a head has learnt how frequent ids are, hidden states have a large component in common along this direction.
    """
    mean = rows[:: cdiv(max(len(rows), 1), DIRECTION_ROWS)].mean(0, dtype=torch.float32)
    return torch.nn.functional.normalize(mean, dim=0).bfloat16().float()


def quantise_(
    out: Quantised | None,
    matrix: Tensor,
    direction: Tensor | None = None,
    dots: Tensor | None = None,
    prints: Tensor | None = None,
    expected: Tensor | None = None,
) -> None:
    """Rounds a matrix to e4m3 by torch operations. ``kernels/e4m3/launch.py``, ``quantise``, describes the
    arguments."""
    has_row_scales = out is None or out.scale.dim() == 1
    divisor = matrix.new_empty(()) if has_row_scales else divisor_of(matrix)
    squares = torch.zeros(2, len(matrix), dtype=torch.float32, device=matrix.device)
    for block in slices(len(matrix), cast_rows(matrix.shape[1])):
        exact = matrix[block].float()
        if direction is not None and dots is not None:
            torch.mv(exact, direction, out=dots[block])
            if expected is not None:
                dots[block].masked_fill_(fingerprints(matrix[block]) != expected[block], torch.nan)
            if out is not None and has_row_scales:
                # 8 significant bits, so that the product with the direction is exact
                dots[block].view(torch.int32).bitwise_and_(-65536)
                exact = exact - dots[block, None] * direction
        if prints is not None:
            prints[block] = fingerprints(matrix[block])
        if out is None:
            continue
        if has_row_scales:
            largest = exact.abs().amax(1)
            out.scale[block] = divisor = (largest / LARGEST_E4M3).clamp(min=LEAST_SCALE) + largest * 0.0
        exact = exact * torch.reciprocal(divisor).unsqueeze(-1)
        out.values[block] = exact.to(torch.float8_e4m3fn)
        squares[0, block] = exact.square_().sum(1)
        squares[1, block] = exact.copy_(out.values[block]).square_().sum(1)
    if out is not None:
        # 1 more for both, so that the ratio for a row of zeros is 1
        exact_squares, rounded_squares = (squares if has_row_scales else squares.sum(1)) + 1.0
        torch.mul(out.scale if has_row_scales else divisor, (exact_squares / rounded_squares).sqrt_(), out=out.scale)


def fingerprints(matrix: Tensor) -> Tensor:
    """Returns the fingerprints [rows] int32 of a 16-bit matrix, which ``kernels/e4m3/quantise.py`` defines."""
    column_factors = torch.arange(matrix.shape[1], device=matrix.device) * 2654435769 & WORD_MASK
    column_factors = (column_factors ^ (column_factors >> 15)) * 2246822519 & WORD_MASK
    row_sums = (matrix.view(torch.int16).long() * (column_factors ^ (column_factors >> 13) | 1)).sum(1) & WORD_MASK
    return (row_sums - (row_sums >> 31 << 32)).int()


def divisor_of(weight: Tensor) -> Tensor:
    """Returns the power of 2 [] that divides a weight before it is rounded. The longest of a few rows gets a root mean
    square of 2 to 4; less if the weight's largest number would else exceed e4m3's."""
    sampled_rows = torch.stack([weight[i * len(weight) // SAMPLED_ROWS] for i in range(SAMPLED_ROWS)]).float()
    mean_square = sampled_rows.square().mean(1).amax().clamp(min=LEAST_SCALE)
    divisor, largest = (0.5 * mean_square.log2()).floor().sub(1.0).exp2(), torch.linalg.vector_norm(weight, math.inf)
    return divisor * (largest / divisor / LARGEST_E4M3).clamp(min=1.0).log2().ceil().exp2()
