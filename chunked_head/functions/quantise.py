"""``quantise``: a weight in e4m3, which the caller keeps for several calls."""

import torch
from torch import Tensor

from ..call.run import on_device
from ..core import checks
from ..parallel.dtensor import local_operands, local_part
from ..parallel.groups import TokenParallel, VocabParallel
from ..stores import backend_of
from ..stores.quantised import QuantisedWeight, direction_of, e4m3_missing, version_of

HALVES = torch.bfloat16, torch.float16


def quantise(
    weight: Tensor,
    *,
    hidden: Tensor | None = None,
    vocab_size: int | None = None,
    parallel: VocabParallel | TokenParallel | None = None,
    backend: str | None = None,
) -> QuantisedWeight:
    """A weight [vocab, hidden] in e4m3, for ``fp8_weight`` of calls with ``precision="fp8"`` until the weight changes.

        head = quantise(model.lm_head.weight)
        for hidden, target in micro_batches:
            linear_cross_entropy(hidden, model.lm_head.weight, target, precision="fp8", fp8_weight=head).backward()
        optimizer.step()

    ``quantize`` is the same. It takes a byte for each number of the weight, two from the first call on
    that makes gradients of e4m3 operands, and has one scale. A direction that hidden
    states share is taken out of them before they are rounded, and makes its part of logits exactly: that of the
    weight's mean row, or of the mean of ``hidden`` [..., hidden], some rows of the calls'. ``vocab_size`` and
    ``parallel`` are those of the calls, where they have some: rows that stand for no id are not looked at. Of a DTensor
    it is this rank's part.

    A call on a weight that has been written to since raises, and any call after an optimizer's step. Writes that no
    version counter shows (``weight.data``, memory that the weight is a view of, collectives, replayed CUDA graphs) are
    found on the device: the call's results are nan (docs/fp8.md).
    """
    local_weight, rows = local_part(weight), vocab_size
    checks.check_tensor("weight", local_weight, optional=False)
    checks.refuse({
        f"weight must be [vocab, hidden], got {list(local_weight.shape)}; pass lm_head.weight":
            local_weight.dim() != 2 or not local_weight.numel(),
    })  # fmt: skip
    if rows is not None:
        checks.check_int("vocab_size", rows, 1)
    _, _, _, _, vocab, parallel = local_operands(local_weight, weight, None, None, vocab_size, parallel)
    if isinstance(parallel, VocabParallel):
        rows = parallel.split(len(local_weight), vocab)[1][parallel.rank]
    rows = len(local_weight) if rows is None else rows
    local_weight = local_weight.detach()
    hidden_text = None if hidden is None else f"{list(hidden.shape)} {hidden.dtype} on {hidden.device}"
    checks.refuse({
        f"vocab_size is {rows}, and weight has {len(local_weight)} rows; pass how many of them stand for ids":
            rows > len(local_weight),
        f"weight must be bfloat16, float16 or float32, got {local_weight.dtype}; cast it":
            not local_weight.is_floating_point() or local_weight.itemsize > 4,
        f"hidden must be rows of {local_weight.shape[1]} numbers on {local_weight.device}, got {hidden_text}":
            hidden is not None and (hidden.shape[-1:] != local_weight.shape[1:] or not hidden.numel() or
            hidden.device != local_weight.device or not hidden.is_floating_point()),
    })  # fmt: skip
    device_backend = backend_of(backend, local_weight.device)
    device_backend.check(local_weight.device, local_weight.dtype, "weight")
    if missing := e4m3_missing(device_backend.traits(local_weight.device), local_weight.device):
        raise ValueError(missing)
    with on_device(local_weight.device), torch.no_grad():
        matrix = local_weight[:rows].contiguous()
        if local_weight.dtype in HALVES:  # any other dtype is that of a weight that autocast casts
            fingerprints = {local_weight.dtype: torch.empty(rows, dtype=torch.int32, device=local_weight.device)}
        else:
            fingerprints = {dtype: device_backend.fingerprints(matrix.to(dtype)) for dtype in HALVES}
        direction = direction_of(matrix if hidden is None else hidden.detach().view(-1, hidden.shape[-1]))
        copy = device_backend.quantised(matrix, direction, fingerprints.get(local_weight.dtype))
        return QuantisedWeight(copy, direction, local_weight, version_of(local_weight), fingerprints)
