"""LLaMA-Factory on this library's head: its SFT, DFT, DPO and pre-training losses without [tokens, vocab] logits.

    python -m chunked_head.integrations.llamafactory train.yaml       # instead of llamafactory-cli train train.yaml
    torchrun --nproc-per-node 8 -m chunked_head.integrations.llamafactory train.yaml

where ``train.yaml`` may have the head's options, next to LLaMA-Factory's arguments:

    chunked_head: {memory_budget: 1GiB}

LLaMA-Factory has no plugins, and its callbacks do not see a reference model. Every stage has ``load_model``: for the
length of a run a function stands there that patches what theirs returns. All else is LLaMA-Factory's code on lazy
logits (``patch_model``).
"""

import contextlib
import functools
from collections.abc import Iterator, Mapping
from typing import Any

from .frameworks import Framework, Place
from .huggingface.agreement import check_options
from .huggingface.patch import patch_model

KEY = "chunked_head"  # of a configuration file
STAGES = ("pt", "sft", "dpo", "kto")
PARAMETERS = "tokenizer, model_args, finetuning_args, is_trainable, add_valuehead"
IMPORTERS = (*(f"llamafactory.train.{stage}.workflow" for stage in STAGES), "llamafactory.train.trainer_utils")
LLAMAFACTORY = Framework("llamafactory", ("0.9.5",), {(path, "load_model"): PARAMETERS for path in IMPORTERS})
# arguments that have the loss made elsewhere, and what to do
ELSEWHERE = {
    "use_mca": "leave it out, or train Megatron's models with chunked_head.integrations.megatron",
    "use_hyper_parallel": "leave it out",
    "use_unsloth": "leave it out: Unsloth has a head of its own",
    "use_ray": "leave it out: its workers are other processes; torchrun starts several",
}


def run_exp(args: Mapping[str, Any] | None = None, callbacks: list[Any] | None = None, **options: Any) -> None:
    """LLaMA-Factory's function of this name, ``llamafactory.train.tuner.run_exp``, with models on this head.

    Args:
        args, callbacks: LLaMA-Factory's; None for ``args`` reads the command line and the file that it names.
        options: of the head, as in ``patch_model``, in addition to those under ``chunked_head`` in ``args``.

    Raises:
        TypeError, ValueError: for a wrong option; a stage or an argument whose loss this library has no part in.
        ImportError: LLaMA-Factory is not installed.
    """
    LLAMAFACTORY.version()
    from llamafactory.hparams import read_args
    from llamafactory.train import tuner

    arguments = read_args(None if args is None else dict(args))
    if not isinstance(arguments, dict):
        raise ValueError("LLaMA-Factory's arguments must come from a .yaml or .json file, or as a dict")
    options = dict(arguments.pop(KEY, None) or {}) | options
    stage = arguments.get("stage", "sft")
    if stage not in STAGES:
        raise ValueError(f"stage must be one of {', '.join(STAGES)} for chunked_head, got {stage!r}")
    for name, remedy in ELSEWHERE.items():
        if arguments.get(name):
            raise ValueError(f"{name} has its loss made where chunked_head has no part in it; {remedy}")
    if arguments.get("enable_liger_kernel") and stage in ("pt", "sft"):
        raise ValueError("enable_liger_kernel brings Liger's head for stages pt and sft; leave it out for this one")
    with patched_models(**options):
        tuner.run_exp(arguments, callbacks)


@contextlib.contextmanager
def patched_models(**options: Any) -> Iterator[list[Any]]:
    """Puts every model that a stage loads in a ``with`` block on this head. Gives the list of those loaded."""
    check_options(options)
    loaded: list[Any] = []

    def loading(place: Place, theirs: Any) -> Any:
        @functools.wraps(theirs)
        def load_model(*args: Any, **kwargs: Any) -> Any:
            loaded.append(patch_model(theirs(*args, **kwargs), when="always", **options))
            return loaded[-1]

        return load_model

    LLAMAFACTORY.replace(loading)
    try:
        yield loaded
    finally:
        LLAMAFACTORY.give_back()


if __name__ == "__main__":
    run_exp()
