"""Losses that sum a user's function over the vocabulary. The function takes log-probabilities of the student, and
optionally of a dense teacher.

The function and its slope (by autograd) are traced once into a graph of elementwise operations, and written as Triton
source. Plain numbers that the function closes over are constants of the graph. The graph holds no tensor.
"""

import functools
import hashlib
import inspect
from collections.abc import Callable, Collection, Hashable, Mapping
from types import BuiltinFunctionType, CellType, CodeType, FunctionType, ModuleType
from typing import Any, ClassVar, Unpack

import torch
from torch import Tensor, fx

from ..core.checks import number
from ..core.divergences import TRACED
from ..core.memory import Cache
from ..core.private import breaks_graph, in_own_thread
from ..core.records import SumFunction, VocabularySum
from ..core.tiles import LOG_FLOOR
from ..core.tracing import FILL_ARGUMENTS, FILL_VALUES, SAME_NUMBERS, NoKernelError, Writer, name_of, traced
from .base import Losses, SummandOptions, make
from .batch import Batch, Stats
from .distillation import TeacherOptions, dense

# a user's function f(log_p), f(log_p, log_q), f(log_p, options) or f(log_p, log_q, options)
ElementwiseFunction = Callable[..., Tensor]
SUM_FUNCTIONS: Cache[Hashable, SumFunction] = Cache(256)  # traced functions, by a key of the user's function
CONSTANT_TYPES = (type(None), bool, int, complex, str, bytes, torch.dtype, CodeType)  # of values that keys contain
TRACED_VOCABS = (5, 7)  # two sizes of the vocabulary at which a function is traced; both graphs must be equal
MAX_DEPTH = 6  # levels of nested functions and tuples that a key reads


def sum_of(
    owner: str, function: ElementwiseFunction, options: Mapping[str, Any] | None, is_paired: bool | None = None
) -> VocabularySum:
    """The sum over the vocabulary of a user's function with ``options``. ``is_paired``: the function takes log_q
    too; None: the number of its parameters decides. ``owner``: the public function's name, for errors. TypeError or
    ValueError for wrong arguments, and for a function that cannot be traced."""
    if not callable(function):
        raise TypeError(f"{owner} takes a function of log-probabilities, got {function!r}")
    if options is not None and not isinstance(options, Mapping):
        raise TypeError(f"options of {owner} must be a mapping of names to numbers, got {options!r}")
    numbers = tuple([number(owner, f"option {name!r}", value) for name, value in (options or {}).items()])
    option_names = tuple(options or ())
    if is_paired is None:
        is_paired = number_of_parameters(owner, function) - bool(option_names) == 2
    function_key = key_of(function), option_names, is_paired
    return VocabularySum(
        SUM_FUNCTIONS.get_or_make(function_key, lambda: trace(owner, function, option_names, is_paired)), numbers
    )


def number_of_parameters(owner: str, function: ElementwiseFunction) -> int:
    """The number of a function's positional parameters without defaults. TypeError for a function without a
    signature."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError) as error:
        raise TypeError(f"{owner} takes a function whose parameters can be read; wrap it in a lambda") from error
    return sum(parameter.default is parameter.empty and parameter.kind in (0, 1) for parameter in parameters)


def key_of(value: Any, depth: int = 0) -> Hashable:
    """A key of a function. Functions of equal code that read equal plain values and functions have equal keys. The key
    of a function that reads anything else equals no other key, since other values may change unnoticed."""
    value_type = type(value)
    if value_type in CONSTANT_TYPES:
        return value_type, value
    if value_type is float:
        return value_type, value.hex()
    if isinstance(value, ModuleType | FunctionType | BuiltinFunctionType | type) and is_constant(value):
        return value
    if value_type is tuple and depth < MAX_DEPTH:
        return value_type, *[key_of(item, depth + 1) for item in value]
    if value_type is not FunctionType or depth >= MAX_DEPTH:
        return object()
    code_objects, global_names = [value.__code__], dict[str, None]()
    for code in code_objects:  # the loop appends to ``code_objects``
        code_objects += [item for item in code.co_consts if isinstance(item, CodeType)]
        global_names |= dict.fromkeys(code.co_names)
    cell_contents = [object() if cell == CellType() else cell.cell_contents for cell in value.__closure__ or ()]
    global_values = {name: value.__globals__[name] for name in global_names if name in value.__globals__}
    global_keys = [(name, key_of(item, depth + 1)) for name, item in global_values.items()]
    defaults = value.__defaults__, *(value.__kwdefaults__ or {}).items()
    closure_and_defaults = *cell_contents, *(defaults[0] or ()), *defaults[1:]
    content_keys = [None if item is value else key_of(item, depth + 1) for item in closure_and_defaults]
    return value.__code__, *content_keys, *global_keys


def is_constant(value: Any) -> bool:
    """True for modules, functions and types of torch, math and Python's builtins. All of these are constant."""
    if isinstance(value, BuiltinFunctionType) and not isinstance(value.__self__, ModuleType | type):
        return False  # a method of some object
    module_name = value.__name__ if isinstance(value, ModuleType) else value.__module__
    return str(module_name).partition(".")[0] in ("torch", "math", "builtins", "None")


class SumWriter(Writer):
    """Writes a traced function as Triton source: a function that returns terms of ids, and slopes by log_p."""

    shape = "log_p.shape"  # Triton source of the shape of all values
    # operations by exp2 and log2: as exact as p itself, in two thirds of the registers
    overrides: ClassVar = {  # Triton source by operation
        "exp": "tl.exp2({0} * log2_e)", "log": "tl.log2({0}) * ln_2", "logaddexp": "log_of_sum({0}, {1})",
        "div": "{0} / {1}", "reciprocal": "1.0 / {0}",
    }  # fmt: skip

    def __init__(self, graph: fx.GraphModule, is_paired: bool, num_options: int):
        self.arguments = ["log_p", *["log_q"] * is_paired, *[f"n{i}" for i in range(num_options)]]
        super().__init__(graph)
        self.terms = [self.cast(node, torch.float32) for node in self.outputs]

    def read(self, node: fx.Node) -> str:
        """The name of the argument for ``node``, an input of the trace."""
        return self.arguments[self.inputs[node]]

    def source(self, name: str) -> str:
        """Triton source of the traced function, under the name ``<name>_terms``."""
        arguments = "".join(f", {argument}" for argument in self.arguments if argument.startswith("n"))
        header = f"@triton.jit\ndef {name}_terms(log_p, log_q, p, q, tie_tolerance{arguments}):"
        return "\n    ".join([header, *self.lines, f"return {', '.join(self.terms)}"])


def trace(owner: str, function: ElementwiseFunction, option_names: tuple[str, ...], is_paired: bool) -> SumFunction:
    """The traced function, in PyTorch and as Triton source. ``option_names``: names of the function's options.
    ValueError, with the reason, for a function that cannot be traced."""

    def terms_and_slopes(inputs: list[Tensor]) -> list[Tensor]:
        """Returns terms [ids], and the slopes [ids] of the terms by log_p. ``inputs``: log_p [ids]; log_q [ids] if
        ``is_paired``; then the options, 0-d tensors."""
        log_p = inputs[0].detach().requires_grad_()
        log_arguments, numbers = (log_p, *inputs[1 : 1 + is_paired]), inputs[1 + is_paired :]
        with torch.enable_grad():
            term_values = function(
                *log_arguments, *[dict(zip(option_names, numbers, strict=True))][: bool(option_names)]
            )
            if (
                not isinstance(term_values, Tensor)
                or term_values.shape != log_p.shape
                or not term_values.is_floating_point()
            ):
                result_in_words = (
                    f"{term_values.dtype} {list(term_values.shape)}"
                    if isinstance(term_values, Tensor)
                    else repr(term_values)
                )
                raise ValueError(f"it must return a floating-point number for each id, got {result_in_words}")
            if not term_values.requires_grad:
                return [term_values, torch.zeros_like(log_p)]
            (slopes,) = torch.autograd.grad(term_values, log_p, torch.ones_like(term_values), materialize_grads=True)
        return [term_values.detach(), slopes]

    def graph_of(vocab: int) -> fx.GraphModule:
        sample_logprobs = [torch.zeros([vocab], dtype=torch.float32, device="cpu") for _ in range(1 + is_paired)]
        sample_numbers = [torch.ones([], dtype=torch.float32, device="cpu") for _ in option_names]
        return traced(terms_and_slopes, [*sample_logprobs, *sample_numbers])

    try:
        # a thread of its own: modes and hooks around the call do not reach the trace
        graphs = [in_own_thread(functools.partial(graph_of, vocab)) for vocab in TRACED_VOCABS]
        sources = [SumWriter(graph, is_paired, len(option_names)).source("f") for graph in graphs]
        if sources[0] != sources[1]:
            raise ValueError("it depends on the number of ids")
    except Exception as error:  # a user's function may raise any error on made-up tensors
        reason = str(error).partition("\n")[0].rstrip(".")
        reason = f"there is no kernel of {reason}" if isinstance(error, NoKernelError) else reason
        raise ValueError(
            f"the function of {owner} cannot be computed column by column: {reason}. It must be made of elementwise "
            "operations of torch on log-probabilities and options, without other tensors and branches on their values"
        ) from error
    name = f"user_{hashlib.sha256(sources[0].encode()).hexdigest()[:16]}"
    graph = graphs[0].graph
    graph.eliminate_dead_code()
    source = SumWriter(graphs[0], is_paired, len(option_names)).source(name)
    sum_function = SumFunction(name, TracedFunction(graph), "slopes", None, len(option_names), is_paired, source)
    return TRACED.get_or_make(name, lambda: sum_function)


class TracedFunction:
    """A traced function to call in PyTorch, on log-probabilities of any shape and dtype. Returns terms and slopes of
    that shape. Log-probabilities are clamped to at least -1e4, so that ``p * log_p`` is 0 for p = 0. A slope that is
    nan at p = 0 is replaced by 0."""

    def __init__(self, graph: fx.Graph):
        self.graph, read_nodes = graph, set[fx.Node]()
        # for each node, its inputs that no later node reads: their values are freed once the node has run
        self.last_inputs: dict[fx.Node, list[fx.Node]] = {}
        for node in reversed(graph.nodes):
            self.last_inputs[node] = [input_node for input_node in node.all_input_nodes if input_node not in read_nodes]
            read_nodes.update(node.all_input_nodes)

    def __call__(self, log_p: Tensor, log_q: Tensor, *numbers: float) -> tuple[Tensor, Tensor]:
        log_p, log_q = (logprobs.clamp(min=LOG_FLOOR) for logprobs in (log_p, log_q))
        placeholders = self.graph.find_nodes(op="placeholder")
        log_arguments = (log_p, log_q)[: len(placeholders) - len(numbers)]
        values_by_node = dict[fx.Node, Any](
            zip(placeholders, [*log_arguments, *[log_p.new_full((), number) for number in numbers]], strict=True)
        )
        for node in self.graph.nodes:
            if node.op == "call_function":
                values_by_node[node] = self.result_of(node, values_by_node, log_p)
                for input_node in self.last_inputs[node]:
                    del values_by_node[input_node]
        (output_node,) = self.graph.find_nodes(op="output")
        terms, slopes = (values_by_node[node].expand_as(log_p) for node in output_node.args[0])
        return terms, torch.where((log_p.exp() == 0) & slopes.isnan(), 0.0, slopes)

    def result_of(self, node: fx.Node, values_by_node: dict[fx.Node, Any], log_p: Tensor) -> Any:
        """The result of a node. A floating result has the dtype of ``log_p``. ``values_by_node``: values of inputs."""
        operation_name, torch_function = name_of(node), node.target
        arguments: Any = fx.node.map_arg(node.args, lambda argument: values_by_node[argument])
        dtype = node.meta["val"].dtype
        dtype = log_p.dtype if dtype.is_floating_point else dtype
        if operation_name in SAME_NUMBERS:
            return arguments[0].to(dtype)
        if operation_name in FILL_VALUES or operation_name in FILL_ARGUMENTS:
            is_constant_fill = operation_name in FILL_VALUES
            value = FILL_VALUES[operation_name] if is_constant_fill else arguments[FILL_ARGUMENTS[operation_name]]
            return torch.full_like(log_p, value, dtype=dtype) if not isinstance(value, Tensor) else value
        assert callable(torch_function)
        return torch_function(*arguments, **node.kwargs)


@breaks_graph
def divergence(
    function: ElementwiseFunction, options: Mapping[str, float] | None = None, **teacher: Unpack[TeacherOptions]
) -> Losses:
    """``f(p.log(), q.log()).sum(-1)`` with ``function`` f: any divergence between student p and a dense teacher q.

        def alpha_divergence(log_p, log_q, options):
            a = options["alpha"]
            return ((a * log_q + (1 - a) * log_p).exp() - log_q.exp()) / (a * (a - 1))

        loss = losses.divergence(alpha_divergence, {"alpha": 0.3}, temperature=2.0)

    ``function(log_p, log_q)``, or with options ``function(log_p, log_q, options)``, returns a number for each id by
    elementwise operations of torch. The function and its slope (by autograd) are traced once into a kernel. ``options``
    are arguments of the kernel, so that new values compile nothing. Plain numbers that the function closes over are
    constants of the kernel. ValueError for a function that sums over ids, reads other tensors, branches on values, or
    cannot be traced for another reason.

    Log-probabilities are clamped to at least -1e4, so that a probability of 0 times its logarithm is 0, and values are
    finite where student or teacher excludes an id. Fields are those of ``forward_kl``.
    """
    vocab_sum = sum_of("losses.divergence", function, options, True)
    return dense("divergence", ("divergence",), teacher, sums={"divergence": vocab_sum})


@breaks_graph
def vocabulary_sum(
    function: ElementwiseFunction, options: Mapping[str, float] | None = None, **summand: Unpack[SummandOptions]
) -> Losses:
    """``f(p.log()).sum(-1)`` with ``function`` f: any function of the student's distribution that adds up over ids.

        loss = losses.vocabulary_sum(lambda log_p: (2 * log_p).exp())  # sum of p squared: 1 minus Tsallis' entropy

    ``function(log_p)``, or ``function(log_p, options)``, and ``options`` are as in ``divergence``. The target may be
    None; a target only says which tokens count. ``losses.custom(..., sums=...)`` takes functions of such sums, for
    example Renyi's entropy.
    """
    vocab_sum = sum_of("losses.vocabulary_sum", function, options, False)
    statistics, sums_by_name = ("vocabulary_sum",), {"vocabulary_sum": vocab_sum}
    return make("vocabulary_sum", _vocabulary_sum, summand, needs=statistics, sums=sums_by_name, reads_target=False)


def _vocabulary_sum(stats: Stats, batch: Batch) -> Tensor:
    return stats.vocabulary_sum


def named_sums(owner: str, sums: Mapping[str, Any] | None, statistics: Collection[str]) -> dict[str, VocabularySum]:
    """Sums over the vocabulary, by the names of their statistics. ``sums`` maps each name to a function or to a pair
    ``(function, options)``. ``statistics``: names that sums cannot have. TypeError or ValueError for wrong names and
    functions."""
    if sums is not None and not isinstance(sums, Mapping):
        raise TypeError(f"sums of {owner} must be a mapping of names to functions, got {sums!r}")
    sums_by_name = {}
    for name, function_or_pair in (sums or {}).items():
        if not isinstance(name, str) or not name.isidentifier() or name in statistics:
            raise ValueError(
                f"sums of {owner} has {name!r}, which must be a new name of a statistic; take another name"
            )
        is_pair = isinstance(function_or_pair, tuple) and len(function_or_pair) == 2
        function, options = function_or_pair if is_pair else (function_or_pair, None)
        sums_by_name[name] = sum_of(f"sum {name!r} of {owner}", function, options)
    return sums_by_name
