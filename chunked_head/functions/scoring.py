"""Scores of texts longer than a model's context, and log-probabilities of prompts as inference engines have them."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..core.checks import check_int, choice
from .logprobs import linear_logprobs

NAMES = "logprob", "rank", "decoded_token"  # of vLLM's record of a token


class Score(NamedTuple):
    """Log-probabilities ``logprobs`` [tokens] fp32. ``is_scored`` [tokens] bool is False for tokens that no hidden
    state predicts; their ``logprobs`` are 0."""

    logprobs: Tensor
    is_scored: Tensor

    @property
    def perplexity(self) -> Tensor:
        """[] ``exp`` of the mean negative log-probability of the tokens that are scored."""
        return (-self.logprobs.double().sum() / self.is_scored.sum().clamp(min=1)).exp()


def windows(length: int, context: int, stride: int) -> Iterator[tuple[slice, slice]]:
    """Windows of a text of ``length`` tokens, of at most ``context`` tokens and ``stride`` apart. Each comes with the
    slice of the text that it scores: the tokens that no earlier window has scored, without the window's first token,
    which it cannot predict. HuggingFace's page on the perplexity of fixed-length models has the same windows."""
    for name, value, least in (("length", length, 0), ("context", context, 2), ("stride", stride, 1)):
        check_int(name, value, least)
    if stride > context:
        raise ValueError(f"stride must be at most context, {context}, or tokens between windows have no score")
    scored = 0
    for begin in range(0, length, stride):
        end = min(begin + context, length)
        if max(scored, begin + 1) < end:
            yield slice(begin, end), slice(max(scored, begin + 1), end)
        scored = end
        if end == length:
            return


@torch.no_grad()
def score(
    states: Callable[[Tensor], Tensor], weight: Tensor, ids: Tensor, context: int, stride: int, **options: Any
) -> Score:
    """Log-probabilities of a text's tokens ``ids`` [tokens], each predicted from at least ``context - stride`` tokens
    before it, or from all if there are fewer.
    ``states``: a window's ids [n] -> its hidden states [n, hidden]. ``options``: of ``linear_logprobs``."""
    logprobs = torch.zeros(len(ids), dtype=torch.float32, device=ids.device)
    is_scored = torch.zeros(len(ids), dtype=torch.bool, device=ids.device)
    for window, scored in windows(len(ids), context, stride):
        values = linear_logprobs(states(ids[window]), weight, ids[window], shift=1, **options)
        logprobs[scored], is_scored[scored] = values[scored.start - window.start :].float(), True
    return Score(logprobs, is_scored)


def load_prompt_logprobs(prompts: Iterable[Sequence[Any]], length: int | None = None) -> dict[str, Tensor]:
    """Fields of a batch for ``losses.topk_kl`` from log-probabilities of prompts, for a call with ``shift=1``.

    ``prompts``: for each an entry per token: None, vLLM's ``prompt_logprobs`` ({id: record}, ids as text from its
    server), or SGLang's ``input_top_logprobs`` ([(logprob, id, text), ...]). An entry has the distribution that
    predicts its token, so it is moved to the row of the token before. K is the length of the longest entry. Missing
    entries, and rows from a prompt's last token up to ``length`` (None: the longest prompt), have -inf, which the loss
    leaves out.

    Returns ``teacher_ids`` int64 and ``teacher_logprobs`` fp32, [prompts, length, K], on the CPU.
    """
    texts = [[entries_of(entry) for entry in prompt] for prompt in prompts]
    longest, width = (max(map(len, rows), default=0) for rows in (texts, [e for text in texts for e in text]))
    length = longest if length is None else length
    if longest > length:
        raise ValueError(f"length must be at least that of the longest prompt, {longest}, got {length}")
    missing = [(-torch.inf, 0)] * max(width, 1)
    rows = [[(*e, *missing[len(e) :]) for e in text[1:]] + [missing] * (length - len(text[1:])) for text in texts]
    table = torch.tensor(rows, dtype=torch.float64, device="cpu").view(len(texts), length, len(missing), 2)
    return {"teacher_ids": table[..., 1].long(), "teacher_logprobs": table[..., 0].float()}


def entries_of(entry: Any) -> list[tuple[float, int]]:
    """(log-probability, id) of one token's entry in either format; none for None."""
    if not isinstance(entry, Mapping):
        return [(float(logprob), int(token)) for logprob, token, *_ in entry or ()]
    records = [(record if isinstance(record, Mapping) else vars(record), token) for token, record in entry.items()]
    return [(float(record["logprob"]), int(token)) for record, token in records]


def dump_prompt_logprobs(ids: Tensor, results: Any, engine: str = "vllm") -> Any:
    """The log-probabilities of a prompt ``ids`` [tokens] as vLLM's ``prompt_logprobs``, or for ``engine="sglang"``
    as its ``input_token_logprobs`` and ``input_top_logprobs``; plain values, without texts of tokens.

    ``results``: of ``linear_logprobs(hidden, weight, ids, top_k=K, shift=1)``. A token's own entry is among its top K,
    or after them without a rank."""
    choice("dump_prompt_logprobs", "engine", engine, ("vllm", "sglang"))
    tokens, logprobs = ids.tolist(), [None, *results.logprobs.tolist()[1:]]
    pairs = zip(results.top_k_logprobs.tolist(), results.top_k_ids.tolist(), strict=True)
    top = [[(value, token, None) for value, token in zip(*pair, strict=True)] for pair in pairs]
    if engine == "sglang":
        targets = [(value, token, None) for value, token in zip(logprobs, tokens, strict=True)]
        return {"input_token_logprobs": targets, "input_top_logprobs": [None, *top[1:]]}
    entries: list[Any] = [None]
    for token, logprob, best in list(zip(tokens, logprobs, top, strict=True))[1:]:
        ranked = {i: dict(zip(NAMES, (value, rank, None), strict=True)) for rank, (value, i, _) in enumerate(best, 1)}
        entries.append(ranked | {token: ranked.get(token, dict(zip(NAMES, (logprob, None, None), strict=True)))})
    return entries
