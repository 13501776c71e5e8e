"""Rows of losses: what tests know of a loss stands beside its formula, and every table of the tests is read from here.

``losses/test_formulas.py`` tries each of the options, with and without fields that may be missing. The fuzzer draws the
first few. ``helpers/loss_cases.py`` has a call of each loss, which every backend, layout of ranks and memory test runs.
``losses/test_extremes.py`` takes each loss beyond what exponentials hold, by its fields. ``losses/test_rows.py`` fails
where a public loss has no row, or an option no value.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

Options = Mapping[str, Any]
Formula = Callable[..., Tensor]  # of final logits [n, V], targets [n], fields and options: [n], [P] or [num_segments]

CLASS_WEIGHTS = "class weights of the vocabulary"  # stands for a tensor of the call's vocabulary
DENSE = "dense_teacher"  # stands for teacher_logits, or for teacher_hidden and teacher_weight
POLICY = "old_logprobs advantages"
SEGMENTED = POLICY + " segments"
PAIRED = "ref_logprobs segments pairs"
TOPK = "teacher_ids teacher_logprobs"


@dataclass(frozen=True)
class Row:
    """A loss in tests."""

    formula: Formula
    fields: tuple[str, ...]
    options: tuple[Options, ...]  # calls of the loss; together they give each option a value
    optional: tuple[str, ...]  # fields that some calls leave out
    unit: str  # what a value is of: "token", "pair" or "segment"; an option ``weighting`` decides it itself
    drawn: int  # the first so many of the options are drawn by the fuzzer
    sure_is_infinite: bool  # the loss of a token of probability 1 is infinite in float64

    def unit_of(self, options: Options) -> str:
        weighting: str = options.get("weighting", self.unit)
        return weighting

    def batch(self, teacher: str = "teacher_hidden teacher_weight") -> str:
        """Names of the fields, with a dense teacher's."""
        return " ".join(teacher if name == DENSE else name for name in self.fields)


ROWS: dict[str, Row] = {}


def add_row(
    fields: str = "",
    *options: Options,
    optional: str = "",
    unit: str = "",
    drawn: int = 2,
    sure_is_infinite: bool = False,
) -> Callable[[Formula], Formula]:
    """Adds the loss of the formula's name. Without options the loss is tried with its defaults alone."""

    def add(formula: Formula) -> Formula:
        names = tuple(fields.split())
        kind = unit or ("pair" if "pairs" in names else "token")
        tries = [each for i, each in enumerate(options or ({},)) if each not in options[:i]]
        ROWS[formula.__name__] = Row(
            formula, names, tuple(tries), tuple(optional.split()), kind, drawn, sure_is_infinite
        )
        return formula

    return add
