"""Scores by windows, beside HuggingFace's page; log-probabilities of prompts in both engines' formats."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from chunked_head import linear_logprobs, linear_loss, losses, patch_model, scoring

VOCAB, WIDTH = 61, 16


def page(model: Any, input_ids: Tensor, max_length: int, stride: int) -> tuple[Tensor, list[tuple[float, int]]]:
    """The loop of HuggingFace's page on the perplexity of fixed-length models, and each window's mean and weight."""
    seq_len, nll_sum, n_tokens, prev_end_loc, windows = input_ids.size(1), 0.0, 0, 0, []
    for begin_loc in range(0, seq_len, stride):
        end_loc = min(begin_loc + max_length, seq_len)
        trg_len = end_loc - prev_end_loc
        ids = input_ids[:, begin_loc:end_loc]
        target_ids = ids.clone()
        target_ids[:, :-trg_len] = -100
        with torch.no_grad():
            neg_log_likelihood = model(ids, labels=target_ids).loss
        num_loss_tokens = (target_ids != -100).sum().item() - target_ids.size(0)
        nll_sum += neg_log_likelihood * num_loss_tokens
        n_tokens += num_loss_tokens
        windows.append((float(neg_log_likelihood), num_loss_tokens))
        prev_end_loc = end_loc
        if end_loc == seq_len:
            break
    return torch.exp(nll_sum / n_tokens), windows


@pytest.mark.parametrize("stride", [8, 20, 32])
def test_beside_huggingfaces_page(stride: int) -> None:
    """Each window's mean is the page's, which weighs a window by a token less than it scores where windows overlap."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.GPT2Config(vocab_size=VOCAB, n_positions=32, n_embd=WIDTH, n_layer=1, n_head=2)
    model = transformers.GPT2LMHeadModel(config).eval()
    ids = torch.randint(VOCAB, (1, 101))
    theirs, means = page(model, ids, 32, stride)
    weight = model.lm_head.weight
    found = scoring.score(lambda x: model.transformer(x[None]).last_hidden_state[0], weight, ids[0], 32, stride)
    assert found.is_scored.sum() == (100 if stride < 32 else 97) and not found.is_scored[0]
    total = weights = 0.0
    for (_, scored), (mean, tokens) in zip(scoring.windows(101, 32, stride), means, strict=True):
        torch.testing.assert_close(-found.logprobs[scored].mean().item(), mean, rtol=1e-5, atol=1e-5)
        assert scored.stop - scored.start == tokens + (scored.start > 1 and stride < 32)
        total, weights = total - found.logprobs[scored].mean().item() * tokens, weights + tokens
    torch.testing.assert_close(torch.tensor(total / weights).exp(), theirs, rtol=1e-5, atol=0)
    if stride == 32:  # without overlap the page's number is the definition's
        torch.testing.assert_close(found.perplexity.float(), theirs, rtol=1e-5, atol=0)
    torch.testing.assert_close(page(patch_model(model), ids, 32, stride)[0], theirs, rtol=1e-5, atol=0)


def test_windows() -> None:
    assert list(scoring.windows(10, 4, 3)) == [
        (slice(0, 4), slice(1, 4)), (slice(3, 7), slice(4, 7)), (slice(6, 10), slice(7, 10)),
    ]  # fmt: skip
    assert not list(scoring.windows(0, 4, 2)) and not list(scoring.windows(1, 4, 2))
    for length in range(40):
        for context in range(2, 9):
            for stride in range(1, context + 1):
                seen = [t for _, scored in scoring.windows(length, context, stride) for t in range(length)[scored]]
                disjoint = [t for t in range(1, length) if stride < context or t % context]
                assert seen == disjoint
    with pytest.raises(ValueError, match="stride must be at most context, 4"):
        list(scoring.windows(10, 4, 5))


def teacher(tokens: int = 9, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    made = torch.Generator().manual_seed(seed)
    hidden, weight = torch.randn(tokens, WIDTH, generator=made), torch.randn(VOCAB, WIDTH, generator=made) / 4
    return hidden, weight, torch.randint(VOCAB, (tokens,), generator=made)


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_prompt_logprobs_there_and_back(engine: str) -> None:
    hidden, weight, ids = teacher()
    results = linear_logprobs(hidden, weight, ids, top_k=5, shift=1)
    dumped = scoring.dump_prompt_logprobs(ids, results, engine)
    if engine == "sglang":
        own, dumped = dumped["input_token_logprobs"], dumped["input_top_logprobs"]
        assert own[0] == (None, int(ids[0]), None)
        assert own[3] == (pytest.approx(results.logprobs[3].item()), int(ids[3]), None)
    else:
        assert dumped[3][int(ids[3])]["logprob"] == pytest.approx(results.logprobs[3].item(), abs=1e-5)
        assert [record["rank"] for record in dumped[3].values()][:5] == [1, 2, 3, 4, 5]
        assert {type(token) for token in dumped[3]} == {int}
    assert dumped[0] is None and len(dumped) == len(ids)
    loaded = scoring.load_prompt_logprobs([dumped])
    x = (hidden @ weight.T).log_softmax(-1)
    for t in range(len(ids) - 1):  # the hidden state at t predicts the token at t + 1
        values = loaded["teacher_logprobs"][0, t]
        there = values > -torch.inf
        assert there.sum() in (5, 6)
        torch.testing.assert_close(values[there], x[t, loaded["teacher_ids"][0, t]][there])
    assert (loaded["teacher_logprobs"][0, -1] == -torch.inf).all()


def test_a_batch_for_topk_kl() -> None:
    """Prompts of two lengths, of an offline engine and of a server, one of them without entries for some tokens: the
    loss is that of the rows that have some."""
    weight, texts = teacher()[1], []
    for seed, tokens in ((1, 9), (2, 6)):
        states, head, ids = teacher(tokens, seed)
        texts.append(scoring.dump_prompt_logprobs(ids, linear_logprobs(states, head, ids, top_k=4, shift=1)))
    offline = [entry and {i: SimpleNamespace(**record) for i, record in entry.items()} for entry in texts[0]]
    offline[4] = None  # an engine begins at logprob_start_len
    server = [entry and {str(i): record for i, record in entry.items()} for entry in texts[1]]
    fields = scoring.load_prompt_logprobs([offline, server], length=10)
    assert fields["teacher_ids"].shape == fields["teacher_logprobs"].shape == (2, 10, 5)
    has_entries = (fields["teacher_logprobs"] > -torch.inf).any(-1)
    expected = torch.zeros(2, 10, dtype=torch.bool)
    expected[0, :8], expected[0, 3], expected[1, :5] = True, False, True
    assert torch.equal(has_entries, expected)
    student = torch.randn(2, 10, WIDTH, requires_grad=True)
    target = torch.where(has_entries.roll(1, 1), 1, -100)
    out = linear_loss(student, weight, target, losses.topk_kl(), batch=fields, shift=1)
    logs = (student @ weight.T).log_softmax(-1).gather(-1, fields["teacher_ids"])
    t = fields["teacher_logprobs"].exp()
    rest_t, rest_s = 1 - t.sum(-1), 1 - torch.where(t > 0, logs.exp(), 0.0).sum(-1)
    terms = torch.where(t > 0, t * (fields["teacher_logprobs"] - logs), 0.0).sum(-1) + rest_t * (rest_t / rest_s).log()
    torch.testing.assert_close(out.loss, terms[has_entries].mean())
    out.loss.backward()
    assert student.grad is not None and (student.grad[~has_entries] == 0).all()
    with pytest.raises(ValueError, match="length must be at least that of the longest prompt, 9, got 8"):
        scoring.load_prompt_logprobs([offline], length=8)
