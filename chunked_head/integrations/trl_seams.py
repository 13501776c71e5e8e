"""Where TRL's trainers call what this library replaces, and whether it looks as it did when that was written."""

import importlib
import importlib.util
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


@dataclass(frozen=True)
class Seam(Place):
    """One that holds an autograd function, and the one function that calls it."""

    parameters: tuple[str, ...]  # of its forward
    caller: str  # the function that calls it
    calls: tuple[str, ...]  # pieces of its source, without white space


@dataclass(frozen=True)
class InTrainer(Place):
    """One that a trainer's module has imported: how often it stands there, and the pieces in which it does."""

    times: int
    uses: tuple[str, ...]  # of the module's source, without white space


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
            "def_fused_forward(self,*args,fused_lm_head=False,labels=None",
            "lm_head=self.get_output_embeddings()",
            "weight,bias=lm_head.weight,lm_head.bias",
            "model.forward=types.MethodType(_fused_forward,model)",
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


# where an adapter on the head is refused, and where a trainer's models are given their fused forward
CHECK, FUSE = "BaseTunerLayer", "add_fused_lm_head"
REFUSES = "ifis_peft_model(model)andisinstance(model.get_output_embeddings(),BaseTunerLayer):"
CASTS = "isinstance(target_model.lm_head,BaseTunerLayer):"
FUSES = "add_fused_lm_head(self.model.get_base_model()ifis_peft_model(self.model)elseself.model,"
CASTS_FUSED = "temperature=self.temperature,cast_lm_head_to_fp32=args.cast_lm_head_to_fp32,"
TRAINERS = tuple(
    InTrainer(f"trl.trainer.{trainer}_trainer", name, times, uses)
    for trainer, checks, fuses, casts in (
        ("sft", 2, 2, False), ("dpo", 2, 3, False), ("kto", 2, 3, False), ("grpo", 3, 3, True), ("rloo", 2, 3, False)
    )
    for name, times, uses in (
        (CHECK, checks, (REFUSES, CASTS) if casts else (REFUSES,)),
        (FUSE, fuses, (FUSES, CASTS_FUSED) if casts else (FUSES,)),
    )
)  # fmt: skip


def places() -> tuple[Place, ...]:
    """All of them; without PEFT there are no adapters to be served."""
    return SEAMS if importlib.util.find_spec("peft") is None else (*SEAMS, *TRAINERS)


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
        found = getattr(module, place.name, None) if original is None else original
        check = seam_differs if isinstance(place, Seam) else trainer_differs
        differs = check(place, module, found)  # type: ignore[arg-type]
        if differs is None:
            return module
    raise RuntimeError(
        f"patch_trl knows TRL {KNOWN}, and in TRL {version} {differs}; nothing was patched. Install 'trl=={KNOWN}.*', "
        f"or a chunked_head that knows TRL {version}"
    )


def seam_differs(seam: Seam, module: ModuleType, function: Any) -> str | None:
    forward, caller = getattr(function, "forward", None), getattr(module, seam.caller, None)
    for name, found in ((seam.where, forward), (f"{seam.path}.{seam.caller}", caller)):
        if found is None:
            return f"{name} is missing or no autograd function"
    parameters = tuple(inspect.signature(forward).parameters)  # type: ignore[arg-type]
    if parameters != seam.parameters:
        return f"{seam.where} takes ({', '.join(parameters)}) instead of ({', '.join(seam.parameters)})"
    source = source_of(caller)
    if source is None:
        return f"{seam.path}.{seam.caller} has no source to look at"
    for piece in seam.calls:
        if piece not in source:
            return f"{seam.path}.{seam.caller} does not contain {piece!r}, by which it called {seam.name}"
    return None


def trainer_differs(place: InTrainer, module: ModuleType, found: Any) -> str | None:
    source = source_of(module)
    if found is None or source is None:
        return f"{place.where} is missing" if found is None else f"{place.path} has no source to look at"
    if source.count(place.name) != place.times:
        return f"{place.path} names {place.name} {source.count(place.name)} times instead of {place.times}"
    for piece in place.uses:
        if piece not in source:
            return f"{place.path} does not contain {piece!r}, by which it used {place.name}"
    return None


def source_of(what: Any) -> str | None:
    """Without white space."""
    try:
        return "".join(inspect.getsource(what).split())
    except OSError:
        return None
