"""PyTorch's own ``F.linear_cross_entropy(options=...)`` on this library's head: PyTorch's samples of it and its errors,
its options in pairs, and that nothing is changed where it is not what is known. Compared with PyTorch's operator and,
where numbers are rounded, with float64: an error at most twice PyTorch's, and 4 ulp."""

import importlib
import sys
import types
import unittest
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tiers import crossed
from torch import Tensor

import chunked_head
from chunked_head.integrations import pytorch

Options: Any = getattr(torch.nn, "LinearCrossEntropyOptions", None)
if Options is None or not hasattr(torch.library, "get_kernel"):
    pytest.skip("torch has no chunked linear_cross_entropy before 2.13", allow_module_level=True)
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.fixture(autouse=True)
def untouched() -> Iterator[None]:
    yield
    assert pytorch.Override.current_override is None


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Calls that ours computed."""
    calls: list[Any] = []
    real = pytorch.loss_and_gradients

    def counted(call: Any, options: Any) -> Any:
        calls.append(call)
        return real(call, options)

    monkeypatch.setattr(pytorch, "loss_and_gradients", counted)
    return calls


def operands(dtype: torch.dtype = torch.float32, device: str = "cpu", tokens: int = 23, classes: int = 37) -> list[Any]:
    """Input, weight, bias, targets of which some do not count, weights of the classes."""
    made = torch.Generator().manual_seed(2)
    shapes = (tokens, 11), (classes, 11), (classes,)
    leaves = [torch.randn(shape, generator=made).to(device, dtype).requires_grad_() for shape in shapes]
    target = torch.randint(0, classes, (tokens,), generator=made)
    target[::5] = -100
    return [*leaves, target.to(device), torch.rand(classes, generator=made).to(device, dtype) + 0.5]


def step(leaves: list[Tensor | None], target: Tensor, upstream: float = 1.0, **given: Any) -> list[Tensor]:
    """The loss, and gradients of the leaves that have one."""
    hidden, weight, bias = leaves
    loss = F.linear_cross_entropy(hidden, weight, target, linear_bias=bias, **given)
    wanted = [leaf for leaf in leaves if leaf is not None and leaf.requires_grad]
    return [loss, *(torch.autograd.grad(loss, wanted, torch.full_like(loss, upstream)) if wanted else ())]


def wide(value: Any) -> Any:
    if isinstance(value, Tensor) and value.dtype.is_floating_point:
        return value.detach().double().requires_grad_(value.requires_grad)
    return value


def within_budget(
    ours: list[Tensor], theirs: list[Tensor], true: list[Tensor], dtype: torch.dtype, probability: float = 0.0
) -> None:
    """``probability``: how much an error of 1 in every token's probabilities would make of a gradient; an ulp of it is
    allowed, since a target of probability 0.997 has a gradient of 0.003 that is rounded as the probability is."""
    ulp = torch.finfo(dtype).eps
    for mine, other, exact in zip(ours, theirs, true, strict=True):
        assert mine.dtype == other.dtype and mine.shape == other.shape
        assert torch.equal(mine.isnan(), other.isnan())
        exact = exact.nan_to_num()
        error, allowed = ((each.double().nan_to_num() - exact).abs() for each in (mine, other))
        assert bool((error <= 2 * allowed + ulp * (4 * exact.abs() + 4 * exact.abs().max() + probability)).all())


@crossed(
    reduction=["mean", "sum"], bias=[True, False], weights=[False, True], frozen=[None, 0, 1], upstream=[1.0, -0.5],
    policy=["auto", "accurate", "compact"], retain=[False, True], ignore=[None, 3, -1],
    dtype=[torch.float32, torch.float64, torch.bfloat16, torch.float16],
)  # fmt: skip
def test_options(
    reduction: str, bias: bool, weights: bool, frozen: int | None, upstream: float, policy: str, retain: bool,
    ignore: int | None, dtype: torch.dtype, served: list[Any],
) -> None:  # fmt: skip
    *leaves, target, class_weights = operands(dtype)
    leaves[2] = leaves[2] if bias else None
    if frozen is not None:
        leaves[frozen] = leaves[frozen].detach()
    if ignore is not None:
        target = torch.where(target == -100, ignore, target)
    given = {"weight": class_weights if weights else None, "reduction": reduction, "ignore_index": ignore}
    options = Options(acc_policy=policy, allow_retain_graph=retain, batch_chunk_size=8, chunking_method=None)
    theirs = step(leaves, target, upstream, options=options, **given)
    assert not served
    with chunked_head.override_torch():
        ours = step(leaves, target, upstream, options=options, **given)
    assert len(served) == 1
    given["weight"] = wide(given["weight"])
    true = step([wide(leaf) for leaf in leaves], target, upstream, **given)
    within_budget(ours, theirs, true, dtype)


def own_tests() -> Any:
    """PyTorch's table of its functions' tests, with the samples of each."""
    if (
        "expecttest" not in sys.modules and importlib.util.find_spec("expecttest") is None
    ):  # of which the table's modules import a class
        sys.modules["expecttest"] = types.ModuleType("expecttest")
        sys.modules["expecttest"].TestCase = unittest.TestCase  # type: ignore[attr-defined]
    table = importlib.import_module("torch.testing._internal.common_methods_invocations").op_db
    return {one.variant_test_name: one for one in table if one.name == "nn.functional.linear_cross_entropy"}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("device", DEVICES)
def test_pytorchs_own_samples(device: str, dtype: torch.dtype, served: list[Any]) -> None:
    """Of its chunked variants: values, gradients and warnings are PyTorch's."""
    count = 0
    for name in ("chunked", "chunked_none"):
        for sample in own_tests()[name].sample_inputs(device, dtype, requires_grad=True):
            hidden, weight, target = sample.input, *sample.args
            given = dict(sample.kwargs)
            leaves = [hidden, weight, given.pop("linear_bias", None)]
            exact = {key: wide(value) for key, value in given.items() if key != "options"}
            found = []
            for ours in (False, True):
                with warnings.catch_warnings(record=True) as said:
                    warnings.simplefilter("always")
                    if ours:
                        with chunked_head.override_torch():
                            found.append((step(leaves, target, **given), [str(one.message) for one in said]))
                    else:
                        found.append((step(leaves, target, **given), [str(one.message) for one in said]))
            assert found[0][1] == found[1][1]
            true = step([wide(leaf) for leaf in leaves], wide(target), **exact)
            size = max(1.0, *(float(leaf.detach().abs().max()) for leaf in leaves[:2]))
            within_budget(
                found[1][0], found[0][0], true, dtype, size if given.get("reduction", "mean") == "mean" else 0.0
            )
            count += 1
    assert count >= 20 and len(served) >= 10


def test_pytorchs_own_errors() -> None:
    for name in ("chunked", "chunked_none"):
        for wrong in own_tests()[name].error_inputs("cpu"):
            sample = wrong.sample_input
            with chunked_head.override_torch(), pytest.raises(wrong.error_type, match=wrong.error_regex):
                F.linear_cross_entropy(sample.input, *sample.args, **sample.kwargs)


@pytest.mark.parametrize("tokens", [0, 1, 9])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("weights", [False, True])
def test_no_target_counts(tokens: int, reduction: str, weights: bool, served: list[Any]) -> None:
    """A mean of nothing is nan, as PyTorch's, and its gradients where PyTorch's are."""
    *leaves, _, class_weights = operands(tokens=tokens)
    target = torch.full((tokens,), -100)
    given = {"reduction": reduction, "options": Options(), "weight": class_weights if weights else None}
    theirs = step(leaves, target, **given)
    with chunked_head.override_torch():
        ours = step(leaves, target, **given)
    assert len(served) == bool(tokens)
    assert ours[0].isnan() == theirs[0].isnan() == (reduction == "mean")
    for mine, other in zip(ours, theirs, strict=True):
        assert torch.equal(mine.isnan(), other.isnan()) and torch.equal(mine.nan_to_num(), other.nan_to_num())


def test_weights_of_sum_0(served: list[Any]) -> None:
    *leaves, target, class_weights = operands()
    given = {"options": Options(), "weight": torch.zeros_like(class_weights)}
    theirs = step(leaves, target, **given)
    with chunked_head.override_torch():
        ours = step(leaves, target, **given)
    assert len(served) == 1 and ours[0].isnan() and theirs[0].isnan()
    for mine, other in zip(ours[1:], theirs[1:], strict=True):
        assert torch.equal(mine.isnan(), other.isnan())


def test_a_second_backward() -> None:
    """PyTorch's error, or PyTorch's permission."""
    *leaves, target, _ = operands()
    with chunked_head.override_torch():
        for retain in (False, True):
            loss = F.linear_cross_entropy(*leaves[:2], target, options=Options(allow_retain_graph=retain))
            first = torch.autograd.grad(loss, leaves[:2], retain_graph=True)
            kept = [grad.clone() for grad in first]
            if retain:
                again = torch.autograd.grad(loss * 2, leaves[:2])
                torch.testing.assert_close([grad / 2 for grad in again], kept)
            else:
                with pytest.raises(RuntimeError, match="backward called twice"):
                    torch.autograd.grad(loss, leaves[:2])


@pytest.mark.filterwarnings("ignore:linear_cross_entropy. forcing allow_retain_graph:UserWarning")
def test_compiled(served: list[Any]) -> None:
    """A graph runs the operator, and ours in it; what is switched off stays off in graphs made before."""
    *leaves, target, _ = operands()

    def loss(*leaves: Tensor) -> Tensor:
        return F.linear_cross_entropy(*leaves[:2], target, linear_bias=leaves[2], options=Options()) * 2

    plain = loss(*leaves)
    expected = torch.autograd.grad(plain, leaves)
    compiled = torch.compile(loss, backend="aot_eager")
    with chunked_head.override_torch():
        found = compiled(*leaves)
        torch.testing.assert_close((found, *torch.autograd.grad(found, leaves)), (plain, *expected))
    assert len(served) == 1
    torch.testing.assert_close(compiled(*leaves), plain)
    assert len(served) == 1


def test_module_and_vmap(served: list[Any]) -> None:
    module = torch.nn.LinearCrossEntropyLoss(11, 37, options=Options())
    hidden, *_, target, _ = operands()
    theirs = module(hidden, target)
    pairs = torch.stack([hidden, hidden * 2]).detach(), torch.stack([target, target])

    def loss(hidden: Tensor, target: Tensor) -> Tensor:
        return F.linear_cross_entropy(hidden, module.linear.weight, target, options=Options())

    with torch.no_grad():
        apart = torch.stack([loss(*pair) for pair in zip(*pairs, strict=True)])
    with chunked_head.override_torch():
        torch.testing.assert_close(module(hidden, target), theirs)
        with torch.no_grad():
            torch.testing.assert_close(torch.vmap(loss)(*pairs), apart)
    assert len(served) == 3


DECLINED: dict[str, dict[str, Any]] = {
    "probabilities": {"target": torch.rand(23, 37)},
    "reduction": {"reduction": "none"},
    "autocast": {"autocast": True},
    "fp64 weight": {"weight_dtype": torch.float64},
}


@pytest.mark.parametrize("what", DECLINED)
def test_what_is_left_to_pytorch(what: str, served: list[Any]) -> None:
    """Bit by bit, errors included."""
    given = dict(DECLINED[what])
    *leaves, target, _ = operands()
    target = given.pop("target", target)
    leaves[1] = leaves[1].detach().to(given.pop("weight_dtype", torch.float32)).requires_grad_()
    cast = torch.autocast("cpu", torch.bfloat16, enabled=given.pop("autocast", False))
    found: list[Any] = []
    for ours in (False, True):
        handle = chunked_head.override_torch() if ours else None
        try:
            with cast:
                found.append(step(leaves, target, options=Options(), **given))
        except RuntimeError as error:
            found.append(str(error))
        if handle is not None:
            handle.undo()
    assert not served
    if isinstance(found[0], str):
        assert found[0] == found[1]
    else:
        assert all(torch.equal(mine, other) for mine, other in zip(*found, strict=True))


def test_switched_on_and_off(served: list[Any]) -> None:
    *leaves, target, _ = operands()
    first = chunked_head.override_torch(chunk_tokens=4)
    step(leaves, target, options=Options())
    second = chunked_head.override_torch()  # in the first's place
    first.undo()
    step(leaves, target, options=Options())
    assert len(served) == 2 and pytorch.Override.current_override is second
    step(leaves, target)  # without options: PyTorch's reference
    second.undo()
    second.undo()
    step(leaves, target, options=Options())
    assert len(served) == 2
    for wrong in ({"parallel": None}, {"memory_budget": "much"}, {"memory_budgt": 3}):
        with pytest.raises((TypeError, ValueError), match=r"memory_bud|parallel"):
            chunked_head.override_torch(**wrong)


@pytest.mark.parametrize("other", ["schema", "gone", "older torch"])
def test_another_operator(other: str, served: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """It says so and does nothing."""
    if other == "schema":
        monkeypatch.setattr(pytorch, "SCHEMA", pytorch.SCHEMA.replace("bool allow_retain_graph, ", ""))
    elif other == "gone":
        monkeypatch.setattr(pytorch, "OPERATOR_NAME", "_linear_cross_entropy_of_another_name")
    else:
        monkeypatch.delattr(torch.library, "get_kernel")
    with pytest.warns(UserWarning, match=r"nothing is changed, and PyTorch computes its loss itself") as said:
        handle = chunked_head.override_torch()
    assert said[0].filename == __file__
    *leaves, target, _ = operands()
    with handle:
        step(leaves, target, options=Options())
    assert not served
