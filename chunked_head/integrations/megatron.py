"""Megatron's GPTModel on this library's head, by the model's own hook behind the decoder (megatron-core from 0.18 on).

    from chunked_head.integrations.megatron import OutputProcessor
    processor = OutputProcessor(memory_budget="1GiB")
    losses = model(tokens, position_ids, attention_mask, labels=labels, loss_mask=loss_mask, output_processor=processor)

or ``attach_head(model)`` once, after which every forward with labels has it. Vocabulary- and sequence-parallel as the
model's output layer is. Values are Megatron's, but for logits that ours does not round to 16 bits.
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

MODEL = ("megatron.core.models.gpt.gpt_model", "GPTModel")
MEGATRON = Framework(
    "megatron-core", ("0.18.0", "0.19.2"),
    {MODEL: "input_ids, position_ids, attention_mask, decoder_input, labels, *, output_processor, inference_context"},
    module="megatron.core",
)  # fmt: skip
# output layers whose logits are the product with their weight and nothing else
PLAIN = ("megatron.core.tensor_parallel.layers",)
UNREAD = {  # further arguments that the model gives its hook in the tested versions
    "input_ids", "position_ids", "attention_mask", "decoder_input", "packed_seq_params", "runtime_gather_output",
    "compute_language_model_loss", "scale_logits",
}  # fmt: skip
REFUSED = ("parallel", "bias", "shift", "ignore_index", "logit_scale")  # the model says what they are


class OutputProcessor:
    """Processor that ``GPTModel.forward(output_processor=)`` calls with the decoder's hidden states.

    Args:
        logprobs: False returns losses per token [batch, sequence], fp32, as the model does where it has labels; True
            log-probabilities of the labels.
        entropy: with ``logprobs``, returns ``(logprobs, entropy)``.
        temperature: of the log-probabilities; a number, or [batch, sequence].
        reduction: ``"none"``, or ``"sum"``: one number, the losses' sum weighted by ``loss_mask``, for a loss function
            of one's own. Gradients are then made in the forward pass: three matmuls rather than four.
        options: as in ``chunked_head.Execution``, and ``softcap``. ``accumulate_into="main_grad"`` adds the weight's
            gradient where Megatron's own layer does; with ``reduction="sum"`` it promises an upstream gradient of 1.

    A temperature of one batch is a processor of its own for that call. Where ``loss_mask`` is 0, values and gradients
    are 0. Of a model with MTP this is the main loss: Megatron computes those of the further tokens before the hook,
    from logits.
    """

    def __init__(
        self,
        *,
        logprobs: bool = False,
        entropy: bool = False,
        temperature: float | Tensor = 1.0,
        reduction: str = "none",
        **options: Unpack[HeadOptions],
    ):
        check_named(options, HeadOptions.__annotations__.keys() - set(REFUSED))
        choice("OutputProcessor", "reduction", reduction, ("none", "sum"))
        flag("logprobs", logprobs)
        flag("entropy", entropy)
        CHECKS["temperature"](temperature)
        tempered = isinstance(temperature, Tensor) or temperature != 1.0
        refuse({
            "entropy and temperature go with logprobs=True; Megatron's loss has neither":
                not logprobs and (entropy or tempered),
            'logprobs=True are per token; leave reduction="none"': logprobs and reduction != "none",
        })  # fmt: skip
        self.logprobs, self.entropy, self.temperature = logprobs, entropy, temperature
        self.reduction, self.options = reduction, dict(options)

    def __call__(
        self,
        *,
        hidden_states: Tensor,  # [sequence, batch, hidden], of this rank's part of the sequence where that is sharded
        output_layer: nn.Module,
        output_weight: Tensor | None,  # [vocab / ranks, hidden]
        labels: Tensor | None,  # [batch, sequence]
        loss_mask: Tensor | None,  # [batch, sequence]
        context: Any,
        config: Any,
        inference_context: Any,
        **unread: Any,
    ) -> Any:
        if unread.keys() - UNREAD:
            new = ", ".join(sorted(unread.keys() - UNREAD))
            warnings.warn(f"Megatron gives output_processor {new} too, which chunked_head does not read", stacklevel=2)
        refuse({
            "output_processor_context must be None: OutputProcessor has temperature=, logprobs= and entropy=":
                context is not None,
            "output_processor needs labels, and no inference_context; leave it out where logits are wanted":
                labels is None or inference_context is not None,
        })  # fmt: skip
        check_layer(output_layer, config, "softcap" in self.options)
        scale = float(config.mup_output_mult) if getattr(config, "use_mup", False) else 1.0
        compute = functools.partial(self.values, output_layer, labels, loss_mask, scale)
        return call_through(output_layer, compute, hidden_states, output_weight)

    def values(
        self, layer: Any, labels: Any, loss_mask: Tensor | None, scale: float, hidden: Tensor, weight: Tensor | None
    ) -> Any:
        """Values that the hook returns, of operands that the layer's hooks have made ready."""
        weight, layout = layer.weight if weight is None else weight, Layout(layer)
        bias = None if getattr(layer, "skip_bias_add", False) else getattr(layer, "bias", None)
        target = layout.local(labels.t())
        head: dict[str, Any] = {**self.options, "bias": bias, "logit_scale": scale, "parallel": layout.parallel}
        weights = None if loss_mask is None else layout.local(loss_mask.t())
        if self.logprobs:
            temperature = self.temperature
            if isinstance(temperature, Tensor):
                temperature = layout.local(temperature.t())
            mask = None if weights is None else weights != 0
            values = linear_logprobs(
                hidden, weight, target, entropy=self.entropy, temperature=temperature, mask=mask, **head
            )
            if isinstance(values, Tensor):
                return layout.all_tokens(values)
            return tuple(layout.all_tokens(value) for value in values)
        if weights is not None:
            target = target.masked_fill(weights == 0, -100)
        if self.reduction == "none":
            return layout.all_tokens(linear_cross_entropy(hidden, weight, target, reduction="none", **head))
        factors = None if weights is None else weights.float()
        return linear_cross_entropy(hidden, weight, target, reduction="sum", token_weights=factors, **head)


class Layout:
    """Layout of an output layer's operands over the ranks of its tensor-parallel group."""

    def __init__(self, layer: Any):
        self.group = getattr(layer, "tp_group", None)
        self.ranks = 1 if self.group is None else torch.distributed.get_world_size(self.group)
        self.sharded = self.ranks > 1 and bool(layer.sequence_parallel)
        self.parallel = None
        if self.ranks > 1:
            # where a layer does not sum its input's gradient, the layer before does
            sums = self.sharded or not layer.disable_grad_reduce
            self.parallel = VocabParallel(self.group, sequence_sharded=self.sharded, reduce_dhidden=sums)

    def local(self, values: Tensor) -> Tensor:
        """This rank's part of values of all tokens [sequence, ...]."""
        return values.chunk(self.ranks)[torch.distributed.get_rank(self.group)] if self.sharded else values

    def all_tokens(self, values: Tensor) -> Tensor:
        """Values of all tokens [batch, sequence], of this rank's part of them [sequence, batch]."""
        values = Gathered.apply(values, self.group) if self.sharded else values
        return values.t().contiguous()


class Gathered(torch.autograd.Function):
    """Every rank's values along the first dimension. All ranks compute the same from them: each takes its part of the
    gradient, without a message."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, group: Any) -> Tensor:
        ctx.group, ranks = group, torch.distributed.get_world_size(group)
        gathered = values.new_empty(ranks * values.shape[0], *values.shape[1:])
        torch.distributed.all_gather_into_tensor(gathered, values.contiguous(), group=group)
        return gathered

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        ranks = torch.distributed.get_world_size(ctx.group)
        return gradient.chunk(ranks)[torch.distributed.get_rank(ctx.group)].contiguous(), None


def check_layer(layer: Any, config: Any, capped: bool) -> None:
    """ValueError where an output layer does more than a product, its weight is sharded over one more group, or Megatron
    makes the weight's gradient from what the layer stores."""
    place = inspect.getmodule(type(layer).forward)
    if not capped and ("forward" in vars(layer) or place is None or place.__name__ not in PLAIN):
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
        model: a GPTModel, or a wrapper (DDP, Float16Module) or list of them. Models without an output layer, those of
            other pipeline stages, stay as they are.

    Returns:
        ``model``, so that it can be a pre-wrap hook of Megatron-Bridge's model provider; as it was, with a warning,
        where GPTModel has other arguments than in the tested versions.

    Raises:
        ValueError: a model is none that takes an output_processor. TypeError, ValueError: as ``OutputProcessor``.
        ImportError: megatron-core is not installed.
    """
    processor = OutputProcessor(**options)
    if not MEGATRON.fits():
        return model

    def add(_: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
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
            model_chunk.register_forward_pre_hook(add, with_kwargs=True)
    return model
