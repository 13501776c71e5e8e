"""Functions with the names and signatures of verl's fused log-probabilities, computed by this library's head.

    from chunked_head.integrations.verl import patch_verl
    patch_verl(memory_budget="1GiB")

has to run before a worker builds its model, with ``actor_rollout_ref.model.use_fused_kernels=True``. The setting
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
    {  # verl looks up these names at every call
        ("verl.utils.kernel.linear_cross_entropy", "linear_cross_entropy"):
            "hidden, weight, labels, temperature, reduction, dist_process_group",
        ("verl.utils.experimental.torch_functional", "FusedLinearForPPO"):
            "hidden_states, vocab_weights, input_ids, temperature",
    },
    module="verl",
    importing_modules=("verl.models.mcore.model_forward_fused", "verl.models.mcore.model_forward_1f1b_overlap"),
)  # fmt: skip
# autograd node of Megatron's gather_from_sequence_parallel_region; the node sums gradients over the ranks
GATHER_BACKWARD = "_GatherFromSequenceParallelRegionBackward"
TRAINER_LOGPROBS = LogprobsOfTrainer()  # ``linear_logprobs`` for verl's losses


def linear_cross_entropy(
    hidden: Tensor,  # [..., hidden]
    weight: Tensor,  # [vocab, hidden], under tensor parallelism this rank's rows
    labels: Tensor,  # [...] int64
    temperature: float | Tensor = 1.0,
    reduction: str = "none",  # of the log-probabilities
    dist_process_group: Any = None,  # ranks that share the weight's rows
    *,
    mask: Tensor | None = None,  # bool [...]
    reduce_dhidden: bool | None = None,  # this function sums the gradient of ``hidden`` over the ranks
    **options: Unpack[Execution],
) -> tuple[Tensor, Tensor]:
    """Log-probabilities of ``labels`` and entropies, both fp32 and differentiable, with verl's signature.

    Args:
        hidden, labels: tokens are in the same order in both. Leading dimensions may differ by dimensions of 1, as in
            Megatron's [sequence, 1, hidden] and [1, sequence], or by flattening.
        temperature: divides the logits: a number, a 0-d tensor, or a tensor of labels' shape.
        reduction: of the log-probabilities: ``"none"``, ``"sum"`` or ``"mean"``. Entropies are always per token.
        dist_process_group: ranks that hold consecutive rows of the weight. All ranks hold the same number of rows.
        mask: bool, in the shape of labels: tokens that count, such as those of responses. Other tokens, and tokens
            whose label is -100, have value 0 and no gradient; with ``skip_ignored=True`` they cost no matmul.
        reduce_dhidden: True: this function sums the gradient of ``hidden`` over ``dist_process_group``. False: the
            graph that made ``hidden`` sums it, as the backward of Megatron's gather of sequences does. None: False if
            Megatron's gather made ``hidden``; otherwise ValueError, since the gradient could be wrong.
        options: as in ``chunked_head.Execution``.

    Returns:
        ``(logprobs, entropy)``, in the shape of labels if hidden has the same leading shape, else flat [tokens].
    """
    if reduction not in ("none", "sum", "mean"):
        raise ValueError(f'reduction must be "none", "sum" or "mean", got {reduction!r}')
    if dist_process_group is not None:
        if "parallel" in options:
            raise ValueError("parallel is what dist_process_group says already; leave one of them out")
        reduces_dhidden = sums_dhidden(hidden, dist_process_group, reduce_dhidden)
        options["parallel"] = VocabParallel(dist_process_group, reduce_dhidden=reduces_dhidden)
    leading_shape = tuple(hidden.shape[:-1])
    if isinstance(temperature, Tensor) and temperature.dim() == 0:
        temperature = temperature.expand(labels.shape)
    if leading_shape != tuple(labels.shape):
        sizes, label_sizes = ([size for size in shape if size != 1] for shape in (leading_shape, labels.shape))
        num_tokens = torch.Size(leading_shape).numel()
        if num_tokens != labels.numel() or (len(sizes) > 1 and len(label_sizes) > 1 and sizes != label_sizes):
            raise ValueError(
                f"hidden has the leading shape {leading_shape} and labels {tuple(labels.shape)}: flattened, their "
                "tokens do not correspond; transpose one of them"
            )
        hidden = hidden.reshape(-1, hidden.shape[-1])
        mask, temperature = flat_tokens("mask", mask, labels), flat_tokens("temperature", temperature, labels)
        labels = labels.reshape(-1)
    logprobs, entropy = TRAINER_LOGPROBS(
        hidden, weight, labels.long(), entropy=True, temperature=temperature, mask=mask, **options
    )
    if reduction == "sum":
        return logprobs.sum(), entropy
    return (logprobs if reduction == "none" else logprobs.mean()), entropy


class FusedLinearForPPO(nn.Module):
    """A module with the arguments of verl's module of this name. ``chunk_size``: number of tokens in a chunk; None: the
    plan decides. ``impl_backend``, which chooses among verl's kernels, is checked and has no effect."""

    options: ClassVar[Execution] = {}  # options of every call; patch_verl makes a subclass that has others

    def __init__(self, chunk_size: int | None = None, impl_backend: str = "torch"):
        super().__init__()
        if impl_backend not in ("torch", "liger", "triton"):
            raise ValueError(f'impl_backend must be "torch", "liger" or "triton", got {impl_backend!r}')
        self.chunk_size, self.impl_backend = chunk_size, impl_backend

    def forward(
        self, hidden_states: Tensor, vocab_weights: Tensor, input_ids: Tensor, temperature: float | Tensor = 1.0
    ) -> tuple[Tensor, Tensor]:
        """Log-probabilities of ``input_ids`` [...], and entropies, as ``linear_cross_entropy`` returns them."""
        options = self.options if self.chunk_size is None else {**self.options, "chunk_tokens": self.chunk_size}
        return linear_cross_entropy(hidden_states, vocab_weights, input_ids, temperature, **options)


def sums_dhidden(hidden: Tensor, group: Any, reduce_dhidden: bool | None) -> bool:
    """True if this library has to sum the gradient of ``hidden`` over ``group``. False if the graph that made
    ``hidden`` sums it. ValueError if it is not known which."""
    if reduce_dhidden is not None:
        return reduce_dhidden
    if torch.distributed.get_world_size(group) == 1 or not (hidden.requires_grad and torch.is_grad_enabled()):
        return True
    if type(hidden.grad_fn).__name__ == GATHER_BACKWARD:
        return False
    raise ValueError(
        "hidden does not come from Megatron's gather of a sequence-parallel region, whose backward would sum its "
        "gradient over dist_process_group. Pass reduce_dhidden=True (to patch_verl, for verl's own calls) where "
        "nothing else sums it, as in tensor parallelism without sequence parallelism, or False where the graph does"
    )


def flat_tokens(name: str, value: Any, labels: Tensor) -> Any:
    """Flattens ``value`` to [tokens]; returns ``value`` if it is no tensor. ValueError for a tensor in
    another shape than labels. ``name``: name of the argument, for errors."""
    if not isinstance(value, Tensor):
        return value
    if value.shape != labels.shape:
        raise ValueError(f"{name} must have the shape of labels {tuple(labels.shape)}, got {tuple(value.shape)}")
    return value.reshape(-1)


def patch_verl(*, reduce_dhidden: bool | None = None, **options: Unpack[Execution]) -> None:
    """Makes ``use_fused_kernels`` use this library's head in this process, for every ``impl_backend``.

    Args:
        reduce_dhidden: as in ``linear_cross_entropy``. True for Megatron's tensor parallelism without sequence
            parallelism.
        options: options of every call, as in ``chunked_head.Execution`` without ``parallel``.

    Raises:
        TypeError, ValueError: an option is wrong for every call. ImportError: verl is not installed.

    A function whose parameters differ from those of verl 0.9 is not replaced, and a warning says how they differ.
    """
    check_named(options, Execution.__annotations__.keys() - {"parallel"})
    function = functools.partial(linear_cross_entropy, reduce_dhidden=reduce_dhidden, **options)
    module_class = type("FusedLinearForPPO", (FusedLinearForPPO,), {"options": dict(options)})
    VERL.replace(lambda object_path, _: module_class if object_path[1] == module_class.__name__ else function)


def unpatch_verl() -> None:
    """Undoes ``patch_verl``. Nothing happens if verl is not patched."""
    VERL.restore()
