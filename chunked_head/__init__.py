"""chunked_head: the head of a language model, from hidden states to loss and gradients without the logits."""

from pathlib import Path

__version__ = "0.2.0"

# The kernels' folder lies beside this package in a checkout and inside it in a wheel. It must have no __init__.py: at
# the top of a checkout it would pass for the package `kernels`, which transformers looks for and would then execute.
_checkout = Path(__file__).resolve().parent.parent
_kernel_file = _checkout / "kernels" / "statistics" / "exp_logits.py"
if not (Path(__file__).resolve().parent / "kernels").is_dir() and _kernel_file.is_file():
    __path__.append(str(_checkout))

# ruff: noqa: E402  (after the path is set)
from . import losses, metrics
from .call.options import Execution
from .core.checks import answer_names
from .functions import scoring
from .functions.cross_entropy import ChunkedHead, CrossEntropyLoss, linear_cross_entropy
from .functions.divergence import linear_divergence
from .functions.gathered_topk import gathered_topk_kl
from .functions.logprobs import linear_logprobs, logits_logprobs
from .functions.loss import LossOutput, linear_loss, logits_loss
from .functions.plan import plan
from .functions.quantise import quantise
from .integrations.huggingface.explain import explain_model
from .integrations.huggingface.patch import log_metrics, patch_model, unpatch_model
from .integrations.pytorch import override_torch
from .integrations.trl import patch_trl
from .losses import weights
from .parallel import TokenParallel, VocabParallel, shift_targets
from .plan.plans import Plan

__all__ = [
    "ChunkedHead", "CrossEntropyLoss", "Execution", "LossOutput", "Plan", "TokenParallel", "VocabParallel",
    "explain_model", "gathered_topk_kl", "linear_cross_entropy", "linear_divergence", "linear_logprobs", "linear_loss",
    "log_metrics", "logits_logprobs", "logits_loss", "losses", "metrics", "override_torch", "patch_model", "patch_trl",
    "plan", "quantise", "scoring", "shift_targets", "unpatch_model", "weights",
]  # fmt: skip

quantize = quantise  # the American name
answer_names(__name__, {
    "chunked_head.integrations.liger.LigerFusedLinearCrossEntropyLoss": "ligerfusedlinearcrossentropyloss",
    "linear_cross_entropy, as a module ChunkedHead; CrossEntropyLoss is of logits":
        "linearcrossentropy linearcrossentropyloss fusedlinearcrossentropy fusedlinearcrossentropyloss crossentropy",
    "linear_logprobs": "logprobs selectivelogsoftmax", "metrics.Metric": "metric", "linear_loss": "loss",
    "patch_model": "patch", "chunked_head.integrations.trl.unpatch_trl": "unpatchtrl",
})  # fmt: skip
