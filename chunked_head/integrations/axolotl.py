"""Axolotl's fine-tuning and pre-training on this library's head, with adapters or without: no [tokens, vocab] logits.

    plugins:
      - chunked_head.integrations.axolotl.ChunkedHeadPlugin
    chunked_head:              # if at all; Axolotl's validation of the file checks it
      memory_budget: 1GiB

The model is patched once it has its adapters (``patch_model``). Preference and reinforcement learning (``rl:``) are
refused: TRL 1.14, which Axolotl 0.21 pins, makes their losses of logits by kernels of its own.
"""

from typing import Any

from pydantic import BaseModel, Field, model_validator

from .frameworks import Framework
from .huggingface.agreement import check_options
from .huggingface.patch import patch_model

BASE = "axolotl.integrations.base"
AXOLOTL = Framework(
    "axolotl", ("0.21.0",),
    {
        (BASE, "BasePlugin"): "", (BASE, "BasePlugin.get_input_args"): "",
        (BASE, "BasePlugin.post_model_load"): "cfg, model",
    },
)  # fmt: skip
SEAMS = AXOLOTL.tested_objects()
BasePlugin: Any = SEAMS.get((BASE, "BasePlugin"), object)
KEY = "chunked_head"
OTHER_HEADS = ("cut_cross_entropy", "liger_cross_entropy", "liger_fused_linear_cross_entropy", "chunked_cross_entropy")


class ChunkedHeadArgs(BaseModel):
    """Options that this plugin adds to Axolotl's configuration."""

    chunked_head: dict[str, Any] | None = Field(
        default=None,
        json_schema_extra={"description": "Options of chunked_head's patch_model, such as memory_budget: 1GiB"},
    )

    @model_validator(mode="before")
    @classmethod
    def check_chunked_head(cls, data: Any) -> Any:
        """Raises for wrong options, for another library's head beside this one, and for losses that do not use the
        model's head."""
        try:
            check_options(data.get(KEY) or {})
        except TypeError as error:
            raise ValueError(str(error)) from error  # pydantic reports this one
        for name in OTHER_HEADS:
            if data.get(name):
                raise ValueError(f"{name} is another head than ChunkedHeadPlugin's; leave one of the two out")
        if data.get("rl"):
            raise ValueError(
                f"rl: {getattr(data['rl'], 'value', data['rl'])} has its loss made by TRL 1.14 from logits, in kernels "
                "of its own; ChunkedHeadPlugin has no part in it, leave it out"
            )
        return data


class ChunkedHeadPlugin(BasePlugin):
    """Axolotl's plugin; see the module's text for what a configuration has."""

    def get_input_args(self) -> str:
        return f"{__name__}.{ChunkedHeadArgs.__name__}"

    def post_model_load(self, cfg: Any, model: Any) -> None:
        """Patches the model. Axolotl calls it once the model has its adapters, before it makes a trainer."""
        patch_model(model, when="always", **dict(cfg.get(KEY) or {}))


if len(SEAMS) < len(AXOLOTL.uses):  # a plugin that does nothing
    ChunkedHeadPlugin = type("ChunkedHeadPlugin", (BasePlugin,), {})  # type: ignore[assignment, misc]
