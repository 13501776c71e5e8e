"""What no other test launches in Triton's own interpreter, and that every kernel has run there by then.

``test_interpreter.py`` runs this file, behind tests of other files, in a process of its own. The interpreter takes
bfloat16 operands of a product for integers.
"""

import importlib
import re
from pathlib import Path
from typing import Any

import torch
from chunked_head.kernels.common.launcher import Launcher
from chunked_head.kernels.products import launch as products
from triton.runtime import interpreter

from chunked_head import kernels, linear_cross_entropy
from chunked_head.core.stats import Demand, RowStats, layout_of
from chunked_head.stores.triton.backend import TRITON

launched: set[str] = set()
launch = Launcher.__getitem__


def record(self: Launcher, grid: tuple[int, ...]) -> Any:
    launched.add(self.kernel.fn.__name__)
    return launch(self, grid)


Launcher.__getitem__ = record  # type: ignore[method-assign]


def test_nothing_of_the_interpreter_is_replaced() -> None:
    assert interpreter.InterpreterBuilder.create_dot.__module__ == interpreter.__name__


def test_exponentials_in_the_place_of_logits() -> None:
    """Without their numbers, which are products of bfloat16. Over two chunks, which sum rows of frequent ids apart."""
    hidden, weight = (torch.randn(rows, 64).bfloat16().requires_grad_() for rows in (20, 67))
    linear_cross_entropy(hidden, weight, torch.randint(67, (20,)), backend="triton", chunk_tokens=10).backward()


def test_targets_rows_beside_a_product() -> None:
    """Of BLAS, where a GPU's own product would be no faster."""
    product, weight, out = torch.randn(40, 64), torch.randn(600, 64).half(), torch.empty(40, 64)
    target, (softmax, at_target) = torch.randint(600, (40,)), torch.rand(2, 40)
    products.finish_dhidden(out, product, weight, (target, softmax, at_target))
    expected = softmax[:, None] * product + at_target[:, None] * weight[target]
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-4)


def test_statistics_of_two_ranks() -> None:
    logits, target = torch.randn(5, 40), torch.randint(40, (5,))
    picked, names = logits.gather(1, target[:, None])[:, 0], layout_of(Demand()).message_indices
    pieces = []
    for first in (0, 20):
        part, here = logits[:, first : first + 20], (target >= first) & (target < first + 20)
        top = part.amax(1)
        found = {
            "lse_base": top,
            "neg_log_sum": top - part.logsumexp(1),
            "target_logit": torch.where(here, picked, 0.0),
        }
        pieces.append(torch.stack([*(found[name] for name in names), target.float()]))
    out = RowStats.empty(5, layout_of(Demand()), torch.float32, target.device)
    TRITON.merge_ranks(out, torch.stack(pieces), Demand(), target, False, torch.zeros(()))
    torch.testing.assert_close(out.logprob, logits.log_softmax(1).gather(1, target[:, None])[:, 0])
    torch.testing.assert_close(out.lse, logits.logsumexp(1))


def test_every_kernel_has_run() -> None:
    root = Path(next(iter(kernels.__path__)))
    paths = list(root.glob("*/*.py"))
    names = (path.relative_to(root).with_suffix("").parts for path in paths)
    modules = [importlib.import_module(".".join((kernels.__name__, *name))) for name in names]
    generated = {name for path in paths for name in re.findall(r'kernel_of\([^,"]+, "(\w+)"', path.read_text())}
    found = generated | {
        v.kernel.fn.__name__ for module in modules for v in vars(module).values() if isinstance(v, Launcher)
    }
    assert len(found) > 20 and not (missing := found - launched), missing
