"""LLaMA-Factory on this library's head: its SFT, DFT, DPO and pre-training losses without [tokens, vocab] logits.

    python -m chunked_head.integrations.llamafactory train.yaml       # instead of llamafactory-cli train train.yaml
    torchrun --nproc-per-node 8 -m chunked_head.integrations.llamafactory train.yaml

where ``train.yaml`` may have the head's options, next to LLaMA-Factory's arguments:

    chunked_head: {memory_budget: 1GiB}

LLaMA-Factory has no plugins, and its callbacks do not see a reference model. Every training
stage calls LLaMA-Factory's ``load_model``. During a run, a wrapper replaces this function. The wrapper patches the
loaded model (``patch_model``). All else is LLaMA-Factory's code on lazy logits.
"""

import contextlib
import functools
from collections.abc import Iterator, Mapping
from typing import Any

from .frameworks import Framework, ObjectPath
from .huggingface.model_patch import check_options
from .huggingface.patch import patch_model

OPTIONS_KEY = "chunked_head"  # key of a configuration file
STAGES = ("pt", "sft", "dpo", "kto")  # training stages whose models are patched
LOADER_PARAMETERS = "tokenizer, model_args, finetuning_args, is_trainable, add_valuehead"
LOADING_MODULES = (*(f"llamafactory.train.{stage}.workflow" for stage in STAGES), "llamafactory.train.trainer_utils")
LLAMAFACTORY = Framework(
    "llamafactory", ("0.9.5",), {(module_name, "load_model"): LOADER_PARAMETERS for module_name in LOADING_MODULES}
)
# arguments whose losses this library has no part in, and what to do instead
REFUSED_ARGUMENTS = {
    "use_mca": "leave it out, or train Megatron's models with chunked_head.integrations.megatron",
    "use_hyper_parallel": "leave it out",
    "use_unsloth": "leave it out: Unsloth has a head of its own",
    "use_ray": "leave it out: its workers are other processes; torchrun starts several",
}


def run_exp(args: Mapping[str, Any] | None = None, callbacks: list[Any] | None = None, **options: Any) -> None:
    """Runs ``llamafactory.train.tuner.run_exp`` with models on this head.

    Args:
        args, callbacks: as in LLaMA-Factory's function. ``args=None`` reads the command line, and the file that the
            command line names.
        options: options of ``patch_model``. They override the options under ``chunked_head`` in ``args``.

    Raises:
        TypeError, ValueError: an option is wrong, or a stage or argument has a loss that is not computed by this head.
            ImportError: LLaMA-Factory is not installed.
    """
    LLAMAFACTORY.version()
    from llamafactory.hparams import read_args
    from llamafactory.train import tuner

    arguments = read_args(None if args is None else dict(args))
    if not isinstance(arguments, dict):
        raise ValueError("LLaMA-Factory's arguments must come from a .yaml or .json file, or as a dict")
    options = dict(arguments.pop(OPTIONS_KEY, None) or {}) | options
    stage = arguments.get("stage", "sft")
    if stage not in STAGES:
        raise ValueError(f"stage must be one of {', '.join(STAGES)} for chunked_head, got {stage!r}")
    for name, remedy in REFUSED_ARGUMENTS.items():
        if arguments.get(name):
            raise ValueError(f"{name} has its loss made where chunked_head has no part in it; {remedy}")
    if arguments.get("enable_liger_kernel") and stage in ("pt", "sft"):
        raise ValueError("enable_liger_kernel brings Liger's head for stages pt and sft; leave it out for this one")
    with patched_models(**options):
        tuner.run_exp(arguments, callbacks)


@contextlib.contextmanager
def patched_models(**options: Any) -> Iterator[list[Any]]:
    """A context in which every model that a stage loads is patched. ``with`` yields the list of the loaded models."""
    check_options(options)
    loaded_models: list[Any] = []

    def loader(object_path: ObjectPath, original: Any) -> Any:
        @functools.wraps(original)
        def load_model(*args: Any, **kwargs: Any) -> Any:
            loaded_models.append(patch_model(original(*args, **kwargs), when="always", **options))
            return loaded_models[-1]

        return load_model

    LLAMAFACTORY.replace(loader)
    try:
        yield loaded_models
    finally:
        LLAMAFACTORY.restore()


if __name__ == "__main__":
    run_exp()
