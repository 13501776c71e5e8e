"""A sample of the zoo: a model of every kind of tail between head and loss, and tails that are wrong."""

import dataclasses
import importlib
from typing import Any

import pytest

pytest.importorskip("transformers")

from zoo import __main__ as sweep
from zoo.check import KINDS, Entry, check, find

from chunked_head import linear_loss

CLASSES = {entry.name: entry for entry in find()}

# class, where its head is, and what stands between it and the loss
FUSED = [
    ("LlamaForCausalLM", "lm_head", "scale 1, no softcap"),
    ("CohereForCausalLM", "lm_head", "scale 0.7, no softcap"),
    ("GraniteForCausalLM", "lm_head", "scale 0.769231, no softcap"),  # divided by 1.3
    ("FalconH1ForCausalLM", "lm_head", "scale 0.6, no softcap"),
    ("Gemma2ForCausalLM", "lm_head", "scale 1, softcap 3"),
    ("GPTJForCausalLM", "lm_head", "scale 1, no softcap"),  # with a bias of its own
    ("BertLMHeadModel", "cls.predictions.decoder", "scale 1, no softcap"),
    ("RobertaForMaskedLM", "lm_head.decoder", "scale 1, no softcap"),
    ("BartForCausalLM", "lm_head", "scale 1, no softcap"),  # CrossEntropyLoss in its forward, labels not shifted
    ("BartForConditionalGeneration", "lm_head", "scale 1, no softcap, 1 added vector(s)"),
    ("T5ForConditionalGeneration", "lm_head", "scale 1, no softcap"),
    ("MixtralForCausalLM", "lm_head", "scale 1, no softcap"),  # with its router's loss
    ("Qwen2VLForConditionalGeneration", "lm_head", "scale 1, no softcap"),
    ("ProphetNetForCausalLM", "lm_head", "scale 1, no softcap"),  # by log_softmax and nll_loss
    ("BlipForConditionalGeneration", "text_decoder.cls.predictions.decoder", "scale 1, no softcap"),  # names no head
    ("ClvpForCausalLM", "lm_head", "scale 1, no softcap"),  # nor does this one
    ("InklingForConditionalGeneration", "lm_head", "scale 1, no softcap, vocabulary cropped to 97"),
]


@pytest.mark.parametrize("name, head, tail", [case for case in FUSED if case[0] in CLASSES])
def test_every_kind_of_tail_is_fused_and_right(name: str, head: str, tail: str) -> None:
    outcome = check(CLASSES[name])
    assert (outcome.verdict, outcome.reason) == ("fused", "")
    assert (outcome.head, outcome.tail, outcome.materialised) == (head, tail, 0)


def test_ids_that_are_filled_compute_the_logits() -> None:
    outcome = check(CLASSES["ChameleonForConditionalGeneration"])
    assert outcome.verdict == "materialised" and "__setitem__ at modeling_chameleon.py" in outcome.reason


REFUSED = {"FSMTForConditionalGeneration": "embed", "MusicgenForCausalLM": "modules, as of several codebooks"}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_no_head_is_refused(name: str) -> None:
    outcome = check(CLASSES[name])
    assert outcome.verdict == "refused" and REFUSED[name] in outcome.reason


WRONG = [("CohereForCausalLM", "logit_scale", 1.0), ("BartForConditionalGeneration", "biases", ())]
FUSED_LOSS = "chunked_head.integrations.huggingface.fused"


@pytest.mark.parametrize("name, part, neutral", WRONG)
def test_a_part_of_the_tail_that_is_dropped_is_seen(
    name: str, part: str, neutral: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = importlib.import_module(FUSED_LOSS).tail_of
    changed = {part: neutral}
    monkeypatch.setattr(f"{FUSED_LOSS}.tail_of", lambda logits: dataclasses.replace(plain(logits), **changed))
    outcome = check(CLASSES[name])
    assert outcome.verdict == "WRONG" and outcome.reason.startswith("loss")


def test_a_gradient_that_is_not_made_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    def frozen(hidden: Any, **options: Any) -> Any:
        return linear_loss(hidden, **(options | {"weight": options["weight"].detach()}))

    monkeypatch.setattr(f"{FUSED_LOSS}.linear_loss", frozen)
    outcome = check(CLASSES["LlamaForCausalLM"])
    assert outcome.verdict == "WRONG" and "other parameters: lm_head.weight" in outcome.reason


def test_classes_are_found_of_every_kind() -> None:
    assert {entry.kind for entry in CLASSES.values()} == set(KINDS)
    assert len(CLASSES) > 200 and not any("Flax" in name or name.startswith("TF") for name in CLASSES)


def test_a_class_that_cannot_be_built_is_an_outcome() -> None:
    outcome = check(Entry("NoSuchClass", "transformers.models.llama.modeling_llama", "causal"))
    assert outcome.verdict == "not built" and "NoSuchClass" in outcome.reason


def test_the_sweep_writes_its_table_and_its_outcomes(tmp_path: Any) -> None:
    table, outcomes = tmp_path / "zoo.md", tmp_path / "zoo.json"
    names = ["--only", "LlamaForCausalLM", "FSMTForConditionalGeneration", "--output", str(table)]
    assert sweep.main([*names, "--json", str(outcomes)]) == 0
    read = sweep.Sweep.read(outcomes)
    assert [one.verdict for one in read.outcomes] == ["refused", "fused"]
    assert "| nothing | `LlamaForCausalLM` |" in table.read_text() and "FSMT" in table.read_text()
    assert sweep.main(["--only", "NoSuchClass"]) == 2
