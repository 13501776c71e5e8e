"""ms-swift on this library's head: its SFT, DFT and DPO losses without [batch, tokens, vocab] logits.

    # head.py
    from chunked_head.integrations.ms_swift import register
    register(memory_budget="1GiB")

    swift sft --external_plugins head.py --callbacks chunked_head ...

The callback sees the trainer once it is made, with its model and its reference model. Losses, metrics and everything
else are ms-swift's code on lazy logits (``patch_model``).
"""

from typing import Any

from transformers import TrainerCallback

from .frameworks import Framework
from .huggingface.agreement import check_options
from .huggingface.patch import patch_model

NAME = "chunked_head"  # of the callback
SWIFT = Framework(
    "ms-swift", ("4.6.0",),
    {("swift.callbacks.mapping", "callbacks_map"): "*", ("swift.callbacks.base", "TrainerCallback"): "args, trainer"},
)  # fmt: skip
MODELS = ("model", "ref_model", "teacher_model")  # attributes of a trainer


def register(**options: Any) -> None:
    """Makes ``--callbacks chunked_head`` known to ms-swift; a second call puts its options in the place of the first's.

    Args:
        options: ``memory_budget``, ``chunk_tokens``, ``deterministic``, ... as in ``patch_model``.

    Raises:
        TypeError, ValueError: for a wrong option. ImportError: ms-swift is missing.

    Where callbacks are not as in ms-swift 4.6, a warning says so, and this one does nothing.
    """
    check_options(options)
    seams = SWIFT.tested_objects()
    callbacks_map, theirs = (seams.get(place) for place in SWIFT.uses)
    if callbacks_map is None:
        return
    if theirs is None:
        callbacks_map[NAME] = lambda args, trainer: TrainerCallback()
        return
    base: Any = theirs

    class ChunkedHeadCallback(base):
        """Patches a trainer's models before anything wraps them for several processes."""

        def on_init_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if getattr(args, "use_liger_kernel", False):
                raise ValueError("use_liger_kernel brings Liger's head; leave it out for --callbacks chunked_head")
            for name in MODELS:
                model: Any = getattr(self.trainer, name, None)
                if hasattr(model, "parameters"):
                    patch_model(model, when="always", **options)

    callbacks_map[NAME] = ChunkedHeadCallback
