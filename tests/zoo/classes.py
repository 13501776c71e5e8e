"""Which classes of the installed transformers have a head over a vocabulary and take labels, found by reading it."""

import contextlib
import importlib
import inspect
import re
from pathlib import Path
from typing import Any, NamedTuple

import transformers
from transformers.models.auto import modeling_auto

KINDS = ("causal", "conditional", "masked")
NAMED = {
    "causal": ("ForCausalLM", "LMHeadModel", "ModelWithLMHead"),
    "conditional": ("ForConditionalGeneration",),
    "masked": ("ForMaskedLM",),
}
MAPPED = {
    "causal": ("MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",),
    "conditional": (
        "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES", "MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES",
        "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES", "MODEL_FOR_VISION_2_SEQ_MAPPING_NAMES",
        "MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES",
    ),
    "masked": ("MODEL_FOR_MASKED_LM_MAPPING_NAMES",),
}  # fmt: skip


class Entry(NamedTuple):
    """A class by name, the module it is in, and the kind of its head's use."""

    name: str
    module: str
    kind: str

    def load(self) -> Any:
        """The class itself; imports its module."""
        return getattr(importlib.import_module(self.module), self.name)


def mapped() -> dict[str, str]:
    """Every class of the automatic mappings, with its kind: the first of ``KINDS`` that names it."""
    found: dict[str, str] = {}
    for kind in KINDS:
        for name in MAPPED[kind]:
            for value in getattr(modeling_auto, name, {}).values():
                for one in (value,) if isinstance(value, str) else value:
                    found.setdefault(one, kind)
    return found


def kind_of(name: str, by_mapping: dict[str, str]) -> str | None:
    """By the class's name, which is surer than a mapping that lists it among others, else by the mapping."""
    for kind in KINDS:
        if name.endswith(NAMED[kind]):
            return kind
    return by_mapping.get(name)


def find(kind: str = "all") -> list[Entry]:
    """Every class of one kind or of all, by reading the modules' text: nothing is imported, exported or not."""
    by_mapping, found = mapped(), []
    root = Path(inspect.getfile(transformers)).parent
    for path in sorted((root / "models").glob("*/modeling_*.py")):
        if path.parent.name == "auto" or path.stem.startswith(("modeling_tf_", "modeling_flax_")):
            continue
        module = f"transformers.models.{path.parent.name}.{path.stem}"
        for name in re.findall(r"^class (\w+)\(", path.read_text(encoding="utf-8"), re.MULTILINE):
            its_kind = kind_of(name, by_mapping)
            if its_kind is not None and kind in ("all", its_kind):
                found.append(Entry(name, module, its_kind))
    return found


def parameters_of(forward: Any) -> dict[str, inspect.Parameter]:
    """Of a forward, by name."""
    with contextlib.suppress(TypeError, ValueError):
        return dict(inspect.signature(forward).parameters)
    return {}
