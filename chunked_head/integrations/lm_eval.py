"""lm-eval's HuggingFace model on this library's head: its log-likelihoods without [batch, tokens, vocab] logits.

    lm = ChunkedHeadLM(pretrained="Qwen/Qwen3-8B", batch_size=64)      # HFLM's arguments, and the head's options
    lm_eval.simple_evaluate(model=lm, tasks=["hellaswag", "wikitext"])

or ``python -m chunked_head.integrations.lm_eval run --model chunked_head_hf ...``, which is lm-eval's own command line
with this module imported. The model's logits are lazy (``patch_model``). The continuations of a batch are scored in one
call: of ``linear_logprobs``, or of ``logits_logprobs`` if the logits have to be computed. lm-eval's code orders
requests, makes batches and caches contexts.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from ..functions.logprobs import logits_logprobs
from .frameworks import Framework
from .huggingface.fused import logprobs_outputs, statistics_operand
from .huggingface.lazy_logits import LazyLogits
from .huggingface.model_patch import OPTIONS, check_options
from .huggingface.patch import patch_model

MODULE = "lm_eval.models.huggingface"  # lm-eval's module that has HFLM
TESTED_PARAMETERS = {
    ("lm_eval.api.registry", "register_model"): "names", (MODULE, "HFLM"): "pretrained, *",
    (MODULE, "HFLM._loglikelihood_tokens"): "requests, disable_tqdm, override_bs",
    (MODULE, "HFLM._model_call"): "inps, *", (MODULE, "HFLM._batch_scheduler"): "*",
    (MODULE, "Collator"): "arr, sort_fn, group_fn, group_by", (MODULE, "Collator.get_batched"): "n, batch_fn",
    (MODULE, "Collator.get_cache"): "req_str, cxt_toks, cont_toks, logits",
    (MODULE, "Collator.get_original"): "newarr",
}  # fmt: skip
# in other versions lm-eval's own loop reads lazy logits, one request after the other
IS_SUPPORTED = Framework("lm_eval", ("0.4.11", "0.4.13"), TESTED_PARAMETERS).has_tested_parameters()

from lm_eval.api.registry import register_model  # noqa: E402
from lm_eval.models import huggingface as lm_eval_models  # noqa: E402

Request = tuple[tuple[str, str] | None, list[int], list[int]]  # texts, ids of the context, ids of the continuation


@register_model("chunked_head_hf")
class ChunkedHeadLM(lm_eval_models.HFLM):
    """``HFLM`` whose model computes only the rows of logits that lm-eval reads.

    Args:
        pretrained, args, kwargs: as in ``HFLM``.
        memory_budget, chunk_tokens, deterministic, backend, ...: options of ``patch_model``.

    Log-likelihoods and greedy flags are those of fp32 logits and softmaxes, whatever ``softmax_dtype`` says.
    ``generate_until`` is HFLM's. If the head is not understood, all logits are computed, and a warning says why.

    Raises:
        TypeError, ValueError: an option of the head is wrong (found before the model is loaded), or the model is an
            encoder-decoder.
    """

    def __init__(self, pretrained: Any, *args: Any, **kwargs: Any):
        options = {name: kwargs.pop(name) for name in OPTIONS if name in kwargs}
        check_options(options)
        super().__init__(pretrained, *args, **kwargs)
        if self.backend != "causal":
            raise ValueError(
                f"ChunkedHeadLM scores decoder-only models, got one with backend={self.backend!r}; use lm-eval's hf"
            )
        patch_model(self.model, when="always", **options)

    def _loglikelihood_tokens(
        self, requests: Sequence[Request], disable_tqdm: bool = False, override_bs: int | None = None
    ) -> list[tuple[float, bool]]:
        """Scores a batch of contexts at a time, in place of HFLM's method. Returns a pair for each request: the
        log-likelihood of the continuation, and whether each id of the continuation has the largest logit."""
        if not IS_SUPPORTED:
            lm_eval_outcomes: list[tuple[float, bool]]
            lm_eval_outcomes = super()._loglikelihood_tokens(requests, disable_tqdm, override_bs)
            return lm_eval_outcomes
        collator = lm_eval_models.Collator(
            requests, sort_fn=lambda request: (-len(request[1] + request[2]), tuple(request[1] + request[2])),
            group_by="contexts" if self.logits_cache else None, group_fn=lambda request: request[1] + request[2][:-1],
        )  # fmt: skip
        is_automatic = self.batch_size == "auto"
        batch_scheduler = self._batch_scheduler if is_automatic and len(collator) and not override_bs else None
        if batch_scheduler is not None:
            self.batch_sizes: dict[int, int] = {}  # batch sizes of earlier requests do not count
        outcomes: list[tuple[float, bool]] = []
        is_silent = disable_tqdm or self.rank != 0
        batch_size = (override_bs or 0) if is_automatic else self.batch_size
        with lm_eval_models.tqdm(total=len(requests), disable=is_silent, desc="log-likelihoods") as progress:
            for batch in collator.get_batched(n=batch_size, batch_fn=batch_scheduler):
                for texts, outcome in self.batch_outcomes(batch, collator):
                    outcomes.append(outcome)
                    if texts is not None:  # None of loglikelihood_rolling, which caches whole texts itself
                        self.cache_hook.add_partial("loglikelihood", texts, outcome)
                    progress.update(1)
        outcomes_in_order: list[tuple[float, bool]] = collator.get_original(outcomes)
        return outcomes_in_order

    def batch_outcomes(self, batch: Sequence[Request], collator: Any) -> list[tuple[Any, tuple[float, bool]]]:
        """Returns pairs of a request's texts and outcome: the continuation's log-likelihood, and whether it is greedy.
        There is a pair for each request of the batch, and for each request with the same context as one of these."""
        input_ids = [
            torch.tensor((context + ids)[-(self.max_length + 1) : -1], device=self.device) for _, context, ids in batch
        ]
        if any(len(ids) > len(tokens) for (_, _, ids), tokens in zip(batch, input_ids, strict=True)):
            raise ValueError(f"a continuation without a context, or longer than the model's {self.max_length} tokens")
        padded_ids = pad_sequence(input_ids, batch_first=True)
        logits = self._model_call(padded_ids)
        row_length = logits.shape[1]
        num_prompt_tokens = row_length - padded_ids.shape[1]  # virtual tokens, which stand first
        # texts, ids of the continuation, and indices of the ids' rows in the batch's flattened logits
        scored_requests: list[tuple[Any, Tensor, Tensor]] = []
        for i, ((texts, context, ids), tokens) in enumerate(zip(batch, input_ids, strict=True)):
            end_row = i * row_length + num_prompt_tokens + len(tokens)
            row_indices = torch.arange(end_row - len(ids), end_row, device="cpu").view(1, -1, 1)  # passed as logits
            for request_texts, request_ids, request_rows in collator.get_cache(texts, context, ids, row_indices):
                last_rows = request_rows.flatten()[-len(request_ids) :]
                scored_requests.append((request_texts, torch.tensor(request_ids, device="cpu"), last_rows))
        texts_by_request, ids_by_request, rows_by_request = zip(*scored_requests, strict=True)
        scored_logits = logits.flatten(0, 1)[torch.cat(rows_by_request).to(logits.device)]
        logprobs, is_greedy = scores(scored_logits, torch.cat(ids_by_request).to(logits.device))
        continuation_lengths = [len(ids) for ids in ids_by_request]
        logprob_sums = [
            float(logprobs_of_ids.sum()) for logprobs_of_ids in logprobs.cpu().double().split(continuation_lengths)
        ]
        are_greedy = [bool(is_greedy_of_ids.all()) for is_greedy_of_ids in is_greedy.cpu().split(continuation_lengths)]
        return list(zip(texts_by_request, zip(logprob_sums, are_greedy, strict=True), strict=True))


@torch.no_grad()
def scores(logits: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Returns log-probabilities of ids [rows] under logits [rows, vocab], and a mask [rows] of the ids that are the
    first with the largest logit."""
    operand = statistics_operand(logits._virtual) if isinstance(logits, LazyLogits) else None
    if operand is not None:
        logprobs, largest_ids = logprobs_outputs(operand, ids, argmax=True)
        operand.logits.head_call.patch.count_loss(operand.tail)
    else:
        logprobs, largest_ids = logits_logprobs(
            logits.materialise() if isinstance(logits, LazyLogits) else logits, ids, argmax=True
        )
    return logprobs, largest_ids == ids


if __name__ == "__main__":
    from lm_eval.__main__ import cli_evaluate

    cli_evaluate()
