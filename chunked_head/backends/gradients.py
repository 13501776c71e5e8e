"""Buffers of gradients."""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..parallel.hidden_rows import ScatteredRows, SummedRows
from ..program.gradient_buffer import GradientBuffer
from ..program.plans import Plan

Scale = Callable[[Tensor, Tensor, torch.dtype], Tensor]


@dataclass
class Gradients:
    """Gradients, or what waits to become them once the upstream gradient is known; None where nobody asks."""

    hidden: Tensor | None
    weight: Tensor | None
    bias: Tensor | None
    into: GradientBuffer | None = None  # ``weight`` is a buffer of the caller's, to be added to
    gain: Tensor | None = None  # [] taken out of the coefficients, for what nobody scales afterwards
    padded: dict[str, Tensor] = field(default_factory=dict)  # ``weight`` and ``bias`` with rows beyond the vocabulary
    over_ranks: SummedRows | ScatteredRows | None = None  # what becomes of ``hidden`` where ranks share the vocabulary

    @classmethod
    def empty(
        cls, plan: Plan, hidden: torch.dtype, weight: torch.dtype, device: torch.device, into: GradientBuffer | None
    ) -> "Gradients":
        sizes = plan.sizes
        if into is not None:
            into.before_adding()

        def buffer(wanted: bool, dtype: torch.dtype, *shape: int) -> Tensor | None:
            # without tokens no product fills them
            make = torch.empty if sizes.tokens else torch.zeros
            return make(shape, dtype=dtype, device=device) if wanted else None

        rows, wide = sizes.vocab + sizes.padding, torch.promote_types(sizes.dtype, torch.float32)
        grads = cls(
            buffer(sizes.hidden_grad, hidden, sizes.own_tokens, sizes.hidden),
            into.buffer if into else buffer(sizes.weight_grad, weight, rows, sizes.hidden),
            buffer(sizes.bias_grad, wide, rows),
            into,
        )
        if sizes.padding:
            grads.set_aside(sizes.vocab)
        return grads

    def set_aside(self, vocab: int) -> None:
        """The rows that stand for no id, whose gradient is 0."""
        if self.weight is not None:
            self.padded["weight"], self.weight = self.weight, self.weight[:vocab]
        if self.bias is not None:
            self.padded["bias"], self.bias = self.bias, self.bias[:vocab]
        for name, whole in self.padded.items():
            if not (name == "weight" and self.into is not None):
                whole[vocab:].zero_()

    def whole(self, name: str) -> Tensor | None:
        """A gradient with the rows that stand for no id."""
        return self.padded.get(name, getattr(self, name))

    def hidden_rows(self, at: slice, order: Tensor | None = None) -> Tensor:
        """Where rows ``at`` of the call have their gradient made: theirs, or all, in which ``order`` says where."""
        assert self.hidden is not None
        if order is not None:
            return self.hidden
        return self.hidden[at] if self.over_ranks is None else self.over_ranks.rows(self.hidden, at)

    def hidden_done(self, at: slice, order: Tensor | None) -> None:
        """Rows ``at``, or those that ``order`` says, are complete but for what other ranks add to them."""
        if self.over_ranks is not None and self.hidden is not None:
            self.over_ranks.done(self.hidden, at, order)

    def wait(self) -> None:
        """Until what other ranks add is there."""
        if self.over_ranks is not None and self.hidden is not None:
            self.over_ranks.wait(self.hidden)

    def stores(self, first: bool) -> bool:
        """Whether a product is stored in the weight's gradient rather than added."""
        return first and self.into is None

    def finish(
        self, scale: Scale, factor: Tensor, one_or_nan: Tensor, plan: Plan
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Times the last factor by a backend's ``scale``, in the dtypes of the inputs; each buffer is let go before the
        next is handed over.

        The caller's buffer holds more than this call's gradient, and takes no factor but ``one_or_nan``.
        """
        dtypes = plan.sizes.hidden_dtype, plan.sizes.weight_dtype, plan.sizes.bias_dtype or plan.sizes.weight_dtype
        finished: list[Tensor | None] = []
        for name, dtype in zip(("hidden", "weight", "bias"), dtypes, strict=True):
            buffer = getattr(self, name)
            setattr(self, name, None)
            if name == "weight" and self.into is not None:
                scale(buffer, one_or_nan, buffer.dtype)
                finished.append(self.into.handed_over())
                continue
            buffer = self.padded.pop(name, buffer)
            finished.append(None if buffer is None else scale(buffer, factor, dtype))
        return finished[0], finished[1], finished[2]
