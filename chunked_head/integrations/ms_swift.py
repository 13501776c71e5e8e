"""ms-swift on this library's head: its SFT, DFT and DPO losses without [batch, tokens, vocab] logits.

A file that ms-swift imports as a plugin, and its callback:

    # head.py
    from chunked_head.integrations.ms_swift import register
    register(memory_budget="1GiB")

    swift sft --external_plugins head.py --callbacks chunked_head ...

``external_plugins`` and ``callbacks_map`` are ms-swift's own seams: the callback sees the trainer once it is made, with
its model and its reference model. Losses, metrics and everything else are ms-swift's code on lazy logits
(``patch_model``).
"""

from typing import Any

from .frameworks import Framework
from .huggingface.agreement import check_options
from .huggingface.patch import patch_model

NAME = "chunked_head"  # of the callback
MODELS = ("model", "ref_model", "teacher_model")  # attributes of a trainer


def register(**options: Any) -> None:
    """Makes ``--callbacks chunked_head`` known to ms-swift; a second call puts its options in the place of the first's.

    Args:
        options: ``memory_budget``, ``chunk_tokens``, ``deterministic``, ... as in ``patch_model``.

    Raises:
        TypeError, ValueError: for a wrong option.
        ImportError, RuntimeError: ms-swift is missing, or of a version that was not tried.
    """
    check_options(options)
    Framework("ms-swift", "4.6", "4.7").check()
    from swift import TrainerCallback, callbacks_map

    class ChunkedHeadCallback(TrainerCallback):
        """Patches a trainer's models before anything wraps them for several processes."""

        def on_init_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if getattr(args, "use_liger_kernel", False):
                raise ValueError("use_liger_kernel brings Liger's head; leave it out for --callbacks chunked_head")
            for name in MODELS:
                model: Any = getattr(self.trainer, name, None)
                if hasattr(model, "parameters"):
                    patch_model(model, when="always", **options)

    callbacks_map[NAME] = ChunkedHeadCallback
