"""Whatever a person may have switched on around a call: the public functions give what they give without, or refuse in
words; also where it is switched on, or off, between calls."""

import ast
import contextlib
import re
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import graph_calls
import pytest
import torch
from cases import PLACES, Place
from graph_calls import SEGMENTS, Data, chosen, make_data, named
from tiers import Turn, crossed, first_of
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from chunked_head import (
    ChunkedHead,
    gathered_topk_kl,
    linear_cross_entropy,
    linear_logprobs,
    linear_loss,
    losses,
    metrics,
    quantise,
)
from chunked_head.arithmetic import vectors
from chunked_head.call import spec
from chunked_head.core.memory import Cache
from chunked_head.functions import quantise as functions_quantise

ROOT = Path(__file__).resolve().parents[2]
Step = Callable[[Data], Any]
TOKENS, VOCAB, WIDTH = 7, 61, 32


# ---- the functions


def root(stats: Any, batch: Any) -> Tensor:
    """A user's loss whose slope is infinite where a token does not count, at a log-probability of 0."""
    return (-stats.logprob).sqrt() * batch["advantages"]


def own_loss(d: Data) -> Any:
    loss = losses.custom(root, scope="token") + 0.1 * losses.entropy()
    return linear_loss(d.hidden, d.weight, d.target, loss, batch=chosen(d, "advantages"))


def streams(d: Data) -> Any:
    return linear_loss([d.hidden, d.hidden * 0.5], d.weight, d.target, losses.cross_entropy(), shift=(1, 2)).loss


def by_lengths(d: Data) -> Any:
    batch = chosen(d, "old_logprobs", "advantages")
    return linear_loss(
        d.hidden, d.weight, d.target, losses.gspo(), batch=batch, segment_lengths=[4, TOKENS - 4, TOKENS],
        chunk_tokens=8, metrics=[metrics.ratio()],
    )  # fmt: skip


def skipping(d: Data) -> Any:
    return linear_cross_entropy(d.hidden, d.weight, d.target, skip_ignored="wait", reduction="none")


def in_e4m3(d: Data) -> Any:
    half = d.hidden.to(torch.float16), d.weight.to(torch.float16)
    return linear_logprobs(*half, d.target, precision="fp8", fp8_weight=quantise(half[1]))


def into_a_buffer(d: Data) -> Any:
    buffer = torch.ones(d.weight.shape, dtype=torch.float32, device=d.weight.device)
    loss = linear_cross_entropy(d.hidden, d.weight, d.target, accumulate_into=buffer, upstream=0.37)
    if not loss.requires_grad:
        assert (buffer == 1.0).all()  # a call without gradients adds none
        return loss
    return loss, buffer


def head_module(d: Data) -> Any:
    head = ChunkedHead(1, 1, bias=True, z_loss=1e-3, device=d.weight.device, dtype=torch.float32)
    del head.weight, head.bias
    head.weight, head.bias = d.weight, d.bias
    return head(d.hidden, d.target)


def gathered(d: Data) -> Any:
    logits = graph_calls.logits_of(d)
    return gathered_topk_kl(
        logits.gather(-1, d.fields["teacher_ids"]), d.fields["teacher_logprobs"], lse=logits.logsumexp(-1),
        teacher_ids=d.fields["teacher_ids"], mask=d.target >= 0,
    )  # fmt: skip


def recorded(d: Data) -> Any:
    return linear_cross_entropy(d.hidden.bfloat16(), d.weight.bfloat16(), d.target, z_loss=1e-3)


STEPS = [
    recorded,
    *graph_calls.CALLS, own_loss, streams, by_lengths, skipping, in_e4m3, into_a_buffer, head_module, gathered,
]  # fmt: skip


def numbers(out: Any) -> list[Tensor]:
    return [*out] if type(out) is tuple else [*named(out).values()]


def outcome(step: Step, data: Data) -> list[Tensor | None]:
    """Values, and where gradients are enabled those of the operands."""
    found = numbers(step(data))
    total = [value.sum() * 0.37 for value in found if value.requires_grad]
    leaves = data.hidden, data.weight, data.bias
    for leaf in leaves:
        leaf.grad = None
    if total:
        sum(total[1:], total[0]).backward()  # torch's counter of FLOPs refuses autograd.grad of a module's parameters
    return [*[value.detach() for value in found], *[leaf.grad for leaf in leaves if total]]


@pytest.fixture
def on_backend(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Calls that name no backend run on this one."""

    def switch(name: str) -> None:
        for module in (spec, functions_quantise):
            real = module.backend_of
            monkeypatch.setattr(module, "backend_of", lambda _, device, real=real: real(name, device))
        monkeypatch.setattr(graph_calls, "VOCAB", VOCAB + 3)  # of which ``segments_on_logits`` leaves out 3

    yield switch
    spec.SPECS.clear()


# ---- the modes


class FunctionMode(TorchFunctionMode):
    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return function(*args, **(kwargs or {}))


class DispatchMode(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def anomaly(check_nan: bool = True) -> Iterator[None]:
    with warnings.catch_warnings(action="ignore"), torch.autograd.detect_anomaly(check_nan):
        yield


@contextlib.contextmanager
def switched(get: Callable[[], Any], switch: Callable[[Any], None], value: Any) -> Iterator[None]:
    before = get()
    switch(value)
    try:
        yield
    finally:
        switch(before)


@contextlib.contextmanager
def deterministic(fill: bool = True) -> Iterator[None]:
    filled = torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = fill
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)
        torch.utils.deterministic.fill_uninitialized_memory = filled


def default_dtype(dtype: torch.dtype) -> AbstractContextManager[None]:
    return switched(torch.get_default_dtype, torch.set_default_dtype, dtype)


MODES: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "anomaly": anomaly,
    "anomaly-unchecked": lambda: anomaly(check_nan=False),
    "deterministic": deterministic,
    "deterministic-unfilled": lambda: deterministic(fill=False),
    "default-float64": lambda: default_dtype(torch.float64),
    "default-bfloat16": lambda: default_dtype(torch.bfloat16),
    "on-meta": lambda: torch.device("meta"),
    "default-meta": lambda: switched(lambda: None, torch.set_default_device, "meta"),
    "function-mode": FunctionMode,
    "dispatch-mode": DispatchMode,
    "profiler": lambda: torch.profiler.profile(record_shapes=True, profile_memory=True),
    "flop-counter": lambda: FlopCounterMode(display=False),
    "one-thread": lambda: torch.autograd.set_multithreading_enabled(False),
    "saved-elsewhere": torch.autograd.graph.save_on_cpu,
    "force-eager": lambda: torch.compiler.set_stance("force_eager"),
    "fail-on-recompile": lambda: torch.compiler.set_stance("fail_on_recompile"),
    "no-grad": torch.no_grad,
    "inference": torch.inference_mode,
}
BARE = "no-grad", "inference"  # results have no gradients
# four calls of a kind: the first makes what is kept, the second records, later ones replay
ORDERS = {"first-off": (False, True, True, False), "first-on": (True, False, False, True)}


@crossed(step=STEPS, mode=Turn(MODES), order=Turn(ORDERS), place=PLACES)
def test_in_every_order(step: Step, mode: str, order: str, place: Place, on_backend: Callable[[str], None]) -> None:
    hold(step, mode, order, place, on_backend)


FEW = [graph_calls.plain, recorded, graph_calls.grpo, graph_calls.logprobs, graph_calls.on_logits]


@crossed(mode=MODES, order=Turn(ORDERS), place=PLACES)  # each mode in one order by torch, in the other by kernels
@pytest.mark.parametrize("step", first_of(FEW))
def test_every_mode(step: Step, mode: str, order: str, place: Place, on_backend: Callable[[str], None]) -> None:
    hold(step, mode, order, place, on_backend)


def hold(step: Step, mode: str, order: str, place: Place, on_backend: Callable[[str], None]) -> None:
    on_backend(place.backend)
    data = make_data(device=place.device, tokens=TOKENS, vocab=VOCAB, width=WIDTH)
    forget()
    expected = outcome(step, data)
    forget()
    tolerance = {"rtol": 0.0, "atol": 0.0} if place.device == "cpu" else {"rtol": 1e-4, "atol": 1e-5}
    for is_on in ORDERS[order]:
        with MODES[mode]() if is_on else contextlib.nullcontext():
            found = outcome(step, data)
        count = len(found)
        assert count == len(expected) or (is_on and mode in BARE)
        torch.testing.assert_close(found, expected[:count], equal_nan=True, **tolerance)


def forget() -> None:
    """Empties what outlives calls."""
    for name, module in [*sys.modules.items()]:
        if name.partition(".")[0] == "chunked_head":
            for one in [*vars(module).values()]:
                if isinstance(one, Cache):
                    one.clear()


MAKERS = {"arange", "empty", "eye", "full", "linspace", "ones", "rand", "randint", "randn", "tensor", "zeros"}
FOLDERS = ("arithmetic", "call", "core", "functions", "losses", "metrics", "parallel", "plan", "stores", "kernels")


def test_whoever_makes_a_tensor_names_device_and_dtype() -> None:
    """Which a person may have set defaults of; integers have a dtype of their own."""
    for folder in FOLDERS:
        for path in (ROOT / ("" if folder == "kernels" else "chunked_head") / folder).rglob("*.py"):
            tree = ast.parse(path.read_text())
            inside = {node for block in ast.walk(tree) if named_device(block) for node in ast.walk(block)}
            for node in ast.walk(tree):
                if isinstance(node, ast.Call) and ast.unparse(node.func) in {f"torch.{name}" for name in MAKERS}:
                    named = {keyword.arg for keyword in node.keywords}
                    integers = ast.unparse(node.func) in ("torch.arange", "torch.tensor")
                    where = f"{path.relative_to(ROOT)}:{node.lineno}"
                    assert named & {"device", None} or node in inside, f"{where} makes a tensor on the default device"
                    assert named & {"dtype", None} or integers, f"{where} makes a tensor of the default dtype"


def named_device(node: ast.AST) -> bool:
    return isinstance(node, ast.With) and any("torch.device(" in ast.unparse(item) for item in node.items)


# ---- anomaly mode


def misses(d: Data) -> Tensor:
    """A user's loss of ours, with a nan in its gradient: the root of a number below 0."""
    values = linear_logprobs(d.hidden, d.weight, d.target)
    return torch.where(d.target >= 0, values + 2.0, 1.0).sqrt().nansum()


def misses_inside(d: Data) -> Tensor:
    return linear_loss(d.hidden, d.weight, d.target, losses.custom(below, scope="token", check=False)).loss


def below(stats: Any, batch: Any) -> Tensor:
    return torch.sqrt(stats.logprob + 2.0)


def misses_a_number(d: Data) -> Tensor:
    """A built-in loss, of advantages with a nan."""
    batch = chosen(d, "old_logprobs") | {"advantages": d.fields["advantages"] * torch.nan}
    return linear_loss(d.hidden, d.weight, d.target, losses.grpo(), batch=batch).loss


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize(
    ("step", "name", "line"),
    [
        (misses, "SqrtBackward0", ".sqrt().nansum()"),
        (misses_inside, "SqrtBackward0", "torch.sqrt(stats.logprob + 2.0)"),
        (misses_a_number, "(CallFunctionBackward|MulBackward0)", "losses.grpo()"),
    ],
    ids=["after", "inside", "built-in"],
)
def test_anomaly_mode_names_a_nan(
    step: Step, name: str, line: str, place: Place, on_backend: Callable[[str], None]
) -> None:
    """The operation in its error, the line in its warning. Without ``check_nan`` nothing is looked at."""
    on_backend(place.backend)
    data = make_data(device=place.device, tokens=TOKENS, vocab=VOCAB, width=WIDTH)
    with anomaly(check_nan=False):
        loss = step(data)
        loss.backward()
    assert data.hidden.grad is not None and data.hidden.grad.isnan().any()
    forget()  # a kernel of the loss's arithmetic, which is traced at the first call
    with (
        torch.autograd.detect_anomaly(),
        pytest.warns(UserWarning, match=re.escape(line)),
        pytest.raises(RuntimeError, match=f"'{name}' returned nan values in its"),
    ):
        step(data).backward()


@pytest.mark.parametrize("place", PLACES)
def test_anomaly_mode_looks_at_tokens_that_count(place: Place, on_backend: Callable[[str], None]) -> None:
    """``root`` has an infinite slope at those that do not, in a call and where the loss is made; segments likewise."""
    on_backend(place.backend)
    data = make_data(device=place.device, tokens=TOKENS, vocab=VOCAB, width=WIDTH)

    def of_segments(d: Data) -> Any:
        loss = losses.custom(root, scope="segment")
        batch = chosen(d, "advantages", "segments")
        return linear_loss(d.hidden, d.weight, d.target, loss, batch=batch, num_segments=SEGMENTS, chunk_tokens=8)

    for step in own_loss, of_segments:
        expected = outcome(step, data)
        forget()
        with anomaly():
            torch.testing.assert_close(outcome(step, data), expected, rtol=0, atol=0)


def test_a_trace_is_the_same_while_anomaly_mode_is_on() -> None:
    sources = []
    for mode in contextlib.nullcontext, anomaly, lambda: anomaly(check_nan=False):
        x = torch.linspace(-2.0, 2.0, 5)

        def slope(given: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
            leaf = given[0].detach().requires_grad_()
            return [*torch.autograd.grad((leaf.exp() * leaf.sigmoid()).sum(), leaf)], []

        with mode():
            sources.append(vectors.VectorWriter(*vectors.trace(slope, [x], [0], 5), [x], [0]).source)
    assert len({*sources}) == 1 and "functions.exp" in sources[0]


# ---- refused in words


def ours(hidden: Tensor, made: Data, reduction: str) -> Tensor:
    return linear_cross_entropy(hidden, made.weight, made.target, reduction=reduction)


def batched(f: Step, hidden: Tensor) -> Any:
    out = f(hidden)
    return torch.autograd.grad(out, hidden, torch.ones(3, *out.shape), is_grads_batched=True)


def forward_mode(f: Step, hidden: Tensor) -> Any:
    with torch.autograd.forward_ad.dual_level():
        return f(torch.autograd.forward_ad.make_dual(hidden, torch.ones_like(hidden)))


FUNCTIONAL = torch.autograd.functional
ONE_BY_ONE, ORDER = "ask for one after the other", "no second derivatives"


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize(
    ("run", "words"),
    [
        pytest.param(batched, ONE_BY_ONE, id="is_grads_batched"),
        pytest.param(lambda f, x: FUNCTIONAL.jacobian(f, x, vectorize=True), ONE_BY_ONE, id="vectorized"),
        pytest.param(forward_mode, "forward-mode derivatives", id="forward-mode"),
        pytest.param(lambda f, x: FUNCTIONAL.jvp(f, x, torch.ones_like(x)), ORDER, id="jvp"),
        pytest.param(lambda f, x: FUNCTIONAL.hessian(lambda h: f(h).sum(), x), ORDER, id="hessian"),
        pytest.param(lambda f, x: torch.func.jacrev(f)(x), "torch.func transforms", id="jacrev"),
        pytest.param(lambda f, x: torch.func.functionalize(f)(x), "torch.func transforms", id="functionalize"),
    ],
)
def test_refused_in_words(run: Callable[..., Any], words: str, reduction: str) -> None:
    data = make_data(tokens=TOKENS, vocab=VOCAB, width=WIDTH)
    with pytest.raises(RuntimeError, match=words):
        run(lambda h: ours(h, data, reduction), data.hidden)


def test_a_jacobian_row_by_row() -> None:
    data = make_data(tokens=TOKENS, vocab=VOCAB, width=WIDTH)
    found = FUNCTIONAL.jacobian(lambda h: ours(h, data, "none").flatten(), data.hidden)
    (expected,) = torch.autograd.grad(ours(data.hidden, data, "none").sum(), data.hidden)
    torch.testing.assert_close(found.sum(0), expected)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("step", [graph_calls.plain, graph_calls.grpo, graph_calls.on_logits])
def test_in_a_checkpoint(step: Step, reentrant: bool) -> None:
    """Of the whole step, whose backward computes it again."""
    data, found = make_data(tokens=TOKENS, vocab=VOCAB, width=WIDTH), []

    def plainly(hidden: Tensor) -> Tensor:
        return numbers(step(data._replace(hidden=hidden)))[0]

    for call in plainly, lambda hidden: checkpoint(plainly, hidden, use_reentrant=reentrant):
        call(data.hidden.sin()).backward()
        found.append([None if leaf.grad is None else leaf.grad.clone() for leaf in (data.hidden, data.weight)])
        data.hidden.grad = data.weight.grad = None
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-6)
