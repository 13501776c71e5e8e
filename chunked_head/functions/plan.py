"""The plan of a call that has not been made."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from .. import losses
from ..call.fields import kinds_of
from ..call.options import NO_LOSSES, Call, check_options
from ..call.run import sizes_of
from ..call.spec import check_fp8, decided, parts_of
from ..core import checks
from ..core.checks import choice, flag
from ..kernels.common.gpus import GPUS, Gpu
from ..losses.base import Losses, as_losses
from ..losses.user_checks import Function
from ..metrics import Metric
from ..metrics.values import as_metrics
from ..parallel.groups import part_sizes
from ..plan.planner import make_plan
from ..plan.plans import Plan
from ..stores import backend_of
from ..stores.gradients import sum_dtype
from ..stores.operands import TeacherHead
from .logprobs import FLAGS, output_names


def plan(
    tokens: int,
    hidden: int,
    vocab: int,
    dtype: torch.dtype,
    *,
    loss: Losses | Function | None = None,
    returns: Sequence[str] = (),
    top_k: int | None = None,
    metrics: Sequence[Metric] = (),
    memory_budget: int | str | None = None,
    chunk_tokens: int | None = None,
    accumulate_dtype: torch.dtype | None = None,
    accumulate_into: bool | torch.dtype = False,
    hidden_grad: bool = True,
    weight_grad: bool = True,
    bias: bool = False,
    hidden_dtype: torch.dtype | None = None,
    weight_dtype: torch.dtype | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    softcap: float | None = None,
    temperature: float = 1.0,
    teacher_k: int = 0,
    teacher_vocab: int | None = None,
    teacher_hidden: int | None = None,
    teacher_dtype: torch.dtype | None = None,
    skip_ignored: bool = False,
    segment_lengths: bool = False,
    deterministic: bool = False,
    precision: str | None = None,
    ranks: int = 1,
    sequence_sharded: bool = False,
    device: torch.device | str | None = None,
    backend: str | None = None,
) -> Plan:
    """The plan that ``linear_cross_entropy`` follows for a call of these sizes; with a ``loss``, ``linear_loss``; with
    names of what it ``returns``, such as ``("logprobs", "entropy")``, ``linear_logprobs``. Nothing is allocated.

        print(plan(tokens=16384, hidden=4096, vocab=128256, dtype=torch.bfloat16, memory_budget="1GiB"))

    ``dtype`` is that of the matmuls, ``hidden_dtype`` and ``weight_dtype`` those of the tensors where autocast makes
    them differ. ``teacher_k`` is the K of ``teacher_ids``; a dense teacher has ``teacher_vocab`` rows (None: the
    student's) and, where it gives hidden states, ``teacher_hidden`` columns of ``teacher_dtype``. ``device`` defaults
    to the GPU where there is one; an architecture's name, such as ``"sm_89"``, plans for a GPU that is not there.
    ``accumulate_into``, True or a dtype: the weight's gradient is added to a buffer of the caller's.
    ``segment_lengths``: whether the call is given them. ``ranks``: so many share the vocabulary in ``torch.chunk``'s
    pieces (``VocabParallel``); the plan is that of the first, ``tokens`` and ``vocab`` are those of all.
    ``sequence_sharded``: as there. ValueError where the request cannot be met.
    """
    least = {"tokens": 0, "hidden": 1, "vocab": 1, "ranks": 1, "teacher_k": 0}
    for argument, size in zip(least, (tokens, hidden, vocab, ranks, teacher_k), strict=True):
        checks.check_int(argument, size, least[argument])
    for argument, given in (("teacher_vocab", teacher_vocab), ("teacher_hidden", teacher_hidden)):
        if given is not None:
            checks.check_int(argument, given, 1)
    checks.check_dtype("dtype", dtype)
    dtypes = ("hidden_dtype", hidden_dtype), ("weight_dtype", weight_dtype), ("teacher_dtype", teacher_dtype)
    for argument, other in dtypes:
        if other is not None:
            checks.check_dtype(argument, other)
    flags = {
        "hidden_grad": hidden_grad, "weight_grad": weight_grad, "bias": bias, "skip_ignored": skip_ignored,
        "segment_lengths": segment_lengths, "sequence_sharded": sequence_sharded,
    }  # fmt: skip
    for argument, value in flags.items():
        flag(argument, value)
    options = {
        "reduction": reduction, "label_smoothing": label_smoothing, "softcap": softcap, "temperature": temperature,
        "deterministic": deterministic, "precision": precision, "backend": backend,
    }  # fmt: skip
    check_options(options)
    measured = as_metrics(metrics)
    parts = part_sizes(vocab, ranks)
    if 0 in parts:
        raise ValueError(
            f"ranks is {ranks}: torch.chunk makes {vocab} rows into {ranks - parts.count(0)} parts; pass fewer ranks"
        )
    got = f"; got tokens={tokens}, vocab={vocab}, teacher_vocab={teacher_vocab}, ranks={ranks}"
    checks.refuse({
        "sequence_sharded=True needs as many tokens on every rank: round tokens up" + got:
            sequence_sharded and tokens % ranks,
        "sequence_sharded=True does not go with skip_ignored: leave it False" + got: sequence_sharded and skip_ignored,
        "a teacher of ranks has the student's vocabulary: leave teacher_vocab None" + got:
            ranks > 1 and teacher_vocab not in (None, vocab),
        "deterministic=True goes with 2 ranks where hidden takes a gradient: leave it False" + got:
            deterministic and hidden_grad and ranks > 2,
    })  # fmt: skip
    sums, buffer_dtype = sum_dtype(weight_dtype or dtype), None
    if not isinstance(accumulate_into, bool | torch.dtype) or accumulate_into not in (False, True, sums):
        raise ValueError(f"accumulate_into must be False, True or {sums} for this weight, got {accumulate_into!r}")
    if accumulate_into is not False and weight_grad:
        buffer_dtype = sums
    place, absent = place_of(device)
    chosen = backend_of(backend, place)
    chosen.check(place, dtype, "dtype")
    if not isinstance(returns, list | tuple):
        raise TypeError(f"returns must be a list of names, got {returns!r}")
    if top_k is not None:
        checks.check_int("top_k", top_k, 1)
    names, terms = tuple(returns), NO_LOSSES
    if names or top_k is not None:
        for name in names:
            choice("plan", "returns", name, ("logprobs", *FLAGS))
        if loss is not None or label_smoothing or measured:
            raise ValueError(
                "returns and top_k are of linear_logprobs, which takes no loss and no metrics; leave these out"
            )
        names = output_names([name in names for name in FLAGS], top_k)
    elif loss is None:
        terms = losses.cross_entropy(label_smoothing=label_smoothing)
    elif label_smoothing:
        raise ValueError("label_smoothing goes with loss=None; give it to losses.cross_entropy")
    else:
        terms = as_losses(loss)
    if isinstance(temperature, torch.Tensor):
        raise TypeError(
            "temperature of plan is a number; a call with one per token is planned as one at 1 is; pass 1.0"
        )

    def made(*shape: int, dtype: torch.dtype | None) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    weight_dtype, hidden_dtype, learns_bias = weight_dtype or dtype, hidden_dtype or dtype, bias and weight_grad
    call: Call[Plan] = Call(
        function="plan", rows=made(tokens, hidden, dtype=hidden_dtype),
        weight=made(parts[0], hidden, dtype=weight_dtype),
        bias=made(parts[0], dtype=weight_dtype) if learns_bias else None, target=made(tokens, dtype=torch.int64),
        vocab_size=vocab, reduction=reduction, softcap=softcap, temperature=temperature, deterministic=deterministic,
        precision=precision, skip_ignored=skip_ignored, memory_budget=memory_budget, chunk_tokens=chunk_tokens,
        top_k=top_k, accumulate_dtype=accumulate_dtype, losses=terms, metrics=measured, outputs=names,
        result=lambda made: made,
    )  # fmt: skip
    call.device = place  # of a GPU that may not be there
    read = parts_of(call)
    of_ids = next((part.label for part in read if "teacher_ids" in part.fields), None)
    if of_ids is not None and not teacher_k:
        raise ValueError(f"{of_ids} reads K ids of a teacher for each token; pass teacher_k, the K, got 0")
    fields, autocast = [field for part in read for field in part.fields], {hidden_dtype, weight_dtype} != {dtype}
    spec = decided(call, dtype, chosen, fields, kinds_of(read), teacher_k, teacher_vocab)
    check_fp8(call, spec, absent)
    if sequence_sharded:
        spec = replace(spec, demand=spec.demand._replace(columns_only=False))
    teacher, pairing = None, spec.demand.pairing
    if pairing is not None:
        rows, logits = None, made(0, dtype=torch.float32)
        if teacher_hidden is not None:
            rows = made(pairing.columns, teacher_hidden, dtype=teacher_dtype or dtype)
        teacher = TeacherHead(logits if rows is None else None, rows, rows, None, dtype=dtype if autocast else None)
    traits: dict[str, Any] = {"columns": parts[0], "ranks": ranks, "hidden_ranks": ranks if sequence_sharded else 1}
    traits["largest_part"] = parts[0] if ranks > 1 else None
    if absent is not None and "gpu" in chosen.traits(place):
        nvidia = absent.name.startswith("sm_")
        traits |= {"gpu": absent, "multiprocessors": absent.multiprocessors, "half_products": nvidia}
    by_segments = segment_lengths and spec.by_segments
    sizes = sizes_of(
        call, spec, tokens, (hidden_grad, weight_grad, learns_bias), teacher, skips=skip_ignored,
        moved=skip_ignored or by_segments, by_segments=by_segments, buffer_dtype=buffer_dtype, **traits,
    )  # fmt: skip
    return make_plan(sizes, spec.request)


def place_of(device: torch.device | str | None) -> tuple[torch.device, Gpu | None]:
    """A device, and the GPU that stands for one where an architecture is named."""
    if device is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu"), None
    if isinstance(device, str) and device in GPUS:
        return torch.device("cuda"), GPUS[device]
    try:
        return torch.device(device), None
    except (RuntimeError, TypeError) as error:
        raise ValueError(
            "device must be a torch.device or its name, such as 'cuda:0', or a GPU's architecture "
            f"({', '.join(GPUS)}); got {device!r}"
        ) from error
