"""Megatron's GPTModel on this library's head, by the model's argument ``output_processor`` (from megatron-core 0.18).

    from chunked_head.integrations.megatron import OutputProcessor
    processor = OutputProcessor(memory_budget="1GiB")
    losses = model(tokens, position_ids, attention_mask, labels=labels, loss_mask=loss_mask, output_processor=processor)

or ``attach_head(model)`` once: then every forward with labels uses a processor. If the model's output layer is
vocabulary-parallel or sequence-parallel, the head is too. Values differ only where Megatron rounds logits to 16 bits.
"""

import functools
import inspect
import warnings
from typing import Any, Unpack

import torch
from torch import Tensor, nn

from ..call.options import CHECKS, HeadOptions
from ..core.checks import choice, flag, refuse
from ..functions.cross_entropy import linear_cross_entropy
from ..functions.logprobs import linear_logprobs
from ..parallel.groups import VocabParallel
from .frameworks import Framework, call_through, check_named

MODEL_PATH = ("megatron.core.models.gpt.gpt_model", "GPTModel")
MEGATRON = Framework(
    "megatron-core", ("0.18.0", "0.19.2"),
    {
        MODEL_PATH:
            "input_ids, position_ids, attention_mask, decoder_input, labels, *, output_processor, inference_context",
    },
    module="megatron.core",
)  # fmt: skip
# modules of the output layers whose logits are the product with their weight and nothing else
PRODUCT_MODULES = ("megatron.core.tensor_parallel.layers",)
UNREAD_ARGUMENTS = {  # arguments that the model passes in the tested versions, and that OutputProcessor does not read
    "input_ids", "position_ids", "attention_mask", "decoder_input", "packed_seq_params", "runtime_gather_output",
    "compute_language_model_loss", "scale_logits",
}  # fmt: skip
REFUSED_OPTIONS = ("parallel", "bias", "shift", "ignore_index", "logit_scale")  # the model decides these


class OutputProcessor:
    """Processor that ``GPTModel.forward(output_processor=)`` calls with the decoder's hidden states.

    Args:
        logprobs: False: the processor returns losses per token [batch, sequence], fp32, as the model does for labels.
            True: it returns log-probabilities of the labels.
        entropy: with ``logprobs``, the processor returns ``(logprobs, entropy)``.
        temperature: of the log-probabilities: a number, or a tensor [batch, sequence] for the batch of the next call.
        reduction: ``"none"``, or ``"sum"``: the processor returns the sum of losses weighted by ``loss_mask``, a
            scalar. A loss function of the caller has to take the sum. Gradients are then made in the forward pass, by
            three matmuls rather than four.
        options: options of ``chunked_head.Execution``, and ``softcap``. ``accumulate_into="main_grad"`` adds the
            weight's gradient to the buffer that Megatron's own layer adds to; with ``reduction="sum"`` the upstream
            gradient must be 1.

    Values and gradients are 0 where ``loss_mask`` is 0. In a model with multi-token prediction, the processor
    returns the main loss. Megatron computes the losses of further tokens from logits, before it calls the processor.
    """

    def __init__(
        self,
        *,
        logprobs: bool = False,  # True: results are log-probabilities, not losses
        entropy: bool = False,  # True: results have entropies too
        temperature: float | Tensor = 1.0,
        reduction: str = "none",
        **options: Unpack[HeadOptions],
    ):
        check_named(options, HeadOptions.__annotations__.keys() - set(REFUSED_OPTIONS))
        choice("OutputProcessor", "reduction", reduction, ("none", "sum"))
        flag("logprobs", logprobs)
        flag("entropy", entropy)
        CHECKS["temperature"](temperature)
        has_temperature = isinstance(temperature, Tensor) or temperature != 1.0
        refuse({
            "entropy and temperature go with logprobs=True; Megatron's loss has neither":
                not logprobs and (entropy or has_temperature),
            'logprobs=True are per token; leave reduction="none"': logprobs and reduction != "none",
        })  # fmt: skip
        self.logprobs, self.entropy, self.temperature = logprobs, entropy, temperature
        self.reduction, self.options = reduction, dict(options)

    def __call__(
        self,
        *,
        hidden_states: Tensor,  # [sequence, batch, hidden], of this rank's part of a sharded sequence
        output_layer: nn.Module,
        output_weight: Tensor | None,  # [vocab / ranks, hidden]
        labels: Tensor | None,  # [batch, sequence]
        loss_mask: Tensor | None,  # [batch, sequence]
        context: Any,  # must be None
        config: Any,  # Megatron's TransformerConfig
        inference_context: Any,  # must be None
        **unread_arguments: Any,  # by name, all other arguments from Megatron
    ) -> Any:
        if unread_arguments.keys() - UNREAD_ARGUMENTS:
            new_names = ", ".join(sorted(unread_arguments.keys() - UNREAD_ARGUMENTS))
            warnings.warn(
                f"Megatron gives output_processor {new_names} too, which chunked_head does not read", stacklevel=2
            )
        refuse({
            "output_processor_context must be None: OutputProcessor has temperature=, logprobs= and entropy=":
                context is not None,
            "output_processor needs labels, and no inference_context; leave it out where logits are wanted":
                labels is None or inference_context is not None,
        })  # fmt: skip
        check_layer(output_layer, config, "softcap" in self.options)
        logit_scale = float(config.mup_output_mult) if getattr(config, "use_mup", False) else 1.0
        compute_values = functools.partial(self.values, output_layer, labels, loss_mask, logit_scale)
        return call_through(output_layer, compute_values, hidden_states, output_weight)

    def values(
        self,
        layer: Any,  # the output layer
        labels: Any,  # [batch, sequence]
        loss_mask: Tensor | None,  # [batch, sequence]
        logit_scale: float,  # factor of the logits
        hidden: Tensor,  # [sequence of this rank, batch, hidden]
        weight: Tensor | None,  # [vocab of this rank, hidden]; None: the weight of the layer
    ) -> Any:
        """The processor's result, from operands that the layer's hooks have made ready."""
        weight, rank_layout = layer.weight if weight is None else weight, RankLayout(layer)
        bias = None if getattr(layer, "skip_bias_add", False) else getattr(layer, "bias", None)
        targets = rank_layout.local_values(labels.t())
        head_options: Any = {**self.options, "bias": bias, "logit_scale": logit_scale, "parallel": rank_layout.parallel}
        token_weights = None if loss_mask is None else rank_layout.local_values(loss_mask.t())
        if self.logprobs:
            temperature = self.temperature
            if isinstance(temperature, Tensor):
                temperature = rank_layout.local_values(temperature.t())
            mask = None if token_weights is None else token_weights != 0
            values = linear_logprobs(
                hidden, weight, targets, entropy=self.entropy, temperature=temperature, mask=mask, **head_options
            )
            if isinstance(values, Tensor):
                return rank_layout.all_tokens(values)
            return tuple(rank_layout.all_tokens(value) for value in values)
        if token_weights is not None:
            targets = targets.masked_fill(token_weights == 0, -100)
        if self.reduction == "none":
            return rank_layout.all_tokens(
                linear_cross_entropy(hidden, weight, targets, reduction="none", **head_options)
            )
        fp32_weights = None if token_weights is None else token_weights.float()
        return linear_cross_entropy(
            hidden, weight, targets, reduction="sum", token_weights=fp32_weights, **head_options
        )


class RankLayout:
    """Distribution of an output layer's tokens and weight over the ranks of the layer's tensor-parallel group."""

    def __init__(self, layer: Any):
        self.group = getattr(layer, "tp_group", None)
        self.num_ranks = 1 if self.group is None else torch.distributed.get_world_size(self.group)
        self.is_sequence_sharded = self.num_ranks > 1 and bool(layer.sequence_parallel)
        self.parallel: VocabParallel | None = None
        if self.num_ranks > 1:
            # where a layer does not sum its input's gradient, the layer before does
            reduces_dhidden = self.is_sequence_sharded or not layer.disable_grad_reduce
            self.parallel = VocabParallel(
                self.group, sequence_sharded=self.is_sequence_sharded, reduce_dhidden=reduces_dhidden
            )

    def local_values(self, values: Tensor) -> Tensor:
        """Values of this rank's tokens, out of ``values`` [sequence, ...] of all tokens. If the sequence is not
        sharded, a rank has all tokens."""
        if not self.is_sequence_sharded:
            return values
        return values.chunk(self.num_ranks)[torch.distributed.get_rank(self.group)]

    def all_tokens(self, values: Tensor) -> Tensor:
        """Values [batch, sequence] of all tokens, from ``values`` [sequence, batch] of this rank's tokens."""
        values = GatheredValues.apply(values, self.group) if self.is_sequence_sharded else values
        return values.t().contiguous()


class GatheredValues(torch.autograd.Function):
    """Gathers all ranks' values along the first dimension. Every rank computes the same loss from the gathered values,
    so backward sends no message and returns this rank's slice of the gradient."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, group: Any) -> Tensor:
        ctx.group, num_ranks = group, torch.distributed.get_world_size(group)
        all_values = values.new_empty(num_ranks * values.shape[0], *values.shape[1:])
        torch.distributed.all_gather_into_tensor(all_values, values.contiguous(), group=group)
        return all_values

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        num_ranks = torch.distributed.get_world_size(ctx.group)
        return gradient.chunk(num_ranks)[torch.distributed.get_rank(ctx.group)].contiguous(), None


def check_layer(layer: Any, config: Any, has_softcap: bool) -> None:
    """ValueError if an output layer does more than a product, if the layer's weight is sharded over a second group, or
    if Megatron computes the weight's gradient from tensors that the layer stores. ``has_softcap``: the caller has
    passed ``softcap``; then the layer's forward is not checked."""
    forward_module = inspect.getmodule(type(layer).forward)
    if not has_softcap and (
        "forward" in vars(layer) or forward_module is None or forward_module.__name__ not in PRODUCT_MODULES
    ):
        raise ValueError(
            f"the output layer is a {type(layer).__name__} with a forward of its own, which may do more than multiply "
            "by its weight. Pass softcap= to OutputProcessor: the cap that it puts on logits, or None for none"
        )
    if getattr(layer, "gtp_remat_size", 1) > 1:
        raise ValueError("the output layer's weight is sharded over a GTP group, which this head does not gather")
    if getattr(config, "defer_embedding_wgrad_compute", False):
        raise ValueError("defer_embedding_wgrad_compute makes the weight's gradient from what the output layer stores; "
                         "switch it off")  # fmt: skip


def attach_head(model: Any, **options: Any) -> Any:
    """Makes every forward of a model with labels use ``OutputProcessor(**options)``, by a forward pre-hook.

    Args:
        model: a GPTModel, a wrapper of it (DDP, Float16Module), or a list of both. A model without an output
            layer, on another pipeline stage, does not change.

    Returns:
        ``model``, so that this function can be a pre-wrap hook of Megatron-Bridge's model provider. If GPTModel's
        parameters differ from those of the tested versions, ``model`` does not change, and a warning says so.

    Raises:
        ValueError: a model takes no ``output_processor``. TypeError, ValueError: an option is wrong, as in
            ``OutputProcessor``. ImportError: megatron-core is not installed.
    """
    processor = OutputProcessor(**options)
    if not MEGATRON.has_tested_parameters():
        return model

    def add_processor(_: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        # labels are the fifth positional argument
        labels = kwargs.get("labels", args[4] if len(args) > 4 else None)
        if labels is not None and kwargs.get("output_processor") is None and kwargs.get("inference_context") is None:
            kwargs = {**kwargs, "output_processor": processor}
        return args, kwargs

    for model_chunk in model if isinstance(model, list) else [model]:
        while hasattr(model_chunk, "module"):
            model_chunk = model_chunk.module
        if "output_processor" not in inspect.signature(model_chunk.forward).parameters:
            raise ValueError(
                f"{type(model_chunk).__name__}.forward takes no output_processor, as GPTModel's does; of a multimodal "
                "model pass its language_model"
            )
        if getattr(model_chunk, "post_process", True):
            model_chunk.register_forward_pre_hook(add_processor, with_kwargs=True)
    return model
