"""A loss for torchtitan on this library's head, in the place of torchtitan's ``ChunkedLossWrapper``.

    from chunked_head.integrations.torchtitan import ChunkedHeadLoss
    config = llama3_8b()  # a config function of torchtitan's registry, or of yours
    config.loss = ChunkedHeadLoss.Config()

The trainer gives the output layer to this loss, and the model returns hidden states, as with
``ChunkedLossWrapper``.
"""

from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor, nn

from ..call.options import check_options
from ..functions.cross_entropy import linear_cross_entropy
from ..parallel.groups import VocabParallel
from .frameworks import Framework, call_through

LOSS_MODULE = "torchtitan.components.loss"  # torchtitan's module of losses
TORCHTITAN = Framework(
    "torchtitan", ("0.3.0",),
    {
        (LOSS_MODULE, "BaseLoss.Config"): "*", (LOSS_MODULE, "ChunkedLossWrapper"): "config, compile_config",
        (LOSS_MODULE, "ChunkedLossWrapper.set_lm_head"): "lm_head",
        (LOSS_MODULE, "ChunkedLossWrapper.__call__"): "pred, labels, global_valid_tokens, loss_inputs",
        ("torchtitan.config", "CompileConfig"): "*", ("torchtitan.distributed.utils", "get_spmd_backend"): "",
        ("torchtitan.distributed.spmd_types", "current_spmd_mesh"): "",
        ("torchtitan.distributed.spmd_types", "spmd_mesh_size"): "axis_name",
        ("spmd_types", "no_typecheck"): "*", ("spmd_types", "is_type_checking"): "", ("spmd_types", "assert_type"): "*",
    },
    module="torchtitan",
)  # fmt: skip
IS_SUPPORTED = TORCHTITAN.has_tested_parameters()
if IS_SUPPORTED:
    import spmd_types as spmd
    from torchtitan.components.loss import BaseLoss, ChunkedLossWrapper
    from torchtitan.config import CompileConfig
    from torchtitan.distributed.spmd_types import current_spmd_mesh, spmd_mesh_size
    from torchtitan.distributed.utils import get_spmd_backend
else:

    class BaseLoss:  # type: ignore[no-redef]
        Config = object

    ChunkedLossWrapper = CompileConfig = BaseLoss


class ChunkedHeadLoss(ChunkedLossWrapper):
    """Cross-entropy of logits that the output layer would compute, summed over tokens and divided by
    ``global_valid_tokens``.

    FSDP gathers the output layer's weight once, and reduces its gradient once. The backends ``spmd_types`` and
    ``partial_dtensor`` are supported, also with tensor and context parallelism. ``compile.components = ["loss"]`` has
    no effect on this loss.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(BaseLoss.Config):
        global_vocab_size: int | None = None
        """Number of ids of the vocabulary. Needed if the ranks of a tensor-parallel ``spmd_types`` layer hold different
        numbers of ids, or if the last rows of the layer are padding. The config functions of torchtitan know it."""
        label_smoothing: float = 0.0
        z_loss: float = 0.0
        """Coefficient of the squared log-sum-exp."""
        softcap: float | None = None
        memory_budget: int | str | None = None
        """This option and those below: as in ``chunked_head.Execution``."""
        chunk_tokens: int | None = None
        accumulate_dtype: torch.dtype | None = None
        skip_ignored: bool | str = False

        def __post_init__(self) -> None:
            TORCHTITAN.require(IS_SUPPORTED, "ChunkedHeadLoss")

    def __init__(self, config: Config, *, compile_config: CompileConfig | None = None):
        names = [config_field.name for config_field in fields(config) if not config_field.name.startswith("_")]
        self.options = {name: getattr(config, name) for name in names}
        self.options["vocab_size"] = self.options.pop("global_vocab_size")
        check_options(self.options)
        self.lm_head: nn.Module | None = None

    def __call__(
        self, pred: Tensor, labels: Tensor, global_valid_tokens: Tensor | None = None, **loss_inputs: Any
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss of hidden states ``pred`` [batch, sequence, hidden] against ``labels`` [batch, sequence].

        Raises:
            TypeError: ``loss_inputs`` has arguments of other losses. ValueError: ``set_lm_head`` was not called, or the
                backend is ``full_dtensor``.
        """
        unknown_inputs = loss_inputs.keys() - {"positions"}  # the trainer passes positions to every loss
        if unknown_inputs:
            raise TypeError(
                f"ChunkedHeadLoss takes no {', '.join(sorted(unknown_inputs))}: it is a cross-entropy of tokens"
            )
        if self.lm_head is None:
            raise ValueError("ChunkedHeadLoss needs the output layer: call set_lm_head(model.lm_head) first")
        if get_spmd_backend() == "full_dtensor":
            raise ValueError('ChunkedHeadLoss does not know spmd_backend="full_dtensor"; use "spmd_types"')
        lm_head: Any = self.lm_head
        options: dict[str, Any] = dict(self.options)
        if get_spmd_backend() == "spmd_types" and spmd_mesh_size("tp") > 1:
            # each rank computes its share of the hidden states' gradient; the graph before this loss sums the shares
            options["parallel"] = VocabParallel(current_spmd_mesh().get_group("tp"), reduce_dhidden=False)
        if global_valid_tokens is None:
            options["reduction"] = "sum"
        else:
            options["normalizer"] = global_valid_tokens

        def loss_of(hidden: Tensor) -> Tensor:
            bias = getattr(lm_head, "bias", None)
            return linear_cross_entropy(hidden, lm_head.weight, labels, bias=bias, **options)

        is_type_checking = spmd.is_type_checking()
        with spmd.no_typecheck():
            loss = call_through(lm_head, loss_of, pred)
            if is_type_checking:
                spmd.assert_type(loss, {"dp": spmd.P, "cp": spmd.P, "tp": spmd.I})
        return loss, {}
