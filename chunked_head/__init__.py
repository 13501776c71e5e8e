"""chunked_head: the head of a language model, from hidden states to loss and gradients without the logits."""

from pathlib import Path

# The kernels' folder lies beside this package in a checkout and inside it in a wheel. It must have no __init__.py: at
# the top of a checkout it would pass for the package `kernels`, which transformers looks for and would then execute.
_beside = Path(__file__).resolve().parent.parent
if not (Path(__file__).resolve().parent / "kernels").is_dir() and (_beside / "kernels" / "exp_logits.py").is_file():
    __path__.append(str(_beside))

from . import losses, metrics, weights  # noqa: E402  (after the path is set)
from .head import ChunkedHead, linear_cross_entropy  # noqa: E402
from .linear_loss import LossOutput, linear_loss  # noqa: E402
from .logprobs import linear_logprobs  # noqa: E402
from .plan_of import plan  # noqa: E402
from .plans import Plan  # noqa: E402

__all__ = [
    "ChunkedHead",
    "LossOutput",
    "Plan",
    "linear_cross_entropy",
    "linear_logprobs",
    "linear_loss",
    "losses",
    "metrics",
    "plan",
    "weights",
]
