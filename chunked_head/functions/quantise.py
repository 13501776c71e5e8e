"""A weight in e4m3, which callers keep."""

from torch import Tensor

from ..call.run import on_device
from ..core import checks
from ..parallel.dtensor import local_part
from ..stores import backend_of
from ..stores.quantised import QuantisedWeight, e4m3_missing, version_of


def quantise(weight: Tensor, *, backend: str | None = None) -> QuantisedWeight:
    """A weight [vocab, hidden] in e4m3, for ``fp8_weight`` of calls with ``precision="fp8"`` until the weight changes.

        head = quantise(model.lm_head.weight)
        for hidden, target in micro_batches:
            linear_cross_entropy(hidden, model.lm_head.weight, target, precision="fp8", fp8_weight=head).backward()
        optimizer.step()

    It takes a byte for each number of the weight, and has one scale. A call on a weight that has changed since raises,
    and any call after an optimizer's step. What goes unnoticed: changes through ``weight.data``, by collectives such as
    ``dist.broadcast``, by a replayed CUDA graph, and of inference tensors. Of a DTensor it is this rank's part.
    """
    own = local_part(weight)
    checks.check_tensor("weight", own, optional=False)
    own = own.detach()
    checks.refuse({
        f"weight must be [vocab, hidden], got {list(own.shape)}; pass lm_head.weight":
            own.dim() != 2 or not own.numel(),
        f"weight must be bfloat16, float16 or float32, got {own.dtype}; cast it":
            not own.is_floating_point() or own.itemsize > 4,
    })  # fmt: skip
    chosen = backend_of(backend, own.device)
    chosen.check(own.device, own.dtype, "weight")
    if missing := e4m3_missing(chosen.traits(own.device), own.device):
        raise ValueError(missing)
    with on_device(own.device):
        return QuantisedWeight(chosen.quantised(own.contiguous()), own, version_of(own))
