"""lm-eval's HuggingFace model on this library's head: the same log-likelihoods without [batch, tokens, vocab] logits.

    lm = ChunkedHeadLM(pretrained="Qwen/Qwen3-8B", batch_size=64)      # HFLM's arguments, and the head's options
    lm_eval.simple_evaluate(model=lm, tasks=["hellaswag", "wikitext"])

or ``python -m chunked_head.integrations.lm_eval run --model chunked_head_hf ...``, which is lm-eval's own command line
with this module imported. Requests, batches, caches and the automatic batch size are lm-eval's code; what it takes for
logits are lazy ones (``patch_model``), of which it reads only the rows of continuations.
"""

from typing import Any

from .frameworks import Framework
from .huggingface.agreement import OPTIONS, check_options
from .huggingface.patch import patch_model

Framework(
    "lm_eval",
    ("0.4.11", "0.4.13"),
    {("lm_eval.api.registry", "register_model"): "names", ("lm_eval.models.huggingface", "HFLM"): "pretrained, *"},
).fits()

from lm_eval.api.registry import register_model  # noqa: E402
from lm_eval.models.huggingface import HFLM  # noqa: E402


@register_model("chunked_head_hf")
class ChunkedHeadLM(HFLM):
    """``HFLM`` whose model's logits are computed where lm-eval reads them, and nowhere else.

    Args:
        pretrained, args, kwargs: of ``HFLM``.
        memory_budget, chunk_tokens, deterministic, backend, ...: of the head, as in ``patch_model``.

    Log-likelihoods are fp32 softmaxes of the head's products, whatever ``softmax_dtype`` says: nearer to exact for
    16-bit models, whose log-softmax lm-eval rounds to 16 bits. Greedy flags are those of the model's own logits, and
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


if __name__ == "__main__":
    from lm_eval.__main__ import cli_evaluate

    cli_evaluate()
