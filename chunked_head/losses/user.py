"""A loss of the user's own."""

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor

from ..core.checks import choice
from ..core.private import breaks_graph
from .base import DENSE, FIELDS, STATISTICS, TAKERS, TEACHER_FIELDS, Field, Losses, Scope, Summand, Teacher, Unit, make
from .sums import named_sums
from .user_checks import Function, checked

ALWAYS = ("logprob", "lse")


@breaks_graph
def custom(
    function: Function,
    *,
    scope: Scope,
    needs: Iterable[str] | None = None,
    fields: Mapping[str, Field | str] | Iterable[str] | None = None,
    unit: Unit = "token",
    name: str | None = None,
    check: bool = True,
    options: Mapping[str, Any] | None = None,
    tensors: Mapping[str, Tensor] | None = None,
    teacher: Teacher | None = None,
    sums: Mapping[str, Any] | None = None,
    **summand: Any,
) -> Losses:
    """A loss from ``function(stats, batch) -> values``: unreduced, one value per ``unit``.

        def unlikelihood(stats, batch):
            return -torch.log1p(-stats.logprob.exp().clamp(max=0.999))

        loss = losses.custom(unlikelihood, scope="token")

    ``stats`` are those of ``chunked_head.losses.batch.Stats``, ``batch`` is a ``chunked_head.losses.batch.Batch``;
    gradients are autograd's, to the statistics. Masks, weights, denominators and coefficients are applied to the
    values. docs/losses.md says what the function may read, keep and change.

    ``scope``: ``"token"`` where a token's value depends on nothing but its own statistics and fields, so that it may be
    computed on any slice of the tokens; ``"segment"`` where it needs other tokens (``batch.segment_sum`` and the like):
    then all statistics come first and logits are computed twice.

    The function runs here once, on some made-up tokens with every field: which statistics (``needs``) and fields it
    reads is found out, and with ``scope="token"`` whether two unequal pieces of them have the same values and
    gradients. ``fields={"my_weights": "token"}`` declares fields of your own (or a ``losses.Field``, where they are not
    floating or have dimensions besides the kind's) and a dense teacher's tensors, ``needs`` a statistic that the
    function reads in some calls only. Fields without which it runs too are optional. ``check=False`` leaves
    all this out, takes ``needs`` and ``fields`` as they are given, and a target to be read.

    ``sums={"p2": lambda log_p: (2 * log_p).exp()}`` adds statistics: sums over the vocabulary of functions as
    ``losses.vocabulary_sum`` takes them, or of ``log_p`` and ``log_q`` as ``losses.divergence`` does; a pair
    ``(function, options)`` where a function has options.

    ``options`` and ``tensors`` are what the function gets as keyword arguments, ``teacher`` how it sees a dense
    teacher; ``summand``: ``SummandOptions``.
    """
    if not callable(function):
        raise TypeError(f"losses.custom takes a function (stats, batch) -> values, got {function!r}")
    function_name = getattr(function, "__name__", "custom")
    name = name or ("custom" if function_name == "<lambda>" else function_name)
    where = f"losses.custom({name!r})"
    choice(where, "scope", scope, ("token", "segment"))
    choice(where, "unit", unit, ("token", "segment", "pair"))
    if unit != "token" and scope == "token":
        raise ValueError(f'{where} has values per {unit}, which need all tokens: scope="segment"')
    declared, extra = declared_fields(where, fields)
    statistics, required, optional, reads_target = set(needs or ()), set(declared), set[str](), True
    if unknown := sorted(statistics - {*ALWAYS, *STATISTICS, *DENSE}):
        raise ValueError(
            f"needs of {where}: there is no statistic {unknown[0]!r}; there are {', '.join((*STATISTICS, *DENSE))}"
        )
    options, tensors = dict(options or {}), dict(tensors or {})
    sums_by_name = named_sums(where, sums, (*ALWAYS, *STATISTICS, *DENSE))
    if check:
        question = Summand(
            "custom", function, options, sums=sums_by_name, unit=unit, scope=scope, name=name, tensors=tensors
        )
        read, required, optional = checked(where, question, extra)
        # a branch that a field would choose may read what this one did not
        reads_target = "logprob" in read or "target" in required or bool(optional)
        statistics |= read
        required, optional = required - {"target"}, optional | set(declared)
    if "topk_logprobs" in statistics:
        required.add("teacher_ids")
    if "weighted_sum" in statistics and "class_weights" not in tensors:
        raise ValueError(f'{where} reads stats.weighted_sum: pass the weights, tensors={{"class_weights": ...}}')
    if statistics & set(DENSE) or any(vocab_sum.function.is_paired for vocab_sum in sums_by_name.values()):
        optional |= set(TEACHER_FIELDS)  # which of them, the call decides
        teacher = teacher or Teacher()
        if "jsd" in statistics and teacher.beta is None:
            raise ValueError(
                f"{where} reads stats.jsd: pass teacher=Teacher(beta=...), the teacher's part of the mixture"
            )
    return make(
        "custom",
        function,
        {"name": name, **summand},
        options,
        tensors=tensors,
        teacher=teacher,
        needs=statistics - set(ALWAYS),
        sums=sums_by_name,
        fields=tuple(sorted(required)),
        optional_fields=tuple(sorted(optional - required)),
        extra_fields=extra,
        scope=scope,
        separable=scope == "token",
        unit=unit,
        reads_target=reads_target,
    )


TAKERS.append(lambda function: custom(function, scope="token"))


def declared_fields(
    where: str, fields: Mapping[str, Field | str] | Iterable[str] | None
) -> tuple[tuple[str, ...], dict[str, Field]]:
    """Names of all fields given, and what those are that FIELDS does not know."""
    if isinstance(fields, str):
        raise TypeError(f"fields of {where} must be a mapping or several names, got {fields!r}")
    if not isinstance(fields, Mapping):
        fields = {name: FIELDS.get(name, "") for name in fields or ()}
        if unknown := [name for name, kind in fields.items() if not kind]:
            raise ValueError(
                f"fields of {where} has {unknown[0]!r}, which is not the library's; give its kind too: "
                f"fields={{{unknown[0]!r}: 'token'}}"
            )
    extra: dict[str, Field] = {}
    for name, declared in fields.items():
        kind = declared if isinstance(declared, Field) else Field(declared)  # type: ignore[arg-type]
        choice(where, f"field {name!r}", kind.kind, ("token", "row", "segment", "pair", "constant"))
        if name not in FIELDS:
            extra[name] = kind
        elif kind.kind != FIELDS[name].kind or (isinstance(declared, Field) and declared != FIELDS[name]):
            raise ValueError(
                f"field {name!r} of {where} is a known one, {FIELDS[name]}, and cannot be another; take another name"
            )
    return tuple(fields), extra
