"""Scores of texts that are longer than a model's context, and log-probabilities of prompts in the formats of vLLM and
SGLang."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..core.checks import check_int, choice
from .logprobs import linear_logprobs

RECORD_FIELDS = "logprob", "rank", "decoded_token"  # fields of vLLM's record of a token


class Score(NamedTuple):
    """Log-probabilities of a text's tokens."""

    logprobs: Tensor  # [tokens] fp32; 0 where ``is_scored`` is False
    is_scored: Tensor  # [tokens] bool; False for tokens that no hidden state predicts

    @property
    def perplexity(self) -> Tensor:
        """``exp`` of the mean negative log-probability over scored tokens, 0-d, fp64."""
        return (-self.logprobs.double().sum() / self.is_scored.sum().clamp(min=1)).exp()


def windows(length: int, context: int, stride: int) -> Iterator[tuple[slice, slice]]:
    """Windows of at most ``context`` tokens, ``stride`` apart, over a text of ``length`` tokens.

    Each item is a pair of slices of the text: a window, and the tokens that the window scores. A window scores tokens
    that no earlier window has scored, but not its own first token, which no token predicts. Source: HuggingFace's page
    on the perplexity of fixed-length models. ValueError for a ``stride`` above ``context``.
    """
    for name, value, least_value in (("length", length, 0), ("context", context, 2), ("stride", stride, 1)):
        check_int(name, value, least_value)
    if stride > context:
        raise ValueError(f"stride must be at most context, {context}, or tokens between windows have no score")
    scored_end = 0
    for begin in range(0, length, stride):
        end = min(begin + context, length)
        if max(scored_end, begin + 1) < end:
            yield slice(begin, end), slice(max(scored_end, begin + 1), end)
        scored_end = end
        if end == length:
            return


@torch.no_grad()
def score(
    states: Callable[[Tensor], Tensor], weight: Tensor, ids: Tensor, context: int, stride: int, **options: Any
) -> Score:
    """Log-probabilities of a text's tokens ``ids`` [tokens]. Each token is predicted from at least
    ``context - stride`` tokens before it, or from all tokens before it if these are fewer.

    ``states``: a function from a window's ids [n] to hidden states [n, hidden]. ``options``: options of
    ``linear_logprobs``.
    """
    logprobs = torch.zeros(len(ids), dtype=torch.float32, device=ids.device)
    is_scored = torch.zeros(len(ids), dtype=torch.bool, device=ids.device)
    for window, scored_tokens in windows(len(ids), context, stride):
        window_logprobs = linear_logprobs(states(ids[window]), weight, ids[window], shift=1, **options)
        logprobs[scored_tokens] = window_logprobs[scored_tokens.start - window.start :].float()
        is_scored[scored_tokens] = True
    return Score(logprobs, is_scored)


def load_prompt_logprobs(prompts: Iterable[Sequence[Any]], length: int | None = None) -> dict[str, Tensor]:
    """Fields of a batch for ``losses.topk_kl`` from log-probabilities of prompts, for a call with ``shift=1``.

    Args:
        prompts: for each prompt a list with an entry for each token. An entry is None, or has the format of vLLM's
            ``prompt_logprobs``, {id: record} with ids as ints or text, or of SGLang's ``input_top_logprobs``,
            [(logprob, id, text), ...].
        length: number of rows for each prompt; None: the length of the longest prompt.

    Returns:
        ``teacher_ids`` int64 and ``teacher_logprobs`` fp32, [prompts, length, K], on the CPU. K is the length of the
        longest entry. The entry of a token predicts this token, and stands in the row of the token before.
        Log-probabilities of -inf, which the loss leaves out, fill up shorter entries, the row of a prompt's last token
        and rows of padding.

    Raises:
        ValueError: a prompt is longer than ``length``.
    """
    entries_by_prompt = [[entries_of(entry) for entry in prompt] for prompt in prompts]
    longest_prompt_length = max(map(len, entries_by_prompt), default=0)
    longest_entry_length = max((len(entry) for entries in entries_by_prompt for entry in entries), default=0)
    length = longest_prompt_length if length is None else length
    if longest_prompt_length > length:
        raise ValueError(f"length must be at least that of the longest prompt, {longest_prompt_length}, got {length}")
    missing_row = [(-torch.inf, 0)] * max(longest_entry_length, 1)
    padded_rows = [
        [(*entry, *missing_row[len(entry) :]) for entry in entries[1:]] + [missing_row] * (length - len(entries[1:]))
        for entries in entries_by_prompt
    ]
    entry_table = torch.tensor(padded_rows, dtype=torch.float64, device="cpu")
    entry_table = entry_table.view(len(padded_rows), length, len(missing_row), 2)
    return {"teacher_ids": entry_table[..., 1].long(), "teacher_logprobs": entry_table[..., 0].float()}


def entries_of(entry: Any) -> list[tuple[float, int]]:
    """Pairs (log-probability, id) of a token's entry in vLLM's or SGLang's format; [] for None."""
    if not isinstance(entry, Mapping):
        return [(float(logprob), int(token_id)) for logprob, token_id, *_ in entry or ()]
    return [
        (float((fields if isinstance(fields, Mapping) else vars(fields))["logprob"]), int(token_id))
        for token_id, fields in entry.items()
    ]


def dump_prompt_logprobs(ids: Tensor, results: Any, engine: str = "vllm") -> Any:
    """The log-probabilities of a prompt ``ids`` [tokens] in an engine's format, as numbers, lists and dicts.

    ``results``: the results of ``linear_logprobs(hidden, weight, ids, top_k=K, shift=1)``. ``engine``: ``"vllm"``
    returns vLLM's ``prompt_logprobs``; a token of the prompt that is not among the top K follows the top K, with rank
    None. ``"sglang"`` returns SGLang's ``input_token_logprobs`` and ``input_top_logprobs``. Tokens' texts are None."""
    choice("dump_prompt_logprobs", "engine", engine, ("vllm", "sglang"))
    token_ids, logprobs = ids.tolist(), [None, *results.logprobs.tolist()[1:]]
    top_records = [
        [(top_logprob, top_id, None) for top_logprob, top_id in zip(top_logprobs, top_ids, strict=True)]
        for top_logprobs, top_ids in zip(results.top_k_logprobs.tolist(), results.top_k_ids.tolist(), strict=True)
    ]
    if engine == "sglang":
        token_records = [(logprob, token_id, None) for logprob, token_id in zip(logprobs, token_ids, strict=True)]
        return {"input_token_logprobs": token_records, "input_top_logprobs": [None, *top_records[1:]]}
    prompt_logprobs: list[Any] = [None]
    for token_id, logprob, token_records in list(zip(token_ids, logprobs, top_records, strict=True))[1:]:
        records_by_id = {
            top_id: vllm_record(top_logprob, rank) for rank, (top_logprob, top_id, _) in enumerate(token_records, 1)
        }
        prompt_logprobs.append(records_by_id | {token_id: records_by_id.get(token_id, vllm_record(logprob, None))})
    return prompt_logprobs


def vllm_record(logprob: float | None, rank: int | None) -> dict[str, Any]:
    """The record of a token in vLLM's format: a value for each of ``RECORD_FIELDS``, None as the token's text."""
    return dict(zip(RECORD_FIELDS, (logprob, rank, None), strict=True))
