"""Buffers of gradients."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch
from torch import Tensor

from ..parallel.merge import ScatteredRows, SummedRows
from ..plan.plans import Plan
from .gradient_buffer import GradientBuffer


class Scaling(Protocol):
    """A backend's functions that scale gradients."""

    def scale(self, source: Tensor, factors: Sequence[Tensor], dtype: torch.dtype) -> Tensor: ...
    def scale_(self, sources: Sequence[Tensor], factors: Sequence[Tensor]) -> None: ...


@dataclass
class Gradients:
    """Buffers of gradients, to be scaled once the upstream gradient is known; None for one that is not wanted."""

    hidden: Tensor | None
    weight: Tensor | None
    bias: Tensor | None
    gradient_buffer: GradientBuffer | None = None  # ``weight`` is a buffer of the caller's, to be added to
    padded: dict[str, Tensor] = field(default_factory=dict)  # ``weight`` and ``bias`` with rows beyond the vocabulary
    over_ranks: SummedRows | ScatteredRows | None = None  # what becomes of ``hidden`` where ranks share the vocabulary

    @classmethod
    def empty(
        cls,
        plan: Plan,
        hidden: torch.dtype,
        weight: torch.dtype,
        device: torch.device,
        gradient_buffer: GradientBuffer | None,
    ) -> "Gradients":
        sizes = plan.sizes

        def buffer(wanted: bool, dtype: torch.dtype, *shape: int) -> Tensor | None:
            # without tokens no product fills them
            make = torch.empty if sizes.tokens else torch.zeros
            return make(shape, dtype=dtype, device=device) if wanted else None

        rows, wide = sizes.vocab + sizes.padding, torch.promote_types(sizes.dtype, torch.float32)
        grads = cls(
            buffer(sizes.hidden_grad, hidden, sizes.own_tokens, sizes.hidden),
            gradient_buffer.buffer if gradient_buffer else buffer(sizes.weight_grad, weight, rows, sizes.hidden),
            buffer(sizes.bias_grad, wide, rows),
            gradient_buffer,
        )
        if sizes.padding:
            grads.set_aside(sizes.vocab)
        return grads

    def of_this_rank(self) -> "Gradients":
        """The buffers, whose rows are not to be summed over ranks yet."""
        return replace(self, over_ranks=None)

    def set_aside(self, vocab: int) -> None:
        """The rows that stand for no id, whose gradient is 0."""
        if self.weight is not None:
            self.padded["weight"], self.weight = self.weight, self.weight[:vocab]
        if self.bias is not None:
            self.padded["bias"], self.bias = self.bias, self.bias[:vocab]
        for name, padded in self.padded.items():
            if not (name == "weight" and self.gradient_buffer is not None):
                padded[vocab:].zero_()

    def with_padding(self, name: str) -> Tensor | None:
        """A gradient with the rows that stand for no id."""
        return self.padded.get(name, getattr(self, name))

    def hidden_rows(self, at: slice) -> Tensor:
        """The memory [rows, hidden] that the gradient of rows ``at`` of the call is made in."""
        assert self.hidden is not None
        return self.hidden[at] if self.over_ranks is None else self.over_ranks.rows(self.hidden, at)

    def hidden_done(self, at: slice) -> None:
        """Rows ``at`` are complete but for what other ranks add to them."""
        if self.over_ranks is not None and self.hidden is not None:
            self.over_ranks.done(self.hidden, at)

    def wait(self) -> None:
        """Waits until other ranks' sums are there."""
        if self.over_ranks is not None and self.hidden is not None:
            self.over_ranks.wait(self.hidden)

    def stores(self, first: bool) -> bool:
        """True where a product is stored in the weight's gradient rather than added."""
        return first and (self.gradient_buffer is None or self.gradient_buffer.fresh)

    def finish(
        self, backend: Scaling, factors: Sequence[Tensor], one_or_nan: Tensor, plan: Plan
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Times the last factors, in the dtypes of the inputs; each buffer is let go before the next is handed over.

        The caller's buffer holds more than this call's gradient, and takes no factor but ``one_or_nan``.
        """
        if self.gradient_buffer is not None and self.weight is not None:
            backend.scale_([self.weight], [one_or_nan])
            self.weight = None
            self.padded.pop("weight", None)
        sizes = plan.sizes
        dtypes = sizes.hidden_dtype, sizes.weight_dtype, sizes.bias_dtype
        buffers = [self.with_padding(name) for name in ("hidden", "weight", "bias")]
        self.hidden = self.weight = self.bias = None
        self.padded.clear()
        pairs = zip(buffers, dtypes, strict=True)
        in_place = [buffer for buffer, dtype in pairs if buffer is not None and buffer.dtype == dtype]
        backend.scale_(in_place, factors)
        for i, dtype in enumerate(dtypes):
            buffer = buffers[i]
            if buffer is not None and buffer.dtype != dtype:
                assert dtype is not None
                buffers[i] = backend.scale(buffer, factors, dtype)
        of_hidden, of_weight, of_bias = buffers
        return of_hidden, of_weight if self.gradient_buffer is None else self.gradient_buffer.handed_over(), of_bias
