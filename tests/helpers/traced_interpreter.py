"""Triton's interpreter runs a kernel's Python once for each way through it; from then on NumPy's part alone.

Of an interpreted program most of the time goes into Triton's language, which finds out what to ask of the builder; for
the next program, and for the next launch with arguments alike, it finds out the same. A trace keeps the builder's
calls, with a place for each handle that they take or return. Where Python looks at a number (a condition, the end of a
range) the trace branches by what it saw. Where it has not seen that before, the kernel's Python runs once more: it is
given what this program has computed so far, and goes on from there. A kernel that takes a handle from elsewhere runs
as it would without traces.
"""

import functools
import inspect
import operator
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable
from typing import Any

PLACES = 100_000  # of all traces that a process keeps: Python's collector of garbage looks through them
KEPT = 1 << 12  # bytes of an array that is kept where it is the same in every program
CHANGING = "get_program_id", "get_num_programs", "print", "assert", "assume", "barrier"  # whatever they take
Function = Callable[..., Any]


class Node:
    """Calls of the builder up to where Python looks at a number, and a node for each number that it has seen there."""

    def __init__(self) -> None:
        # of which places, to which, and which end then
        self.steps: list[tuple[Function, tuple[int, ...], int, tuple[int, ...]]] = []
        # where what was returned is, and whether it is one
        self.calls: list[tuple[str, Function, tuple[int, ...], bool]] = []
        self.looks_at: int | None = None
        self.children: dict[bytes, Node] = {}
        self.ends = False


class Trace:
    """Of one kernel with arguments of one kind."""

    def __init__(self, leaves: int) -> None:
        self.root, self.leaves, self.usable = Node(), leaves, True
        self.values: list[Any] = [None] * leaves
        self.alike: set[int] = set()  # places of those that are the same in every program

    def place(self) -> int:
        self.values.append(None)
        return len(self.values) - 1

    def same(self, value: Any) -> int:
        place = self.place()
        self.values[place] = value
        self.alike.add(place)
        return place

    def run(self, leaves: list[Any], python: Function) -> None:
        values = self.values.copy()
        values[: self.leaves] = leaves
        node, seen = self.root, []
        while True:
            for function, takes, gives, dead in node.steps:
                values[gives] = function(*[values[i] for i in takes])
                for i in dead:
                    values[i] = None
            if node.ends:
                return
            if node.looks_at is None:  # nothing is known yet
                break
            data = values[node.looks_at].data
            seen.append((node, data))
            if data.tobytes() not in node.children:
                break
            node = node.children[data.tobytes()]
        Recorder(self, leaves, values, seen).record(python)


class Recorder:
    """One run of a kernel's Python. What is known it is given; what is new is computed and noted."""

    def __init__(self, trace: Trace, leaves: list[Any], values: list[Any], seen: list[tuple[Node, Any]]) -> None:
        self.trace, self.values, self.seen = trace, values, deque(seen)
        self.calls = deque(call for node, _ in seen for call in node.calls)
        self.node = None if seen else trace.root  # what is added to; none while all is known
        self.places: dict[int, tuple[int, Any]] = {}  # by a handle's id; and what tells of its end
        self.dead: list[int] = []
        self.inside = False  # of the builder, or of a kernel that is not traced
        for place, leaf in enumerate(leaves):
            self.put(leaf, place)

    def put(self, handle: Any, place: int) -> None:
        which = id(handle)

        def ends(_: Any) -> None:
            self.places.pop(which, None)
            self.dead.append(place)

        self.places[which] = place, weakref.ref(handle, ends)

    def record(self, python: Function) -> None:
        self.trace.usable = False  # unless it comes to its end
        forget = watch(self)
        try:
            python()
        finally:
            forget()
            self.places.clear()
        if self.calls or self.seen:
            raise AssertionError("a kernel's Python went another way than before")
        if self.node is not None:
            self.node.ends = self.trace.usable = True

    def give_up(self) -> None:
        self.node, self.inside = None, True

    def look(self, handle: Any) -> Any:
        """At a handle's array."""
        if self.inside:
            return vars(handle)["data"]
        place = self.places[id(handle)][0] if id(handle) in self.places else None
        if place in self.trace.alike:
            return vars(handle)["data"]
        if self.node is None:
            node, data = self.seen.popleft()
        else:
            node, data = self.node, vars(handle)["data"]
            if place is None or data.size != 1:
                self.give_up()
                return data
            node.looks_at = place
        if not self.seen:
            self.node = node.children[data.tobytes()] = Node()
            self.dead = []
        return data

    def call(self, name: str, function: Function, *args: Any) -> Any:
        if self.inside:
            return function(*args)
        if self.node is None:
            known, _, places, single = self.calls.popleft()
            if known != name:
                raise AssertionError(f"a kernel's Python called {name} where it called {known} before")
            values = tuple(map(self.known, places))
            return values[0] if single else values
        self.inside = True
        result = function(*args)
        try:
            self.note(self.node, name, function, args, result)
            self.inside = False
        except KeyError:  # a handle that nobody has returned
            self.give_up()
        return result

    def known(self, place: int) -> Any:
        value = self.values[place]
        if place in self.trace.alike and not isinstance(value, HANDLES):
            return value
        if value is None:
            value = object.__new__(HANDLES[0])  # it had ended: nobody looks at it
        self.put(value, place)
        return value

    def note(self, node: Node, name: str, function: Function, args: tuple[Any, ...], result: Any) -> None:
        ends: list[int] = []
        takes = tuple([self.taken(node, arg, ends) for arg in args])
        results = result if (several := isinstance(result, tuple)) else (result,)
        alike = all(place in self.trace.alike for place in takes) and not any(part in name for part in CHANGING)
        if not several and id(result) in self.places:
            places = [self.places[id(result)][0]]
        elif alike and all(getattr(each, "data", NOTHING).nbytes <= KEPT for each in results):
            places = [self.trace.same(each) for each in results]
        else:
            place = self.trace.place()
            node.steps.append((function, takes, place, (*self.dead, *ends)))
            self.dead = []
            places = [self.trace.place() for _ in results] if several else [place]
            if several:
                for i, each in enumerate(places):
                    ended = (place,) if i + 1 == len(places) else ()
                    node.steps.append((operator.itemgetter(i), (place,), each, ended))
        for place, each in zip(places, results, strict=True):
            if isinstance(each, HANDLES):
                self.put(each, place)
        node.calls.append((name, function, tuple(places), not several))

    def taken(self, node: Node, arg: Any, ends: list[int]) -> int:
        if isinstance(arg, HANDLES):
            return self.places[id(arg)][0]
        if isinstance(arg, list) and any(isinstance(each, HANDLES) for each in arg):
            place = self.trace.place()
            given = tuple([self.taken(node, each, ends) for each in arg])
            node.steps.append((listed, given, place, ()))
            ends.append(place)
            return place
        return self.trace.same(arg)


def listed(*values: Any) -> list[Any]:
    return list(values)


NOTHING = memoryview(b"")
HANDLES: tuple[type, ...] = ()  # the interpreter's: of a tensor and of its description


def watch(recorder: Recorder) -> Function:
    """The builder's calls, reductions and what Python looks at are the recorder's, until the returned is called."""
    import triton.language as tl
    from triton.runtime import interpreter

    builder, kind = interpreter.interpreter_builder, interpreter.ReduceScanOpInterface
    apply, transpose = kind.apply, tl.tensor.T

    def called(name: str, function: Function) -> Function:
        def call(*args: Any, **kwargs: Any) -> Any:
            return recorder.call(name, functools.partial(function, **kwargs) if kwargs else function, *args)

        return call

    def reduce(self: Any, given: Any) -> Any:
        if recorder.inside:
            return apply(self, given)
        tensors = given if isinstance(given, tuple) else (given,)
        types: list[Any] = []

        def of_handles(*handles: Any) -> Any:
            found = apply(self, tuple(map(type(tensors[0]), handles, (tensor.type for tensor in tensors))))
            types[:] = [tensor.type for tensor in found]
            return tuple(tensor.handle for tensor in found)

        of_handles.types = types
        if recorder.node is None:
            types = recorder.calls[0][1].types
        handles = recorder.call("reduce", of_handles, *(tensor.handle for tensor in tensors))
        found = tuple(map(type(tensors[0]), handles, types))
        return found if isinstance(given, tuple) else found[0]

    names = [name for name in dir(type(builder)) if name.startswith(("create_", "get_"))]
    for name in names:
        setattr(builder, name, called(name, getattr(builder, name)))
    kind.apply, tl.tensor.T = reduce, property(tl.trans)
    HANDLES[0].data = property(recorder.look, lambda self, data: vars(self).update(data=data))

    def forget() -> None:
        for name in names:
            delattr(builder, name)
        kind.apply, tl.tensor.T = apply, transpose
        del HANDLES[0].data

    return forget


class Launch:
    """A kernel's Python as one launch calls it, once for each program."""

    def __init__(self, python: Any, traces: OrderedDict[Hashable, Trace]) -> None:
        self.python, self.traces = python, traces
        self.trace: Trace | None = None
        self.leaves: list[Any] | None = None
        self.__globals__, self.__name__ = python.__globals__, python.__name__
        self.__annotations__, self.__signature__ = python.__annotations__, inspect.signature(python)

    def __call__(self, **args: Any) -> None:
        if self.leaves is None:
            self.leaves = []
            self.trace = self.trace_of(args)
        if self.trace is None or not self.trace.usable:
            self.python(**args)
        else:
            self.trace.run(self.leaves, functools.partial(self.python, **args))

    def trace_of(self, args: dict[str, Any]) -> Trace | None:
        key = self.python, *(self.kind_of(value) for value in args.values())
        try:
            trace = self.traces.pop(key, None) or Trace(len(self.leaves or []))
        except TypeError:  # an argument that is not hashable
            return None
        self.traces[key] = trace
        places = sum(len(each.values) for each in self.traces.values())
        while places > PLACES and len(self.traces) > 1:
            places -= len(self.traces.popitem(last=False)[1].values)
        return trace

    def kind_of(self, value: Any) -> Hashable:
        import triton.language as tl

        assert self.leaves is not None
        if isinstance(value, tuple | tl.tuple):
            return type(value), *map(self.kind_of, value)
        if isinstance(value, tl.tensor):
            self.leaves.append(value.handle)
            return "tensor", repr(value.type)
        if isinstance(value, tl.core.tensor_descriptor_base):
            self.leaves.append(value.handle)
            return "descriptor", repr(value.block_type), self.kind_of(value.shape), self.kind_of(value.strides)
        if isinstance(value, tl.constexpr):
            return "constexpr", value.value
        return type(value), value


def install(interpreter: Any) -> None:
    global HANDLES
    # names that recording takes from Triton: where one is gone, nothing is traced
    assert interpreter.interpreter_builder and interpreter.ReduceScanOpInterface.apply
    HANDLES = interpreter.TensorHandle, interpreter.TensorDescHandle
    traces: OrderedDict[Hashable, Trace] = OrderedDict()
    begin = interpreter.GridExecutor.__init__

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        begin(self, *args, **kwargs)
        self.fn = Launch(self.fn, traces)

    interpreter.GridExecutor.__init__ = init
