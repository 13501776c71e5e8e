"""A weight in e4m3, which callers keep."""

import torch
from torch import Tensor

from ..call.run import on_device
from ..core import checks
from ..parallel.dtensor import local_operands, local_part
from ..parallel.groups import TokenParallel, VocabParallel
from ..stores import backend_of
from ..stores.quantised import QuantisedWeight, e4m3_missing, version_of

HALVES = torch.bfloat16, torch.float16


def quantise(
    weight: Tensor,
    *,
    vocab_size: int | None = None,
    parallel: VocabParallel | TokenParallel | None = None,
    backend: str | None = None,
) -> QuantisedWeight:
    """A weight [vocab, hidden] in e4m3, for ``fp8_weight`` of calls with ``precision="fp8"`` until the weight changes.

        head = quantise(model.lm_head.weight)
        for hidden, target in micro_batches:
            linear_cross_entropy(hidden, model.lm_head.weight, target, precision="fp8", fp8_weight=head).backward()
        optimizer.step()

    It takes a byte for each number of the weight, and has one scale. ``vocab_size`` and ``parallel`` are those of the
    calls, where they have some: rows that stand for no id are not looked at. Of a DTensor it is this rank's part.

    A call on a weight that has been written to since raises, and any call after an optimizer's step. Writes that no
    version counter shows (``weight.data``, memory that the weight is a view of, collectives, replayed CUDA graphs) are
    found on the device: the call's results are nan (docs/fp8.md).
    """
    own, rows = local_part(weight), vocab_size
    checks.check_tensor("weight", own, optional=False)
    checks.refuse(
        {
            f"weight must be [vocab, hidden], got {list(own.shape)}; pass lm_head.weight": own.dim() != 2
            or not own.numel()
        }
    )
    if rows is not None:
        checks.check_int("vocab_size", rows, 1)
    _, _, _, _, of_all, parallel = local_operands(own, weight, None, None, vocab_size, parallel)
    if isinstance(parallel, VocabParallel):
        rows = parallel.split(len(own), of_all)[1][parallel.rank]
    rows = len(own) if rows is None else rows
    own = own.detach()
    checks.refuse({
        f"vocab_size is {rows}, and weight has {len(own)} rows; pass how many of them stand for ids": rows > len(own),
        f"weight must be bfloat16, float16 or float32, got {own.dtype}; cast it":
            not own.is_floating_point() or own.itemsize > 4,
    })  # fmt: skip
    chosen = backend_of(backend, own.device)
    chosen.check(own.device, own.dtype, "weight")
    if missing := e4m3_missing(chosen.traits(own.device), own.device):
        raise ValueError(missing)
    with on_device(own.device), torch.no_grad():
        matrix = own[:rows].contiguous()
        if own.dtype in HALVES:  # else autocast casts it to one of them
            prints = {own.dtype: torch.empty(rows, dtype=torch.int32, device=own.device)}
        else:
            prints = {dtype: chosen.fingerprints(matrix.to(dtype)) for dtype in HALVES}
        return QuantisedWeight(chosen.quantised(matrix, prints=prints.get(own.dtype)), own, version_of(own), prints)
