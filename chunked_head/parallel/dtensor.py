"""DTensor operands of a call as this rank's tensors, with the layout of ranks that their placements describe."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ..core.checks import is_dtensor
from .groups import VocabParallel, part_sizes

PLAIN_TYPES = frozenset((Tensor, torch.nn.Parameter, type(None)))  # types of operands that need no conversion


def local_operands(
    hidden: Any,  # a tensor or DTensor; so are weight, target and the option "bias"
    weight: Any,
    target: Any,
    options: Mapping[str, Any],
) -> tuple[tuple[Any, Any, Any], Any]:
    """Returns hidden states, weight and targets as this rank's plain tensors, through which gradients flow, and the
    options of a call on these tensors, with a plain "bias", and with "vocab_size" and "parallel" from the placements.

    A weight with ``Shard(0)`` (``ColwiseParallel``) is split over the vocabulary. A weight with ``Replicate()`` is
    complete. Hidden states have ``Replicate()``, or ``Shard(i)`` along a dimension of tokens on the weight's mesh.
    ValueError for other placements.
    """
    bias, vocab_size, parallel = options.get("bias"), options.get("vocab_size"), options.get("parallel")
    if is_dtensor(weight):
        if isinstance(parallel, VocabParallel):
            raise ValueError("weight is a DTensor, whose placements say how it is split; leave parallel=None")
        mesh = vocabulary_mesh(weight)
        if mesh is not None:
            hidden, target, is_sequence_sharded = local_tokens(hidden, target, mesh)
            rows_by_rank = part_sizes(weight.shape[0], mesh.size())
            parallel = VocabParallel(mesh, rows_by_rank, sequence_sharded=is_sequence_sharded, tokens=parallel)
            vocab_size = weight.shape[0] if vocab_size is None else vocab_size
        if bias is not None and getattr(bias, "placements", None) != weight.placements:
            raise ValueError(f"bias must be split as weight is, by placements {list(weight.placements)}")
    if is_dtensor(hidden) and not all(placement.is_replicate() for placement in hidden.placements):
        raise ValueError(
            f"hidden has the placements {list(hidden.placements)}, and weight is whole on every rank; pass "
            "hidden.to_local() for this rank's tokens, or hidden.full_tensor()"
        )
    hidden, weight, target, bias = (local_part(operand) for operand in (hidden, weight, target, bias))
    return (hidden, weight, target), {**options, "bias": bias, "vocab_size": vocab_size, "parallel": parallel}


class WaitForCollective(torch.autograd.Function):
    """Waits for an asynchronous collective, and returns the collective's result as a plain tensor."""

    @staticmethod
    def forward(ctx: Any, tensor: Any) -> Tensor:
        return tensor.trigger_wait().detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


def local_part(tensor: Any) -> Any:
    """This rank's part of a DTensor as a plain tensor; any other value unchanged. If an asynchronous collective writes
    the tensor (``redistribute(async_op=True)``), the device waits for the collective."""
    if is_dtensor(tensor):
        tensor = tensor.to_local()
    if type(tensor).__name__ != "AsyncCollectiveTensor" or torch.compiler.is_compiling():
        return tensor
    return WaitForCollective.apply(tensor)


WEIGHT_REMEDY = (
    "a head takes Shard(0) along one dimension of the mesh, the tensor-parallel one, and Replicate() along others: "
    "inside of the forward of a module that fully_shard wraps they are, elsewhere pass weight.full_tensor()"
)


def vocabulary_mesh(weight: Any) -> Any:
    """The one-dimensional mesh over which a DTensor's rows are split; None if every rank has all rows. ValueError for
    other placements."""
    sharded_dims = [(i, placement) for i, placement in enumerate(weight.placements) if not placement.is_replicate()]
    if not sharded_dims:
        return None
    (mesh_dim, placement), *further_dims = sharded_dims
    if further_dims or not placement.is_shard(0) or type(placement).__name__ != "Shard":
        raise ValueError(f"weight has the placements {list(weight.placements)}; {WEIGHT_REMEDY}")
    mesh = weight.device_mesh
    if mesh.ndim == 1:
        return mesh
    if mesh.mesh_dim_names is None:
        raise ValueError("the DeviceMesh of weight needs mesh_dim_names, so that its tensor-parallel part can be named")
    return mesh[mesh.mesh_dim_names[mesh_dim]]


def local_tokens(hidden: Any, target: Any, mesh: Any) -> tuple[Tensor, Any, bool]:
    """Returns hidden states and targets on this rank, and a bool: True if the rank has a part of the tokens, False if
    it has all tokens. ``mesh``: mesh of the weight. ValueError for placements that no head takes."""
    if not is_dtensor(hidden):
        return hidden, target, False
    sharded_placements = [placement for placement in hidden.placements if not placement.is_replicate()]
    if not sharded_placements:
        # every rank gets the complete gradient
        return hidden.to_local(grad_placements=hidden.placements), target, False
    placement, hidden_dim = sharded_placements[0], hidden.dim() - 1
    is_shard = len(sharded_placements) == 1 and type(placement).__name__ == "Shard"
    if not is_shard or placement.dim % hidden.dim() == hidden_dim:
        raise ValueError(
            f"hidden has the placements {list(hidden.placements)}; a head takes Replicate() or a Shard along a "
            "dimension of tokens: redistribute it (a Partial needs its sum first)"
        )
    if hidden.device_mesh != mesh:
        raise ValueError(f"hidden is split over {hidden.device_mesh}, weight over {mesh}; redistribute hidden")
    dim = placement.dim % hidden.dim()
    if hidden.shape[dim] % mesh.size():
        raise ValueError(
            f"hidden has {hidden.shape[dim]} rows along dimension {dim}, which {mesh.size()} ranks cannot share "
            "evenly; pad it"
        )
    if target is not None and not is_dtensor(target) and target.shape == hidden.shape[:-1]:
        target = target.chunk(mesh.size(), dim)[mesh.get_local_rank()]
    return hidden.to_local(), target, True
