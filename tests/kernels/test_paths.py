"""Which option takes which path on a GPU: docs/paths.md is this table, made from the dispatcher itself.

`python tests/kernels/test_paths.py > docs/paths.md` makes it anew.
"""

from pathlib import Path
from typing import Any

import torch

from chunked_head import losses, metrics, plan
from chunked_head.losses import Losses

TOPK = {"teacher_k": 8}
DENSE = {"teacher_hidden": 64}
CE = losses.cross_entropy()
ASKED: dict[str, tuple[Losses, tuple, dict[str, Any]]] = {
    "cross-entropy, class weights, DFT, focal": (CE + losses.focal() + losses.unlikelihood(), (), {}),
    "z-loss": (losses.z_loss(), (), {}),
    "policy losses, KL to a reference": (losses.grpo() + losses.kl_to_reference() + losses.cispo(), (), {}),
    "losses of segments and pairs": (losses.gspo() + losses.dpo(), (), {}),
    "entropy, accuracy, lse, mean logit as metrics": (
        CE, (metrics.entropy(), metrics.accuracy(), metrics.lse(), metrics.mean_logit()), {}
    ),
    "softcap": (CE, (), {"softcap": 30.0}),
    "trained bias": (CE, (), {"bias": True}),
    "label smoothing": (losses.cross_entropy(label_smoothing=0.1), (), {}),
    "entropy as a loss": (CE - 0.1 * losses.entropy(), (), {}),
    "two temperatures": (CE + losses.z_loss(temperature=2.0), (), {}),
    "top-K teacher": (CE + losses.topk_kl(), (), TOPK),
    "dense teacher": (losses.forward_kl() + losses.reverse_kl() + losses.jsd() + losses.tvd(), (), DENSE),
}  # fmt: skip


def table() -> str:
    """The table in Markdown."""
    lines = [
        "# Paths",
        "",
        "A path is what a call keeps of the logits of a chunk between the statistics and the gradient. On a",
        "[listed GPU](gpus.md) there are three:",
        "",
        "- `fast` keeps bf16 exponentials relative to the target's logit. The gradient takes no pass over them.",
        "- `relative` keeps fp16 logits relative to strips of 128 columns. The gradient takes one pass over them.",
        "- `logits` keeps fp32 logits.",
        "",
        "Statistics come from fp32 accumulators on every path. A sum of losses takes the path furthest down this list.",
        "Other GPUs, odd alignments and `linear_logprobs(top_k=...)` take `logits`, and so does the torch backend.",
        "",
        "Some calls need all statistics before any gradient: losses of segments and pairs in several chunks,",
        '`reduction="none"`, small budgets, a second backward. `fast` and `relative` then keep no logits. A second',
        "matrix product for the logits makes the gradient in 16 bits, beside a dense teacher from fp32 logits.",
        "",
        "| losses, metrics and options of a call | bf16 | fp16 | fp32 |",
        "|---|---|---|---|",
    ]
    for name, (loss, measured, more) in ASKED.items():
        stores = [
            plan(
                4096, 64, 5000, dtype, loss=loss, metrics=measured, device="cuda", backend="triton", **more
            ).sizes.store
            for dtype in (torch.bfloat16, torch.float16, torch.float32)
        ]
        lines.append(f"| {name} | {' | '.join(stores)} |")
    return "\n".join(lines) + "\n"


def test_table() -> None:
    written = Path(__file__).parents[2] / "docs" / "paths.md"
    assert written.read_text() == table(), "python tests/kernels/test_paths.py > docs/paths.md"


if __name__ == "__main__":
    print(table(), end="")
