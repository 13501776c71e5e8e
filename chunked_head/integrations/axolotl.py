"""Axolotl on this library's head: SFT, DPO, KTO and GRPO, with adapters or without, and no [tokens, vocab] logits.

    plugins:
      - chunked_head.integrations.axolotl.ChunkedHeadPlugin
    chunked_head:              # if at all; Axolotl's validation of the file checks it
      memory_budget: 1GiB

Axolotl's own seam. The model is patched once it has its adapters (``patch_model``); for the trainers of TRL that
compute their losses from the head's weight, TRL is (``patch_trl``).
"""

from typing import Any

from .frameworks import check_version
from .huggingface import patch_model
from .huggingface.given import check_options

check_version("axolotl", "0.21", "0.22")

from axolotl.integrations.base import BasePlugin  # noqa: E402
from pydantic import BaseModel, Field, model_validator  # noqa: E402

KEY = "chunked_head"
BY_TRL = ("dpo", "ipo", "kto", "grpo")  # values of rl whose trainers take the head's weight, not logits
TRL_OPTIONS = ("memory_budget", "chunk_tokens", "accumulate_dtype", "deterministic", "backend")
OTHERS = ("cut_cross_entropy", "liger_cross_entropy", "liger_fused_linear_cross_entropy", "chunked_cross_entropy")


class ChunkedHeadArgs(BaseModel):
    """What Axolotl's configuration may have beside its own."""

    chunked_head: dict[str, Any] | None = Field(
        default=None,
        json_schema_extra={"description": "Options of chunked_head's patch_model, such as memory_budget: 1GiB"},
    )

    @model_validator(mode="before")
    @classmethod
    def check_chunked_head(cls, data: Any) -> Any:
        """Raises for options that are wrong, and for heads of others beside this one."""
        rl = str(getattr(data.get("rl"), "value", data.get("rl")))
        try:
            check_options(data.get(KEY) or {})
        except TypeError as error:
            raise ValueError(str(error)) from error  # pydantic reports this one
        for name in OTHERS:
            if data.get(name):
                raise ValueError(f"{name} is another head than ChunkedHeadPlugin's; leave one of the two out")
        if rl in BY_TRL:
            unused = sorted(set(data.get(KEY) or {}) - set(TRL_OPTIONS))
            if unused:
                raise ValueError(
                    f"chunked_head.{unused[0]} does not go with rl: {rl}; options are {', '.join(TRL_OPTIONS)}"
                )
        return data


class ChunkedHeadPlugin(BasePlugin):
    """Axolotl's plugin; see the module's text for what a configuration has."""

    def get_input_args(self) -> str:
        """Where Axolotl finds the options that its validation is to know."""
        return f"{__name__}.{ChunkedHeadArgs.__name__}"

    def post_model_load(self, cfg: Any, model: Any) -> None:
        """Once a model has its adapters, before a trainer is made."""
        options = dict(cfg.get(KEY) or {})
        if str(getattr(cfg.get("rl"), "value", cfg.get("rl"))) in BY_TRL:
            from .trl import patch_trl

            patch_trl(**options)
        else:
            patch_model(model, when="always", **options)

    def post_train_unload(self, cfg: Any) -> None:
        """TRL is as it was, for the next run in this process."""
        from .trl import unpatch_trl

        unpatch_trl()
