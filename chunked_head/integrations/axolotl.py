"""Axolotl's fine-tuning and pre-training on this library's head, also with adapters, without [tokens, vocab] logits.

    plugins:
      - chunked_head.integrations.axolotl.ChunkedHeadPlugin
    chunked_head:              # optional; Axolotl checks it with the rest of the file
      memory_budget: 1GiB

``patch_model`` patches the model after adapters are added. Preference and reinforcement learning (``rl:``) raise:
TRL 1.14, which Axolotl 0.21 pins, computes these losses from logits in kernels of TRL.
"""

from typing import Any

from pydantic import BaseModel, Field, model_validator

from .frameworks import Framework
from .huggingface.model_patch import check_options
from .huggingface.patch import patch_model

BASE = "axolotl.integrations.base"
AXOLOTL = Framework(
    "axolotl", ("0.21.0",),
    {
        (BASE, "BasePlugin"): "", (BASE, "BasePlugin.get_input_args"): "",
        (BASE, "BasePlugin.post_model_load"): "cfg, model",
    },
)  # fmt: skip
TESTED_OBJECTS = AXOLOTL.tested_objects()
BasePlugin: Any = TESTED_OBJECTS.get((BASE, "BasePlugin"), object)
OPTIONS_KEY = "chunked_head"  # key of Axolotl's configuration
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
        """Returns ``data``, the configuration. ValueError for wrong options, for another library's head beside this
        one, and for losses that do not use the model's head."""
        try:
            check_options(data.get(OPTIONS_KEY) or {})
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
    """A plugin of Axolotl that patches the model of a run. The module's docstring says how to configure the plugin."""

    def get_input_args(self) -> str:
        return f"{__name__}.{ChunkedHeadArgs.__name__}"

    def post_model_load(self, cfg: Any, model: Any) -> None:
        """Patches the model. Axolotl calls this method after it adds adapters, and before it makes a trainer."""
        patch_model(model, when="always", **dict(cfg.get(OPTIONS_KEY) or {}))


if len(TESTED_OBJECTS) < len(AXOLOTL.parameters_by_path):  # a plugin that does nothing
    ChunkedHeadPlugin = type("ChunkedHeadPlugin", (BasePlugin,), {})  # type: ignore[assignment, misc]
