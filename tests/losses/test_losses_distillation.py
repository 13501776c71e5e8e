"""Distillation losses against the oracle: values and gradients, in float64 on whole logits."""

import itertools
import math
from typing import Any

import pytest
import torch
from full_stats import Batch, Stats, full_stats
from oracle import distillation as oracle
from tiers import crossed, first_of
from torch import Tensor

from chunked_head import gathered_topk_kl
from chunked_head.losses import Losses, Summand, Teacher, distillation, topk
from chunked_head.losses.topk import entries

TOKENS, VOCAB = 12, 17

DENSE: list[tuple[str, dict[str, Any]]] = [
    ("forward_kl", {}),
    ("forward_kl", {"form": "cross_entropy"}),
    ("forward_kl", {"temperature": 2.0}),
    ("forward_kl", {"temperature": 2.0, "t_squared": True}),
    ("forward_kl", {"teacher_temperature": 3.0}),
    ("forward_kl", {"temperature": 1.5, "teacher_temperature": 0.7}),
    ("forward_kl", {"teacher_logit_scale": 0.25, "teacher_softcap": 1.5}),
    ("reverse_kl", {}),
    ("reverse_kl", {"temperature": 2.0, "t_squared": True, "teacher_softcap": 2.0}),
    ("jsd", {}),
    ("jsd", {"beta": 0.1, "temperature": 2.0, "t_squared": True}),
    ("jsd", {"beta": 0.9, "teacher_temperature": 2.0}),
    ("jsd", {"beta": 0.0, "temperature": 2.0}),
    ("jsd", {"beta": 1.0, "teacher_logit_scale": 0.5}),
    ("tvd", {}),
    ("tvd", {"temperature": 3.0, "t_squared": True}),
    ("lk", {"temperature": 2.0, "t_squared": True}),
    ("lk", {"form": "hybrid", "eta": 1.0}),
]

TOPK: list[dict[str, Any]] = [
    *(
        {"divergence": divergence, "normalize": normalize, **more}
        for divergence, normalize, more in itertools.product(
            ("forward", "reverse", "jsd", "tvd"),
            ("tail", "vocab", "topk"),
            ({}, {"teacher_renormalize": True, "teacher_temperature": 2.0}),
        )
        # a renormalised teacher leaves no tail: the reverse divergence from it is infinite
        if not (divergence == "reverse" and normalize == "tail" and more)
    ),
    {"normalize": "topk", "teacher_renormalize": False},
    {"divergence": "jsd", "normalize": "topk", "teacher_renormalize": False, "beta": 0.8},
    {"teacher_temperature": 2.0},
    {"divergence": "reverse", "teacher_temperature": 0.5, "temperature": 2.0, "t_squared": True},
    {"divergence": "jsd", "beta": 0.1},
    {"divergence": "jsd", "beta": 0.0},
    {"divergence": "jsd", "beta": 1.0},
    {"divergence": "jsd", "beta": 0.25, "normalize": "vocab", "temperature": 3.0, "t_squared": True},
]


def only(losses: Losses) -> Summand:
    ((_, summand),) = losses.terms
    return summand


def with_gradient(values: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """Values, and their gradient under a different weight each."""
    weights = torch.linspace(0.5, 2.0, values.numel(), dtype=values.dtype).view(values.shape)
    return values.detach(), torch.autograd.grad((values * weights).sum(), x, retain_graph=True)[0]


def assert_same(mine: Tensor, true: Tensor, x: Tensor, rtol: float = 1e-8, atol: float = 1e-11) -> None:
    (a, da), (b, db) = with_gradient(mine, x), with_gradient(true, x)
    assert db.abs().max() > 1e-4  # or there is nothing to compare
    torch.testing.assert_close(a, b, rtol=rtol, atol=atol)
    torch.testing.assert_close(da, db, rtol=rtol, atol=atol)


# ---- dense teachers


def teacher_of(logits: Tensor, summand: Summand) -> Tensor:
    """What the framework makes of a teacher's logits: its temperature is the student's unless it has its own."""
    teacher = summand.teacher
    assert teacher is not None
    temperature = summand.temperature or 1.0 if teacher.temperature is None else teacher.temperature
    y = logits * teacher.logit_scale
    if teacher.softcap is not None:
        y = teacher.softcap * torch.tanh(y / teacher.softcap)
    return y / temperature


def dense(losses: Losses, x: Tensor, teacher_logits: Tensor) -> Tensor:
    summand = only(losses)
    shared = min(x.shape[1], teacher_logits.shape[1])
    beta = {} if summand.teacher is None or summand.teacher.beta is None else {"beta": summand.teacher.beta}
    teacher_x = teacher_of(teacher_logits, summand)
    target = torch.zeros(len(x)).long()
    stats = full_stats(x[:, :shared], target, teacher_logits=teacher_x[:, :shared], **beta)
    needed = {name: stats.values[name] for name in summand.needs}
    return summand.values(Stats(needed), Batch({}, target, None, x.shape[1]), {})


@pytest.mark.parametrize(("kind", "options"), DENSE, ids=str)
@pytest.mark.parametrize("teacher_vocab", [VOCAB, VOCAB - 4, VOCAB + 6])
def test_dense_against_oracle(kind: str, options: dict[str, Any], teacher_vocab: int) -> None:
    logits = torch.randn(TOKENS, VOCAB).double().mul_(2).requires_grad_()
    teacher_logits = torch.randn(TOKENS, teacher_vocab).double() * 2
    scale, cap = options.get("teacher_logit_scale", 1.0), options.get("teacher_softcap")
    student_temperature = options.get("temperature", 1.0)
    teacher_x = teacher_logits * scale
    if cap is not None:
        teacher_x = cap * torch.tanh(teacher_x / cap)
    teacher_x = teacher_x / options.get("teacher_temperature", student_temperature)
    x = logits / student_temperature
    mine = dense(getattr(distillation, kind)(**options), x, teacher_logits)
    true = getattr(oracle, kind)(x, None, {"teacher_x": teacher_x}, **options)
    assert mine.shape == (TOKENS,)
    assert_same(mine, true, logits)


def test_dense_t_squared_scales_value_and_gradient() -> None:
    logits = torch.randn(TOKENS, VOCAB).double().requires_grad_()
    teacher = torch.randn(TOKENS, VOCAB).double()
    for make in (distillation.forward_kl, distillation.reverse_kl, distillation.jsd, distillation.tvd):
        plain, plain_gradient = with_gradient(dense(make(temperature=3.0), logits / 3, teacher), logits)
        value, gradient = with_gradient(dense(make(temperature=3.0, t_squared=True), logits / 3, teacher), logits)
        assert plain_gradient.any()
        torch.testing.assert_close(value, 9 * plain)
        torch.testing.assert_close(gradient, 9 * plain_gradient)


@pytest.mark.parametrize(("kind", "options"), DENSE, ids=str)
def test_dense_teacher_is_student(kind: str, options: dict[str, Any]) -> None:
    options = {name: value for name, value in options.items() if name in ("beta", "form", "t_squared")}
    x = torch.randn(TOKENS, VOCAB).double().mul_(3).requires_grad_()
    summand = getattr(distillation, kind)(**options, temperature=2.0)
    values, gradient = with_gradient(dense(summand, x / 2, x.detach()), x)
    entropy = (
        full_stats(x / 2, torch.zeros(TOKENS).long()).entropy
        if options.get("form") == "cross_entropy"
        else torch.zeros(TOKENS)
    )
    torch.testing.assert_close(values, entropy.double(), atol=1e-14, rtol=1e-12)
    if kind not in ("tvd", "lk"):  # whose gradient has the sign of a difference that may round to either side of 0
        torch.testing.assert_close(gradient, torch.zeros_like(gradient), atol=1e-14, rtol=0.0)
    other, other_gradient = with_gradient(dense(summand, x / 2, x.detach().flip(-1)), x)
    assert (other > values + 1e-3).all() and other_gradient.abs().max() > 1e-3


@pytest.mark.parametrize(("kind", "options"), DENSE, ids=str)
@pytest.mark.parametrize("student_too", [False, True])
def test_dense_teacher_excludes(kind: str, options: dict[str, Any], student_too: bool) -> None:
    """Teacher logits of -inf: reverse is infinite where the student has probability there, all else is finite."""
    x = torch.randn(TOKENS, VOCAB).double()
    teacher = torch.randn(TOKENS, VOCAB).double()
    teacher[:, 3:6] = -torch.inf
    if student_too:
        x[:, 3:6] = -1e4
    reverse = kind == "reverse_kl" or options.get("beta") == 1.0
    capped = "teacher_softcap" in options  # which makes them finite
    x.requires_grad_()
    values, gradient = with_gradient(dense(getattr(distillation, kind)(**options), x, teacher), x)
    if reverse and not student_too and not capped:
        assert (values == torch.inf).all()
    else:
        assert values.isfinite().all() and gradient.isfinite().all()
        assert gradient.any() and (values > 0).all()


def test_dense_declarations() -> None:
    summand = only(distillation.jsd(0.3, temperature=2.0, teacher_softcap=30.0, teacher_logit_scale=0.5))
    assert summand.teacher == Teacher(None, 0.5, 30.0, 0.3)
    assert summand.needs == {"jsd"} and not summand.reads_target
    assert (summand.unit, summand.scope, summand.fields) == ("token", "token", ())
    assert set(summand.optional_fields) == {"teacher_logits", "teacher_hidden", "teacher_weight", "teacher_bias"}
    assert only(distillation.forward_kl(temperature=2.0, teacher_temperature=5.0)).teacher == Teacher(5.0)
    for beta, need in ((0, "forward_kl"), (1, "reverse_kl")):
        end = only(distillation.jsd(beta))
        assert end.needs == {need} and end.teacher is not None and end.teacher.beta is None and end.kind == "jsd"
    assert only(distillation.forward_kl("cross_entropy")).needs == {"forward_kl", "teacher_entropy"}


# ---- top-K teachers


class Known:
    """Teachers of K ids: distinct ones, then some that repeat and some that are padding."""

    def __init__(self, tokens: int = TOKENS, k: int = 6, vocab: int = VOCAB, spoilt: bool = False, sure: float = 2.0):
        self.x = torch.randn(tokens, vocab).double() * 2
        teacher = torch.log_softmax(torch.randn(tokens, vocab).double() * sure, -1)
        self.teacher_logprobs, self.teacher_ids = teacher.topk(k, -1)
        self.mask: Tensor | None = None
        if spoilt:
            ids, logprobs = self.teacher_ids, self.teacher_logprobs
            self.mask = torch.ones(tokens, k, dtype=torch.bool)
            self.mask[1, 2:] = False  # masked entries hold anything
            logprobs[1, 2:] = torch.tensor([torch.nan, torch.inf, 5.0] + [-1.0] * (k - 5)).double()
            logprobs[2, 3:], ids[2, 3:] = -1e9, 0  # padding of collators
            logprobs[3, 4:], ids[3, 4:] = -torch.inf, 0
            ids[4, 3] = ids[4, 0]  # the same outcome with another probability, and with the same
            ids[5, 3], logprobs[5, 3] = ids[5, 1], logprobs[5, 1]
            ids[6, 1:] = ids[6, 0]
            ids[7, 2:], self.mask[7, 2:] = ids[7, 0], False  # masked repetitions
            logprobs[8, 0], ids[8, 0], ids[8, 1] = -1e9, 0, 0  # padding before the true entry of id 0
            self.mask[9] = False  # nothing is known
            logprobs[10] = -torch.inf

    def fields(self) -> dict[str, Tensor]:
        fields = {"teacher_ids": self.teacher_ids, "teacher_logprobs": self.teacher_logprobs}
        return fields if self.mask is None else fields | {"teacher_mask": self.mask}

    def ours(self, x: Tensor, rows: slice = slice(None), **options: Any) -> Tensor:
        fields = {name: field[rows] for name, field in self.fields().items()}
        summand = only(topk.topk_kl(**options))
        assert set(fields) <= {*summand.fields, *summand.optional_fields}
        target = torch.zeros(len(x), dtype=torch.int64)[rows]
        stats = full_stats(x[rows], target, ids=fields["teacher_ids"])
        stats = Stats({name: stats.values[name] for name in summand.needs})
        return summand.values(stats, Batch(fields, target, None, x.shape[1]), {})

    def theirs(self, x: Tensor, **options: Any) -> Tensor:
        return oracle.topk_kl(x, None, self.fields(), **options)


@pytest.mark.parametrize("options", TOPK, ids=str)
@pytest.mark.parametrize("spoilt", [False, True])
def test_topk_against_oracle(options: dict[str, Any], spoilt: bool) -> None:
    data = Known(spoilt=spoilt)
    x = data.x.requires_grad_()
    mine = data.ours(x, **options)
    assert_same(mine, data.theirs(x, **options), x)
    if spoilt:
        assert (mine[9:11] == 0).all()
        assert not torch.autograd.grad(mine.sum(), x)[0][9:11].any()


@pytest.mark.parametrize("options", TOPK, ids=str)
def test_topk_slices_equal_the_whole(options: dict[str, Any]) -> None:
    data = Known(spoilt=True)
    x = data.x.requires_grad_()
    pieces = [data.ours(x, slice(a, b), **options) for a, b in ((0, 1), (1, 6), (6, 12))]
    whole, gradient = with_gradient(data.ours(x, **options), x)
    values, pieces_gradient = with_gradient(torch.cat(pieces), x)
    assert gradient.any()
    torch.testing.assert_close(values, whole, rtol=1e-13, atol=1e-15)
    torch.testing.assert_close(pieces_gradient, gradient, rtol=1e-13, atol=1e-15)


@crossed(dtype=[torch.float32, torch.float64], k=[1, 5, VOCAB], options=TOPK)
def test_topk_teacher_is_student(options: dict[str, Any], k: int, dtype: torch.dtype) -> None:
    if options.get("teacher_temperature") or options.get("normalize") == "vocab":
        options = {**options, "teacher_temperature": None, "normalize": "topk", "teacher_renormalize": None}
    if options.get("teacher_renormalize") is False:
        options = {**options, "teacher_renormalize": None}
    for sure in (1.0, 30.0):
        x = (torch.randn(TOKENS, VOCAB) * sure).to(dtype).requires_grad_()
        data = Known(k=k)
        logprobs, data.teacher_ids = torch.log_softmax(x.detach(), -1).topk(k, -1)
        stats = full_stats(x, torch.zeros(TOKENS).long(), ids=data.teacher_ids)
        data.teacher_logprobs = stats.topk_logprobs.detach()
        torch.testing.assert_close(data.teacher_logprobs, logprobs)
        values, gradient = with_gradient(data.ours(x, **options), x)
        eps = torch.finfo(dtype).eps
        torch.testing.assert_close(values, torch.zeros_like(values), atol=10 * eps, rtol=0.0)
        torch.testing.assert_close(gradient, torch.zeros_like(gradient), atol=100 * eps, rtol=0.0)


@pytest.mark.parametrize("options", TOPK, ids=str)
def test_topk_of_one(options: dict[str, Any]) -> None:
    """K = 1: normalised over K identically 0; otherwise it pulls at the one id."""
    data = Known(k=1)
    x = data.x.requires_grad_()
    values, gradient = with_gradient(data.ours(x, **options), x)
    renormalised = options.get("teacher_renormalize", options.get("normalize") == "topk")
    if options.get("normalize") == "topk" and renormalised:
        assert not values.any() and not gradient.any()
    elif options.get("normalize") == "topk":
        assert gradient.abs().max() < 1e-14
    else:
        assert_same(data.ours(x, **options), data.theirs(x, **options), x)


@pytest.mark.parametrize("divergence", ["forward", "reverse", "jsd", "tvd"])
@pytest.mark.parametrize("normalize", ["tail", "vocab", "topk"])
def test_topk_of_all_ids_is_dense(divergence: str, normalize: str) -> None:
    """K = V: nothing is left for a tail, and every normalisation is the dense divergence."""
    x = torch.randn(TOKENS, VOCAB).double().requires_grad_()
    teacher = torch.randn(TOKENS, VOCAB).double()
    data = Known(k=VOCAB)
    data.teacher_logprobs, data.teacher_ids = torch.log_softmax(teacher, -1).sort(-1)
    name = {"forward": "forward_kl", "reverse": "reverse_kl"}.get(divergence, divergence)
    mine = data.ours(x, divergence=divergence, normalize=normalize)
    assert_same(mine, getattr(oracle, name)(x, None, {"teacher_x": teacher}), x)


@crossed(dtype=[torch.float32, torch.float64], options=TOPK, student=[0.0, 40.0, 300.0], teacher=[0.0, 40.0, 300.0])
def test_topk_guards(dtype: torch.dtype, options: dict[str, Any], student: float, teacher: float) -> None:
    """Students and teachers whose K ids hold all probability, or next to none of it."""
    ids = torch.arange(4).expand(2, 4)
    x = torch.randn(2, VOCAB)
    x[0, :4] += student
    x[1, :4] -= student
    y = torch.randn(2, VOCAB)
    y[0, :4] -= teacher
    y[1, :4] += teacher
    x = x.to(dtype).requires_grad_()
    data = Known(2)
    data.teacher_ids, data.teacher_logprobs = ids, torch.log_softmax(y.to(dtype), -1)[:, :4]
    values, gradient = with_gradient(data.ours(x, **options), x)
    assert values.isfinite().all() and gradient.isfinite().all()
    if options.get("normalize") != "vocab" and options.get("teacher_renormalize") is not False:
        assert (values > -1e-5).all()


def test_topk_tail_without_rest() -> None:
    """A teacher whose K probabilities sum to 1: the student's tail is pushed to 0, alpha = 1 and b = -t."""
    data = Known(k=4)
    data.teacher_logprobs = torch.log_softmax(data.teacher_logprobs, -1)
    x = data.x.requires_grad_()
    (gradient,) = torch.autograd.grad(data.ours(x).sum(), x)
    expected = torch.softmax(x.detach(), -1).scatter_add(-1, data.teacher_ids, -data.teacher_logprobs.exp())
    torch.testing.assert_close(gradient, expected, rtol=1e-8, atol=1e-10)
    reverse = data.ours(x, divergence="reverse")
    assert reverse.isfinite().all() and (reverse > 1).all()  # its tail counts as one epsilon


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_topk_renormalised_leaves_no_rest(dtype: torch.dtype) -> None:
    """The teacher's rest is 0 then, its logarithm that of one epsilon, and not what a sum is rounded by."""
    data = Known(k=8)
    data.teacher_logprobs, x = data.teacher_logprobs.to(dtype), data.x.to(dtype)
    values = data.ours(x, divergence="reverse", teacher_renormalize=True).double()
    t, s = data.teacher_logprobs.double().log_softmax(-1), x.double().log_softmax(-1).gather(-1, data.teacher_ids)
    left = 1.0 - s.exp().sum(-1)
    expected = (s.exp() * (s - t)).sum(-1) + left * (left.log() - math.log(torch.finfo(dtype).eps))
    torch.testing.assert_close(values, expected, rtol=1e-5, atol=1e-6)


def test_topk_student_excludes() -> None:
    """Student logits of -inf among the ids: forward infinite, the others finite with finite gradients."""
    student = torch.log_softmax(torch.randn(3, 5).double(), -1) - 0.3
    student[:, 2] = -torch.inf
    student.requires_grad_()
    teacher = torch.log_softmax(torch.randn(3, 5).double(), -1) - 0.2
    lse = torch.zeros(3).double()
    for divergence, normalize in itertools.product(("forward", "reverse", "jsd", "tvd"), ("tail", "vocab", "topk")):
        values = gathered_topk_kl(
            student, teacher, lse=lse, divergence=divergence, normalize=normalize, reduction="none"
        )
        (gradient,) = torch.autograd.grad(values.sum(), student)
        assert (values == torch.inf).all() if divergence == "forward" else values.isfinite().all()
        assert divergence == "forward" or (gradient.isfinite().all() and gradient.any())


@pytest.mark.parametrize("options", TOPK, ids=str)
def test_topk_of_tokens_that_do_not_count(options: dict[str, Any]) -> None:
    """Statistics and fields are 0 there: what comes out is dropped, but must be finite, as must its gradient."""
    options = {name: value for name, value in options.items() if name not in ("temperature", "t_squared")}
    zeros = torch.zeros(3, 4)
    student = zeros.clone().requires_grad_()
    batch = Batch({"teacher_ids": zeros.long(), "teacher_logprobs": zeros}, torch.full((3,), -1), None, VOCAB)
    values, gradient = with_gradient(
        only(topk.topk_kl(**options)).values(Stats({"topk_logprobs": student}), batch, {}), student
    )
    assert values.isfinite().all() and gradient.isfinite().all()


def test_topk_nan_shows() -> None:
    """A teacher's nan that counts is an error of the caller's: the loss is nan rather than plausible."""
    data = Known()
    data.teacher_logprobs[1, 2] = torch.nan
    values = data.ours(data.x)
    assert values[1].isnan() and values[[0, 2, 3]].isfinite().all()


def test_topk_t_squared() -> None:
    data = Known()
    torch.testing.assert_close(data.ours(data.x, temperature=3.0, t_squared=True), 9 * data.ours(data.x))


def test_topk_renormalised_takes_logits() -> None:
    data = Known()
    before = data.ours(data.x, teacher_renormalize=True)
    data.teacher_logprobs = data.teacher_logprobs + 17.0
    torch.testing.assert_close(data.ours(data.x, teacher_renormalize=True), before)
    assert not torch.allclose(before, data.ours(data.x, normalize="vocab"))


def test_entries() -> None:
    logprobs = torch.tensor([[-3.0, -1.0, -2.0, -1.0, -1e9, -torch.inf, -1.0]])
    ids = torch.tensor([[4, 4, 5, 4, 0, 1, 7]])
    mask = torch.tensor([[True, True, True, True, True, True, False]])
    assert entries(logprobs, ids, mask).tolist() == [[False, True, True, False, False, False, False]]
    assert entries(logprobs, ids, None).tolist() == [[False, True, True, False, False, False, True]]
    assert entries(logprobs, None, mask).tolist() == [[True, True, True, True, False, False, False]]


@pytest.mark.parametrize("normalize", first_of(["tail", "vocab", "topk"]))
@pytest.mark.parametrize("divergence", first_of(["forward", "reverse", "jsd", "tvd"], 2))
def test_topk_compiles_and_differentiates(divergence: str, normalize: str) -> None:
    """Under torch.func.grad, and as one graph with dynamic shapes."""
    torch._dynamo.reset()  # each option is a compilation of the same code
    data = Known(spoilt=True)
    summand = only(topk.topk_kl(divergence, normalize))
    student = full_stats(data.x, torch.zeros(TOKENS).long(), ids=data.teacher_ids).topk_logprobs.detach()

    def total(logprobs: Tensor, target: Tensor, fields: dict[str, Tensor]) -> Tensor:
        return summand.values(Stats({"topk_logprobs": logprobs}), Batch(fields, target, None, VOCAB), {}).sum()

    compiled = torch.compile(torch.func.grad(total), fullgraph=True, dynamic=True, backend="eager")
    for rows in (TOKENS, 7):
        fields = {name: field[:rows] for name, field in data.fields().items()}
        arguments = student[:rows], torch.zeros(rows).long(), fields
        eager = torch.func.grad(total)(*arguments)
        assert eager.any()
        torch.testing.assert_close(compiled(*arguments), eager)


# ---- on gathered logits


@pytest.mark.parametrize("options", TOPK, ids=str)
def test_gathered_is_topk_kl(options: dict[str, Any]) -> None:
    data, options = Known(spoilt=True), dict(options)
    temperature = options.get("temperature", 1.0)
    logits = data.x.requires_grad_()
    x = logits / temperature
    mine = gathered_topk_kl(
        logits.gather(-1, data.teacher_ids), data.teacher_logprobs, lse=x.logsumexp(-1), teacher_ids=data.teacher_ids,
        teacher_mask=data.mask, reduction="none", **options,
    )  # fmt: skip
    assert_same(mine, data.ours(x, **options), logits)


def test_gathered_reductions_and_masks() -> None:
    data = Known()
    shape = (3, 4)
    x = data.x.requires_grad_()
    mask = torch.rand(shape) > 0.4
    mask[0, :2] = torch.tensor([True, False])
    weights = torch.where(mask, torch.rand(shape).double(), torch.nan)
    student = x.gather(-1, data.teacher_ids).unflatten(0, shape)
    student = torch.where(mask[..., None], student, torch.nan)
    lse = torch.where(mask, x.logsumexp(-1).unflatten(0, shape), torch.inf)
    teacher = torch.where(mask[..., None], data.teacher_logprobs.unflatten(0, shape), torch.nan)

    def loss(**more: Any) -> Tensor:
        return gathered_topk_kl(student, teacher, lse=lse, **{"mask": mask, "token_weights": weights} | more)

    each = torch.where(mask, weights, 0.0) * data.ours(x).unflatten(0, shape)
    assert_same(loss(reduction="none"), each, x)
    assert_same(loss(reduction="sum"), each.sum(), x)
    assert_same(loss(), each.sum() / mask.sum(), x)
    assert_same(loss(normalizer=7.0), each.sum() / 7, x)
    assert_same(loss(normalizer=torch.tensor(3)), each.sum() / 3, x)
    for none in (loss(normalizer=0), loss(mask=torch.zeros_like(mask))):
        value, gradient = with_gradient(none, x)
        assert value == 0 and not gradient.any()


def test_gathered_gradients_of_what_does_not_count() -> None:
    """0 to the last bit, of nan and infinite leaves too; none to the teacher."""
    data = Known()
    mask = torch.arange(TOKENS) % 3 > 0
    student = torch.where(mask[:, None], data.x[:, :6], torch.nan).requires_grad_()
    lse = torch.where(mask, data.x.logsumexp(-1), torch.inf).requires_grad_()
    teacher = torch.where(mask[:, None], data.teacher_logprobs, torch.nan).requires_grad_()
    for options in TOPK:
        value = gathered_topk_kl(student, teacher, lse=lse, mask=mask, **options)
        gradients = torch.autograd.grad(value, (student, lse, teacher), allow_unused=True)
        assert gradients[2] is None
        assert gradients[0][mask].any()
        for gradient in gradients[:2]:
            assert gradient is None or (gradient.isfinite().all() and not gradient[~mask].any())


def test_gathered_half_is_float32() -> None:
    data = Known()
    student = data.x.gather(-1, data.teacher_ids).bfloat16()
    mine = gathered_topk_kl(student, data.teacher_logprobs, normalize="topk")
    assert mine.dtype == torch.float32
    assert torch.equal(mine, gathered_topk_kl(student.float(), data.teacher_logprobs, normalize="topk"))
    assert mine > 0


# ---- errors


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: distillation.forward_kl("ce"), "form of losses.forward_kl must be one of"),
        (lambda: distillation.forward_kl(temperature=0), "for T = 0 train on the argmax"),
        (lambda: distillation.forward_kl(temperature=0, t_squared=True), "for T = 0 train on the teacher's argmax"),
        (lambda: distillation.forward_kl(teacher_temperature=0), "for T = 0 train on the teacher's argmax"),
        (lambda: distillation.tvd(teacher_temperature=-1.0), "teacher_temperature of losses.tvd must be a number"),
        (lambda: distillation.tvd(teacher_temperature=math.inf), "must be a positive number, got inf"),
        (lambda: distillation.reverse_kl(teacher_softcap=0.0), "teacher_softcap of losses.reverse_kl must be a pos"),
        (lambda: distillation.reverse_kl(t_squared=True), "t_squared of losses.reverse_kl needs the loss's own"),
        (lambda: distillation.jsd(1.5), "beta of losses.jsd must be a number in"),
        (lambda: topk.topk_kl("kl"), "divergence of losses.topk_kl must be one of"),
        (lambda: topk.topk_kl(normalize="k"), "normalize of losses.topk_kl must be one of"),
        (lambda: topk.topk_kl(beta=-0.1), "beta of losses.topk_kl must be a number in"),
        (lambda: topk.topk_kl(normalize="vocab", teacher_temperature=2.0), "pass teacher_renormalize=True"),
        (lambda: topk.topk_kl(teacher_temperature=0.0), "teacher_temperature of losses.topk_kl must be a pos"),
        (lambda: gathered_topk_kl(torch.ones(2, 3), torch.ones(2, 3)), "lse is needed with normalize='tail'"),
        (lambda: gathered_topk_kl(torch.ones(2, 3), torch.ones(2, 3), reduction="batchmean"), "reduction of losses"),
        (
            lambda: gathered_topk_kl(torch.ones(2, 3), torch.ones(2, 4), normalize="topk"),
            r"teacher_logprobs must have shape \(2, 3\), got \(2, 4\)",
        ),
        (
            lambda: gathered_topk_kl(
                torch.ones(2, 3), torch.ones(2, 3), normalize="topk", reduction="sum", normalizer=2.0
            ),
            "normalizer goes with",
        ),
        (lambda: gathered_topk_kl(torch.ones(2, 3).long(), torch.ones(2, 3), normalize="topk"), "floating-point"),
        (
            lambda: gathered_topk_kl(torch.ones(2, 3), torch.ones(2, 3), normalize="topk", temperature=0.0),
            "temperature of losses.gathered_topk_kl must be a positive number",
        ),
    ],
)
def test_errors(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


# ---- Liger


@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("temperature", [1.0, 2.0])
def test_liger_jsd(beta: float, temperature: float) -> None:
    """Both by one temperature, no T^2, mean over the tokens that count; vocabularies of one size, for Liger pads."""
    liger = pytest.importorskip("liger_kernel.chunked_loss")
    hidden = torch.randn(TOKENS, 6).double().requires_grad_()
    teacher_hidden, weight, teacher_weight = (torch.randn(n, 6).double() for n in (TOKENS, VOCAB, VOCAB))
    theirs = liger.LigerFusedLinearJSDLoss(
        weight_hard_loss=0.0, weight_soft_loss=1.0, beta=beta, temperature=temperature, compiled=False
    )(hidden, weight, teacher_hidden, teacher_weight, torch.zeros(TOKENS).long())
    losses = distillation.jsd(beta, temperature=temperature)
    mine = dense(losses, hidden @ weight.T / temperature, teacher_hidden @ teacher_weight.T).mean()
    assert_same(mine.float(), theirs, hidden, rtol=1e-5, atol=1e-6)  # Liger adds up in float32
