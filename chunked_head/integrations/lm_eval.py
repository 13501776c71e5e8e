"""lm-eval's HuggingFace model on this library's head: the same log-likelihoods without [batch, tokens, vocab] logits.

    lm = ChunkedHeadLM(pretrained="Qwen/Qwen3-8B", batch_size=64)      # HFLM's arguments, and the head's options
    lm_eval.simple_evaluate(model=lm, tasks=["hellaswag", "wikitext"])

or ``python -m chunked_head.integrations.lm_eval run --model chunked_head_hf ...``, which is lm-eval's own command line
with this module imported. What its model returns for logits are lazy ones (``patch_model``); the rows of a batch's
continuations are one call of ``linear_logprobs``. Order, batches and the cache of contexts are lm-eval's code.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from ..functions.logprobs import logits_logprobs
from .frameworks import Framework
from .huggingface.agreement import OPTIONS, check_options
from .huggingface.fused import outputs_of, reading
from .huggingface.lazy_logits import LazyLogits
from .huggingface.patch import patch_model

MODULE = "lm_eval.models.huggingface"
USES = {
    ("lm_eval.api.registry", "register_model"): "names", (MODULE, "HFLM"): "pretrained, *",
    (MODULE, "HFLM._loglikelihood_tokens"): "requests, disable_tqdm, override_bs",
    (MODULE, "HFLM._model_call"): "inps, *", (MODULE, "HFLM._batch_scheduler"): "*",
    (MODULE, "Collator"): "arr, sort_fn, group_fn, group_by", (MODULE, "Collator.get_batched"): "n, batch_fn",
    (MODULE, "Collator.get_cache"): "req_str, cxt_toks, cont_toks, logits",
    (MODULE, "Collator.get_original"): "newarr",
}  # fmt: skip
# elsewhere lm-eval's own loop reads lazy logits, one request after the other
IN_BATCHES = Framework("lm_eval", ("0.4.11", "0.4.13"), USES).fits()

from lm_eval.api.registry import register_model  # noqa: E402
from lm_eval.models import huggingface as theirs  # noqa: E402

Request = tuple[tuple[str, str] | None, list[int], list[int]]  # texts, ids of the context, ids of the continuation


@register_model("chunked_head_hf")
class ChunkedHeadLM(theirs.HFLM):
    """``HFLM`` whose model's logits are computed where lm-eval reads them, and nowhere else.

    Args:
        pretrained, args, kwargs: of ``HFLM``.
        memory_budget, chunk_tokens, deterministic, backend, ...: of the head, as in ``patch_model``.

    Log-likelihoods and greedy flags are those of fp32 logits and softmaxes, whatever ``softmax_dtype`` says.
    ``generate_until`` is HFLM's. A model whose head is not understood is scored as before, and a warning says why.

    Raises:
        TypeError, ValueError: for an option of the head that is wrong, before the model is loaded; for an
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
        """HFLM's method, a batch of contexts at a time: the log-likelihood of each request's continuation, and True
        where each of its ids is the largest."""
        if not IN_BATCHES:
            scored: list[tuple[float, bool]] = super()._loglikelihood_tokens(requests, disable_tqdm, override_bs)
            return scored
        order = theirs.Collator(
            requests, sort_fn=lambda request: (-len(request[1] + request[2]), tuple(request[1] + request[2])),
            group_by="contexts" if self.logits_cache else None, group_fn=lambda request: request[1] + request[2][:-1],
        )  # fmt: skip
        automatic = self.batch_size == "auto"
        schedule = self._batch_scheduler if automatic and len(order) and not override_bs else None
        if schedule is not None:
            self.batch_sizes: dict[int, int] = {}  # those of other requests' lengths do not count
        answers: list[tuple[float, bool]] = []
        with theirs.tqdm(total=len(requests), disable=disable_tqdm or self.rank != 0, desc="log-likelihoods") as bar:
            for batch in order.get_batched(n=(override_bs or 0) if automatic else self.batch_size, batch_fn=schedule):
                for texts, answer in self.answers(batch, order):
                    answers.append(answer)
                    if texts is not None:  # of loglikelihood_rolling, which keeps whole texts itself
                        self.cache_hook.add_partial("loglikelihood", texts, answer)
                    bar.update(1)
        in_order: list[tuple[float, bool]] = order.get_original(answers)
        return in_order

    def answers(self, batch: Sequence[Request], order: Any) -> list[tuple[Any, tuple[float, bool]]]:
        """Texts and answer of each request of a batch, and of those that share a context with one of it."""
        inputs = [
            torch.tensor((context + ids)[-(self.max_length + 1) : -1], device=self.device) for _, context, ids in batch
        ]
        if any(len(ids) > len(tokens) for (_, _, ids), tokens in zip(batch, inputs, strict=True)):
            raise ValueError(f"a continuation without a context, or longer than the model's {self.max_length} tokens")
        padded = pad_sequence(inputs, batch_first=True)
        logits = self._model_call(padded)
        width = logits.shape[1]
        prompt = width - padded.shape[1]  # virtual tokens, which stand first
        scored: list[tuple[Any, Tensor, Tensor]] = []  # texts, ids, and the ids' rows in all of the batch
        for i, ((texts, context, ids), tokens) in enumerate(zip(batch, inputs, strict=True)):
            end = i * width + prompt + len(tokens)
            places = torch.arange(end - len(ids), end, device="cpu").view(1, -1, 1)  # Collator takes them for logits
            for key, continuation, cached in order.get_cache(texts, context, ids, places):
                scored.append((key, torch.tensor(continuation, device="cpu"), cached.flatten()[-len(continuation) :]))
        texts_of, ids_of, places_of = zip(*scored, strict=True)
        rows = logits.flatten(0, 1)[torch.cat(places_of).to(logits.device)]
        logprobs, greedy = scores(rows, torch.cat(ids_of).to(logits.device))
        lengths = [len(ids) for ids in ids_of]
        sums = [float(values.sum()) for values in logprobs.cpu().double().split(lengths)]
        all_greedy = [bool(flags.all()) for flags in greedy.cpu().split(lengths)]
        return list(zip(texts_of, zip(sums, all_greedy, strict=True), strict=True))


@torch.no_grad()
def scores(logits: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Log-probabilities of ids [rows] under logits [rows, vocab], and True where an id is the first of the largest."""
    read = reading(logits._virtual) if isinstance(logits, LazyLogits) else None
    if read is not None:
        logprobs, largest = outputs_of(read, ids, argmax=True)
        read.logits.source.agreement.count_loss(read.tail)
    else:
        logprobs, largest = logits_logprobs(
            logits.materialise() if isinstance(logits, LazyLogits) else logits, ids, argmax=True
        )
    return logprobs, largest == ids


if __name__ == "__main__":
    from lm_eval.__main__ import cli_evaluate

    cli_evaluate()
