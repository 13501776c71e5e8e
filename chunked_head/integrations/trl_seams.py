"""Where TRL's trainers call what this library replaces, and whether it looks as it did when that was written."""

import importlib
import inspect
from dataclasses import dataclass
from importlib import metadata
from types import ModuleType
from typing import Any

KNOWN = "1.16"


@dataclass(frozen=True)
class Seam:
    """A name in one of TRL's modules that holds an autograd function, and the one function that calls it."""

    path: str  # of the module
    name: str
    parameters: tuple[str, ...]  # of its forward
    caller: str  # the function that calls it
    calls: tuple[str, ...]  # pieces of its source, without white space

    @property
    def where(self) -> str:
        return f"{self.path}.{self.name}"

    def module(self) -> ModuleType:
        return importlib.import_module(self.path)


SEAMS = (
    Seam(
        "trl.trainer.utils",
        "_ChunkedLogProbFunction",
        (
            "ctx", "hidden", "weight", "bias", "targets", "temperature", "chunk_size", "final_logit_softcapping",
            "logit_scale", "outputs",
        ),
        "add_fused_lm_head",
        (
            "weight,bias,labels[mask]ifcompactelselabels.clamp(min=0).reshape(-1),temperature,"
            "_CHUNKED_LOGPROB_CHUNK_SIZE,final_logit_softcapping,logit_scale,outputs,)",
            "log_probs,entropy,log_sum_sq_probs,mean_logits,is_top1=per_token",
        ),
    ),
    Seam(
        "trl.trainer.distillation_trainer",
        "ChunkedDivergenceFunction",
        (
            "ctx", "student_hidden", "student_weight", "student_bias", "teacher_hidden", "teacher_weight",
            "teacher_bias", "beta", "temperature", "student_logit_scale", "student_final_logit_softcapping",
            "teacher_logit_scale", "teacher_final_logit_softcapping",
        ),
        "_chunked_divergence_loss",
        (
            "per_token_divergence,per_token_entropy=ChunkedDivergenceFunction.apply(h_s,student_lm_head_weight,"
            "student_lm_head_bias,h_t,teacher_lm_head_weight,teacher_lm_head_bias,beta,temperature,student_logit_scale,"
            "student_final_logit_softcapping,teacher_logit_scale,teacher_final_logit_softcapping,)",
        ),
    ),
)  # fmt: skip


def checked_module(seam: Seam, original: Any = None) -> ModuleType:
    """The seam's module, or an error that says how it differs from what is known. ``original``: what was there before
    it was replaced by us."""
    try:
        version = metadata.version("trl")
    except metadata.PackageNotFoundError:
        raise ImportError(
            f"patch_trl needs TRL {KNOWN}, which is not installed: pip install 'trl=={KNOWN}.*'"
        ) from None

    def refuse(what: str) -> RuntimeError:
        return RuntimeError(
            f"patch_trl knows TRL {KNOWN}, and in TRL {version} {what}; nothing was patched. Install "
            f"'trl=={KNOWN}.*', or a chunked_head that knows TRL {version}"
        )

    if version.split(".")[:2] != KNOWN.split("."):
        raise refuse("its losses may be computed otherwise")
    module = seam.module()
    function = getattr(module, seam.name, None) if original is None else original
    forward, caller = getattr(function, "forward", None), getattr(module, seam.caller, None)
    for name, found in ((seam.where, forward), (f"{seam.path}.{seam.caller}", caller)):
        if found is None:
            raise refuse(f"{name} is missing or no autograd function")
    parameters = tuple(inspect.signature(forward).parameters)  # type: ignore[arg-type]
    if parameters != seam.parameters:
        raise refuse(f"{seam.where} takes ({', '.join(parameters)}) instead of ({', '.join(seam.parameters)})")
    try:
        source = "".join(inspect.getsource(caller).split())  # type: ignore[arg-type]
    except OSError:
        raise refuse(f"{seam.path}.{seam.caller} has no source to look at") from None
    for piece in seam.calls:
        if piece not in source:
            raise refuse(f"{seam.path}.{seam.caller} does not contain {piece!r}, by which it called {seam.name}")
    return module
