"""ms-swift on this library's head: its SFT, DFT and DPO losses without [batch, tokens, vocab] logits.

    # head.py
    from chunked_head.integrations.ms_swift import register
    register(memory_budget="1GiB")

    swift sft --external_plugins head.py --callbacks chunked_head ...

At the end of a trainer's ``__init__``, the callback patches the trainer's models (``patch_model``). Losses and
metrics are ms-swift's code on lazy logits.
"""

from typing import Any

from transformers import TrainerCallback

from .frameworks import Framework
from .huggingface.model_patch import check_options
from .huggingface.patch import patch_model

CALLBACK_NAME = "chunked_head"  # value of ``--callbacks``
SWIFT = Framework(
    "ms-swift", ("4.6.0",),
    {("swift.callbacks.mapping", "callbacks_map"): "*", ("swift.callbacks.base", "TrainerCallback"): "args, trainer"},
)  # fmt: skip
MODEL_ATTRIBUTES = ("model", "ref_model", "teacher_model")  # attributes of a trainer


def register(**options: Any) -> None:
    """Makes ``--callbacks chunked_head`` known to ms-swift. A later call replaces the options of an earlier call.

    Args:
        options: ``memory_budget``, ``chunk_tokens``, ``deterministic``, ... as in ``patch_model``.

    Raises:
        TypeError, ValueError: an option is wrong. ImportError: ms-swift is not installed.

    If ms-swift's callbacks are not as in version 4.6, a warning says so, and nothing is patched.
    """
    check_options(options)
    tested_objects = SWIFT.tested_objects()
    callbacks_map, callback_base = (tested_objects.get(object_path) for object_path in SWIFT.parameters_by_path)
    if callbacks_map is None:
        return
    if callback_base is None:
        callbacks_map[CALLBACK_NAME] = lambda args, trainer: TrainerCallback()
        return
    base_class: Any = callback_base

    class ChunkedHeadCallback(base_class):
        """A callback that patches a trainer's models before they are wrapped for several processes."""

        def on_init_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if getattr(args, "use_liger_kernel", False):
                raise ValueError("use_liger_kernel brings Liger's head; leave it out for --callbacks chunked_head")
            for name in MODEL_ATTRIBUTES:
                model: Any = getattr(self.trainer, name, None)
                if hasattr(model, "parameters"):
                    patch_model(model, when="always", **options)

    callbacks_map[CALLBACK_NAME] = ChunkedHeadCallback
