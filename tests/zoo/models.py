"""One small model of any class of transformers, with seeded weights, and inputs for it; nothing is downloaded."""

import contextlib
import inspect
from collections.abc import Iterator
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from . import exceptions
from .shrink import FIRST_WORD, LAST_WORD, VOCAB, Shrinking

BATCH, LENGTH = 2, 8
LARGEST = 6_000_000  # parameters: more means that a rule is missing
IGNORED = -100
TIMM = ("timm_wrapper", "timm_backbone", "gemma3n_vision")
DECODERS = ("CausalLM", "LMHeadModel", "Decoder", "ModelWithLMHead")


# ---- configurations that are put together from others and have no defaults of their own


def small(name: str, **attributes: Any) -> dict[str, Any]:
    """A small configuration by its class's name, with attributes."""
    return Shrinking().shrink(getattr(transformers, name)()).to_dict() | attributes


def composed(name: str, encoder: str) -> Any:
    """An encoder with BERT's decoder."""
    decoder = small("BertConfig", is_decoder=True, add_cross_attention=True)
    config = getattr(transformers, name)(encoder=small(encoder), decoder=decoder)
    config.decoder_start_token_id, config.pad_token_id, config.vocab_size = 1, 0, VOCAB
    return config


def musicgen(name: str, decoder: str) -> Any:
    parts = {"text_encoder": small("T5Config"), "audio_encoder": small("EncodecConfig"), "decoder": small(decoder)}
    config = getattr(transformers, name)(**parts)
    config.decoder.decoder_start_token_id = 1
    return config


def granite_vision() -> Any:
    text = small("Granite4VisionTextConfig", model_type="granite4_vision_text")
    others = Shrinking().shrink(transformers.Granite4VisionConfig()).to_dict()
    return transformers.Granite4VisionConfig(**others | {"text_config": text})


MAKERS = {
    "EncoderDecoderModel": lambda: composed("EncoderDecoderConfig", "BertConfig"),
    "SpeechEncoderDecoderModel": lambda: composed("SpeechEncoderDecoderConfig", "Wav2Vec2Config"),
    "VisionEncoderDecoderModel": lambda: composed("VisionEncoderDecoderConfig", "ViTConfig"),
    "MusicgenForConditionalGeneration": lambda: musicgen("MusicgenConfig", "MusicgenDecoderConfig"),
    "MusicgenMelodyForConditionalGeneration": lambda: musicgen("MusicgenMelodyConfig", "MusicgenMelodyDecoderConfig"),
    "CsmDepthDecoderForCausalLM": lambda: Shrinking().shrink(transformers.CsmDepthDecoderConfig()),
    "ClvpForCausalLM": lambda: Shrinking().shrink(transformers.ClvpDecoderConfig()),
    "Granite4VisionForConditionalGeneration": granite_vision,
}


def parameters_of(forward: Any) -> dict[str, inspect.Parameter]:
    """Of a forward, by name."""
    with contextlib.suppress(TypeError, ValueError):
        return dict(inspect.signature(forward).parameters)
    return {}


class NotBuilt(Exception):
    """Why there is no small model of a class."""


def configuration(model_class: Any) -> Any:
    """A small configuration of a model's class."""
    make = MAKERS.get(model_class.__name__)
    config = Shrinking().shrink(model_class.config_class()) if make is None else make()
    if hasattr(config, "is_decoder") and model_class.__name__.endswith(DECODERS):
        config.is_decoder = True
    return config


def build(model_class: Any) -> nn.Module:
    """A small model in fp32 on the CPU, in training mode, without dropout; the same at every call.

    Raises:
        NotBuilt: where it would be large. Whatever the class raises.
    """
    config = configuration(model_class)
    with without_timm():
        return made(model_class, config)


@contextlib.contextmanager
def without_timm() -> Iterator[None]:
    """Vision towers of the package timm, which is not needed for text, are empty."""
    auto: Any = transformers.AutoModel
    plain = auto.from_config.__func__

    def from_config(cls: Any, config: Any, **options: Any) -> Any:
        return nn.Identity() if config.model_type in TIMM else plain(cls, config, **options)

    auto.from_config = classmethod(from_config)
    try:
        yield
    finally:
        auto.from_config = classmethod(plain)


def made(model_class: Any, config: Any) -> nn.Module:
    """The model of a configuration, unless it is large."""
    size = 0
    with contextlib.suppress(RuntimeError), torch.device("meta"):  # some compute with tensors while they are made
        size = sum(parameter.numel() for parameter in model_class(config).parameters())
    if size > LARGEST:
        raise NotBuilt(f"{size / 1e6:.0f}M parameters after shrinking")
    torch.manual_seed(0)
    model = model_class(config).float()
    enliven(model)
    return model.train()


def enliven(model: nn.Module) -> None:
    """Weights over the vocabulary that make logits of order 1, and biases that are not 0: else no scale, cap or bias of
    the head would show. Dropout that no configuration names is taken out."""
    torch.manual_seed(1)
    with torch.no_grad():
        for _, value in [*model.named_parameters(), *model.named_buffers()]:
            if not value.is_floating_point() or value.numel() == 0 or value.dim() == 0:
                continue
            if value.dim() == 2 and value.shape[0] == VOCAB:
                value.normal_(std=0.3)
            elif value.shape[-1] == VOCAB and value.numel() == VOCAB:
                value.normal_()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0


def inputs(model: nn.Module) -> dict[str, Tensor]:
    """What the model's forward takes: tokens with padding, labels of which some are ignored, a decoder's tokens."""
    takes, generator = parameters_of(type(model).forward), torch.Generator().manual_seed(2)

    def words(*shape: int) -> Tensor:
        return torch.randint(FIRST_WORD, LAST_WORD, shape, generator=generator)

    tokens, mask = words(BATCH, LENGTH), torch.ones(BATCH, LENGTH, dtype=torch.long)
    mask[1, -2:] = 0
    labels = words(BATCH, LENGTH)  # not the tokens, which some models see: a loss near 0 is all rounding
    labels[0, :3] = IGNORED
    labels[1, -2:] = IGNORED
    given = {"input_ids": tokens, "attention_mask": mask, "labels": labels, "decoder_input_ids": words(BATCH, LENGTH)}
    given = {name: value for name, value in given.items() if name in takes}
    make = exceptions.INPUTS.get(type(model).__name__)
    return given if make is None else make(model, given)
