"""DTensor operands of a call: this rank's tensors, and the layout of ranks that their placements describe."""

from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from ..core.checks import is_dtensor
from .groups import TokenParallel, VocabParallel, part_sizes

Parallel = VocabParallel | TokenParallel | None
Target = TypeVar("Target", Tensor, Tensor | None)
PLAIN_TYPES = frozenset((Tensor, torch.nn.Parameter, type(None)))  # types of operands for which nothing is done here


class LocalOperands(NamedTuple, Generic[Target]):
    """Operands of a call as plain tensors, with the ``vocab_size`` and ``parallel`` that DTensors' placements mean."""

    hidden: Tensor
    weight: Tensor
    target: Target
    bias: Tensor | None
    vocab_size: int | None
    parallel: Parallel


def local_operands(
    hidden: Any,  # tensors, or DTensors
    weight: Any,
    target: Target,
    bias: Tensor | None,
    vocab_size: int | None,
    parallel: Parallel,
) -> LocalOperands[Target]:
    """The operands as plain tensors, differentiable. ValueError for placements other than these:

    A weight of ``Shard(0)`` (``ColwiseParallel``) is split over the vocabulary, one of ``Replicate()`` is complete.
    Hidden states are ``Replicate()``, or ``Shard(i)`` along a dimension of tokens on the weight's mesh.
    """
    if is_dtensor(weight):
        if isinstance(parallel, VocabParallel):
            raise ValueError("weight is a DTensor, whose placements say how it is split; leave parallel=None")
        mesh = vocabulary_mesh(weight)
        if mesh is not None:
            hidden, target, sharded = local_tokens(hidden, target, mesh)
            rows = part_sizes(weight.shape[0], mesh.size())
            parallel = VocabParallel(mesh, rows, sequence_sharded=sharded, tokens=parallel)
            vocab_size = weight.shape[0] if vocab_size is None else vocab_size
        if bias is not None and getattr(bias, "placements", None) != weight.placements:
            raise ValueError(f"bias must be split as weight is, by placements {list(weight.placements)}")
    if is_dtensor(hidden) and not all(placement.is_replicate() for placement in hidden.placements):
        raise ValueError(
            f"hidden has the placements {list(hidden.placements)}, and weight is whole on every rank; pass "
            "hidden.to_local() for this rank's tokens, or hidden.full_tensor()"
        )
    hidden, weight, target, bias = (local_part(operand) for operand in (hidden, weight, target, bias))
    return LocalOperands(hidden, weight, target, bias, vocab_size, parallel)


class Arrived(torch.autograd.Function):
    """Waits for an asynchronous collective and returns its result as a plain tensor, whose memory kernels read."""

    @staticmethod
    def forward(ctx: Any, tensor: Any) -> Tensor:
        return tensor.trigger_wait().detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


def local_part(tensor: Any) -> Any:
    """This rank's part of a DTensor; a plain tensor unchanged. Waits for an asynchronous collective that makes it, such
    as ``redistribute(async_op=True)``."""
    if is_dtensor(tensor):
        tensor = tensor.to_local()
    if type(tensor).__name__ != "AsyncCollectiveTensor" or torch.compiler.is_compiling():
        return tensor
    return Arrived.apply(tensor)


WEIGHT_REMEDY = (
    "a head takes Shard(0) along one dimension of the mesh, the tensor-parallel one, and Replicate() along others: "
    "inside of the forward of a module that fully_shard wraps they are, elsewhere pass weight.full_tensor()"
)


def vocabulary_mesh(weight: Any) -> Any:
    """The one-dimensional mesh that splits a weight's rows; None if all ranks have all rows."""
    split = [(i, placement) for i, placement in enumerate(weight.placements) if not placement.is_replicate()]
    if not split:
        return None
    (mesh_dim, first), *further = split
    if further or not first.is_shard(0) or type(first).__name__ != "Shard":
        raise ValueError(f"weight has the placements {list(weight.placements)}; {WEIGHT_REMEDY}")
    mesh = weight.device_mesh
    if mesh.ndim == 1:
        return mesh
    if mesh.mesh_dim_names is None:
        raise ValueError("the DeviceMesh of weight needs mesh_dim_names, so that its tensor-parallel part can be named")
    return mesh[mesh.mesh_dim_names[mesh_dim]]


def local_tokens(hidden: Any, target: Any, mesh: Any) -> tuple[Tensor, Any, bool]:
    """Hidden states and targets of this rank, and whether they are its part of the tokens (True) or all tokens
    (False)."""
    if not is_dtensor(hidden):
        return hidden, target, False
    split = [placement for placement in hidden.placements if not placement.is_replicate()]
    if not split:
        # every rank gets the complete gradient
        return hidden.to_local(grad_placements=hidden.placements), target, False
    if len(split) > 1 or type(split[0]).__name__ != "Shard" or split[0].dim % hidden.dim() == hidden.dim() - 1:
        raise ValueError(
            f"hidden has the placements {list(hidden.placements)}; a head takes Replicate() or a Shard along a "
            "dimension of tokens: redistribute it (a Partial needs its sum first)"
        )
    if hidden.device_mesh != mesh:
        raise ValueError(f"hidden is split over {hidden.device_mesh}, weight over {mesh}; redistribute hidden")
    dim = split[0].dim % hidden.dim()
    if hidden.shape[dim] % mesh.size():
        raise ValueError(
            f"hidden has {hidden.shape[dim]} rows along dimension {dim}, which {mesh.size()} ranks cannot share "
            "evenly; pad it"
        )
    if target is not None and not is_dtensor(target) and target.shape == hidden.shape[:-1]:
        target = target.chunk(mesh.size(), dim)[mesh.get_local_rank()]
    return hidden.to_local(), target, True
