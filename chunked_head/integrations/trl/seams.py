"""Where TRL's trainers call what this library replaces, and whether it looks as it did when that was written."""

import importlib
import inspect
from dataclasses import dataclass
from importlib import metadata
from types import ModuleType
from typing import Any

KNOWN = "1.16"


@dataclass(frozen=True)
class Place:
    """A name in one of TRL's modules in whose place something of ours is put."""

    path: str  # of the module
    name: str

    @property
    def where(self) -> str:
        return f"{self.path}.{self.name}"

    def module(self) -> ModuleType:
        return importlib.import_module(self.path)

    def differs(self, module: ModuleType, found: Any) -> str | None:
        """How what stands there differs from what is known."""
        return f"{self.where} is missing" if found is None else None


@dataclass(frozen=True)
class Seam(Place):
    """One that holds an autograd function, and the one function that calls it."""

    parameters: tuple[str, ...]  # of its forward
    caller: str  # the function that calls it
    calls: tuple[str, ...]  # pieces of its source, without white space

    def differs(self, module: ModuleType, found: Any) -> str | None:
        forward, caller = getattr(found, "forward", None), getattr(module, self.caller, None)
        for name, what in ((self.where, forward), (f"{self.path}.{self.caller}", caller)):
            if what is None:
                return f"{name} is missing or no autograd function"
        parameters = tuple(inspect.signature(forward).parameters)  # type: ignore[arg-type]
        if parameters != self.parameters:
            return f"{self.where} takes ({', '.join(parameters)}) instead of ({', '.join(self.parameters)})"
        try:
            source = "".join(inspect.getsource(caller).split())  # type: ignore[arg-type]
        except OSError:
            return f"{self.path}.{self.caller} has no source to look at"
        for piece in self.calls:
            if piece not in source:
                return f"{self.path}.{self.caller} does not contain {piece!r}, by which it called {self.name}"
        return None


PLACES: tuple[Place, ...] = (
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
    # what gives a model its fused forward, as trainers' modules have imported it
    *(Place(f"trl.trainer.{name}_trainer", "add_fused_lm_head") for name in ("sft", "dpo", "kto", "grpo", "rloo")),
)  # fmt: skip


def checked_module(place: Place, original: Any = None) -> ModuleType:
    """The place's module, or an error that says how it differs from what is known. ``original``: what was there before
    it was replaced by us."""
    try:
        version = metadata.version("trl")
    except metadata.PackageNotFoundError:
        raise ImportError(
            f"patch_trl needs TRL {KNOWN}, which is not installed: pip install 'trl=={KNOWN}.*'"
        ) from None
    if version.split(".")[:2] != KNOWN.split("."):
        differs: str | None = "its losses may be computed otherwise"
    else:
        module = place.module()
        differs = place.differs(module, getattr(module, place.name, None) if original is None else original)
        if differs is None:
            return module
    raise RuntimeError(
        f"patch_trl knows TRL {KNOWN}, and in TRL {version} {differs}; nothing was patched. Install 'trl=={KNOWN}.*', "
        f"or a chunked_head that knows TRL {version}"
    )
