"""Apple's cut cross-entropy by its names and signatures, computed by this library's head.

    from chunked_head.integrations.cut_cross_entropy import linear_cross_entropy

in the place of the same import from ``cut_cross_entropy``, which is not needed. Gradients are exact, with nothing
filtered out of them. No tokens that count give loss 0 rather than nan.
"""

import enum
from typing import Any

import torch
from torch import Tensor, distributed

from ..call.options import OptionsModule, check_options
from ..core.collectives import all_gather
from ..core.groups import process_group
from ..core.options import flag
from ..functions import cross_entropy as head
from ..functions.logprobs import linear_logprobs
from ..parallel import VocabParallel

IMPLEMENTATIONS = (
    "cce", "torch_compile", "cce_exact", "cce_kahan", "cce_kahan_full", "cce_kahan_full_c", "cce_kahan_full_e",
    "cce_kahan_full_c_full_e",
)  # fmt: skip
OURS = ("ignore_index", "softcap", "reduction", "memory_budget", "skip_ignored")  # by our names and meanings


def linear_cross_entropy(
    e: Tensor,  # [..., hidden]
    c: Tensor,  # [vocab, hidden]
    targets: Tensor,  # [...] int64
    bias: Tensor | None = None,  # [vocab]
    ignore_index: int = -100,
    softcap: float | None = None,
    reduction: str = "mean",
    shift: bool | int = 0,
    return_lse: bool = False,
    filter_eps: float | str | None = "auto",
    accum_e_fp32: bool = False,
    accum_c_fp32: bool = False,
    filter_e_grad: bool = True,
    filter_c_grad: bool = True,
    impl: str | enum.Enum = "cce",
    vocab_parallel_options: Any = None,
    *,
    memory_budget: int | str | None = None,
    skip_ignored: bool | str = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Apple's function of this name: ``F.cross_entropy((e @ c.T).float(), targets)`` without the logits.

    Args:
        e, c, targets, bias, ignore_index, softcap: ``hidden``, ``weight``, ``target`` and the rest of
            ``chunked_head.linear_cross_entropy``.
        reduction: ``"mean"`` over the tokens that count, ``"sum"``, or ``"none"``: values [...], 0 where a token does
            not count, without the first ``shift`` positions.
        shift: pairs position t of ``e`` with target t + shift; True is 1.
        return_lse: whether to return log-sum-exp too, shaped as unreduced values are and differentiable.
        filter_eps, filter_e_grad, filter_c_grad: which parts of the gradients may be left out as too small: none are.
            A threshold of one's own, a number but 0, is refused.
        accum_e_fp32, accum_c_fp32: either of them sums both gradients over chunks in fp32; without, the plan chooses.
        impl: one of Apple's names, or its enumeration: ``"torch_compile"`` runs in torch's operations, the others on
            the device's own backend, those other than ``"cce"`` with fp32 sums.
        vocab_parallel_options: Apple's ``VocabParallelOptions``: rank by rank, ``c`` and ``bias`` are rows ``start`` to
            ``stop`` of the classifier. What the ranks hold is exchanged at each call, which waits for it; by
            ``chunked_head.VocabParallel(rows=)`` it need not be.
        memory_budget, skip_ignored: as in ``chunked_head.linear_cross_entropy``.

    Returns:
        The loss, fp32, or ``(loss, lse)``.

    Raises:
        TypeError, ValueError, IndexError: as ``chunked_head.linear_cross_entropy``.
    """
    given = {
        "ignore_index": ignore_index, "softcap": softcap, "memory_budget": memory_budget, "skip_ignored": skip_ignored,
    }  # fmt: skip
    check_options(given | {"reduction": reduction})
    flag("return_lse", return_lse)
    options = given | head_options(impl, filter_eps, filter_e_grad, filter_c_grad, accum_e_fp32, accum_c_fp32)
    steps = check_shift(shift, targets)
    options |= {"bias": bias, "shift": steps}
    if vocab_parallel_options is not None:
        options["parallel"] = vocab_parallel(vocab_parallel_options, c)
    if not return_lse:
        loss = head.linear_cross_entropy(e, c, targets, reduction=reduction, **options)
        return loss[..., steps:] if reduction == "none" else loss
    found = linear_logprobs(e, c, targets, lse=True, **options)
    loss, lse = -found.logprobs[..., steps:], found.lse[..., steps:]
    if reduction == "none":
        return loss, lse
    if reduction == "sum":
        return loss.sum(), lse
    return loss.sum() / (targets[..., steps:] != ignore_index).sum().clamp(min=1), lse


class LinearCrossEntropy(OptionsModule):
    """Apple's module of this name: ``module(e, c, targets, bias)``; options as ``linear_cross_entropy``'s."""

    def __init__(
        self,
        ignore_index: int = -100,
        softcap: float | None = None,
        reduction: str = "mean",
        shift: bool | int = 0,
        filter_eps: float | str | None = "auto",
        accum_e_fp32: bool = False,
        accum_c_fp32: bool = False,
        filter_e_grad: bool = True,
        filter_c_grad: bool = True,
        impl: str | enum.Enum = "cce",
        return_lse: bool = False,
        *,
        memory_budget: int | str | None = None,
        skip_ignored: bool | str = False,
    ):
        options = {name: value for name, value in locals().items() if name not in ("self", "__class__")}
        super().__init__()
        check_options({name: value for name, value in options.items() if name in OURS})
        check_shift(shift)
        flag("return_lse", return_lse)
        head_options(impl, filter_eps, filter_e_grad, filter_c_grad, accum_e_fp32, accum_c_fp32)
        self.keep(options)

    def forward(
        self, e: Tensor, c: Tensor, targets: Tensor, bias: Tensor | None = None
    ) -> Tensor | tuple[Tensor, Tensor]:
        return linear_cross_entropy(e, c, targets, bias, **self.options())


def head_options(
    impl: str | enum.Enum, filter_eps: float | str | None, filter_e: bool, filter_c: bool, fp32_e: bool, fp32_c: bool
) -> dict[str, Any]:
    """How the call runs, from the options that choose among Apple's implementations."""
    name = impl.name.lower() if isinstance(impl, enum.Enum) else impl
    if name not in IMPLEMENTATIONS:
        raise ValueError(f"impl must be one of {', '.join(map(repr, IMPLEMENTATIONS))}, got {impl!r}")
    if not (filter_eps is None or filter_eps == "auto" or filter_eps == 0):
        raise ValueError(
            f'filter_eps must be "auto" or None, got {filter_eps!r}: no part of a gradient is left out here'
        )
    flags = {
        "filter_e_grad": filter_e, "filter_c_grad": filter_c, "accum_e_fp32": fp32_e, "accum_c_fp32": fp32_c,
    }  # fmt: skip
    for argument, value in flags.items():
        flag(argument, value)
    exact = name not in ("cce", "torch_compile")
    return {
        "accumulate_dtype": torch.float32 if fp32_e or fp32_c or exact else None,
        "backend": "torch" if name == "torch_compile" else None,
    }


def check_shift(shift: bool | int, targets: Tensor | None = None) -> int:
    if not isinstance(shift, int):
        raise TypeError(f"shift must be True, False or an int, got {shift!r}")
    if shift < 0:
        raise ValueError(f"shift must be at least 0, got {shift}; 1 pairs position t with target t + 1")
    length = targets.shape[-1] if isinstance(targets, Tensor) and targets.dim() else 1
    if targets is not None and shift >= max(1, length):
        raise ValueError(f"shift must be in [0, {length}), the last dimension of targets, got {shift}")
    return int(shift)


def vocab_parallel(options: Any, c: Tensor) -> VocabParallel:
    """This library's way to say what Apple's ``VocabParallelOptions`` do."""
    start, stop = getattr(options, "start", None), getattr(options, "stop", None)
    if type(start) is not int or type(stop) is not int:
        raise TypeError(f"vocab_parallel_options must have start, stop and group, as Apple's have, got {options!r}")
    group = process_group(options.group, "vocab_parallel_options")
    every = torch.empty(distributed.get_world_size(group), 3, dtype=torch.int64, device=c.device)
    all_gather(every.view(-1), torch.tensor([start, stop, c.shape[0]], device=c.device), group)
    parts, at = every.tolist(), 0
    for rank, (first, end, rows) in enumerate(parts):
        if first != at or end - first != rows:
            raise ValueError(
                f"vocab_parallel_options of rank {rank} say rows {first} to {end}, where ranks before it end at {at} "
                f"and its c has {rows} rows; ranks hold the classifier's rows in turn"
            )
        at = end
    return VocabParallel(group, [rows for *_, rows in parts], reduce_dhidden=getattr(options, "reduce_e_grad", True))
