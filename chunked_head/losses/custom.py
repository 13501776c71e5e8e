"""A loss of the user's own, and the check that it is of the scope that it claims."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from types import BuiltinFunctionType, CellType, FunctionType, ModuleType
from typing import Any

import torch
from torch import Tensor

from ..batch import Batch
from ..loss_stats import Stats
from .base import DENSE, FIELDS, STATISTICS, Field, Scope, Summand, Teacher, Unit, make

Function = Callable[..., Tensor]
TEACHER_FIELDS = ("teacher_logits", "teacher_hidden", "teacher_weight", "teacher_bias")
ALWAYS = ("logprob", "lse")


def custom(
    function: Function | None = None,
    *,
    scope: Scope,
    needs: Iterable[str] | None = None,
    fields: Mapping[str, Field | str] | Iterable[str] | None = None,
    unit: Unit = "token",
    name: str | None = None,
    compiled: bool = True,
    reads_target: bool | None = None,
    check: bool = True,
    **summand: Any,
) -> Any:  # Losses, or as a decorator what makes them of a function
    """A loss from ``function(stats, batch) -> values``: unreduced, one value per ``unit``.

    ``stats`` are those of ``chunked_head.loss_stats.Stats``, ``batch`` is a ``chunked_head.batch.Batch``; gradients are
    autograd's, to the statistics alone. Masks, weights, denominators and coefficients are applied to the values.

    ``scope``: ``"token"`` where a token's value depends on nothing but its own statistics and fields, so that it may be
    computed on any slice of the tokens; ``"segment"`` where it needs other tokens (``batch.segment_sum`` and the like):
    then all statistics come first and logits are computed twice. ``compiled=False`` where ``torch.compile`` cannot take
    the function.

    The function runs here once and again, on some made-up tokens: which statistics (``needs``) and fields it reads is
    found out, and with ``scope="token"`` values and gradients of the whole are compared with those of unequal pieces.
    Fields of your own are declared: ``fields={"my_weights": "token"}``, or a ``losses.Field`` where they are not
    floating or have dimensions beside the kind's; fields read by ``batch.get`` or after ``in`` are optional.
    ``check=False`` leaves all this out and takes ``needs``, ``fields`` (known ones by name) and ``reads_target`` as
    they are given.

    Functions of the same code that close over equal numbers and strings are one to the compiler, so that a loss may be
    made anew at every step; such values are read here, once. Tensors that are closed over are not sliced: pass fields.

        @losses.custom(scope="token")
        def unlikelihood(stats, batch):
            return -torch.log1p(-stats.logprob.exp().clamp(max=0.999))

    ``summand``: ``SummandOptions``, and ``tensors=`` and ``options=``, which the function gets as keyword arguments.
    """
    if function is None:
        return lambda decorated: custom(
            decorated, scope=scope, needs=needs, fields=fields, unit=unit, name=name, compiled=compiled,
            reads_target=reads_target, check=check, **summand,
        )  # fmt: skip
    if not callable(function):
        raise TypeError(f"losses.custom takes a function (stats, batch) -> values, got {function!r}")
    own = getattr(function, "__name__", "custom")
    name = name or ("custom" if own == "<lambda>" else own)
    where = f"losses.custom({name!r})"
    _check_choice(where, "scope", scope, ("token", "segment"))
    _check_choice(where, "unit", unit, ("token", "segment", "pair"))
    if unit != "token" and scope == "token":
        raise ValueError(f'{where} has values per {unit}, which need all tokens: scope="segment"')
    declared, extra = _declared(where, fields)
    wanted = frozenset(needs or ())
    if unknown := sorted(wanted - {*ALWAYS, *STATISTICS, *DENSE}):
        raise ValueError(f"needs of {where}: there is no statistic {unknown[0]!r}")
    for option, value in summand.get("options", {}).items():
        if type(value).__hash__ is None:
            raise TypeError(f"option {option!r} of {where} must be hashable, got {value!r}")
    function, identity = _frozen(function)
    reads = _Reads(required=set(declared), statistics=set(wanted), target=reads_target is not False)
    if check:
        question = Summand("custom", function, unit=unit, scope=scope, name=name, **_functional(summand))
        key = None
        if identity is not None and not question.tensors:
            key = (identity, tuple(sorted(question.options.items())), scope, unit, tuple(sorted(extra.items())))
        found = _known(key)
        if found is None:
            found = _checked(where, question, extra)
            _remember(key, found)
        if found.target and reads_target is False:
            raise ValueError(f"{where} reads the target, in stats.logprob or batch.target: not reads_target=False")
        reads = _Reads(
            required=found.required,
            optional=found.optional | (set(declared) - found.required),
            statistics=found.statistics | wanted,
            target=found.target if reads_target is None else reads_target,
        )
    required, optional = set(reads.required), set(reads.optional)
    if "topk_logprobs" in reads.statistics:
        required.add("teacher_ids")
    if "weighted_sum" in reads.statistics and "class_weights" not in summand.get("tensors", {}):
        raise ValueError(f'{where} reads stats.weighted_sum: pass the weights, tensors={{"class_weights": ...}}')
    if reads.statistics & set(DENSE):
        optional |= set(TEACHER_FIELDS)  # which of them, the call decides
        summand.setdefault("teacher", Teacher())
        if "jsd" in reads.statistics and summand["teacher"].beta is None:
            raise ValueError(
                f"{where} reads stats.jsd: pass teacher=Teacher(beta=...), the teacher's part of the mixture"
            )
    return make(
        "custom",
        function,
        needs=frozenset(reads.statistics) - set(ALWAYS),
        fields=tuple(sorted(required)),
        optional_fields=tuple(sorted(optional - required)),
        extra_fields=extra,
        scope=scope,
        unit=unit,
        name=name,
        compiled=compiled,
        reads_target=reads.target,
        **summand,
    )


def _declared(
    where: str, fields: Mapping[str, Field | str] | Iterable[str] | None
) -> tuple[tuple[str, ...], dict[str, Field]]:
    """Names of all fields given, and what those are that FIELDS does not know."""
    if isinstance(fields, str):
        raise TypeError(f"fields of {where} must be a mapping or several names, got {fields!r}")
    if not isinstance(fields, Mapping):
        fields = {name: FIELDS.get(name, "") for name in fields or ()}
    extra: dict[str, Field] = {}
    for name, known in fields.items():
        kind = known if isinstance(known, Field) else Field(known)  # type: ignore[arg-type]
        if kind.kind not in ("token", "row", "segment", "pair", "constant"):
            raise ValueError(
                f"field {name!r} of {where} must be declared as one of 'token', 'row', 'segment', 'pair', 'constant' "
                f"or a Field, got {kind.kind!r}"
            )
        if name not in FIELDS:
            extra[name] = kind
        elif kind.kind != FIELDS[name].kind or (isinstance(known, Field) and known != FIELDS[name]):
            raise ValueError(f"field {name!r} of {where} is a known one, {FIELDS[name]}, and cannot be another")
    return tuple(fields), extra


def _check_choice(where: str, argument: str, value: Any, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ValueError(f"{argument} of {where} must be one of {', '.join(map(repr, allowed))}, got {value!r}")


def _functional(summand: Mapping[str, Any]) -> dict[str, Any]:
    return {key: summand[key] for key in ("options", "tensors") if key in summand}


# ---- the check


class _Reads:
    """What a function was seen to read."""

    def __init__(
        self,
        required: Iterable[str] = (),
        optional: Iterable[str] = (),
        statistics: Iterable[str] = (),
        target: bool = False,
    ):
        self.required, self.optional = set(required), set(optional)
        self.statistics, self.target = set(statistics), target


class _Recording(dict):
    """Statistics or fields that say which of them were read."""

    def __init__(self, values: Mapping[str, Tensor], read: Callable[[str], None]):
        super().__init__(values)
        self.read = read

    def __getitem__(self, name: str) -> Tensor:
        self.read(name)
        return super().__getitem__(name)


class _RecordingFields(_Recording):
    """``get`` and ``in`` ask whether a field is there: it is optional then, read or not."""

    def __init__(self, values: Mapping[str, Tensor], reads: _Reads):
        super().__init__(values, self._require)
        self.reads = reads

    def _require(self, name: str) -> None:
        if name not in self.reads.optional:
            self.reads.required.add(name)

    def __getitem__(self, name: str) -> Tensor:
        if not super().__contains__(name):
            if name in FIELDS:
                raise KeyError(f"field {name!r} is not there")
            raise KeyError(f"there is no field {name!r}; declare one of your own: fields={{{name!r}: 'token'}}")
        return super().__getitem__(name)

    def __contains__(self, name: object) -> bool:
        self.reads.optional |= {str(name)} - self.reads.required
        return super().__contains__(name)

    def get(self, name: str, default: Any = None) -> Any:
        there = name in self
        return self[name] if there else default

    def __iter__(self) -> Iterator[str]:
        raise TypeError("a loss names the fields that it reads: batch cannot be iterated over in losses.custom")

    keys = values = items = __iter__  # type: ignore[assignment]


class _RecordingBatch(Batch):
    def __init__(self, fields: Mapping[str, Tensor], target: Tensor, num_segments: int, vocab: int, reads: _Reads):
        self.reads = reads
        super().__init__(_RecordingFields(fields, reads), target, num_segments, vocab)

    @property
    def target(self) -> Tensor:
        self.reads.target = True
        return self._target

    @target.setter
    def target(self, target: Tensor) -> None:
        self._target = target

    def segment_count(self, name: str = "segments") -> Tensor:
        # the target's shape alone would pass for reading it
        return self.segment_sum(torch.ones_like(self.mask, dtype=torch.float32), name)

    def __contains__(self, name: object) -> bool:
        return name in self.fields

    def get(self, name: str, default: Any = None) -> Any:
        return self.fields.get(name, default)


TOKENS, SEGMENTS, PAIRS, VOCAB, TOP, WIDTH, TRAILING = 24, 5, 3, 13, 4, 7, 2  # all different: a mix-up shows
# lengths 7, 1, 5, 9 and an empty segment; two tokens of none; segments 0 and 2 lie interleaved
SEGMENT_IDS = (0, 0, 2, 0, 2, 2, 0, 0, 2, 0, 0, 2, 1, -1, 3, 3, 3, 3, 3, 3, 3, 3, 3, -1)
MASKED = (4, 13, 19)
PIECES = (6, 1, 14, 3)


class _Synthetic:
    """Made-up statistics and fields, as a call makes them: 0 and -1 where a token does not count."""

    def __init__(self, summand: Summand, extra: Mapping[str, Field]):
        tensors = list(summand.tensors.values())
        self.device = tensors[0].device if tensors else torch.device("cpu")
        self.vocab = len(tensors[0]) if tensors and tensors[0].dim() else VOCAB
        self.generator = torch.Generator().manual_seed(7)
        segments = torch.tensor(SEGMENT_IDS)
        self.mask = torch.ones(TOKENS, dtype=torch.bool).index_fill(0, torch.tensor(MASKED), False)
        self.target = torch.where(self.mask, self._integers(self.vocab, TOKENS), -1)
        kinds = FIELDS | dict(extra)
        self.fields = {name: self._field(name, kind) for name, kind in kinds.items()}
        self.fields["segments"] = self.fields["documents"] = segments
        self.fields["pairs"] = torch.tensor([[0, 1], [2, 3], [3, 0]])
        self.per_token = {name for name, kind in kinds.items() if kind.kind in ("token", "row")}

        logprob = -0.1 - 3 * self._uniform(TOKENS)
        top = self._uniform(TOKENS, TOP).softmax(-1).log() - 0.2
        self.stats = {name: 0.1 + 2 * self._uniform(TOKENS) for name in (*STATISTICS, *DENSE)} | {
            "logprob": logprob,
            "lse": 4 * self._normal(TOKENS),
            "mean_logit": self._normal(TOKENS),
            "argmax": self._integers(self.vocab, TOKENS),
            "top_logprob": logprob * 0.5,
            "topk_logprobs": top,
        }
        for name in ("old_logprobs", "ref_logprobs", "rollout_logprobs"):
            self.fields[name] = logprob + 0.3 * self._normal(TOKENS)
        self.fields["teacher_logprobs"] = top + 0.3 * self._normal(TOKENS, TOP)
        self.fields["teacher_ids"] = torch.arange(TOP).expand(TOKENS, TOP) * (self.vocab // TOP)
        for name in self.per_token:
            empty = -1 if name in ("segments", "documents") else 0
            self.fields[name] = self._counted(self.fields[name], empty)
        self.stats = {name: self._counted(value, 0) for name, value in self.stats.items()}
        for held in (self.fields, self.stats):
            held.update({name: value.to(self.device) for name, value in held.items()})
        self.mask, self.target = self.mask.to(self.device), self.target.to(self.device)
        self.upstream = self._uniform(TOKENS).to(self.device) + 0.5

    def _uniform(self, *shape: int) -> Tensor:
        return torch.rand(shape, generator=self.generator)

    def _normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator)

    def _integers(self, below: int, *shape: int) -> Tensor:
        return torch.randint(below, shape, generator=self.generator)

    def _counted(self, values: Tensor, empty: int) -> Tensor:
        mask = self.mask.view(-1, *[1] * (values.dim() - 1))
        return torch.where(mask, values, torch.full_like(values, empty))

    def _field(self, name: str, kind: Field) -> Tensor:
        last = {
            "teacher_logits": (self.vocab,), "teacher_hidden": (WIDTH,), "teacher_weight": (self.vocab, WIDTH),
            "teacher_bias": (self.vocab,), "teacher_ids": (TOP,), "teacher_logprobs": (TOP,), "teacher_mask": (TOP,),
            "pairs": (2,),
        }.get(name, (TRAILING,) * kind.trailing)  # fmt: skip
        first = {"token": (TOKENS,), "row": (TOKENS,), "segment": (SEGMENTS,), "pair": (PAIRS,), "constant": ()}
        shape = (*first[kind.kind], *last)
        if kind.type == "float":
            return self._normal(*shape)
        return self._integers(2, *shape).to(torch.bool if kind.type == "bool" else torch.int64)

    def run(self, summand: Summand, reads: _Reads, piece: slice, absent: frozenset[str] = frozenset()) -> "_Run":
        """The function on some of the tokens; differentiable statistics are leaves."""
        leaves = {}
        for name, value in self.stats.items():
            leaf = value[piece].clone()
            if name not in ("argmax", "top_logprob", "teacher_entropy"):
                leaf.requires_grad_()
            leaves[name] = leaf
        fields = {
            name: (value[piece] if name in self.per_token else value).clone()
            for name, value in self.fields.items()
            if name not in absent
        }
        batch = _RecordingBatch(fields, self.target[piece], SEGMENTS, self.vocab, reads)
        stats = Stats(_Recording(leaves, reads.statistics.add))
        versions = {name: value._version for name, value in (leaves | fields).items()}
        values = summand.values(stats, batch, summand.tensors)
        reads.target |= "logprob" in reads.statistics
        written = [name for name, value in (leaves | fields).items() if value._version != versions[name]]
        return _Run(values, leaves, written)


class _Run:
    def __init__(self, values: Any, leaves: dict[str, Tensor], written: list[str]):
        self.values, self.leaves, self.written = values, leaves, written

    def gradients(self, upstream: Tensor) -> dict[str, Tensor]:
        leaves = {name: leaf for name, leaf in self.leaves.items() if leaf.requires_grad}
        if not self.values.requires_grad:
            return {name: torch.zeros_like(leaf) for name, leaf in leaves.items()}
        total = torch.where(upstream != 0, self.values * upstream, 0.0).sum()
        found = torch.autograd.grad(total, list(leaves.values()), allow_unused=True, materialize_grads=True)
        return dict(zip(leaves, found, strict=True))


def _checked(where: str, summand: Summand, extra: Mapping[str, Field]) -> _Reads:
    with torch.inference_mode(False), torch.enable_grad(), torch.random.fork_rng(devices=[]):
        return _check(where, summand, extra)


def _check(where: str, summand: Summand, extra: Mapping[str, Field]) -> _Reads:
    synthetic = _Synthetic(summand, extra)
    everything = slice(0, TOKENS)
    reads = _Reads()

    def run(piece: slice, reads: _Reads = reads) -> _Run:
        try:
            outcome = synthetic.run(summand, reads, piece)
        except Exception as error:
            reason = error.args[0] if isinstance(error, KeyError) and error.args else error
            raise ValueError(
                f"{where} raised {type(error).__name__} on {piece.stop - piece.start} made-up tokens, where it was run "
                f"to see what it reads: {reason}. If it cannot run on these, pass check=False with needs= and fields="
            ) from error
        _check_values(where, summand.unit, outcome.values, piece.stop - piece.start)
        if outcome.written:
            raise ValueError(f"{where} writes into {outcome.written[0]!r}, which others read: compute out of place")
        return outcome

    whole = run(everything)
    again = run(everything)
    if not torch.allclose(whole.values, again.values, equal_nan=True):
        raise ValueError(f"{where} gives other values when it is run again: it must not draw random numbers")
    if not whole.values.requires_grad:
        raise ValueError(
            f"{where} has values without a gradient: it must depend on a statistic that is not detached. What is only "
            "to be logged is a Metric"
        )
    if summand.scope == "token":
        _check_pieces(where, synthetic, whole, run)
    _find_optional(synthetic, summand, reads)
    return reads


def _check_values(where: str, unit: Unit, values: Any, tokens: int) -> None:
    number = {"token": tokens, "segment": SEGMENTS, "pair": PAIRS}[unit]
    per = {"token": "[tokens]", "segment": "[num_segments]", "pair": "[pairs]"}[unit]
    if not isinstance(values, Tensor):
        raise ValueError(f"{where} must return a tensor of shape {per}, got {type(values).__name__}")
    if tuple(values.shape) != (number,):
        remedy = " (values are reduced for it: leave out .sum() and .mean())" if values.dim() == 0 else ""
        if values.dim() == 1 and unit == "token" and len(values) == SEGMENTS:
            remedy = '; values per segment are unit="segment"'
        raise ValueError(
            f"{where} must return one value per {unit}, {per} = ({number},) here; got {tuple(values.shape)}{remedy}"
        )
    if not values.dtype.is_floating_point:
        raise ValueError(f"{where} must return floating-point values, got {values.dtype}")


def _check_pieces(where: str, synthetic: _Synthetic, whole: _Run, run: Callable[[slice], _Run]) -> None:
    upstream = torch.where(synthetic.mask, synthetic.upstream, 0.0)
    gradients = whole.gradients(upstream)
    start = 0
    for length in PIECES:
        piece = slice(start, start + length)
        start += length
        part = run(piece)
        counted = synthetic.mask[piece]
        same = _same(whole.values[piece][counted], part.values[counted], whole.values[synthetic.mask])
        what = "values"
        if same:
            for name, gradient in part.gradients(upstream[piece]).items():
                if not _same(gradients[name][piece][counted], gradient[counted], gradients[name][synthetic.mask]):
                    same, what = False, f"gradients to stats.{name}"
        if not same:
            raise ValueError(
                f'{where} has scope="token", but its {what} on {TOKENS} made-up tokens at once and in pieces differ: a '
                'token\'s value depends on other tokens, and would depend on the chunk size. Pass scope="segment", '
                "or compute what is common to the batch before the call and pass it as a field"
            )


def _same(a: Tensor, b: Tensor, scale: Tensor) -> bool:
    """Equal up to rounding; what one token adds to a mean over these few is far larger."""
    finite = scale.detach()[scale.isfinite()].abs()
    atol = 1e-4 * float(finite.max()) if len(finite) else 0.0
    return torch.allclose(a.to(b.dtype), b, rtol=1e-4, atol=atol, equal_nan=True)


def _find_optional(synthetic: _Synthetic, summand: Summand, reads: _Reads) -> None:
    """Runs without each field that was asked for only: whoever cannot do without it requires it.

    What is read instead of it counts as optional too: the other branch does without.
    """
    for name in sorted(reads.optional):
        if name not in synthetic.fields:
            if name not in FIELDS:
                raise ValueError(
                    f"losses.custom({summand.label!r}) asks for the field {name!r}, which nobody knows; declare it: "
                    f"fields={{{name!r}: 'token'}}"
                )
            continue
        without = _Reads()
        try:
            synthetic.run(summand, without, slice(0, TOKENS), frozenset({name}))
        except Exception:
            reads.optional.discard(name)
            reads.required.add(name)
            continue
        reads.optional |= (without.required | without.optional) - reads.required
        reads.statistics |= without.statistics
        reads.target |= without.target


# ---- functions that are equal

PLAIN = (type(None), bool, int, str, bytes, complex, torch.dtype, torch.device, type, ModuleType, BuiltinFunctionType)
REMEMBERED = 256  # functions; beyond that the oldest are forgotten, and compiled anew if they come back
_functions: dict[tuple, FunctionType] = {}
_results: dict[tuple, _Reads] = {}


def _frozen(function: Function) -> tuple[Function, tuple | None]:
    """The first function of the same code over equal values, with those values, and what says that it is the same.

    A copy with cells of its own: were a variable of the first one's maker to change, all others would change with it.
    What closes over anything but plain values (a tensor, an object) stays itself, and None.
    """
    try:
        key, copy = _freeze(function, ())
    except _NotPlainError:
        return function, None
    if not isinstance(copy, FunctionType):
        return function, None
    return _first(_functions, key, copy), key


class _NotPlainError(Exception):
    pass


def _freeze(value: Any, inside: tuple[int, ...]) -> tuple[tuple, Any]:
    """A key that is equal for equal plain values, types included (1, 1.0 and True are three), and a lasting copy."""
    if isinstance(value, float):
        return (type(value), value.hex()), value  # tells 0.0 from -0.0, and nan is equal to nan
    if isinstance(value, PLAIN):
        return (type(value), value), value
    if type(value) is tuple:
        pairs = [_freeze(item, inside) for item in value]
        return (tuple, *(key for key, _ in pairs)), tuple(item for _, item in pairs)
    if type(value) is not FunctionType or id(value) in inside or value.__dict__:
        raise _NotPlainError
    inside = (*inside, id(value))
    try:
        contents = tuple(cell.cell_contents for cell in value.__closure__ or ())
    except ValueError as error:  # a variable without a value yet
        raise _NotPlainError from error
    keyword_defaults = value.__kwdefaults__ or {}
    closure_key, closure = _freeze(contents, inside)
    defaults_key, defaults = _freeze(value.__defaults__ or (), inside)
    keywords_key, keywords = _freeze(tuple(keyword_defaults.values()), inside)
    key = (
        FunctionType, value.__code__, id(value.__globals__), closure_key, defaults_key, tuple(keyword_defaults),
        keywords_key,
    )  # fmt: skip
    if not closure:
        return key, value
    copy = FunctionType(
        value.__code__, value.__globals__, value.__name__, defaults or None, tuple(map(CellType, closure))
    )
    copy.__kwdefaults__ = dict(zip(keyword_defaults, keywords, strict=True)) or None
    copy.__doc__, copy.__qualname__, copy.__module__ = value.__doc__, value.__qualname__, value.__module__
    return key, copy


def _first(held: dict[tuple, Any], key: tuple, value: Any) -> Any:
    if key not in held:
        while len(held) >= REMEMBERED:
            del held[next(iter(held))]
        held[key] = value
    return held[key]


def _known(key: tuple | None) -> _Reads | None:
    return None if key is None else _results.get(key)


def _remember(key: tuple | None, found: _Reads) -> None:
    if key is not None:
        _first(_results, key, found)
