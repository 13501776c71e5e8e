"""``plan``: the plan of a call, from its sizes alone."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from .. import losses
from ..call.fields import kinds_of
from ..call.options import NO_LOSSES, Call, check_options
from ..call.planning import sizes_of
from ..call.spec import Spec, check_fp8, decided, measures_of
from ..core import checks
from ..core.checks import choice, flag
from ..core.gpus import GPUS, Gpu, gpu_named
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
from .logprobs import RESULT_FLAGS, output_names


def plan(
    tokens: int,  # number of tokens
    hidden: int,  # hidden size
    vocab: int,  # number of ids
    dtype: torch.dtype,  # of the matmuls
    *,
    loss: Losses | Function | None = None,
    returns: Sequence[str] = (),  # names of results
    top_k: int | None = None,
    metrics: Sequence[Metric] = (),
    memory_budget: int | str | None = None,
    chunk_tokens: int | None = None,
    accumulate_dtype: torch.dtype | None = None,
    accumulate_into: bool | torch.dtype = False,
    hidden_grad: bool = True,
    weight_grad: bool = True,
    bias: bool = False,  # the head has a bias
    hidden_dtype: torch.dtype | None = None,
    weight_dtype: torch.dtype | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    softcap: float | None = None,
    temperature: float = 1.0,
    teacher_k: int = 0,  # K of ``teacher_ids`` [..., K]
    teacher_vocab: int | None = None,
    teacher_hidden: int | None = None,  # hidden size of a dense teacher
    teacher_dtype: torch.dtype | None = None,
    skip_ignored: bool = False,
    segment_lengths: bool = False,  # the call passes ``segment_lengths``
    deterministic: bool = False,
    precision: str | None = None,
    ranks: int = 1,  # number of ranks
    sequence_sharded: bool = False,
    device: torch.device | str | None = None,
    backend: str | None = None,
) -> Plan:
    """The plan of a call with these sizes. No call is made, and no memory is allocated.

        print(plan(tokens=16384, hidden=4096, vocab=128256, dtype=torch.bfloat16, memory_budget="1GiB"))

    The plan is of a call of ``linear_logprobs`` with ``returns`` (names of results, such as
    ``("logprobs", "entropy")``) or ``top_k``; of ``linear_loss`` with ``loss`` or ``metrics``; else of
    ``linear_cross_entropy``. Arguments that are not described here mean the same as in these functions.

    Args:
        tokens, hidden, vocab: sizes of the whole call, over all ranks.
        dtype: dtype of the matmuls.
        hidden_dtype, weight_dtype: dtypes of the tensors, where autocast casts them; None: ``dtype``.
        accumulate_into: True, or the buffer's dtype, where the weight's gradient is added to a buffer of the caller's.
        hidden_grad, weight_grad: whether hidden states and weight take a gradient.
        bias: whether the head has a bias. It takes a gradient if the weight does.
        teacher_k: K of ``teacher_ids`` [..., K]; 0 without them.
        teacher_vocab: number of rows of a dense teacher's head; None: ``vocab``.
        teacher_hidden, teacher_dtype: hidden size and dtype of a dense teacher's hidden states;
            ``teacher_hidden=None``: the call has the teacher's logits.
        segment_lengths: whether the call passes ``segment_lengths``.
        ranks: number of ranks that share the vocabulary (``VocabParallel``), split as by ``torch.chunk``. The plan is
            of the first rank.
        sequence_sharded: as in ``VocabParallel``.
        device: a device; or the name of a card or an architecture, such as ``"H100"`` or ``"sm_89"``, for a GPU that
            this machine lacks. None: the GPU if there is one, else the CPU.

    Raises:
        TypeError, ValueError: an argument is wrong, or no plan meets the request.
    """
    check_arguments(locals())
    num_rows = rows_of_first_rank(vocab, ranks)
    sizes_in_words = f"; got tokens={tokens}, vocab={vocab}, teacher_vocab={teacher_vocab}, ranks={ranks}"
    checks.refuse({
        "sequence_sharded=True needs as many tokens on every rank: round tokens up" + sizes_in_words:
            sequence_sharded and tokens % ranks,
        "sequence_sharded=True does not go with skip_ignored: leave it False" + sizes_in_words:
            sequence_sharded and skip_ignored,
        "a teacher of ranks has the student's vocabulary: leave teacher_vocab None" + sizes_in_words:
            ranks > 1 and teacher_vocab not in (None, vocab),
        "deterministic=True goes with 2 ranks where hidden takes a gradient: leave it False" + sizes_in_words:
            deterministic and hidden_grad and ranks > 2,
    })  # fmt: skip
    hidden_dtype, weight_dtype = hidden_dtype or dtype, weight_dtype or dtype
    buffer_dtype = buffer_dtype_of(accumulate_into, weight_dtype, weight_grad)
    call_device, absent_gpu = device_and_gpu(device)
    device_backend = backend_of(backend, call_device)
    device_backend.check(call_device, dtype, "dtype")
    metric_functions = as_metrics(metrics)
    takes_loss = bool(loss is not None or label_smoothing or metric_functions)
    names_of_outputs = returned_names(returns, top_k, takes_loss)
    call_losses = NO_LOSSES if names_of_outputs else losses_of(loss, label_smoothing)
    if isinstance(temperature, torch.Tensor):
        raise TypeError(
            "temperature of plan is a number; a call with one per token is planned as one at 1 is; pass 1.0"
        )
    bias_grad = bias and weight_grad
    call: Call[Plan] = Call(
        function="plan", rows=on_meta(tokens, hidden, dtype=hidden_dtype),
        weight=on_meta(num_rows, hidden, dtype=weight_dtype),
        bias=on_meta(num_rows, dtype=weight_dtype) if bias_grad else None,
        target=on_meta(tokens, dtype=torch.int64), vocab_size=vocab, reduction=reduction, softcap=softcap,
        temperature=temperature, deterministic=deterministic, precision=precision, skip_ignored=skip_ignored,
        memory_budget=memory_budget, chunk_tokens=chunk_tokens, top_k=top_k, accumulate_dtype=accumulate_dtype,
        losses=call_losses, metrics=metric_functions, outputs=names_of_outputs, result=lambda plan: plan,
    )  # fmt: skip
    call.device = call_device  # the device may be a GPU that this machine lacks
    measures = measures_of(call)  # summands and metrics
    reader_labels = [measure.label for measure in measures if "teacher_ids" in measure.fields]
    if reader_labels and not teacher_k:
        raise ValueError(f"{reader_labels[0]} reads K ids of a teacher for each token; pass teacher_k, the K, got 0")
    field_names = [field for measure in measures for field in measure.fields]
    spec = decided(call, dtype, device_backend, field_names, kinds_of(measures), teacher_k, teacher_vocab)
    check_fp8(call, spec, absent_gpu)
    if sequence_sharded:
        spec = replace(spec, demand=spec.demand._replace(columns_only=False))
    ends_with_segments = segment_lengths and spec.can_end_with_segments
    size_fields: dict[str, Any] = {
        "columns": num_rows, "ranks": ranks, "hidden_ranks": ranks if sequence_sharded else 1,
        "largest_part": num_rows if ranks > 1 else None, "has_device_count": skip_ignored,
        "is_moved": skip_ignored or ends_with_segments, "ends_with_segments": ends_with_segments,
        "buffer_dtype": buffer_dtype,
    }  # fmt: skip
    if absent_gpu is not None and "gpu" in device_backend.traits(call_device):
        size_fields |= {"gpu": absent_gpu, "multiprocessors": absent_gpu.multiprocessors}
        size_fields["half_products"] = absent_gpu.name.startswith("sm_")  # an NVIDIA GPU
    autocast_dtype = None if hidden_dtype == weight_dtype == dtype else dtype
    teacher = dense_teacher(spec, teacher_hidden, teacher_dtype or dtype, autocast_dtype)
    return make_plan(
        sizes_of(call, spec, tokens, (hidden_grad, weight_grad, bias_grad), teacher, **size_fields), spec.request
    )


# least values of sizes, by argument; a teacher's sizes may be None
LEAST_SIZES = {
    "tokens": 0, "hidden": 1, "vocab": 1, "ranks": 1, "teacher_k": 0, "teacher_vocab": 1, "teacher_hidden": 1
}  # fmt: skip
DTYPE_NAMES = ("dtype", "hidden_dtype", "weight_dtype", "teacher_dtype")  # arguments that are dtypes
NONE_ALLOWED = ("teacher_vocab", "teacher_hidden", *DTYPE_NAMES[1:])  # arguments that may be None
FLAG_NAMES = ("hidden_grad", "weight_grad", "bias", "skip_ignored", "segment_lengths", "sequence_sharded")
CHECKED_OPTIONS = ("reduction", "label_smoothing", "softcap", "temperature", "deterministic", "precision", "backend")


def check_arguments(arguments: Mapping[str, Any]) -> None:
    """Raises TypeError or ValueError for an argument of ``plan`` that is wrong whatever the other arguments are."""
    set_arguments = {name: value for name, value in arguments.items() if value is not None or name not in NONE_ALLOWED}
    for name, least_size in LEAST_SIZES.items():
        if name in set_arguments:
            checks.check_int(name, set_arguments[name], least_size)
    for name in DTYPE_NAMES:
        if name in set_arguments:
            checks.check_dtype(name, set_arguments[name])
    for name in FLAG_NAMES:
        flag(name, arguments[name])
    check_options({name: arguments[name] for name in CHECKED_OPTIONS})


def rows_of_first_rank(vocab: int, ranks: int) -> int:
    """Number of rows of the weight on the first rank, which has the most rows. ValueError if a rank has no rows."""
    rows_by_rank = part_sizes(vocab, ranks)
    if 0 in rows_by_rank:
        raise ValueError(
            f"ranks is {ranks}: torch.chunk makes {vocab} rows into {ranks - rows_by_rank.count(0)} parts; pass fewer "
            "ranks"
        )
    return rows_by_rank[0]


def buffer_dtype_of(
    accumulate_into: bool | torch.dtype, weight_dtype: torch.dtype, weight_grad: bool
) -> torch.dtype | None:
    """Dtype of the caller's buffer for the weight's gradient; None without a buffer. ValueError for a dtype that the
    buffer cannot have."""
    buffer_dtype = sum_dtype(weight_dtype)
    if not isinstance(accumulate_into, bool | torch.dtype) or accumulate_into not in (False, True, buffer_dtype):
        raise ValueError(
            f"accumulate_into must be False, True or {buffer_dtype} for this weight, got {accumulate_into!r}"
        )
    return None if accumulate_into is False or not weight_grad else buffer_dtype


def returned_names(returns: Sequence[str], top_k: int | None, takes_loss: bool) -> tuple[str, ...]:
    """Names of the results if the call is of ``linear_logprobs``, else (). ``takes_loss``: the arguments have a loss or
    metrics. TypeError or ValueError for wrong arguments."""
    if not isinstance(returns, list | tuple):
        raise TypeError(f"returns must be a list of names, got {returns!r}")
    if top_k is not None:
        checks.check_int("top_k", top_k, 1)
    for name in returns:
        choice("plan", "returns", name, ("logprobs", *RESULT_FLAGS))
    if not returns and top_k is None:
        return ()
    if takes_loss:
        raise ValueError(
            "returns and top_k are of linear_logprobs, which takes no loss and no metrics; leave these out"
        )
    return output_names([name in returns for name in RESULT_FLAGS], top_k)


def losses_of(loss: Losses | Function | None, label_smoothing: float) -> Losses:
    """The losses of the call: ``loss``, or the cross-entropy if ``loss`` is None. ValueError for ``label_smoothing``
    beside ``loss``."""
    if loss is None:
        return losses.cross_entropy(label_smoothing=label_smoothing)
    if label_smoothing:
        raise ValueError("label_smoothing goes with loss=None; give it to losses.cross_entropy")
    return as_losses(loss)


def dense_teacher(
    spec: Spec, teacher_hidden_size: int | None, teacher_dtype: torch.dtype, autocast_dtype: torch.dtype | None
) -> TeacherHead | None:
    """The dense teacher of a call, on the meta device: hidden states [tokens, ``teacher_hidden_size``] and a head,
    or logits if ``teacher_hidden_size`` is None. None for a call without a dense teacher."""
    if spec.demand.pairing is None:
        return None
    if teacher_hidden_size is None:
        return TeacherHead(on_meta(0, dtype=torch.float32), None, None, None, dtype=autocast_dtype)
    weight = on_meta(spec.demand.pairing.columns, teacher_hidden_size, dtype=teacher_dtype)
    return TeacherHead(None, weight, weight, None, dtype=autocast_dtype)  # of hidden states, the columns alone are read


def on_meta(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    """An empty tensor on the meta device."""
    return torch.empty(shape, dtype=dtype, device="meta")


def device_and_gpu(device: torch.device | str | None) -> tuple[torch.device, Gpu | None]:
    """Returns the device of a call; and a ``Gpu`` if ``device`` names a card or an architecture, or None if ``device``
    is a torch device, a name of a torch device, or None. ValueError for any other string."""
    if device is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu"), None
    absent_gpu = gpu_named(device) if isinstance(device, str) else None
    if absent_gpu is not None:
        return torch.device("cuda"), absent_gpu
    try:
        return torch.device(device), None
    except (RuntimeError, TypeError) as error:
        raise ValueError(
            "device must be a torch.device or its name, such as 'cuda:0', a card's name, such as 'H100', or a GPU's "
            f"architecture ({', '.join(GPUS)}); got {device!r}"
        ) from error
