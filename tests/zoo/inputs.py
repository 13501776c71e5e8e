"""Inputs beside text or instead of it, for models that do not take text alone.

Every function takes the model and what it would be given as text, and returns what it is given.
"""

from typing import Any

import torch
from torch import Tensor

Inputs = dict[str, Tensor]
IMAGE_TOKEN, IMAGE_TOKENS = 99, 2
BATCH, LENGTH = 2, 8  # as in models.py


def image_size(config: Any) -> int:
    for part in (config, *(getattr(config, name, None) for name in ("vision_config", "encoder"))):
        size = getattr(part, "image_size", None)
        if size is not None:
            return size if isinstance(size, int) else size[0]
    return 32


def floats(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(3))


def words(*shape: int) -> Tensor:
    return torch.randint(12, 60, shape, generator=torch.Generator().manual_seed(4))


def attribute(config: Any, *names: str) -> Any:
    """The first that there is, in the configuration or its encoder's part."""
    for part in (config, *(getattr(config, name, None) for name in ("encoder_config", "audio_config", "encoder"))):
        for name in names:
            if isinstance(getattr(part, name, None), int):
                return getattr(part, name)
    return 16


def without(text: Inputs, *names: str) -> Inputs:
    return {name: value for name, value in text.items() if name not in names}


def pixels(model: Any, text: Inputs) -> Inputs:
    """An image for every text."""
    size = image_size(model.config)
    return text | {"pixel_values": floats(BATCH, 3, size, size)}


def frames(model: Any, text: Inputs) -> Inputs:
    """Two images for every text, which all of its tokens see."""
    size, mask = image_size(model.config), torch.ones(BATCH, LENGTH, 2, dtype=torch.long)
    return text | {"pixel_values": floats(BATCH, 2, 3, size, size), "image_attention_mask": mask}


def image_tokens(model: Any, text: Inputs) -> Inputs:
    """An image in the place of each text's first tokens; questions for models that take them."""
    given = pixels(model, text)
    if "Video" in type(model).__name__:
        given["pixel_values"] = given["pixel_values"][:, None]
    given["input_ids"] = given["input_ids"].clone()
    given["input_ids"][:, :IMAGE_TOKENS] = IMAGE_TOKEN
    if "Instruct" in type(model).__name__:
        given |= {"qformer_input_ids": words(BATCH, 4)}
    return given


def kosmos(model: Any, text: Inputs) -> Inputs:
    """An image in the place of each text's first tokens, by a mask."""
    mask = torch.zeros(BATCH, LENGTH, dtype=torch.bool)
    mask[:, :IMAGE_TOKENS] = True
    return pixels(model, text) | {"image_embeds_position_mask": mask}


def token_types(model: Any, text: Inputs) -> Inputs:
    """Text alone, and said to be."""
    return text | {"mm_token_type_ids": torch.zeros(BATCH, LENGTH, dtype=torch.long)}


def boxes(model: Any, text: Inputs) -> Inputs:
    """Where each token stands on a page."""
    return text | {"bbox": floats(BATCH, LENGTH, 4).sigmoid()}


def patches(model: Any, text: Inputs) -> Inputs:
    """Flattened patches of an image, each after its row and column."""
    width = 2 + model.config.vision_config.patch_embed_hidden_size
    flat = floats(BATCH, LENGTH, width)
    flat[..., :2] = torch.arange(1, LENGTH + 1)[:, None].float()
    return without(text, "input_ids", "attention_mask") | {"flattened_patches": flat}


def spectrogram(model: Any, text: Inputs) -> Inputs:
    """Audio as mel bands x frames."""
    bins = attribute(model.config, "num_mel_bins")
    length = 2 * attribute(model.config, "max_source_positions")
    return without(text, "input_ids", "attention_mask") | {"input_features": floats(BATCH, bins, length)}


def heard(model: Any, text: Inputs) -> Inputs:
    """Likewise, as long as the text beside it."""
    return text | {"input_features": floats(BATCH, attribute(model.config, "num_mel_bins"), 8 * LENGTH)}


def features(model: Any, text: Inputs) -> Inputs:
    """Audio as frames x features."""
    width = attribute(model.config, "input_feat_per_channel", "feature_projection_input_dim", "num_mel_bins")
    return without(text, "input_ids", "attention_mask") | {"input_features": floats(BATCH, 64, width)}


def samples(model: Any, text: Inputs) -> Inputs:
    """Audio as it is."""
    return without(text, "input_ids", "attention_mask") | {"input_values": floats(BATCH, 3200)}


def embeddings(model: Any, text: Inputs) -> Inputs:
    """Hidden states of another model."""
    return without(text, "input_ids") | {"inputs_embeds": floats(BATCH, LENGTH, 64)}


def characters(model: Any, text: Inputs) -> Inputs:
    """Likewise, with one character for each."""
    given = {"char_input_ids": words(BATCH, LENGTH), "char_count_per_id": torch.ones(BATCH, LENGTH, dtype=torch.long)}
    return embeddings(model, text) | given


def codebooks(model: Any, text: Inputs) -> Inputs:
    """Tokens of several codebooks, one after the other in the batch; labels with the codebook last."""
    books = attribute(model.config, "num_codebooks")
    labels = text["labels"][..., None].repeat(1, 1, books)
    return {"input_ids": words(BATCH * books, LENGTH), "labels": labels}


def decoded_codebooks(model: Any, text: Inputs) -> Inputs:
    """Likewise, of a decoder after text."""
    books = model.config.decoder.num_codebooks
    labels = text["labels"][..., None].repeat(1, 1, books)
    return text | {"decoder_input_ids": words(BATCH * books, LENGTH), "labels": labels}


def channels(model: Any, text: Inputs) -> Inputs:
    """Dia's: codebooks last in the decoder's tokens, first in the labels."""
    books = model.config.decoder_config.num_channels
    labels = text["labels"][:, None].repeat(1, books, 1).flatten(0, 1)
    return text | {"decoder_input_ids": words(BATCH, LENGTH, books), "labels": labels}


def csm(model: Any, text: Inputs) -> Inputs:
    """Csm's: codebooks last in tokens and labels."""
    books = model.config.num_codebooks
    labels = text["labels"][..., None].repeat(1, 1, books)
    return text | {"input_ids": words(BATCH, LENGTH, books), "labels": labels}


def kyutai(model: Any, text: Inputs) -> Inputs:
    """Kyutai's: text with the codebooks of what was heard beside it."""
    return text | {"input_ids": words(BATCH, LENGTH, model.config.num_codebooks + 1)}


def all_positions(model: Any, text: Inputs) -> Inputs:
    """A label for every position that the model has, whatever the text's length."""
    return text | {"labels": words(BATCH, model.config.max_position_embeddings)}


def talker(model: Any, text: Inputs) -> Inputs:
    """Hidden states with positions in time, height and width."""
    positions = torch.arange(LENGTH).expand(3, BATCH, LENGTH)
    return embeddings(model, text) | {"position_ids": positions}
