"""Arguments of kernels: tuples of torch tensors and numbers; nothing here needs Triton."""

from typing import NamedTuple

import torch


class Counted(NamedTuple):
    """Number of a call's rows that count, and a chunk's first row among them: rows behind are not computed."""

    count: torch.Tensor | None = None  # [] int64; None: all
    first_row: int = 0


ALL_ROWS = Counted()


class KeptEntries(NamedTuple):
    """Columns that rows keep, an entry for each; a row's stand together."""

    columns: torch.Tensor  # [n] int32, -1 for none
    begins: torch.Tensor  # [rows] int64
    ends: torch.Tensor  # [rows] int64, equal to begins for a row that keeps none
    target: torch.Tensor  # [rows] int64


class Transform(NamedTuple):
    """From raw logits to those that the softmax sees: ``row_scale * softcap * tanh(logit_scale * raw / softcap)``, each
    None where there is none."""

    logit_scale: float | None = None
    softcap: float | None = None
    row_scale: torch.Tensor | None = None  # [rows] fp32


PLAIN = Transform()


class Stored(NamedTuple):
    """Logits in a buffer: raw, or relative to the offsets of their strips."""

    logits: torch.Tensor  # [rows, columns], columns contiguous
    offset: torch.Tensor | None  # [strips, rows] fp32; then what follows is in the logits already
    bias: torch.Tensor | None = None
    transform: Transform = PLAIN

    def at(self, rows: slice) -> "Stored":
        """A slice of the rows, none of which has a scale of its own."""
        offset = None if self.offset is None else self.offset[:, rows]
        return self._replace(logits=self.logits[rows], offset=offset)


class Outputs(NamedTuple):
    """Outputs for statistics of a softmax over each row, [rows] fp32; None for those not wanted."""

    lse: torch.Tensor | None = None
    start: torch.Tensor | None = None  # always there, as rest
    rest: torch.Tensor | None = None
    logprob: torch.Tensor | None = None
    target_logit: torch.Tensor | None = None
    entropy: torch.Tensor | None = None
    weighted_sum: torch.Tensor | None = None
    top: torch.Tensor | None = None
    argmax: torch.Tensor | None = None  # int32


class Softmax(NamedTuple):
    """A softmax of a gradient: ``log p = (ratio x - start) + rest`` over so many columns, its term
    ``p (alpha + eta log p)``; the first is over all at ratio 1."""

    start: torch.Tensor | None = None
    rest: torch.Tensor | None = None
    alpha: torch.Tensor | None = None
    eta: torch.Tensor | None = None
    ratio: float | None = None
    columns: int = 0


NO_SOFTMAX = Softmax()


class Terms(NamedTuple):
    """Vectors that a gradient is made of, but for a teacher's and class weights."""

    target: torch.Tensor  # [rows] int64, of the vocabulary
    target_logit: torch.Tensor  # [rows] fp32, as all that follow
    beta: torch.Tensor | None
    kappa: torch.Tensor | None
    first: Softmax
    second: Softmax

    @property
    def tensors(self) -> tuple[torch.Tensor | None, ...]:
        """The tensors in the order that kernels take them in."""
        return *self[:4], *self.first[:4], *self.second[:4]


class TeacherTerms(NamedTuple):
    """The teacher's side of a gradient."""

    stored: Stored
    start: torch.Tensor
    rest: torch.Tensor
    columns: int
    second: bool  # the student's softmax is the second one
    gamma: torch.Tensor | None
    rho: torch.Tensor | None
    tau: torch.Tensor | None
    theta: torch.Tensor | None
    below: torch.Tensor | None
    beta: float | None
    tie: float | None  # relative difference of probabilities that count as equal
    # where the gradient's kernel writes each program's part of KL(q || p) and of q's entropy
    forward_kl: torch.Tensor | None = None  # [row_programs, rows] fp32
    teacher_entropy: torch.Tensor | None = None
