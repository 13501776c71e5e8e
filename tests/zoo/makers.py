"""Configurations that are put together from others and have no defaults of their own."""

from typing import Any

import transformers

from .shrink import VOCAB, Shrinking


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
