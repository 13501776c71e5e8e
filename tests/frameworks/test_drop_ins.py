"""Liger's and Apple's heads by their names: values and gradients against Liger and plain PyTorch, and refusals."""

import enum
import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tiers import crossed
from torch import Tensor

from chunked_head import linear_logprobs
from chunked_head.integrations import cut_cross_entropy as cce
from chunked_head.integrations import liger

TOKENS, HIDDEN, VOCAB = 23, 16, 53
# on a GPU nothing is interpreted
DEVICES = [
    *([] if torch.cuda.is_available() else ["cpu"]), pytest.param("cuda", marks=pytest.mark.gpu)
]  # fmt: skip


class Number(float):
    """A float that can be cast, as a compiled kernel's arguments can and an interpreted one's cannot."""

    def to(self, dtype: Any) -> "Number":
        return self


class Interpretable:
    """Liger's kernel, with its floats so."""

    def __init__(self, kernel: Any):
        self.kernel = kernel

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        def launch(**arguments: Any) -> None:
            self.kernel[grid](**{k: Number(v) if isinstance(v, float) else v for k, v in arguments.items()})

        return launch


@pytest.fixture
def theirs(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Liger, interpreted where there is no GPU."""
    module = pytest.importorskip("liger_kernel.ops.fused_linear_cross_entropy")
    if not torch.cuda.is_available():
        monkeypatch.setattr(module, "liger_cross_entropy_kernel", Interpretable(module.liger_cross_entropy_kernel))
    return pytest.importorskip("liger_kernel.transformers")


def operands(device: str = "cpu", shape: tuple[int, ...] = (TOKENS,)) -> tuple[list[Tensor], Tensor]:
    made = torch.Generator().manual_seed(6)
    sizes = ((*shape, HIDDEN), (VOCAB, HIDDEN), (VOCAB,))
    leaves = [torch.randn(size, generator=made).to(device).requires_grad_() for size in sizes]
    target = torch.randint(0, VOCAB, shape, generator=made)
    target.view(-1)[2::5] = -100
    # some of them are predicted
    best = (leaves[0] @ leaves[1].t() + leaves[2]).argmax(-1).cpu()
    target.view(-1)[1::5] = best.view(-1)[1::5]
    return leaves, target.to(device)


def gradients(loss: Tensor, leaves: list[Tensor]) -> list[Tensor]:
    upstream = torch.linspace(-1, 2, loss.numel(), device=loss.device).view_as(loss)
    total = loss if loss.dim() == 0 else (loss * upstream).sum()
    return list(torch.autograd.grad(total * 0.37, leaves))


def close(ours: Any, theirs: Any) -> None:
    torch.testing.assert_close(ours, theirs, rtol=3e-5, atol=3e-6)


WEIGHTS = torch.linspace(0.2, 1.7, VOCAB)
ALL = {"return_z_loss": True, "return_token_accuracy": True, "return_predicted_tokens": True}
LIGER: dict[str, dict[str, Any]] = {
    "plain": {},
    "smoothed": {"label_smoothing": 0.1, "lse_square_scale": 1e-2},
    "weighted": {"ce_weight": WEIGHTS, "label_smoothing": 0.2, "lse_square_scale": 1e-2},
    "scaled": {"use_token_scaling": True, "ce_weight": WEIGHTS, "label_smoothing": 0.1},
    "scaled-z": {"use_token_scaling": True, "lse_square_scale": 0.1, "ce_weight": WEIGHTS, **ALL},
    "everything": {"lse_square_scale": 0.1, "label_smoothing": 0.1, **ALL},
    "no-z": {"return_z_loss": True},
    "accuracy": {"return_token_accuracy": True, "lse_square_scale": 0.1},
    "predicted": {"return_predicted_tokens": True, "ce_weight": WEIGHTS},
}


@crossed(device=DEVICES, reduction=["mean", "sum", "none"], name=LIGER)
def test_liger(name: str, reduction: str, device: str, theirs: Any) -> None:
    options = {k: v.to(device) if isinstance(v, Tensor) else v for k, v in LIGER[name].items()}
    (hidden, weight, bias), target = operands(device)
    mine, true = (
        module.LigerFusedLinearCrossEntropyLoss(reduction=reduction, **options)(weight, hidden, target, bias)
        for module in (liger, theirs)
    )
    assert isinstance(mine, Tensor) == isinstance(true, Tensor)
    if not isinstance(mine, Tensor):
        (mine, *further), (true, *expected) = vars(mine).values(), vars(true).values()
        assert not any(value is not None and value.requires_grad for value in further)
        close(further, expected)
    close(mine, true)
    close(gradients(mine, [hidden, weight, bias]), gradients(true, [hidden, weight, bias]))


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_liger_capped(reduction: str) -> None:
    """Its kernel's tanh is not the interpreter's: beside plain PyTorch."""
    (hidden, weight, bias), target = operands()
    module = liger.LigerFusedLinearCrossEntropyLoss(reduction=reduction, softcap=4.0, accum_dtype=torch.float32)
    mine = module(weight, hidden, target, bias)
    true = F.cross_entropy(4.0 * torch.tanh(F.linear(hidden, weight, bias) / 4.0), target, reduction=reduction)
    close(mine, true)
    close(gradients(mine, [hidden, weight, bias]), gradients(true, [hidden, weight, bias]))


def test_liger_functional_and_function() -> None:
    (hidden, weight, bias), target = operands()
    module = liger.LigerFusedLinearCrossEntropyLoss(lse_square_scale=0.1, **ALL, memory_budget="1MiB")
    expected = vars(module(weight, hidden, target, bias))
    functional = liger.liger_fused_linear_cross_entropy(hidden, weight, target, bias, lse_square_scale=0.1, **ALL)
    close(vars(functional), expected)
    apply = liger.LigerFusedLinearCrossEntropyFunction.apply
    options = (None, -100, 0.1, 0.0, "mean", None, True, None, False, True, True)
    close(apply(hidden, weight, target, bias, *options, None, None, 1), tuple(expected.values()))
    loss, *further = apply(hidden, weight, target)
    close(loss, F.cross_entropy(hidden @ weight.t(), target))
    assert further == [None, None, None]


def test_liger_outputs_take_one_softmax_where_values_are_reduced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Predicted tokens and values of each token need statistics that no loss returns: one more product, no gradient."""
    calls = []
    record = lambda *given, **named: calls.append(named) or linear_logprobs(*given, **named)  # noqa: E731
    monkeypatch.setattr(liger, "linear_logprobs", record)
    (hidden, weight, bias), target = operands()
    for options, count in (
        ({"return_z_loss": True, "return_token_accuracy": True}, 0), ({"return_predicted_tokens": True}, 1),
        ({"return_z_loss": True, "reduction": "none"}, 1), ({"reduction": "none"}, 0), ({}, 0),
    ):  # fmt: skip
        calls.clear()
        liger.liger_fused_linear_cross_entropy(hidden, weight, target, bias, lse_square_scale=0.1, **options)
        assert len(calls) == count, options


def test_liger_signatures(theirs: Any) -> None:
    """Theirs, and our own options behind them by name alone."""
    functional = pytest.importorskip("liger_kernel.transformers.functional")
    pairs = [
        (liger.liger_fused_linear_cross_entropy, functional.liger_fused_linear_cross_entropy),
        (liger.LigerFusedLinearCrossEntropyLoss.__init__, theirs.LigerFusedLinearCrossEntropyLoss.__init__),
        (liger.LigerFusedLinearCrossEntropyLoss.forward, theirs.LigerFusedLinearCrossEntropyLoss.forward),
        (liger.CrossEntropyOutput, functional.CrossEntropyOutput),
    ]
    for ours, true in pairs:
        mine = [p for p in inspect.signature(ours).parameters.values() if p.kind is not p.KEYWORD_ONLY]
        assert [(p.name, p.default) for p in mine] == [
            (p.name, p.default) for p in inspect.signature(true).parameters.values()
        ]
    ours, true = (module.LigerFusedLinearCrossEntropyFunction for module in (liger, functional))
    assert [*inspect.signature(ours.apply).parameters] == [*inspect.signature(true.forward).parameters][1:]


@pytest.mark.parametrize(
    ("options", "error", "says"),
    [
        ({"chunk_mem_const": 4}, ValueError, "chunk_mem_const must be 1, got 4; docs/coming-from.md"),
        ({"use_token_scaling": 1}, ValueError, "use_token_scaling must be True or False"),
        ({"return_z_loss": 1}, ValueError, "return_z_loss must be True or False"),
        ({"return_predicted_tokens": None}, ValueError, "return_predicted_tokens must be True or False"),
        ({"accum_dtype": torch.float16}, ValueError, "accumulate_dtype"),
        ({"ce_weight": WEIGHTS[:4]}, ValueError, "weights"),
    ],
    ids=str,
)
def test_liger_refuses(options: dict[str, Any], error: type, says: str) -> None:
    (hidden, weight, bias), target = operands()
    with pytest.raises(error, match=says):
        liger.liger_fused_linear_cross_entropy(hidden, weight, target, bias, **options)


@pytest.mark.parametrize(("name", "value"), [("ce_impl", "triton"), ("ce_mode", "auto"), ("chunk_mem_const", 2)])
def test_liger_refuses_its_kernels(name: str, value: Any) -> None:
    (hidden, weight, bias), target = operands()
    with pytest.raises(ValueError, match=f"{name} must be (None|1), got {value!r}; docs/coming-from.md"):
        liger.LigerFusedLinearCrossEntropyFunction.apply(hidden, weight, target, bias, **{name: value})


def apples(
    e: Tensor, c: Tensor, targets: Tensor, bias: Tensor | None, reduction: str, shift: int, softcap: float | None
) -> tuple[Tensor, Tensor]:
    """Their documentation, and what their code says of log-sum-exp."""
    x = F.linear(e[..., : e.shape[-2] - shift, :], c, bias)
    x = x if softcap is None else softcap * torch.tanh(x / softcap)
    y = targets[..., shift:]
    loss = F.cross_entropy(x.flatten(0, -2), y.flatten(), reduction=reduction)
    lse = torch.where(y == -100, 0.0, x.logsumexp(-1))
    return loss.view(y.shape) if reduction == "none" else loss, lse


@crossed(reduction=["mean", "sum", "none"], shift=[0, 1, True, 3], softcap=[None, 4.0], return_lse=[False, True])
def test_cut_cross_entropy(reduction: str, shift: int, softcap: float | None, return_lse: bool) -> None:
    leaves, target = operands(shape=(3, 11))
    e, c, bias = leaves
    module = cce.LinearCrossEntropy(reduction=reduction, shift=shift, softcap=softcap, return_lse=return_lse)
    found = module(e, c, target, bias)
    loss, lse = apples(e, c, target, bias, reduction, int(shift), softcap)
    if return_lse:
        found, ours = found
        close(ours, lse)
        # z-loss as they compute it
        found, loss = found + ours.square().mean(), loss + lse.square().mean()
    close(found, loss)
    close(gradients(found, leaves), gradients(loss, leaves))


@pytest.mark.parametrize("impl", cce.IMPLEMENTATIONS)
def test_cut_cross_entropy_implementations(impl: str) -> None:
    """Each of their names, and as an enumeration; sums in fp32 where they promise them."""
    leaves, target = operands()
    name = enum.Enum("LinearCrossEntropyImpl", [impl.upper()])[impl.upper()]
    options = cce.translated(cce.OPTIONS, {"impl": name})
    assert options.get("accumulate_dtype") == (None if impl in ("cce", "torch_compile") else torch.float32)
    assert options.get("backend") == ("torch" if impl == "torch_compile" else None)
    loss = cce.linear_cross_entropy(*leaves[:2], target, filter_eps=None, impl=name)
    close(loss, F.cross_entropy(leaves[0] @ leaves[1].t(), target))


def test_without_tokens_that_count() -> None:
    (hidden, weight, bias), target = operands()
    nothing = torch.full_like(target, -100)
    for reduction in ("mean", "sum", "none"):
        out = liger.liger_fused_linear_cross_entropy(
            hidden, weight, nothing, bias, reduction=reduction, lse_square_scale=0.1, **ALL
        )
        assert not out.loss.any() and not out.z_loss.any() and not out.token_accuracy.any()
        assert (out.predicted_tokens == -1).all()
        assert not any(gradient.any() for gradient in gradients(out.loss, [hidden, weight, bias]))
    loss, lse = cce.linear_cross_entropy(hidden, weight, nothing, return_lse=True)
    assert loss == 0 and not lse.any() and not gradients(loss, [hidden, weight])[1].any()


@pytest.mark.parametrize(
    ("options", "error", "says"),
    [
        ({"filter_eps": 1e-3}, ValueError, "filter_eps must be 'auto' or None or 0.0, got 0.001"),
        ({"filter_e_grad": None}, ValueError, "filter_e_grad must be True or False"),
        ({"impl": "liger"}, ValueError, "impl must be 'cce' or 'torch_compile'"),
        ({"vocab_parallel_options": (0, 5)}, ValueError, "vocab_parallel_options must be None, got"),
        ({"return_lse": 1}, ValueError, "return_lse must be True or False, got 1"),
        ({"shift": TOKENS}, ValueError, rf"shift must be in \[0, {TOKENS}\)"),
        ({"shift": 1.0}, TypeError, "shift must be an int, got 1.0"),
    ],
    ids=str,
)
def test_cut_cross_entropy_refuses(options: dict[str, Any], error: type, says: str) -> None:
    leaves, target = operands()
    with pytest.raises(error, match=says):
        cce.linear_cross_entropy(*leaves[:2], target, **options)


def test_cut_cross_entropy_module() -> None:
    """Apple's attributes, in Apple's order; a changed one counts."""
    names = {
        "ignore_index": -100, "softcap": 3.0, "reduction": "sum", "shift": 1, "filter_eps": None, "accum_e_fp32": True,
        "accum_c_fp32": False, "filter_e_grad": True, "filter_c_grad": True, "impl": "cce", "return_lse": False,
    }  # fmt: skip
    taken = inspect.signature(cce.LinearCrossEntropy.__init__).parameters.values()
    assert [p.name for p in taken if p.kind is p.POSITIONAL_OR_KEYWORD][1:] == [*names]
    module = cce.LinearCrossEntropy(-100, 3.0, "sum", 1, None, True)
    assert {name: getattr(module, name) for name in names} == names
    leaves, target = operands()
    module.reduction, module.return_lse, module.shift = "none", True, 0
    assert [value.shape for value in module(*leaves[:2], target)] == [target.shape] * 2
    module.reduction = "max"
    with pytest.raises(ValueError, match="reduction must be one of"):
        module(*leaves[:2], target)
    for options, says in (
        ({"return_lse": "yes"}, "return_lse must be True or False"), ({"shift": -1}, "shift must be at least 0"),
        ({"ignore_index": None}, "ignore_index must be an int"), ({"softcap": "x"}, "softcap must be a number"),
        ({"memory_budget": "x"}, "memory_budget must be"),
    ):  # fmt: skip
        with pytest.raises((TypeError, ValueError), match=says):
            cce.LinearCrossEntropy(**options)
