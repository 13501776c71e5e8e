"""``quantise``: a copy of a weight in e4m3, which the caller passes to several calls."""

import torch
from torch import Tensor

from ..call.run import on_device
from ..core import checks
from ..parallel.dtensor import local_operands, local_part
from ..parallel.groups import TokenParallel, VocabParallel
from ..stores import backend_of
from ..stores.quantised import QuantisedWeight, direction_of, e4m3_missing, version_of

HALF_DTYPES = torch.bfloat16, torch.float16


def quantise(
    weight: Tensor,
    *,
    hidden: Tensor | None = None,
    vocab_size: int | None = None,
    parallel: VocabParallel | TokenParallel | None = None,
    backend: str | None = None,
) -> QuantisedWeight:
    """A copy of a weight [vocab, hidden] in e4m3, for ``fp8_weight`` of calls with ``precision="fp8"``.

        head = quantise(model.lm_head.weight)
        for hidden, target in micro_batches:
            linear_cross_entropy(hidden, model.lm_head.weight, target, precision="fp8", fp8_weight=head).backward()
        optimizer.step()

    The copy takes a byte for each number of the weight, and two bytes once a call has computed gradients from e4m3
    operands. It has a single scale. ``quantize`` is another name of this function. Hidden states have a large component
    along a direction in common. A call subtracts this component before it rounds hidden states to e4m3, and adds the
    component's logits in fp32.

    A call raises if the weight was written to since, or if any optimizer has stepped, whatever it wrote. Writes that no
    version counter shows (``weight.data``, memory that the weight is a view of, collectives, replayed CUDA graphs) are
    found on the device: the call's results are nan (docs/fp8.md).

    Args:
        weight: a bf16, fp16 or fp32 tensor; of a DTensor, this rank's part is copied.
        hidden: some of the calls' hidden states [..., hidden], whose mean is the direction. None: the direction is the
            mean of the weight's rows.
        vocab_size, parallel: as in the calls that take the copy. Rows of the weight that stand for no id are not read.
        backend: as in the calls that take the copy.

    Raises:
        TypeError, ValueError: an argument is wrong, or the device has no e4m3.
    """
    local_weight, num_rows = local_part(weight), vocab_size
    checks.check_tensor("weight", local_weight, optional=False)
    checks.refuse({
        f"weight must be [vocab, hidden], got {list(local_weight.shape)}; pass lm_head.weight":
            local_weight.dim() != 2 or not local_weight.numel(),
    })  # fmt: skip
    if num_rows is not None:
        checks.check_int("vocab_size", num_rows, 1)
    _, layout_options = local_operands(local_weight, weight, None, {"vocab_size": vocab_size, "parallel": parallel})
    parallel = layout_options["parallel"]
    if isinstance(parallel, VocabParallel):
        num_rows = parallel.split(len(local_weight), layout_options["vocab_size"])[1][parallel.rank]
    num_rows = len(local_weight) if num_rows is None else num_rows
    local_weight = local_weight.detach()
    hidden_text = None if hidden is None else f"{list(hidden.shape)} {hidden.dtype} on {hidden.device}"
    checks.refuse({
        f"vocab_size is {num_rows}, and weight has {len(local_weight)} rows; pass how many of them stand for ids":
            num_rows > len(local_weight),
        f"weight must be bfloat16, float16 or float32, got {local_weight.dtype}; cast it":
            not local_weight.is_floating_point() or local_weight.itemsize > 4,
        f"hidden must be rows of {local_weight.shape[1]} numbers on {local_weight.device}, got {hidden_text}":
            hidden is not None and (hidden.shape[-1:] != local_weight.shape[1:] or not hidden.numel() or
            hidden.device != local_weight.device or not hidden.is_floating_point()),
    })  # fmt: skip
    device_backend = backend_of(backend, local_weight.device)
    device_backend.check(local_weight.device, local_weight.dtype, "weight")
    if missing_reason := e4m3_missing(device_backend.traits(local_weight.device), local_weight.device):
        raise ValueError(missing_reason)
    with on_device(local_weight.device), torch.no_grad():
        matrix = local_weight[:num_rows].contiguous()
        if local_weight.dtype in HALF_DTYPES:  # autocast casts a weight of any other dtype
            fingerprints = {local_weight.dtype: torch.empty(num_rows, dtype=torch.int32, device=local_weight.device)}
        else:
            fingerprints = {dtype: device_backend.fingerprints(matrix.to(dtype)) for dtype in HALF_DTYPES}
        direction = direction_of(matrix if hidden is None else hidden.detach().view(-1, hidden.shape[-1]))
        quantised_copy = device_backend.quantised(matrix, direction, fingerprints.get(local_weight.dtype))
        return QuantisedWeight(quantised_copy, direction, local_weight, version_of(local_weight), fingerprints)
