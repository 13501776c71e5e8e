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
    """A loss from ``function(stats, batch) -> values``, which returns one unreduced value per ``unit``.

        def unlikelihood(stats, batch):
            return -torch.log1p(-stats.logprob.exp().clamp(max=0.999))

        loss = losses.custom(unlikelihood, scope="token")

    ``stats`` is a ``chunked_head.losses.batch.Stats``, ``batch`` a ``chunked_head.losses.batch.Batch``. Autograd
    differentiates the values by the statistics. The library applies mask, weights, denominator and coefficient to the
    values. docs/losses.md says what the function may read, keep and change.

    ``scope``: ``"token"`` if a token's value depends on its own statistics and fields only, so that values of any slice
    of the tokens can be computed alone; ``"segment"`` if it depends on other tokens (``batch.segment_sum`` and others).
    Then the statistics of all tokens are made first, and logits are computed twice.

    The function runs once when the loss is made, on made-up tokens with every field. This shows which statistics
    (``needs``) and ``fields`` it reads, and a field without which it runs as well is optional. With ``scope="token"``
    it is checked that two unequal pieces of the tokens have the same values and gradients as all at once.
    ``fields={"my_weights": "token"}`` declares fields of your own and a dense teacher's tensors; the value is a
    ``losses.Field`` where the field is not floating or has further dimensions. ``needs`` adds statistics that the
    function reads in some calls only. With ``check=False`` the function does not run here: ``needs`` and ``fields``
    are complete as given, and the call must have a target.

    ``sums={"p2": lambda log_p: (2 * log_p).exp()}`` adds statistics: sums over the vocabulary of a function that
    ``losses.vocabulary_sum`` or, of ``log_p`` and ``log_q``, ``losses.divergence`` would take. A value may be a pair
    ``(function, options)``.

    ``options`` and ``tensors`` are keyword arguments of the function. ``teacher``: how a dense teacher's logits become
    its distribution. ``summand``: ``SummandOptions``.
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
        # with an optional field the function may take another branch, which reads the target
        reads_target = "logprob" in read or "target" in required or bool(optional)
        statistics |= read
        required, optional = required - {"target"}, optional | set(declared)
    if "topk_logprobs" in statistics:
        required.add("teacher_ids")
    if "weighted_sum" in statistics and "class_weights" not in tensors:
        raise ValueError(f'{where} reads stats.weighted_sum: pass the weights, tensors={{"class_weights": ...}}')
    if statistics & set(DENSE) or any(vocab_sum.function.is_paired for vocab_sum in sums_by_name.values()):
        optional |= set(TEACHER_FIELDS)  # each call has either the logits or the others
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
    """Returns the names of the declared fields, and the ``Field`` of each one that ``FIELDS`` lacks."""
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
