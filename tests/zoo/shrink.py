"""Any configuration of transformers made small: by the names of its attributes, through its sub-configurations."""

import copy
import inspect
import re
from typing import Any

from transformers import PretrainedConfig as Configuration

from . import exceptions

VOCAB = 101  # odd, and no multiple of anything
WIDTH = 64
# Tokens that mean something (images, padding, ends) keep ids below FIRST_WORD or are sent above LAST_WORD, so that what
# the inputs are drawn from means nothing.
FIRST_WORD, LAST_WORD = 12, 60

# The first pattern that is found in a name decides. A number: no larger than this. None: as it is.
SIZES: tuple[tuple[str, float | None], ...] = (
    (r"rope_theta|theta|_base$|_rate$|max_distance|_bias_max|_period$|interval|_every_|_offset$|_scale|factor", None),
    (r"type_vocab_size|token_type|num_channels|in_channels|in_chans|kernel|stride|conv_size|merge_size|temporal", None),
    (r"rotary_dim", 8),
    (r"num_filters|expert_num", 4),
    (r"depths", 1),
    (r"codebook_size$", 64),
    (r"vocab|n_words", VOCAB),
    (r"kv_shared_layers|nextn_predict|num_mtp|mtp_num", 0),
    (r"first_k_dense|dense_layers|num_dense", 1),
    (r"n_group$|topk_group|shared_experts", 1),
    (r"index_topk|index_kpool|hash", None),
    (r"(num|n)_?\w*experts_per_tok|top_?k|num_experts_per|moe_k$|num_selected", 2),
    (r"experts|moe_num", 4),
    (r"kv_heads|key_value_heads|num_groups|n_groups|query_groups|global_kv", 2),
    (r"head_dim$|d_kv$|kv_channels|head_size|dim_head|d_head|v_head|qk_\w+_dim|key_dim|value_dim|index_head", 16),
    (r"lora_rank|_rank$|lora_dim", 16),
    (r"mamba_n_heads|mamba_num_heads|n_mamba_heads", 8),
    (r"heads?$|n_head|attention_heads", 4),
    (r"layers?$|n_layer|depth$|num_blocks|hidden_groups|_layers_", 2),
    (r"state_size|d_state|ssm_state", 8),
    (r"image_size|resolution|crop_size|img_size", 32),
    (r"patch_size|patch_len", 8),
    (r"sliding_window|window|chunk_size|block_size|block_len|attention_context", 8),
    (r"position|n_ctx|max_\w*len|context_length|seq_len|max_seq|n_positions|max_source|max_target", 128),
    (r"num_quer|num_latents|n_latents|query_tokens|num_mel|mel_bins|tokens_per_image|tokens_per", 16),
    (r"dim|size|d_model|d_latents|d_ff|embd|inner|width|channels|hidden|intermediate|ffn|units|features", WIDTH),
)  # fmt: skip
TOKENS = re.compile(r"(_ids?|_index|_indices|_token)$")
DROPS = re.compile(r"drop(?!less)")
KINDS_OF_LAYERS = re.compile(
    r"layer_types|layers_block_type|block_types|attn_layers|attention_types|mixer_types|layout"
)

# What the logits go through, and what is added to the loss: none of them neutral.
TAIL: dict[str, Any] = {
    "logit_scale": 0.7, "logits_scaling": 1.3, "lm_head_multiplier": 0.6, "final_logit_softcapping": 3.0,
    "logits_soft_cap": 3.0, "output_logit_soft_cap": 3.0, "final_logits_soft_cap": 3.0, "logits_softcap": 3.0,
    "logit_cap": 3.0, "logits_scale": 0.7, "output_multiplier": 0.8, "logits_mup_width_multiplier": 1.7,
    "output_router_logits": True, "output_scale": 0.8, "unpadded_vocab_size": 97,
    "use_cache": False, "apply_spec_augment": False,
}  # fmt: skip


class Shrinking:
    """One model's configuration: a token keeps one meaning over all of its sub-configurations."""

    def __init__(self) -> None:
        self.tokens: dict[int, int] = {}

    def token(self, value: int) -> int:
        if value < FIRST_WORD:
            return value
        return self.tokens.setdefault(value, VOCAB - 1 - len(self.tokens) % (VOCAB - LAST_WORD - 1))

    def value(self, name: str, value: Any, layers: int) -> Any:
        """An attribute of a configuration with ``layers`` layers, made small."""
        if name in TAIL:
            return TAIL[name]
        if isinstance(value, (list, tuple)):
            return self.sequence(name, value, layers)
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            return value
        if DROPS.search(name):
            return type(value)(0)
        if isinstance(value, float):
            return value
        if TOKENS.search(name):
            return self.token(value)
        return limited(name, value)

    def sequence(self, name: str, values: Any, layers: int) -> Any:
        """A list: one entry for each layer, tokens, or sizes."""
        if KINDS_OF_LAYERS.search(name) and all(isinstance(one, str) for one in values):
            kinds = list(dict.fromkeys(values))[:2]
            return type(values)((kinds * 2)[:2])
        if len(values) == layers and layers > 4:
            values = values[:2]
        if TOKENS.search(name):
            return type(values)(self.token(one) if isinstance(one, int) else one for one in values)
        return type(values)(self.value(name, one, layers) for one in values)

    def shrink(self, config: Configuration) -> Configuration:
        """A configuration of the same class, made small."""
        layers = next((read(config, name) for name in LAYERS if isinstance(read(config, name), int)), 0)
        parts = {name: self.shrink(getattr(config, name)) for name in sub_configurations(config)}
        given: dict[str, Any] = {}
        for name, parameter in parameters(type(config)).items():
            if name not in parts and parameter.default is not inspect.Parameter.empty:
                given[name] = self.given(name, parameter.default, read(config, name), layers)
        given = {name: value for name, value in given.items() if not isinstance(value, Configuration)}
        if "kv_lora_rank" in given and "num_attention_heads" in given:  # keys are expanded to as many heads
            given |= {"num_key_value_heads": given["num_attention_heads"]} if "num_key_value_heads" in given else {}
        own = copy.deepcopy(exceptions.ATTRIBUTES.get(type(config).__name__, {}))
        parts = {name: part for name, part in parts.items() if name not in own}
        given |= own
        made: Any = type(config)
        try:
            return made(**given, **{name: part.to_dict() for name, part in parts.items()})
        except (TypeError, ValueError):  # some take their parts as they are alone
            return made(**given, **parts)

    def given(self, name: str, default: Any, value: Any, layers: int) -> Any:
        """What to make a configuration with, for an argument's default and what came of it in the full size."""
        if default is not None:
            return self.value(name, default if value is None else value, layers)
        if KINDS_OF_LAYERS.search(name) and isinstance(value, (list, tuple)):
            return self.sequence(name, value, layers)
        if name in TAIL:
            return TAIL[name]
        if isinstance(value, dict) and "mrope_section" in value:
            parts = len(value["mrope_section"])
            return value | {"mrope_section": [WIDTH // 8 - 2 * (parts - 1)] + [2] * (parts - 1)}
        # what is None by default, the configuration works out from the rest; these some do not
        return UNSETTLED.get(name) if value is None else None


LAYERS = ("num_hidden_layers", "num_layers", "n_layer", "n_layers", "encoder_layers", "depth")


UNSETTLED = {"head_dim": 16, "num_key_value_heads": 2}


def read(config: Configuration, name: str) -> Any:
    """An attribute, or None where a configuration has none or refuses to tell."""
    try:
        return getattr(config, name, None)
    except Exception:
        return None


def limited(name: str, value: int) -> int:
    for pattern, limit in SIZES:
        if re.search(pattern, name):
            return value if limit is None else min(value, int(limit))
    return value


def sub_configurations(config: Configuration) -> list[str]:
    """Names of the attributes that are configurations."""
    named = list(getattr(type(config), "sub_configs", {}))
    others = [name for name, value in vars(config).items() if isinstance(value, Configuration) and name not in named]
    return [name for name in (*named, *others) if isinstance(getattr(config, name, None), Configuration)]


BASE = set(inspect.signature(Configuration).parameters)


def parameters(config_class: Any) -> dict[str, inspect.Parameter]:
    """What a configuration's class takes, beside what all of them take; special tokens are not among the latter."""
    found = inspect.signature(config_class).parameters
    plain = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return {
        name: parameter
        for name, parameter in found.items()
        if parameter.kind in plain and (name not in BASE or name.endswith("_token_id"))
    }
