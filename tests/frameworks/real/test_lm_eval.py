"""lm-eval's log-likelihoods through this library's head against its own, value by value."""

from pathlib import Path
from typing import Any

import pytest
import torch
from lm_eval.api.instance import Instance
from lm_eval.api.registry import get_model
from lm_eval.models.huggingface import HFLM
from tiny_texts import llama, saved, tokenizer

from chunked_head.integrations import lm_eval as integration
from chunked_head.integrations.lm_eval import ChunkedHeadLM

PAIRS = [
    ("the sea is", " salt water, deep and never still"),
    ("the sea is", " old"),
    ("a", " b"),
    ("a long context that goes beyond what the model can hold " * 7, " and its end"),
    ("pick one: ", "A"), ("pick one: ", "B"), ("pick one: ", "C"), ("pick one: ", "D"),  # one forward for all four
]  # fmt: skip
TEXTS = ["rain on its way back to the sea. " * 13, "short", "a map"]


def requests(kind: str) -> list[Instance]:
    rows: list[Any] = PAIRS if kind == "loglikelihood" else [(text,) for text in TEXTS]
    return [Instance(request_type=kind, doc={}, arguments=row, idx=i) for i, row in enumerate(rows)]


def scored(make: Any, model: Any, batch_size: Any, **options: Any) -> tuple[list[tuple[float, bool]], list[float]]:
    lm = make(pretrained=model, tokenizer=tokenizer(), batch_size=batch_size, max_batch_size=4, device="cpu", **options)
    return (
        lm.loglikelihood(requests("loglikelihood"), disable_tqdm=True),
        lm.loglikelihood_rolling(requests("loglikelihood_rolling"), disable_tqdm=True),
    )


@pytest.mark.parametrize("batch_size", [1, 3, "auto"])
@pytest.mark.parametrize("logits_cache, in_batches", [(True, True), (False, True), (True, False)])
def test_log_likelihoods(
    batch_size: Any, logits_cache: bool, in_batches: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(integration, "IS_SUPPORTED", integration.IS_SUPPORTED and in_batches)
    assert in_batches == integration.IS_SUPPORTED
    theirs = scored(HFLM, llama(), batch_size, logits_cache=logits_cache)
    model = llama()
    ours = scored(ChunkedHeadLM, model, batch_size, logits_cache=logits_cache, memory_budget="8MiB")
    assert [flag for _, flag in ours[0]] == [flag for _, flag in theirs[0]]
    torch.testing.assert_close([value for value, _ in ours[0]], [value for value, _ in theirs[0]], rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(ours[1], theirs[1], rtol=1e-5, atol=1e-4)
    report = model.chunked_head
    assert report.fused > 0 and report.materialised == 0, report


def test_greedy_flags() -> None:
    """Both flags occur, and each stands where lm-eval has it."""
    model = llama()
    with torch.no_grad():
        ids = torch.tensor([tokenizer()("abc").input_ids])
        best = tokenizer().decode(model.eval()(ids).logits[0, -1].argmax())
    rows = [Instance(request_type="loglikelihood", doc={}, arguments=("abc", text), idx=0) for text in (best, "~", "#")]
    flags = [
        [flag for _, flag in make(pretrained=model, tokenizer=tokenizer(), device="cpu").loglikelihood(rows)]
        for make in (HFLM, ChunkedHeadLM)
    ]
    assert flags[0] == flags[1] == [True, False, False]


def test_a_batch_is_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of three contexts, the last of which two continuations share that begin at other places."""
    made, rows = integration.outputs_of, list[int]()
    monkeypatch.setattr(
        integration, "outputs_of", lambda *args, **asked: rows.append(len(args[1])) or made(*args, **asked)
    )
    texts = [("the sea is", " old and cold"), ("rain", "ing"), ("pick", " two"), ("pick t", "wo"), ("pick t", "w!")]
    instances = [Instance(request_type="loglikelihood", doc={}, arguments=text, idx=0) for text in texts]
    options: Any = {"pretrained": llama(), "tokenizer": tokenizer(), "batch_size": 8, "device": "cpu"}
    theirs = HFLM(logits_cache=False, **options).loglikelihood(instances)
    ours = ChunkedHeadLM(**options).loglikelihood(instances)
    for (value, flag), (their_value, their_flag) in zip(ours, theirs, strict=True):
        assert value == pytest.approx(their_value, rel=1e-5) and flag == their_flag
    ids = tokenizer()
    assert rows == [sum(len(ids(text, add_special_tokens=False).input_ids) for _, text in texts)]


def test_bfloat16_is_nearer_to_exact() -> None:
    exact = scored(HFLM, llama().bfloat16().double(), 2)[1]
    theirs = scored(HFLM, llama().bfloat16(), 2)[1]
    ours = scored(ChunkedHeadLM, llama().bfloat16(), 2)[1]
    errors = [max(abs(a - b) / abs(b) for a, b in zip(found, exact, strict=True)) for found in (ours, theirs)]
    assert errors[0] <= errors[1] and errors[0] < 5e-3


def test_by_name_and_generation(tmp_path: Path) -> None:
    folder = saved(tmp_path)
    lm = get_model("chunked_head_hf").create_from_arg_string(
        f"pretrained={folder},memory_budget=64MiB", {"device": "cpu", "batch_size": 2}
    )
    assert isinstance(lm, ChunkedHeadLM)
    theirs = HFLM(pretrained=folder, device="cpu", batch_size=2)
    until = [
        Instance(request_type="generate_until", doc={}, arguments=("a sea", {"until": ["."], "max_gen_toks": 5}), idx=0)
    ]
    assert lm.generate_until(until) == theirs.generate_until(until)
    assert lm.model.chunked_head.materialised == 0


def test_what_is_refused() -> None:
    with pytest.raises(ValueError, match="memory_budget"):
        ChunkedHeadLM(pretrained="nowhere", memory_budget="a lot")
