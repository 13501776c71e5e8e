"""The softmax of each loss and metric (``Structure``), and the statistics that a call has to make (``Demand``)."""

import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..core.divergences import DIVERGENCES
from ..core.records import Statistic, VocabularySum
from ..core.statistics import OF_LOSSES, TOP, lists_of, needed
from ..core.stats import SUFFIX, Demand, Pairing, View, vectors_at
from ..losses.base import DENSE_STATISTICS, FIELDS, Field, Losses, Summand, Teacher, join_numbers, split_numbers
from ..metrics import Metric


@dataclass(frozen=True, eq=False)
class Structure:
    """Losses and metrics, each paired with its view: the index of its softmax in ``views``. The code of the losses'
    arithmetic depends only on the structure and on the dtypes and dimensions of the input tensors."""

    summands: tuple[tuple[Summand, int], ...]
    metrics: tuple[tuple[Metric, int], ...]
    views: tuple[View, ...]
    pairing: Pairing | None
    sums: tuple[VocabularySum, ...]
    leaf_names: frozenset[str]  # names of the statistics by which autograd differentiates losses
    vocab: int  # number of ids
    temperature: float = 1.0  # temperature of the first view; the head's scale and cap are divided by it
    teacher: Teacher | None = None  # its ``temperature`` is a number, or None where each token has a temperature
    weighted_index: int | None = None  # index of the summand whose class weights the statistic ``weighted_sum`` takes
    segment_metrics: tuple[tuple[Metric, int], ...] = ()  # metrics of segments, which read all tokens at once
    beta: float | None = None  # beta of the first loss that has a beta; metrics of the JSD take it

    @property
    def measures(self) -> tuple[tuple[Summand | Metric, int], ...]:
        """Losses, then metrics, each with its view."""
        return *self.summands, *self.metrics

    @functools.cached_property
    def split(self) -> tuple[tuple, tuple[float, ...]]:
        """Returns a key that is equal for structures with the same code; and the numbers that are the code's arguments:
        the floats of options, and the ratios of the softmaxes after the first."""
        numbers = [number for measure, _ in self.measures for number in measure.key_and_numbers[1]]
        summands = tuple([(summand.key, summand.token_weights, view) for summand, view in self.summands])
        metrics = tuple([(metric.key, view) for metric, view in self.metrics])
        softmaxes = self.views[0], split_numbers(self.views[1:], numbers), self.pairing
        sums = tuple([(s.function, s.view) for s in self.sums])
        sum_names = tuple([tuple(self.sum_vectors[pair].items()) for pair in self.measures])
        return (summands, metrics, softmaxes, sums, sum_names, self.leaf_names, self.vocab), tuple(numbers)

    @functools.cached_property
    def sum_vectors(self) -> dict[tuple[Summand | Metric, int], dict[str, str]]:
        """By loss or metric with its view: a dict of the sums over the vocabulary that the function reads. A key is the
        function's name of a sum, such as "divergence"; the value is the name of the sum's vector, such as "sum0"."""
        name_by_sum = {s._replace(is_differentiated=False): f"sum{i}" for i, s in enumerate(self.sums)}
        return {
            (measure, view): {
                name: name_by_sum[s._replace(view=view)] for name, s in sums_of(measure, self.beta).items()
            }
            for measure, view in self.measures
        }

    def with_numbers(self, numbers: Iterable[Any]) -> "Structure":
        """The structure with ``numbers``, floats or tensors [], in place of those that ``split`` returns."""
        number_iterator = iter(numbers)
        summands = tuple([(summand.with_numbers(number_iterator), view) for summand, view in self.summands])
        metrics = tuple([(metric.with_numbers(number_iterator), view) for metric, view in self.metrics])
        views = join_numbers(self.views[1:], number_iterator)
        return replace(self, summands=summands, metrics=metrics, views=(self.views[0], *views))

    @functools.cached_property
    def is_builtin(self) -> bool:
        """True where all losses and metrics are the library's own."""
        return all(measure.is_builtin for measure, _ in self.measures)

    @functools.cached_property
    def of_logprobs(self) -> bool:
        """True where losses read only the targets' log-probabilities under the first softmax."""
        # a loss of the library that reads lse, and no further statistic, reads no target
        reads_targets = all(summand.is_builtin and summand.reads_target for summand, _ in self.summands)
        return reads_targets and self.leaf_names <= {"logprob", "lse"}

    @functools.cached_property
    def values_only(self) -> "Structure":
        """The structure of an arithmetic that makes values and no coefficients."""
        return replace(self, leaf_names=frozenset())

    @functools.cached_property
    def widths(self) -> list[int]:
        """For each summand and metric the number of values per token; 0 if its values are per segment or pair."""
        return [measure.width for measure, _ in self.measures]


def structure_of(
    losses: Losses,
    metrics: Sequence[Metric],
    temperature: float | None,  # the call's temperature; None where each token has a temperature
    vocab: int,
    columns: int = 0,  # K of ``teacher_ids`` [..., K]
    teacher_vocab: int | None = None,  # number of a dense teacher's ids
) -> tuple[Structure, Demand]:
    """Returns the ``Structure`` of losses and metrics, and the ``Demand``: the statistics that they need. ValueError
    for more softmaxes, teachers or class weights than a call can have."""
    summands = [summand for _, summand in losses.terms]
    measures: list[Summand | Metric] = [*summands, *metrics]
    for kind, labels in (
        ("losses", [measure.label for measure in summands]),
        ("metrics", [measure.label for measure in metrics]),
    ):
        if repeated_labels := sorted({label for label in labels if labels.count(label) > 1}):
            raise ValueError(f"two of the {kind} are called {repeated_labels[0]!r}; give one of them another name=")
    has_token_temperatures, temperature = temperature is None, 1.0 if temperature is None else temperature
    tempered_labels = [measure.label for measure in measures if measure.temperature is not None]
    if has_token_temperatures and tempered_labels:
        raise ValueError(
            f"{tempered_labels[0]} has a temperature of its own, and the call one per token, which goes for all its "
            "losses and metrics; leave out one of them, or make two calls"
        )
    has_smaller_teacher = teacher_vocab is not None and teacher_vocab < vocab
    dense_summands = [summand for summand in summands if summand.teacher is not None]

    def softmax_of(measure: Summand | Metric) -> tuple[float, int | None]:
        """Returns the temperature of the softmax that ``measure`` reads, and the softmax's number of ids; None: all."""
        if isinstance(measure, Metric) and measure.needs & set(DENSE_STATISTICS):
            name = f"metrics.{measure.kind}"
            if not dense_summands:
                remedy = "add one, such as 0.0 * losses.lk()"
                raise ValueError(f"{name} is of a dense teacher, and no loss of the call has one; {remedy}")
            if measure.temperature is not None:
                raise ValueError(
                    f"{name} sees the softmaxes of losses.{dense_summands[0].kind}; leave out its temperature"
                )
            measure = dense_summands[0]
        has_teacher_ids = has_smaller_teacher and isinstance(measure, Summand) and measure.teacher is not None
        return measure.temperature or temperature, teacher_vocab if has_teacher_ids else None

    measure_softmaxes = list(dict.fromkeys(map(softmax_of, measures))) or [(temperature, None)]
    # the first view is over all ids and always made: its temperature becomes the head's scale
    first_softmax = next(
        (softmax for softmax in measure_softmaxes if softmax[1] is None), (measure_softmaxes[0][0], None)
    )
    softmaxes = list(dict.fromkeys([first_softmax, *measure_softmaxes]))
    if len(softmaxes) > 2:
        raise ValueError(
            "a call has at most two softmaxes, over different temperatures or vocabularies; these losses and metrics "
            f"ask for temperatures {', '.join(f'{t:g}' for t in dict.fromkeys(t for t, _ in softmaxes))}"
            + (" and for the vocabulary shared with the teacher besides" if has_smaller_teacher else "")
            + "; split them over two calls"
        )
    views = tuple((first_softmax[0] / t, id_count) for t, id_count in softmaxes)
    summand_views = [(summand, softmaxes.index(softmax_of(summand))) for summand in summands]
    metric_views = [(metric, softmaxes.index(softmax_of(metric))) for metric in metrics]

    leaf_names: set[str] = set()
    for summand, view in summand_views:
        leaf_names |= {name + SUFFIX[view] for name in ("logprob", "lse")}
        sloped_statistics = [s for s in OF_LOSSES if s.slopes is not None and not summand.needs.isdisjoint(s.words)]
        leaf_names |= {vectors_at(s, view)[0] for s in sloped_statistics}
    needed_pairs = {(name, view) for measure, view in (*summand_views, *metric_views) for name in measure.needs}
    needed_names = {name for name, _ in needed_pairs}
    shared_columns = vocab if teacher_vocab is None else min(vocab, teacher_vocab)
    betas = [summand.teacher.beta for summand in dense_summands if summand.teacher is not None]
    beta = next((b for b in betas if b is not None), None)
    sums = all_sums(summand_views, metric_views, beta)
    leaf_names |= {f"sum{i}" for i, s in enumerate(sums) if s.is_differentiated}
    softmax_temperatures = [None if has_token_temperatures else t for t, _ in softmaxes]
    teacher, pairing = pair_up(
        summand_views, (TOP,) if "teacher_argmax" in needed_names else (), sums, shared_columns, softmax_temperatures
    )
    token_metrics, segment_metrics = (
        tuple([pair for pair in metric_views if (pair[0].scope == "token") is is_token]) for is_token in (True, False)
    )
    structure = Structure(
        tuple(summand_views), token_metrics, views, pairing, sums, frozenset(leaf_names), vocab, first_softmax[0],
        teacher, smoothing_index(summands, needed_names), segment_metrics, beta,
    )  # fmt: skip
    fields = {name: FIELDS[name] for measure in measures for name in measure.fields if name in FIELDS}
    # an int field takes 16 bytes per token: the ids, and a copy with -1 for ids out of range
    bytes_by_type = {"float": 4, "int": 16, "bool": 1}
    demand = Demand(
        views=views,
        statistics=needed(needed_pairs, len(views)),
        lists=lists_of(needed_names, columns, 0),
        pairing=pairing,
        sums=sums,
        rank_one=leaf_names <= {"logprob", "lse"} and not sums,
        columns_only=bool(columns and summands)
        and all(s.reads_only_teacher_ids for s in summands)
        and not metrics
        and len(views) == 1,
        values=sum(structure.widths),
        field_bytes=sum(bytes_by_type[field.type] for field in fields.values() if field == Field("token", field.type)),
    )
    return structure, demand


def sums_of(measure: Summand | Metric, beta: float | None) -> dict[str, VocabularySum]:
    """The sums over the vocabulary that a loss or metric reads, by name. ``beta``: the teacher's weight in the JSD
    of the call's losses, which metrics of the JSD take over; None if no loss is a JSD."""
    if isinstance(measure, Summand):
        return dict(measure.sums)
    divergences = {name: DIVERGENCES[name] for name in sorted(measure.needs) if name in DIVERGENCES}
    if beta is None and any(function.numbers for function in divergences.values()):
        raise ValueError(
            f"metrics.{measure.kind} reads the divergence of a mixture, of which no loss of the call has a beta; add "
            "one that has, times 0.0 where it is only to be measured"
        )
    sums = {name: VocabularySum(f, (beta or 0.0,) * f.numbers) for name, f in divergences.items()}
    return sums | dict(measure.sums)


def all_sums(
    summand_views: list[tuple[Summand, int]], metric_views: list[tuple[Metric, int]], beta: float | None
) -> tuple[VocabularySum, ...]:
    """The sums over the vocabulary of a call, without repetition: no two have the same function, numbers and
    softmax."""
    is_differentiated_by_sum = dict[VocabularySum, bool]()
    measures: list[tuple[Summand | Metric, int]] = [*summand_views, *metric_views]
    for measure, view in measures:
        for vocab_sum in sums_of(measure, beta).values():
            sum_at_view = vocab_sum._replace(view=view)
            is_sloped = isinstance(measure, Summand) and vocab_sum.function.total is not None
            is_differentiated_by_sum[sum_at_view] = is_differentiated_by_sum.get(sum_at_view, False) or is_sloped
    return tuple([s._replace(is_differentiated=is_sloped) for s, is_sloped in is_differentiated_by_sum.items()])


def pair_up(
    summand_views: list[tuple[Summand, int]],
    statistics: tuple[Statistic, ...],  # of the teacher's logits
    sums: Sequence[VocabularySum],
    columns: int,  # number of ids that student and teacher share
    temperatures: Sequence[float | None],  # of the call's softmaxes; None: each token has a temperature
) -> tuple[Teacher | None, Pairing | None]:
    """Returns the dense teacher of a call, and the ``Pairing`` of this teacher with a softmax of the student; (None,
    None) without a dense teacher. ValueError for two different teachers."""
    dense_views = [(summand, view) for summand, view in summand_views if summand.teacher is not None]
    if not dense_views:
        return None, None
    teachers_and_views = set[tuple[Teacher, int]]()
    for summand, view in dense_views:
        assert summand.teacher is not None
        temperature = temperatures[view] if summand.teacher.temperature is None else summand.teacher.temperature
        teachers_and_views.add((summand.teacher._replace(temperature=temperature, beta=None), view))
    if len(teachers_and_views) > 1:
        raise ValueError(
            f"losses {', '.join(summand.label for summand, _ in dense_views)} see the dense teacher at different "
            "temperatures or scales; give them the same, or make two calls"
        )
    ((teacher, view),) = teachers_and_views
    # the gradient of a user's loss may depend on the sums, whatever the slopes of the sums are
    sums_come_last = all(s.function.is_early and s.function.is_paired for s in sums)
    sums_come_last = sums_come_last and all(summand.kind != "custom" for summand, _ in summand_views)
    return teacher, Pairing(view, columns, statistics, sums_come_last)


def smoothing_index(summands: Sequence[Summand], statistic_names: set[str]) -> int | None:
    """Index of the summand whose class weights the statistic ``weighted_sum`` takes; None if no summand reads
    ``weighted_sum``. ``statistic_names``: statistics of all measures. ValueError for two different class weights."""
    smoothing_indices = [i for i, summand in enumerate(summands) if "weighted_sum" in summand.needs]
    if not smoothing_indices:
        return None
    class_weights = [summands[i].tensors["class_weights"] for i in smoothing_indices]
    if "mean_logit" in statistic_names or any(weights is not class_weights[0] for weights in class_weights):
        raise ValueError(
            f"{summands[smoothing_indices[0]].label} smooths over class weights, and a call sums its logits with one "
            "set of weights: losses and metrics that smooth with others, or need the mean logit, go into another call"
        )
    return smoothing_indices[0]
