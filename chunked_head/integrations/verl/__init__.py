"""verl's fused log-probabilities and entropies by its names and signatures, computed by this library's head.

    from chunked_head.integrations.verl import patch_verl
    patch_verl(memory_budget="1GiB")

before a worker builds its model, with ``actor_rollout_ref.model.use_fused_kernels=True``. In verl's configuration
``actor_rollout_ref.model.external_lib=chunked_head.integrations.verl.register`` makes the call in every worker.
"""

import functools
from typing import Any, ClassVar, Unpack

import torch
from torch import Tensor, nn

from ...call.options import Execution
from ...functions.logprobs import LogprobsOfTrainer
from ...parallel.groups import VocabParallel
from ..frameworks import Framework, check_named

VERL = Framework(
    "verl", ("0.9.1",),
    {  # which verl looks up at every call
        ("verl.utils.kernel.linear_cross_entropy", "linear_cross_entropy"):
            "hidden, weight, labels, temperature, reduction, dist_process_group",
        ("verl.utils.experimental.torch_functional", "FusedLinearForPPO"):
            "hidden_states, vocab_weights, input_ids, temperature",
    },
    module="verl", bound=("verl.models.mcore.model_forward_fused", "verl.models.mcore.model_forward_1f1b_overlap"),
)  # fmt: skip
# the backward of Megatron's gather_from_sequence_parallel_region, which sums gradients over the ranks
GATHER = "_GatherFromSequenceParallelRegionBackward"
LOGPROBS = LogprobsOfTrainer()


def linear_cross_entropy(
    hidden: Tensor,  # [..., hidden]
    weight: Tensor,  # [vocab, hidden], under tensor parallelism this rank's rows
    labels: Tensor,  # [...] int64
    temperature: float | Tensor = 1.0,
    reduction: str = "none",
    dist_process_group: Any = None,
    *,
    mask: Tensor | None = None,
    reduce_dhidden: bool | None = None,
    **options: Unpack[Execution],
) -> tuple[Tensor, Tensor]:
    """verl's function of this name: log-probabilities of ``labels`` and entropies, both fp32 and differentiable.

    Args:
        hidden, labels: of one order of tokens. Their leading dimensions may differ by dimensions of 1 or by flattening,
            as Megatron's [sequence, 1, hidden] does from [1, sequence].
        temperature: divides the logits: a number, a 0-d tensor, or a tensor of labels' shape, one for each token.
        reduction: of the log-probabilities; entropies are per token always.
        dist_process_group: ranks that hold the rows of the head in turn, as many each.
        mask: labels' shape, bool: tokens that count, such as those of responses. Any other, and one whose label is
            -100, has value 0 and no gradient; with ``skip_ignored=True`` they cost no matmul either.
        reduce_dhidden: whether the gradient of ``hidden`` is summed over ``dist_process_group``. verl's kernels leave
            each rank its share, because ``hidden`` comes from Megatron's gather of sequences, whose backward sums.
            None: the same where ``hidden`` comes from there; otherwise ValueError, since a gradient would be wrong.
        options: as in ``chunked_head.Execution``.

    Returns:
        ``(logprobs, entropy)`` of labels' shape where hidden's leading dimensions are the same, else flat [tokens].
    """
    if reduction not in ("none", "sum", "mean"):
        raise ValueError(f'reduction must be "none", "sum" or "mean", got {reduction!r}')
    if dist_process_group is not None:
        if "parallel" in options:
            raise ValueError("parallel is what dist_process_group says already; leave one of them out")
        reduce = reduces(hidden, dist_process_group, reduce_dhidden)
        options["parallel"] = VocabParallel(dist_process_group, reduce_dhidden=reduce)
    leading = tuple(hidden.shape[:-1])
    if isinstance(temperature, Tensor) and temperature.dim() == 0:
        temperature = temperature.expand(labels.shape)
    if leading != tuple(labels.shape):
        sizes, label_sizes = ([size for size in shape if size != 1] for shape in (leading, labels.shape))
        count = torch.Size(leading).numel()
        if count != labels.numel() or (len(sizes) > 1 and len(label_sizes) > 1 and sizes != label_sizes):
            raise ValueError(
                f"hidden has the leading shape {leading} and labels {tuple(labels.shape)}: flattened, their tokens do "
                "not correspond; transpose one of them"
            )
        hidden = hidden.reshape(-1, hidden.shape[-1])
        mask, temperature = flat("mask", mask, labels), flat("temperature", temperature, labels)
        labels = labels.reshape(-1)
    logprobs, entropy = LOGPROBS(
        hidden, weight, labels.long(), entropy=True, temperature=temperature, mask=mask, **options
    )
    if reduction == "sum":
        return logprobs.sum(), entropy
    return (logprobs if reduction == "none" else logprobs.mean()), entropy


class FusedLinearForPPO(nn.Module):
    """verl's module of this name. ``chunk_size`` tokens at most are in a chunk where it is given; the plan decides
    otherwise, and ``impl_backend`` chooses among verl's own."""

    options: ClassVar[Execution] = {}  # of every call, as patch_verl was given them

    def __init__(self, chunk_size: int | None = None, impl_backend: str = "torch"):
        super().__init__()
        if impl_backend not in ("torch", "liger", "triton"):
            raise ValueError(f'impl_backend must be "torch", "liger" or "triton", got {impl_backend!r}')
        self.chunk_size, self.impl_backend = chunk_size, impl_backend

    def forward(
        self, hidden_states: Tensor, vocab_weights: Tensor, input_ids: Tensor, temperature: float | Tensor = 1.0
    ) -> tuple[Tensor, Tensor]:
        """Log-probabilities and entropies of ``input_ids`` [...], as ``linear_cross_entropy`` returns them."""
        options = self.options if self.chunk_size is None else {**self.options, "chunk_tokens": self.chunk_size}
        return linear_cross_entropy(hidden_states, vocab_weights, input_ids, temperature, **options)


def reduces(hidden: Tensor, group: Any, reduce_dhidden: bool | None) -> bool:
    """True where the gradient of ``hidden`` is summed over ``group`` here, rather than by the graph that made it."""
    if reduce_dhidden is not None:
        return reduce_dhidden
    if torch.distributed.get_world_size(group) == 1 or not (hidden.requires_grad and torch.is_grad_enabled()):
        return True
    if type(hidden.grad_fn).__name__ == GATHER:
        return False
    raise ValueError(
        "hidden does not come from Megatron's gather of a sequence-parallel region, whose backward would sum its "
        "gradient over dist_process_group. Pass reduce_dhidden=True (to patch_verl, for verl's own calls) where "
        "nothing else sums it, as in tensor parallelism without sequence parallelism, or False where the graph does"
    )


def flat(name: str, value: Any, labels: Tensor) -> Any:
    """A tensor of labels' shape as [tokens]; any other value as it is."""
    if not isinstance(value, Tensor):
        return value
    if value.shape != labels.shape:
        raise ValueError(f"{name} must have the shape of labels {tuple(labels.shape)}, got {tuple(value.shape)}")
    return value.reshape(-1)


def patch_verl(*, reduce_dhidden: bool | None = None, **options: Unpack[Execution]) -> None:
    """Puts this library's head behind ``use_fused_kernels``, whichever ``impl_backend``, in this process.

    Args:
        reduce_dhidden: as in ``linear_cross_entropy``: True for Megatron's tensor parallelism without sequence
            parallelism.
        options: of every call, as in ``chunked_head.Execution`` without ``parallel``.

    Raises:
        TypeError, ValueError: for an option that is wrong by itself. ImportError: verl is not installed.

    A function that is not as in verl 0.9 stays verl's own, and a warning says what differs.
    """
    check_named(options, Execution.__annotations__.keys() - {"parallel"})
    function = functools.partial(linear_cross_entropy, reduce_dhidden=reduce_dhidden, **options)
    module = type("FusedLinearForPPO", (FusedLinearForPPO,), {"options": dict(options)})
    VERL.replace(lambda place, _: module if place[1] == module.__name__ else function)


def unpatch_verl() -> None:
    """Gives verl its functions back; without ``patch_verl`` before it, nothing happens."""
    VERL.give_back()
