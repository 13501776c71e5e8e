"""``custom``: a loss of a function that the user writes."""

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor

from ..core.checks import choice
from ..core.private import breaks_graph
from .base import (
    DENSE_STATISTICS,
    FIELDS,
    FUNCTION_LOSS_MAKERS,
    STATISTICS,
    TEACHER_FIELDS,
    Field,
    Losses,
    Scope,
    Summand,
    Teacher,
    Unit,
    make,
)
from .sums import named_sums
from .user_checks import Function, reads_of

BASE_STATISTICS = ("logprob", "lse")


@breaks_graph
def custom(
    function: Function,
    *,
    scope: Scope,  # "token": a value depends on its own token alone; "segment": on other tokens too
    needs: Iterable[str] | None = None,  # names of statistics; None: a run on made-up tokens finds them
    fields: Mapping[str, Field | str] | Iterable[str] | None = None,  # names of fields, or kinds of fields by name
    unit: Unit = "token",  # what has one value: a token, a segment or a pair
    name: str | None = None,  # key of the loss in ``out.parts``; None: the function's name
    check: bool = True,  # the function runs on made-up tokens first
    options: Mapping[str, Any] | None = None,  # the function's keyword arguments
    tensors: Mapping[str, Tensor] | None = None,  # tensors [vocab], further keyword arguments of the function
    teacher: Teacher | None = None,  # options of a dense teacher
    sums: Mapping[str, Any] | None = None,  # functions to sum over the vocabulary, by statistic
    **summand_options: Any,
) -> Losses:
    """A loss of ``function(stats, batch) -> values``, which returns one unreduced value per ``unit``.

        def unlikelihood(stats, batch):
            return -torch.log1p(-stats.logprob.exp().clamp(max=0.999))

        loss = losses.custom(unlikelihood, scope="token")

    ``stats`` is a ``chunked_head.losses.batch.Stats``, ``batch`` a ``chunked_head.losses.batch.Batch``. Autograd
    differentiates the values by the statistics. The library applies mask, weights, denominator and coefficient to the
    values. docs/losses.md says what the function may read, keep and change.

    ``scope``: ``"token"`` if a token's value depends on its own statistics and fields only, so that the values of a
    slice of the tokens can be computed from that slice; ``"segment"`` if it depends on other tokens
    (``batch.segment_sum`` and others). With ``"segment"`` the statistics of all tokens are made first, and logits are
    computed twice.

    When the loss is made, the function runs on made-up tokens with every field. This shows which statistics (``needs``)
    and which ``fields`` the function reads. A field is optional if the function also runs without it. With
    ``scope="token"`` the function also runs on two pieces of the tokens. ValueError if the pieces have other values or
    gradients than all tokens at once. ``fields={"my_weights": "token"}`` declares the kinds of fields that the library
    does not have. A field that is not floating, or has further dimensions, is declared by a ``losses.Field`` in place
    of its kind. Fields of a dense teacher are declared likewise. ``needs`` adds statistics that the function reads in
    some calls only. With ``check=False`` the function does not run on made-up tokens. Then ``needs`` and ``fields``
    have to name all that the function reads, and the call must have a target.

    ``sums={"p2": lambda log_p: (2 * log_p).exp()}`` adds a statistic ``p2``, the sum of the function over the
    vocabulary. Functions take ``log_p`` (see ``losses.vocabulary_sum``), or ``log_p`` and ``log_q`` (see
    ``losses.divergence``). A pair ``(function, options)`` may stand in place of a function.

    ``options`` and ``tensors`` are keyword arguments of the function. ``teacher``: options that turn the logits of a
    dense teacher into its distribution. ``summand_options``: ``SummandOptions``. TypeError or ValueError for wrong
    arguments.
    """
    if not callable(function):
        raise TypeError(f"losses.custom takes a function (stats, batch) -> values, got {function!r}")
    function_name = getattr(function, "__name__", "custom")
    name = name or ("custom" if function_name == "<lambda>" else function_name)
    loss_name = f"losses.custom({name!r})"
    choice(loss_name, "scope", scope, ("token", "segment"))
    choice(loss_name, "unit", unit, ("token", "segment", "pair"))
    if unit != "token" and scope == "token":
        raise ValueError(f'{loss_name} has values per {unit}, which need all tokens: scope="segment"')
    declared_names, extra_fields = declared_fields(loss_name, fields)
    needed_statistics, reads_target = set(needs or ()), True
    required_fields, optional_fields = set(declared_names), set[str]()
    if unknown_names := sorted(needed_statistics - {*BASE_STATISTICS, *STATISTICS, *DENSE_STATISTICS}):
        raise ValueError(
            f"needs of {loss_name}: there is no statistic {unknown_names[0]!r}; there are "
            f"{', '.join((*STATISTICS, *DENSE_STATISTICS))}"
        )
    options, tensors = dict(options or {}), dict(tensors or {})
    sums_by_name = named_sums(loss_name, sums, (*BASE_STATISTICS, *STATISTICS, *DENSE_STATISTICS))
    if check:
        checked_summand = Summand(
            "custom", function, options, sums=sums_by_name, unit=unit, scope=scope, name=name, tensors=tensors
        )
        read_statistics, required_fields, optional_fields = reads_of(loss_name, checked_summand, extra_fields)
        # with an optional field the function may take another branch, which reads the target
        reads_target = "logprob" in read_statistics or "target" in required_fields or bool(optional_fields)
        needed_statistics |= read_statistics
        required_fields, optional_fields = required_fields - {"target"}, optional_fields | set(declared_names)
    if "topk_logprobs" in needed_statistics:
        required_fields.add("teacher_ids")
    if "weighted_sum" in needed_statistics and "class_weights" not in tensors:
        raise ValueError(f'{loss_name} reads stats.weighted_sum: pass the weights, tensors={{"class_weights": ...}}')
    if needed_statistics & set(DENSE_STATISTICS) or any(
        vocab_sum.function.is_paired for vocab_sum in sums_by_name.values()
    ):
        optional_fields |= set(TEACHER_FIELDS)  # a call has the teacher's logits, or its hidden states and weight
        teacher = teacher or Teacher()
        if "jsd" in needed_statistics and teacher.beta is None:
            raise ValueError(
                f"{loss_name} reads stats.jsd: pass teacher=Teacher(beta=...), the teacher's part of the mixture"
            )
    return make(
        "custom",
        function,
        {"name": name, **summand_options},
        options,
        tensors=tensors,
        teacher=teacher,
        needs=needed_statistics - set(BASE_STATISTICS),
        sums=sums_by_name,
        fields=tuple(sorted(required_fields)),
        optional_fields=tuple(sorted(optional_fields - required_fields)),
        extra_fields=extra_fields,
        scope=scope,
        is_separable=scope == "token",
        unit=unit,
        reads_target=reads_target,
    )


FUNCTION_LOSS_MAKERS.append(lambda function: custom(function, scope="token"))


def declared_fields(
    loss_name: str, fields: Mapping[str, Field | str] | Iterable[str] | None
) -> tuple[tuple[str, ...], dict[str, Field]]:
    """Returns the names of the declared fields, and by name the ``Field`` of each field that ``FIELDS`` lacks.
    TypeError or ValueError for wrong declarations."""
    if isinstance(fields, str):
        raise TypeError(f"fields of {loss_name} must be a mapping or several names, got {fields!r}")
    if not isinstance(fields, Mapping):
        fields = {name: FIELDS.get(name, "") for name in fields or ()}
        if unknown_names := [name for name, field_type in fields.items() if not field_type]:
            raise ValueError(
                f"fields of {loss_name} has {unknown_names[0]!r}, which is not the library's; give its kind too: "
                f"fields={{{unknown_names[0]!r}: 'token'}}"
            )
    extra_fields: dict[str, Field] = {}
    for name, declaration in fields.items():
        field_type = declaration if isinstance(declaration, Field) else Field(declaration)  # type: ignore[arg-type]
        choice(loss_name, f"field {name!r}", field_type.kind, ("token", "row", "segment", "pair", "constant"))
        if name not in FIELDS:
            extra_fields[name] = field_type
        elif field_type.kind != FIELDS[name].kind or (isinstance(declaration, Field) and declaration != FIELDS[name]):
            raise ValueError(
                f"field {name!r} of {loss_name} is a known one, {FIELDS[name]}, and cannot be another; take another "
                "name"
            )
    return tuple(fields), extra_fields
