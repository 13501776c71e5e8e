"""Sums over the vocabulary of a user's function of the student's log-probabilities, and of a dense teacher's.

The function and its slope (by autograd) are traced once into a graph of elementwise operations, and written as Triton
source. Plain numbers that the function closes over are constants of the graph, which holds no tensor.
"""

import functools
import hashlib
import inspect
from collections.abc import Callable, Collection, Hashable, Mapping
from types import BuiltinFunctionType, CellType, CodeType, FunctionType, ModuleType
from typing import Any, ClassVar

import torch
from torch import Tensor, fx

from ..core.checks import number
from ..core.divergences import TRACED, Sum
from ..core.memory import Cache
from ..core.private import breaks_graph, in_own_thread
from ..core.records import SumFunction
from ..core.tiles import LOG_FLOOR
from ..core.tracing import FILLED, FILLED_BY, SAME, NoKernelError, Writer, name_of, traced
from .base import Losses, make
from .batch import Batch, Stats
from .distillation import dense

# f(log_p), f(log_p, log_q), f(log_p, options) or f(log_p, log_q, options)
Elementwise = Callable[..., Tensor]
FUNCTIONS: Cache[Hashable, SumFunction] = Cache(256)  # by ``key_of`` the function
PLAIN = (type(None), bool, int, complex, str, bytes, torch.dtype, CodeType)
LENGTHS = (5, 7)  # sizes of the vocabulary at which a function is traced; both graphs must be equal
DEEPEST = 6


def sum_of(where: str, function: Elementwise, options: Mapping[str, Any] | None, is_paired: bool | None = None) -> Sum:
    """The sum over the vocabulary of a user's function at its options. ``is_paired``: the function takes log_q as well;
    None: the number of its parameters decides. TypeError or ValueError for a function that cannot be traced."""
    if not callable(function):
        raise TypeError(f"{where} takes a function of log-probabilities, got {function!r}")
    if options is not None and not isinstance(options, Mapping):
        raise TypeError(f"options of {where} must be a mapping of names to numbers, got {options!r}")
    numbers = tuple([number(where, f"option {name!r}", value) for name, value in (options or {}).items()])
    names = tuple(options or ())
    if is_paired is None:
        is_paired = parameters_of(where, function) - bool(names) == 2
    key = key_of(function), names, is_paired
    return Sum(FUNCTIONS.get_or_make(key, lambda: trace(where, function, names, is_paired)), numbers)


def parameters_of(where: str, function: Elementwise) -> int:
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError) as error:
        raise TypeError(f"{where} takes a function whose parameters can be read; wrap it in a lambda") from error
    return sum(parameter.default is parameter.empty and parameter.kind in (0, 1) for parameter in parameters)


def key_of(value: Any, depth: int = 0) -> Hashable:
    """A key of a function: equal for the same code that reads equal plain values and functions. The key of a function
    that reads anything else equals no other key, since such a value may change unnoticed."""
    kind = type(value)
    if kind in PLAIN:
        return kind, value
    if kind is float:
        return kind, value.hex()
    if isinstance(value, ModuleType | FunctionType | BuiltinFunctionType | type) and is_torchs(value):
        return value
    if kind is tuple and depth < DEEPEST:
        return kind, *[key_of(item, depth + 1) for item in value]
    if kind is not FunctionType or depth >= DEEPEST:
        return object()
    codes, names = [value.__code__], dict[str, None]()
    for code in codes:  # the loop appends to ``codes``
        codes += [item for item in code.co_consts if isinstance(item, CodeType)]
        names |= dict.fromkeys(code.co_names)
    cells = [object() if cell == CellType() else cell.cell_contents for cell in value.__closure__ or ()]
    used = [(name, key_of(value.__globals__[name], depth + 1)) for name in names if name in value.__globals__]
    defaults = value.__defaults__, *(value.__kwdefaults__ or {}).items()
    values = *cells, *(defaults[0] or ()), *defaults[1:]
    contents = [None if item is value else key_of(item, depth + 1) for item in values]
    return value.__code__, *contents, *used


def is_torchs(value: Any) -> bool:
    """True for modules, functions and types of torch, math and Python itself, which are constant."""
    if isinstance(value, BuiltinFunctionType) and not isinstance(value.__self__, ModuleType | type):
        return False  # a method of some object
    name = value.__name__ if isinstance(value, ModuleType) else value.__module__
    return str(name).partition(".")[0] in ("torch", "math", "builtins", "None")


class SumWriter(Writer):
    """The Triton source of a trace: a function that returns a column's term and the term's slope."""

    shape = "log_p.shape"
    # operations by exp2 and log2: as exact as p itself, in two thirds of the registers
    overrides: ClassVar = {
        "exp": "tl.exp2({0} * log2_e)", "log": "tl.log2({0}) * ln_2", "logaddexp": "log_of_sum({0}, {1})",
        "div": "{0} / {1}", "reciprocal": "1.0 / {0}",
    }  # fmt: skip

    def __init__(self, graph: fx.GraphModule, is_paired: bool, numbers: int):
        self.arguments = ["log_p", *["log_q"] * is_paired, *[f"n{i}" for i in range(numbers)]]
        super().__init__(graph)
        self.terms = [self.cast(node, torch.float32) for node in self.outputs]

    def read(self, node: fx.Node) -> str:
        return self.arguments[self.inputs[node]]

    def source(self, name: str) -> str:
        arguments = "".join(f", {argument}" for argument in self.arguments if argument.startswith("n"))
        header = f"@triton.jit\ndef {name}_terms(log_p, log_q, p, q, tie{arguments}):"
        return "\n    ".join([header, *self.lines, f"return {', '.join(self.terms)}"])


def trace(where: str, function: Elementwise, names: tuple[str, ...], is_paired: bool) -> SumFunction:
    """The traced function, in PyTorch and as Triton source. ValueError, with the reason, for a function that cannot be
    traced."""

    def terms(inputs: list[Tensor]) -> list[Tensor]:
        log_p = inputs[0].detach().requires_grad_()
        logs, numbers = (log_p, *inputs[1 : 1 + is_paired]), inputs[1 + is_paired :]
        with torch.enable_grad():
            values = function(*logs, *[dict(zip(names, numbers, strict=True))][: bool(names)])
            if not isinstance(values, Tensor) or values.shape != log_p.shape or not values.is_floating_point():
                description = f"{values.dtype} {list(values.shape)}" if isinstance(values, Tensor) else repr(values)
                raise ValueError(f"it must return a floating-point number for each id, got {description}")
            if not values.requires_grad:
                return [values, torch.zeros_like(log_p)]
            (slopes,) = torch.autograd.grad(values, log_p, torch.ones_like(values), materialize_grads=True)
        return [values.detach(), slopes]

    def graph_of(length: int) -> fx.GraphModule:
        samples = [torch.zeros([length], dtype=torch.float32, device="cpu") for _ in range(1 + is_paired)]
        return traced(terms, [*samples, *[torch.ones([], dtype=torch.float32, device="cpu") for _ in names]])

    try:
        # a thread of its own: modes and hooks around the call do not reach the trace
        graphs = [in_own_thread(functools.partial(graph_of, length)) for length in LENGTHS]
        sources = [SumWriter(graph, is_paired, len(names)).source("f") for graph in graphs]
        if sources[0] != sources[1]:
            raise ValueError("it depends on the number of ids")
    except Exception as error:  # a user's function may raise any error on made-up tensors
        reason = str(error).partition("\n")[0].rstrip(".")
        reason = f"there is no kernel of {reason}" if isinstance(error, NoKernelError) else reason
        raise ValueError(
            f"the function of {where} cannot be computed column by column: {reason}. It must be made of elementwise "
            "operations of torch on log-probabilities and options, without other tensors and branches on their values"
        ) from error
    name = f"user_{hashlib.sha256(sources[0].encode()).hexdigest()[:16]}"
    graph = graphs[0].graph
    graph.eliminate_dead_code()
    source = SumWriter(graphs[0], is_paired, len(names)).source(name)
    sum_function = SumFunction(name, InBlocks(graph), "slopes", None, len(names), is_paired, source)
    return TRACED.get_or_make(name, lambda: sum_function)


class InBlocks:
    """Runs a traced function in PyTorch, on blocks of any shape and dtype. Logarithms are clamped to at least -1e4, so
    that ``p * log_p`` is 0 for p = 0. A slope that is nan at p = 0 is replaced by 0."""

    def __init__(self, graph: fx.Graph):
        self.graph, read = graph, set[fx.Node]()
        # for each node the nodes whose last reader it is: their memory is freed after it
        self.last_uses: dict[fx.Node, list[fx.Node]] = {}
        for node in reversed(graph.nodes):
            self.last_uses[node] = [unused for unused in node.all_input_nodes if unused not in read]
            read.update(node.all_input_nodes)

    def __call__(self, log_p: Tensor, log_q: Tensor, *numbers: float) -> tuple[Tensor, Tensor]:
        log_p, log_q = (log.clamp(min=LOG_FLOOR) for log in (log_p, log_q))
        places = self.graph.find_nodes(op="placeholder")
        logs = (log_p, log_q)[: len(places) - len(numbers)]
        values = dict[fx.Node, Any](
            zip(places, [*logs, *[log_p.new_full((), number) for number in numbers]], strict=True)
        )
        for node in self.graph.nodes:
            if node.op == "call_function":
                values[node] = self.result_of(node, values, log_p)
                for unused in self.last_uses[node]:
                    del values[unused]
        (end,) = self.graph.find_nodes(op="output")
        terms, slopes = (values[node].expand_as(log_p) for node in end.args[0])
        return terms, torch.where((log_p.exp() == 0) & slopes.isnan(), 0.0, slopes)

    def result_of(self, node: fx.Node, values: dict[fx.Node, Any], template: Tensor) -> Any:
        operation, target = name_of(node), node.target
        arguments: Any = fx.node.map_arg(node.args, lambda argument: values[argument])
        dtype = node.meta["val"].dtype
        dtype = template.dtype if dtype.is_floating_point else dtype
        if operation in SAME:
            return arguments[0].to(dtype)
        if operation in FILLED or operation in FILLED_BY:
            value = FILLED[operation] if operation in FILLED else arguments[FILLED_BY[operation]]
            return torch.full_like(template, value, dtype=dtype) if not isinstance(value, Tensor) else value
        assert callable(target)
        return target(*arguments, **node.kwargs)


@breaks_graph
def divergence(function: Elementwise, options: Mapping[str, float] | None = None, **teacher: Any) -> Losses:
    """``f(p.log(), q.log()).sum(-1)`` with ``function`` f: any divergence to a dense teacher.

        def alpha_divergence(log_p, log_q, options):
            a = options["alpha"]
            return ((a * log_q + (1 - a) * log_p).exp() - log_q.exp()) / (a * (a - 1))

        loss = losses.divergence(alpha_divergence, {"alpha": 0.3}, temperature=2.0)

    ``function(log_p, log_q)``, or with options ``function(log_p, log_q, options)``, returns a number for each id by
    elementwise operations of torch. The function and its slope (by autograd) are traced once into a kernel. ``options``
    are arguments of the kernel, so that new values compile nothing; plain numbers that the function closes over are
    constants of the kernel. ValueError for a function that cannot be traced: one that sums over ids, reads other
    tensors or branches on values.

    Logarithms are clamped to at least -1e4, so that a probability of 0 times its logarithm is 0, and values are finite
    where student or teacher excludes an id. ``teacher``: ``TeacherOptions``; fields as ``forward_kl``.
    """
    vocab_sum = sum_of("losses.divergence", function, options, True)
    return dense("divergence", ("divergence",), teacher, sums={"divergence": vocab_sum})


@breaks_graph
def vocabulary_sum(function: Elementwise, options: Mapping[str, float] | None = None, **summand: Any) -> Losses:
    """``f(p.log()).sum(-1)`` with ``function`` f: any function of the student's distribution that adds up over ids.

        loss = losses.vocabulary_sum(lambda log_p: (2 * log_p).exp())  # sum of p squared, 1 less Tsallis' entropy

    ``function(log_p)``, or ``function(log_p, options)``, and ``options`` are as in ``divergence``. The target may be
    None; only its ``ignore_index`` is read. For a function of such sums, as Renyi's entropy is, see
    ``losses.custom(..., sums=...)``. ``summand``: ``SummandOptions``.
    """
    vocab_sum = sum_of("losses.vocabulary_sum", function, options, False)
    needs, sums = ("vocabulary_sum",), {"vocabulary_sum": vocab_sum}
    return make("vocabulary_sum", _vocabulary_sum, summand, needs=needs, sums=sums, reads_target=False)


def _vocabulary_sum(stats: Stats, batch: Batch) -> Tensor:
    return stats.vocabulary_sum


def named_sums(where: str, sums: Mapping[str, Any] | None, statistics: Collection[str]) -> dict[str, Sum]:
    """Sums over the vocabulary by the names of their statistics. ``sums``: for each name a function, or a pair
    ``(function, options)``. TypeError or ValueError for others."""
    if sums is not None and not isinstance(sums, Mapping):
        raise TypeError(f"sums of {where} must be a mapping of names to functions, got {sums!r}")
    sums_by_name = {}
    for name, function_or_pair in (sums or {}).items():
        if not isinstance(name, str) or not name.isidentifier() or name in statistics:
            raise ValueError(
                f"sums of {where} has {name!r}, which must be a new name of a statistic; take another name"
            )
        is_pair = isinstance(function_or_pair, tuple) and len(function_or_pair) == 2
        function, options = function_or_pair if is_pair else (function_or_pair, None)
        sums_by_name[name] = sum_of(f"sum {name!r} of {where}", function, options)
    return sums_by_name
