"""Operands that are DTensors, as this rank's tensors and what their placements say of the ranks."""

from typing import Any, TypeVar

import torch
from torch import Tensor

from ..core.checks import is_dtensor
from .groups import TokenParallel, VocabParallel, chunked

Parallel = VocabParallel | TokenParallel | None
Target = TypeVar("Target", Tensor, Tensor | None)
PLAIN = frozenset((Tensor, torch.nn.Parameter, type(None)))  # operands that are no DTensor and on their way nowhere


def local(
    hidden: Tensor,
    weight: Tensor,
    target: Target,
    bias: Tensor | None,
    vocab_size: int | None,
    parallel: Parallel,
) -> tuple[Tensor, Tensor, Target, Tensor | None, int | None, Parallel]:
    """The operands as plain tensors, differentiable; ValueError for placements that are none of a head's.

    A weight of ``Shard(0)`` (``ColwiseParallel``) is split over the vocabulary, one of ``Replicate()`` is whole.
    Hidden states are ``Replicate()``, or ``Shard(i)`` along a dimension of tokens on the weight's mesh.
    """
    if PLAIN.issuperset((type(hidden), type(weight), type(target), type(bias))):
        return hidden, weight, target, bias, vocab_size, parallel
    if is_dtensor(weight):
        if isinstance(parallel, VocabParallel):
            raise ValueError("weight is a DTensor, whose placements say how it is split; leave parallel=None")
        mesh = vocabulary_mesh("weight", weight, 0, WEIGHT_REMEDY)
        if mesh is not None:
            sequence, vocab = hidden_dimension(hidden, mesh), weight.shape[0]
            rows = chunked(vocab, mesh.size())
            parallel = VocabParallel(mesh, rows, sequence_sharded=sequence is not None, tokens=parallel)
            vocab_size = vocab if vocab_size is None else vocab_size
            hidden, target = local_tokens(hidden, target, sequence, parallel)
        check_bias(weight, bias)
    return own_hidden(hidden), part(weight), part(target), part(bias), vocab_size, parallel


class Arrived(torch.autograd.Function):
    """The result of an asynchronous collective, once it is there: kernels read memory, and the wrapper has none."""

    @staticmethod
    def forward(ctx: Any, tensor: Any) -> Tensor:
        return tensor.trigger_wait().detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


def part(tensor: Any) -> Any:
    """This rank's part of a DTensor, or a plain tensor, of which no part is still on its way
    (``redistribute(async_op=True)`` and the like)."""
    if is_dtensor(tensor):
        tensor = tensor.to_local()
    if type(tensor).__name__ != "AsyncCollectiveTensor" or torch.compiler.is_compiling():
        return tensor
    return Arrived.apply(tensor)


def local_logits(
    logits: Tensor, target: Target, vocab_size: int | None, parallel: Parallel, inplace: bool
) -> tuple[Tensor, Target, int | None, Parallel]:
    """Logits and targets as plain tensors, differentiable, with what the placements say; as ``local``.

    Logits of ``Shard(-1)`` (the output of ``ColwiseParallel`` without a gather) are split over the vocabulary, those of
    ``Replicate()`` are whole.
    """
    if is_dtensor(logits):
        if inplace:
            raise ValueError(
                "inplace=True writes where autograd sees it, and behind a DTensor it would not; pass inplace=False, or "
                "logits that a matmul of local operands has made, with VocabParallel"
            )
        if isinstance(parallel, VocabParallel):
            raise ValueError("logits are a DTensor, whose placements say how they are split; leave parallel=None")
        mesh = vocabulary_mesh("logits", logits, logits.dim() - 1, LOGITS_REMEDY)
        if mesh is not None:
            vocab = logits.shape[-1]
            parallel = VocabParallel(mesh, chunked(vocab, mesh.size()), tokens=parallel)
            vocab_size = vocab if vocab_size is None else vocab_size
        target = complete("target", target)
    return part(logits), part(target), vocab_size, parallel


def complete(name: str, tensor: Target) -> Target:
    """A tensor that every rank has all of; ValueError for other placements."""
    given: Any = tensor
    if is_dtensor(given) and not replicated(given):
        raise ValueError(
            f"{name} has the placements {list(given.placements)}, and every rank needs all of it; pass "
            f"{name}.full_tensor()"
        )
    return part(given)


WEIGHT_REMEDY = (
    "a head takes Shard(0) along one dimension of the mesh, the tensor-parallel one, and Replicate() along others: "
    "inside of the forward of a module that fully_shard wraps they are, elsewhere pass weight.full_tensor()"
)
LOGITS_REMEDY = (
    "a loss takes Shard(-1) along one dimension of the mesh, the tensor-parallel one, and Replicate() along others; "
    "where ranks hold different tokens pass logits.to_local() with TokenParallel(mesh[...]), and where they split the "
    "vocabulary too VocabParallel(mesh[...], tokens=...)"
)


def vocabulary_mesh(name: str, tensor: Any, dim: int, remedy: str) -> Any:
    """The one-dimensional mesh that a tensor's ``dim`` of ids is split over, None where all have all of it."""
    found = None
    for i, placement in enumerate(tensor.placements):
        if placement.is_replicate():
            continue
        if not placement.is_shard(dim) or type(placement).__name__ != "Shard" or found is not None:
            raise ValueError(f"{name} has the placements {list(tensor.placements)}; {remedy}")
        found = i
    if found is None:
        return None
    mesh = tensor.device_mesh
    if mesh.ndim == 1:
        return mesh
    if mesh.mesh_dim_names is None:
        raise ValueError(
            f"the DeviceMesh of {name} needs mesh_dim_names, so that its tensor-parallel part can be named"
        )
    return mesh[mesh.mesh_dim_names[found]]


def hidden_dimension(hidden: Any, mesh: Any) -> int | None:
    """The dimension of tokens that hidden states are split along, None where every rank has all."""
    if not is_dtensor(hidden):
        return None
    split = [p for p in hidden.placements if not p.is_replicate()]
    if not split:
        return None
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
    return dim


def local_tokens(hidden: Any, target: Any, dim: int | None, parallel: VocabParallel) -> tuple[Tensor, Any]:
    """Hidden states and targets of this rank's tokens, where it has some of its own."""
    if dim is None:
        if is_dtensor(hidden):
            from torch.distributed.tensor import Replicate

            # every rank gets the whole gradient
            hidden = hidden.to_local(grad_placements=[Replicate()] * hidden.device_mesh.ndim)
        return hidden, target
    leading = tuple(hidden.shape[:-1])
    hidden = hidden.to_local()
    if target is not None and not is_dtensor(target) and tuple(target.shape) == leading:
        target = target.chunk(parallel.ranks, dim)[parallel.rank]
    return hidden, target


def check_bias(weight: Any, bias: Any) -> None:
    if bias is None or (is_dtensor(bias) and tuple(bias.placements) == tuple(weight.placements)):
        return
    raise ValueError(f"bias must be split as weight is, by placements {list(weight.placements)}")


def replicated(tensor: Any) -> bool:
    """True where every rank has all of a DTensor."""
    return all(placement.is_replicate() for placement in tensor.placements)


def own_hidden(hidden: Any) -> Tensor:
    """Hidden states that every rank has all of, or its own part of already."""
    if is_dtensor(hidden) and not replicated(hidden):
        raise ValueError(
            f"hidden has the placements {list(hidden.placements)}, and weight is whole on every rank; pass "
            "hidden.to_local() for this rank's tokens, or .full_tensor()"
        )
    return part(hidden)
