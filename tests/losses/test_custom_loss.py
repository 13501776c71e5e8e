"""A loss of the user's own: what it reads is found out, what it claims is checked, what is equal is one."""

import copy
import gc
import weakref
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import made_anew
import pytest
import torch
from chunked_head.kernels.common.cache import Cache
from full_stats import Batch, Stats
from torch import Tensor

from chunked_head import linear_logprobs, linear_loss, logits_loss, losses, metrics, plan
from chunked_head.core.checks import exact
from chunked_head.losses import FIELDS, Field, Losses, Summand, Teacher, custom
from chunked_head.losses.user import closures
from chunked_head.losses.user.checks import check_over_ranks
from chunked_head.losses.user.synthetic import MASKED, SEGMENT_IDS, SEGMENTS, TOKENS, VOCAB, Synthetic


def summand(losses: Losses) -> Summand:
    ((coefficient, only),) = losses.terms
    assert coefficient == 1.0
    return only


def nll(stats: Any, batch: Any) -> Tensor:
    return -stats.logprob


# ---- what it reads


@pytest.mark.parametrize(
    ("function", "needs", "fields", "optional", "reads_target"),
    [
        (lambda s, b: -s.logprob, set(), (), (), True),
        (lambda s, b: s.lse.square(), set(), (), (), False),
        (lambda s, b: s.entropy + s.mean_logit, {"entropy", "mean_logit"}, (), (), False),
        (lambda s, b: s.lse * (s.argmax == b.target), {"argmax"}, (), (), True),
        (lambda s, b: -s.logprob * b["advantages"], set(), ("advantages",), (), True),
        (lambda s, b: -s.logprob * b.fields["advantages"], set(), ("advantages",), (), True),
        (
            lambda s, b: s.lse if b.get("advantages") is None else s.lse * b["advantages"],
            set(), (), ("advantages",), True,  # perhaps where there is none
        ),
        (lambda s, b: s.lse * b["advantages"] if "advantages" in b else s.entropy, set(), (), ("advantages",), True),
        (lambda s, b: -s.topk_logprobs.sum(-1), {"topk_logprobs"}, ("teacher_ids",), (), False),
        (
            lambda s, b: s.forward_kl, {"forward_kl"}, (),
            ("teacher_bias", "teacher_hidden", "teacher_logits", "teacher_weight"), False,
        ),
    ],
)  # fmt: skip
def test_what_it_reads(function: Callable, needs: set[str], fields: tuple, optional: tuple, reads_target: bool) -> None:
    found = summand(custom(function, scope="token"))
    assert found.needs == needs
    assert found.fields == fields
    assert found.optional_fields == optional
    assert found.reads_target is reads_target
    assert (found.scope, found.unit, found.label) == ("token", "token", "custom")


def test_segments_and_pairs_are_fields() -> None:
    found = summand(custom(lambda s, b: b.segment_mean(s.entropy), scope="segment", unit="segment"))
    assert (found.fields, found.unit, found.scope, found.reads_target) == (("segments",), "segment", "segment", False)

    def margin(stats: Any, batch: Any) -> Tensor:
        sums = batch.segment_sum(stats.logprob)
        return torch.relu(1 - sums[batch["pairs"][:, 0]] + sums[batch["pairs"][:, 1]])

    found = summand(custom(margin, scope="segment", unit="pair"))
    assert (found.fields, found.unit, found.label) == (("pairs", "segments"), "pair", "margin")
    documents = summand(
        custom(lambda s, b: s.lse * b.per_token(b.segment_count("documents"), "documents"), scope="segment")
    )
    assert documents.fields == ("documents",)


def test_needs_and_fields_add_to_what_is_found() -> None:
    found = summand(custom(nll, scope="token", needs=["entropy"], fields={"mine": "token", "advantages": "token"}))
    assert found.needs == {"entropy"}
    assert found.optional_fields == ("advantages", "mine") and found.fields == ()
    assert found.extra_fields == {"mine": Field("token")}
    assert summand(custom(nll, scope="token", reads_target=True)).reads_target
    assert summand(custom(lambda s, b: s.lse, scope="token", reads_target=True)).reads_target
    assert not summand(custom(lambda s, b: s.lse * b.get("mask", 1), scope="token", reads_target=False)).reads_target


def test_what_another_branch_reads_is_declared() -> None:
    def either(stats: Any, batch: Any) -> Tensor:
        return stats.lse * batch["advantages"] if "advantages" in batch else stats.entropy * batch["ref_logprobs"]

    known = {"fields": ["ref_logprobs"], "needs": ["entropy"]}
    found = linear_loss(**HEAD, loss=custom(either, scope="token", **known), batch={"ref_logprobs": torch.ones(6)})
    torch.testing.assert_close(found.loss, linear_loss(**HEAD, loss=-losses.entropy()).loss.abs())
    with pytest.raises(AttributeError, match=r"'entropy' was not asked for.*losses.custom\(needs=\['entropy'\]\)"):
        linear_loss(**HEAD, loss=custom(either, scope="token"), batch={"ref_logprobs": torch.ones(6)})
    with pytest.raises(KeyError, match="'ref_logprobs' is not in the batch of this call; it has old_logprobs"):
        loss = custom(either, scope="token", needs=["entropy"])
        linear_loss(**HEAD, loss=loss, batch={"old_logprobs": -torch.ones(6)})


@pytest.mark.parametrize(
    ("kind", "use"),
    [
        ("token", lambda field: field),
        (Field("token", "int"), lambda field: torch.tensor([1.0, 2.0])[field]),
        (Field("token", "bool", 1), lambda field: field.any(-1).float()),
        (Field("row", "float", 2), lambda field: field.sum((-1, -2))),
        ("segment", lambda field: field.sum()),
        (Field("pair", "float", 1), lambda field: field.sum()),
        ("constant", lambda field: field),
        (Field("constant", "float", 1), lambda field: field.sum()),
    ],
)
def test_fields_of_ones_own(kind: Any, use: Callable[[Tensor], Tensor]) -> None:
    found = summand(custom(lambda s, b: -s.logprob * use(b["mine"]), scope="token", fields={"mine": kind}))
    assert found.fields == ("mine",)
    assert found.extra_fields == {"mine": kind if isinstance(kind, Field) else Field(kind)}


def test_options_tensors_and_summand_options() -> None:
    def weighted(stats: Any, batch: Any, power: float, class_weights: Tensor) -> Tensor:
        return -(class_weights[batch.target] ** power) * stats.logprob

    weights = torch.rand(37)
    found = summand(
        custom(
            weighted, scope="token", options={"power": 2.0}, tensors={"class_weights": weights}, name="mine",
            temperature=0.5, token_weights="advantages", reduction="sum",
        )
    )  # fmt: skip
    assert found.options == {"power": 2.0} and found.tensors["class_weights"] is weights
    assert (found.name, found.temperature, found.token_weights) == ("mine", 0.5, "advantages")
    assert found.reduction == "sum"
    smoothed = custom(lambda s, b, class_weights: s.weighted_sum, scope="token", tensors={"class_weights": weights})
    assert summand(smoothed).needs == {"weighted_sum"}
    found = summand(custom(lambda s, b: s.jsd, scope="token", teacher=Teacher(beta=0.3)))
    assert found.teacher == Teacher(beta=0.3)
    assert summand(custom(lambda s, b: s.tvd, scope="token")).teacher == Teacher()


def test_decorator() -> None:
    @custom(scope="token", name="other")
    def loss(stats: Any, batch: Any) -> Tensor:
        return -stats.logprob

    @custom(scope="segment")
    def centred(stats: Any, batch: Any) -> Tensor:
        return -stats.logprob * (batch["advantages"] - batch["advantages"].mean())

    assert isinstance(loss, Losses) and summand(loss).label == "other"
    assert summand(centred).label == "centred" and summand(centred).scope == "segment"
    assert [term.label for _, term in (loss + 0.1 * centred).terms] == ["other", "centred"]


@pytest.mark.parametrize("default", ["meta", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_default_device(default: str) -> None:
    """The made-up tokens are of the check's own device, and so is what the function makes on them."""
    with torch.device(default):
        custom(lambda s, b: -s.logprob * torch.ones(len(s.logprob)), scope="token")
        of_ranks = custom(lambda s, b: s.lse.mean() * torch.ones(SEGMENTS), scope="segment", unit="segment")
        with pytest.raises(ValueError, match="lie on two ranks"):
            check_over_ranks(summand(of_ranks), "loss", frozenset({"segments"}), FIELDS)
        with pytest.raises(ValueError, match="depends on other tokens"):
            custom(lambda s, b: s.lse - s.lse.mean(), scope="token")


def test_the_values_are_the_functions() -> None:
    made = Synthetic({}, {})
    assert torch.equal(values_of(custom(lambda s, b: s.lse * 2, scope="token"), made), 2 * made.stats["lse"])


def values_of(losses: Losses, made: Synthetic) -> Tensor:
    return summand(losses).values(Stats(made.stats), Batch(made.fields, made.target, SEGMENTS, VOCAB), {})


# ---- what it claims

SCOPE = 'scope="token", but its .* at once and in pieces differ'


@pytest.mark.parametrize(
    "function",
    [
        lambda s, b: -s.logprob * (b["advantages"] - b["advantages"].mean()),
        lambda s, b: -s.logprob / len(s.logprob),
        lambda s, b: -s.logprob / b.mask.sum(),
        lambda s, b: -s.logprob * torch.arange(len(s.logprob)),
        lambda s, b: -s.logprob.cumsum(0),
        lambda s, b: -s.logprob * (s.logprob - s.logprob.max()).exp().detach(),
        lambda s, b: -b.per_token(b.segment_mean(s.logprob)),
        lambda s, b: -s.logprob.roll(1),
        lambda s, b: 1e-6 * (s.lse - s.lse.mean()),  # small, yet nothing else
    ],
)
def test_other_tokens_in_token_scope_are_caught(function: Callable) -> None:
    with pytest.raises(ValueError, match=SCOPE) as caught:
        custom(function, scope="token", name="mine")
    assert "losses.custom('mine')" in str(caught.value) and 'scope="segment"' in str(caught.value)
    assert summand(custom(function, scope="segment")).scope == "segment"


def test_gradients_are_compared_too() -> None:
    def leaking(stats: Any, batch: Any) -> Tensor:
        mean = stats.lse.mean()
        return -stats.logprob + mean - mean.detach()  # of the value 0

    with pytest.raises(ValueError, match=r"gradients to stats\.lse on 24 made-up tokens"):
        custom(leaking, scope="token")
    assert summand(custom(leaking, scope="segment")).scope == "segment"


@pytest.mark.parametrize(
    "function",
    [
        lambda s, b: -s.logprob * b["advantages"].clamp(min=0),
        lambda s, b: torch.where(b["advantages"] > 0, (s.logprob - b["old_logprobs"]).exp(), -s.entropy),
        lambda s, b: (s.topk_logprobs - b["teacher_logprobs"]).square().mean(-1),
        lambda s, b: -s.logprob * b["kl_baseline"],
        lambda s, b: -s.logprob * b["segment_labels"].float().mean(),  # a segment field is whole in every piece
        lambda s, b: -s.logprob / b["token_weights"],  # 0 / 0 where nothing counts
        lambda s, b: torch.where(b.mask, -s.logprob, b.mask.sum()),  # that of others, where nothing counts
        lambda s, b: (s.lse * 1e4).square() * 1e-8,
    ],
)
def test_token_scope_is_accepted(function: Callable) -> None:
    assert summand(custom(function, scope="token")).scope == "token"


@pytest.mark.parametrize(
    ("function", "known", "words"),
    [
        (lambda s, b: -s.logprob.sum(), {}, r"\[tokens\] = \(24,\) here; got \(\).*leave out .sum\(\)"),
        (lambda s, b: -s.logprob[:, None], {}, r"got \(24, 1\)"),
        (lambda s, b: -s.topk_logprobs, {}, r"got \(24, 4\)"),
        (lambda s, b: -s.logprob.squeeze(), {}, r"\(1,\) here; got \(\)"),  # a piece of one token
        (lambda s, b: 1.0, {}, "must return a tensor .* got float"),
        (lambda s, b: s.argmax, {}, "floating-point values, got torch.int64"),
        (lambda s, b: b.segment_mean(s.lse), {}, r'got \(5,\); values per segment are unit="segment"'),
        (lambda s, b: s.lse, {"unit": "segment", "scope": "segment"}, r"\[num_segments\] = \(5,\) here; got \(24,\)"),
        (lambda s, b: s.lse, {"unit": "pair", "scope": "segment"}, r"\[pairs\] = \(3,\) here; got \(24,\)"),
        (lambda s, b: s.lse, {"unit": "segment"}, 'values per segment, which need all tokens: scope="segment"'),
        (lambda s, b: -s.logprob.detach(), {}, "values without a gradient"),
        (lambda s, b: b["advantages"], {}, "values without a gradient"),
        (lambda s, b: s.lse * torch.rand(()), {}, "or the function draws random numbers"),
        (lambda s, b: s.lse * b["advantages"].sub_(1.0), {}, "or writes into what it reads"),
        (lambda s, b: s.lse * b["mine"], {}, "no field 'mine'; declare .* fields={'mine': 'token'}"),
        (lambda s, b: s.lse * b.get("mine", 1.0), {}, "no field 'mine'; declare .* fields={'mine': 'token'}"),
        (lambda s, b: s.lse + sum(b.values()), {}, "names the fields that it reads"),
        (lambda s, b: s.logprobs, {}, "AttributeError .* statistic 'logprobs' was not asked for.*check=False"),
        (lambda s, b: s.lse / 0 + [], {}, "raised TypeError on 24 made-up tokens.*check=False with needs= and fields="),
        (lambda s, b: s.lse + s.logprob, {"reads_target": False}, "reads the target"),
        (lambda s, b: s.weighted_sum, {}, 'tensors={"class_weights"'),
        (lambda s, b: s.jsd, {}, "pass teacher=Teacher"),
        (nll, {"needs": ["logits"]}, "no statistic 'logits'"),
        (nll, {"fields": {"mine": "tokens"}}, "field 'mine' .* must be declared as one of 'token'.* got 'tokens'"),
        (nll, {"fields": ("mine",)}, "field 'mine' .* must be declared"),
        (nll, {"fields": {"advantages": "segment"}}, "field 'advantages' .* cannot be another"),
        (nll, {"scope": "batch"}, "scope of losses.custom.* got 'batch'"),
        (nll, {"unit": "row"}, "unit of losses.custom"),
        (nll, {"temperature": 0}, "temperature of losses.custom"),
    ],
)  # fmt: skip
def test_refusals(function: Callable, known: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        custom(function, **{"scope": "token", **known})


def test_wrong_types() -> None:
    with pytest.raises(TypeError, match="takes a function"):
        custom(3.0, scope="token")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="several names"):
        custom(nll, scope="token", fields="advantages")
    with pytest.raises(TypeError, match="scope"):
        custom(nll)  # type: ignore[call-arg]


def test_the_cause_stays_visible() -> None:
    with pytest.raises(ValueError, match="ZeroDivisionError") as caught:
        custom(lambda s, b: s.lse * (1 / 0), scope="token")
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


def test_without_the_check() -> None:
    calls = []

    def picky(stats: Any, batch: Any) -> Tensor:
        calls.append(len(stats.lse))
        assert len(stats.lse) > 100
        return stats.lse * batch["advantages"]

    with pytest.raises(ValueError, match="AssertionError"):
        custom(picky, scope="token")
    calls.clear()
    found = summand(custom(picky, scope="token", check=False, needs={"entropy"}, fields=("advantages",)))
    assert calls == []
    assert (found.needs, found.fields, found.reads_target) == ({"entropy"}, ("advantages",), True)
    found = summand(custom(picky, scope="token", check=False, reads_target=False, fields={"mine": "row"}))
    assert found.reads_target is False and found.extra_fields == {"mine": Field("row")}


def test_nothing_outside_is_changed() -> None:
    torch.manual_seed(3)
    state = torch.get_rng_state()
    with pytest.raises(ValueError, match="random numbers"):
        custom(lambda s, b: s.lse * torch.rand(()), scope="token")
    custom(lambda s, b: s.lse * 3, scope="token")
    assert torch.equal(state, torch.get_rng_state())
    with torch.no_grad():
        assert summand(custom(lambda s, b: s.lse * 5, scope="token")).scope == "token"
    with torch.inference_mode():
        assert summand(custom(lambda s, b: s.lse * 7, scope="token")).scope == "token"


def test_the_synthetic_batch() -> None:
    synthetic = Synthetic({}, {})
    assert len(SEGMENT_IDS) == TOKENS
    segments = synthetic.fields["segments"]
    counts = [int((segments == s).sum()) for s in range(SEGMENTS)]
    assert len(set(counts)) > 2 and 0 in counts and 1 in counts and (segments == -1).any()
    masked = ~synthetic.mask
    assert masked.sum() == len(MASKED) and (synthetic.target[masked] == -1).all()
    assert (segments[masked] == -1).all() and (synthetic.fields["advantages"][masked] == 0).all()
    assert all((value[masked] == 0).all() for value in synthetic.stats.values())
    assert all((synthetic.stats[name] != 0).any() for name in synthetic.stats)


# ---- what changes from call to call, and what is known again


@pytest.mark.parametrize("kind", ["loss", "metric"])
def test_values_that_are_equal_are_told_apart_by_type(kind: str) -> None:
    """Of each the value and the gradient are its own, whichever of them came first."""

    def factor(v: Any) -> float:
        return {bool: 2.0, int: 3.0}.get(type(v), 5.0 if str(v) == "1.0" else 7.0 if str(v) == "0.0" else 11.0)

    def scaled(stats: Any, batch: Any, v: Any) -> Tensor:
        return stats.lse * factor(v)

    lse = linear_loss(**HEAD, loss=losses.z_loss(), metrics=[metrics.lse()]).metrics["lse"].value
    for v in (True, 1, 1.0, 0.0, -0.0):
        hidden = HEAD["hidden"].clone().requires_grad_()
        if kind == "metric":
            metric = metrics.Metric("scaled", scaled, options={"v": v})
            found = linear_loss(**HEAD, loss=losses.z_loss(), metrics=[metric]).metrics["scaled"].value
        else:
            call = HEAD | {"hidden": hidden}
            loss = custom(scaled, scope="token", options={"v": v})
            found = linear_loss(**call, loss=loss).loss
            (grad,) = torch.autograd.grad(found, hidden)
            (one,) = torch.autograd.grad(linear_loss(**call, loss=lambda s, b: s.lse).loss, hidden)
            torch.testing.assert_close(grad, one * factor(v))
        torch.testing.assert_close(found, lse * factor(v))


def test_keys_of_the_librarys_own_tell_types_apart() -> None:
    (_, own), (_, users) = (losses.z_loss() + nll).terms

    def key(part: Summand, v: Any) -> Any:
        part = replace(part, options={"v": v})
        return part.key, exact(part.settings)

    values = (True, 1, 1.0, 0, 0.0, -0.0, (1,), (1.0,))
    assert len({key(own, v) for v in values}) == len(values)
    assert len({key(users, v) for v in values}) == 1  # they run as they are


@pytest.mark.parametrize("read", ["get", "in", "item", "attribute"])
@pytest.mark.parametrize("kind", ["function", "custom", "metric"])
def test_a_field_is_given_whatever_was_read_before(kind: str, read: str) -> None:
    """Behind a flag that is set after some steps."""
    reads = {
        "get": lambda batch: batch.get("advantages"), "item": lambda batch: batch["advantages"],
        "attribute": lambda batch: batch.advantages,
        "in": lambda batch: batch["advantages"] if "advantages" in batch else None,  # noqa: SIM401
    }[read]  # fmt: skip
    flags = {"on": False}

    def loss(stats: Any, batch: Any) -> Tensor:
        return stats.lse * reads(batch) if flags["on"] else stats.lse

    given = custom(loss, scope="token") if kind == "custom" else loss
    batch = {"advantages": torch.arange(6.0)}
    found = []
    for on in (False, True, True, False):
        flags["on"] = on
        if kind == "metric":
            measured = [metrics.Metric("mine", loss)]
            found.append(linear_loss(**HEAD, loss=losses.z_loss(), batch=batch, metrics=measured).metrics["mine"].value)
        else:
            found.append(linear_loss(**HEAD, loss=given, batch=batch).loss)
    lse = linear_logprobs(**HEAD, lse=True).lse
    off, on = lse.mean(), (lse * batch["advantages"]).mean()
    torch.testing.assert_close(torch.stack(found), torch.stack([off, on, on, off]))


@pytest.mark.parametrize("name", ["segments", "teacher_logits"])
def test_what_cannot_be_given_says_what_to_declare(name: str) -> None:
    """Rather than None, as if it were not in the batch."""
    on = False

    def loss(stats: Any, batch: Any) -> Tensor:
        return stats.lse * (1.0 if on and batch.get(name) is None else 2.0)

    batch = {"segments": torch.zeros(6, dtype=torch.int64), "teacher_logits": torch.randn(6, 11)}
    linear_loss(**HEAD, loss=loss, batch=batch)
    on = True
    with pytest.raises(ValueError, match=rf"field '{name}' of this call was not asked for; declare it, losses.custom"):
        linear_loss(**HEAD, loss=loss, batch=batch)


def test_a_target_that_is_not_there_is_not_read() -> None:
    on = False

    def loss(stats: Any, batch: Any) -> Tensor:
        return -stats.logprob if on else stats.lse

    linear_loss(**HEAD | {"target": None}, loss=loss)
    on = True
    with pytest.raises(AttributeError, match="'logprob' was not asked for"):
        linear_loss(**HEAD | {"target": None}, loss=loss)
    torch.testing.assert_close(
        linear_loss(**HEAD, loss=loss).loss, linear_loss(**HEAD, loss=losses.cross_entropy()).loss
    )


def test_names_of_fields() -> None:
    """As attributes and by item; one that is neither the batch's nor declared says which there are."""
    batch = {"advantages": torch.arange(6.0), "mine": torch.ones(6)}
    by_item = custom(lambda s, b: s.lse * b["advantages"] * b["mine"], scope="token", fields={"mine": "token"})
    by_name = custom(lambda s, b: s.lse * b.advantages * b.mine, scope="token", fields={"mine": "token"})
    assert (summand(by_name).fields, summand(by_name).needs) == (("advantages", "mine"), frozenset())
    assert torch.equal(
        linear_loss(**HEAD, loss=by_name, batch=batch).loss, linear_loss(**HEAD, loss=by_item, batch=batch).loss
    )
    with pytest.raises(ValueError, match="there is no field 'advantage'; declare one of your own"):
        custom(lambda s, b: s.lse * b.advantage, scope="token")
    with pytest.raises(ValueError, match=r"needs batch\['advantages'\], which is missing"):
        linear_loss(**HEAD, loss=lambda s, b: s.lse * b.advantages)
    fields = Batch({"advantages": torch.ones(2)}, torch.zeros(2, dtype=torch.int64), None, 7)
    with pytest.raises(AttributeError, match="'rewards' is not in the batch of this call; it has advantages"):
        fields.rewards  # noqa: B018
    assert copy.copy(fields).advantages is fields["advantages"]


def of(beta: Any) -> Callable:
    return lambda s, b: (COUNTER.append(1), -s.logprob * b["advantages"] + 0 * s.lse * (beta is COUNTER))[1]


def runs_of(function: Callable, **options: Any) -> int:
    COUNTER.clear()
    custom(function, scope="token", **options)
    return len(COUNTER)


class Named(NamedTuple):
    beta: Any
    other: Any


@dataclass(slots=True)
class Slots:
    beta: Any


class Settings:
    def __init__(self, beta: Any):
        self.beta = beta


def test_functions_alike_are_checked_once() -> None:
    """Of the same code over values of which nothing else is to be expected; and a function by itself, whatever it
    closes over."""
    alike: list[tuple[Any, Any]] = [
        (0.25, 0.75), (float("nan"), float("nan")), ((1, "a"), (1, "a")), (torch.ones(3), torch.zeros(5)),
        (Settings(0.5), Settings(0.6)), ([Settings("x")], [Settings("x")]), ({"a": 1}, {"a": 1}),
        (partial(of, beta=2), partial(of, beta=2)), (of(21), of(21)),
        (Named(2.0, torch.ones(())), Named(3.0, torch.zeros(()))), (Slots(2.0), Slots(3.0)),
        (Slots(torch.ones(())), Slots(torch.ones(()))),
    ]  # fmt: skip
    for one, other in alike:
        assert runs_of(of(one)) > 2 and runs_of(of(other)) == 0, one
    # each told from all others
    for other in (2, True, 1, 0.0, -1.5, "1", None, (3,), (2.0,), torch.ones(2, 2), torch.ones(3).double(),
                  Named(2.0, 1), Slots(-2.0), [Settings("y")], Settings([1]), {"a": 2}, of(22), {1, 2},
                  object):  # fmt: skip
        assert runs_of(of(other)) > 2, other
    kept = of({1, 2})
    assert runs_of(kept) > 2 and runs_of(kept) == 0
    assert runs_of(kept, reads_target=True) == 0 and runs_of(kept, options={}) == 0
    assert custom(kept, scope="segment") and len(COUNTER) == 1  # another question


def test_the_function_is_what_it_is_at_the_call() -> None:
    def two() -> tuple[Losses, Losses]:
        beta = 11.0
        first = custom(lambda s, b: beta * s.lse, scope="token")
        beta = 12.0
        return first, custom(lambda s, b: beta * s.lse, scope="token")

    made = Synthetic({}, {})
    for loss in two():
        torch.testing.assert_close(values_of(loss, made), 12.0 * made.stats["lse"])
    by = torch.tensor(2.0)
    loss = custom(lambda s, b: s.lse * by, scope="token")
    before = linear_loss(**HEAD, loss=loss).loss
    by = torch.tensor(3.0)
    torch.testing.assert_close(linear_loss(**HEAD, loss=loss).loss, before * 1.5)


LATE: dict[str, Callable[[Tensor, Any], Tensor]] = {
    "at once": lambda hidden, loss: linear_loss(**HEAD | {"hidden": hidden}, loss=loss).loss,
    "recomputed": lambda hidden, loss: linear_loss(**HEAD | {"hidden": hidden}, loss=loss, memory_budget=1800).loss,
    "chunks": lambda hidden, loss: linear_loss(**HEAD | {"hidden": hidden}, loss=loss, chunk_tokens=4).loss,
    "upstream": lambda hidden, loss: linear_loss(**HEAD | {"hidden": hidden}, loss=loss, upstream=0.5).loss,
    "unreduced": lambda hidden, loss: linear_loss(**HEAD | {"hidden": hidden}, loss=loss, reduction="none").loss.mean(),
    "logits": lambda hidden, loss: logits_loss(hidden @ HEAD["weight"].t(), HEAD["target"], loss).loss,
}


@pytest.mark.parametrize("scope", ["token", "segment"])
@pytest.mark.parametrize("name", LATE)
def test_a_backward_is_that_of_the_call(name: str, scope: Any) -> None:
    """Whatever the function has become by then, and however often it is done."""
    if (name, scope) == ("unreduced", "segment"):
        return
    by, runs = 2.0, list[int]()

    def function(stats: Any, batch: Any) -> Tensor:
        runs.append(len(stats.lse))
        return by * stats.logprob.square() + stats.entropy

    loss = 0.5 * custom(function, scope=scope) + losses.z_loss()
    hidden = HEAD["hidden"].clone().requires_grad_()
    expected = torch.autograd.grad(LATE[name](hidden, loss) * 0.37, hidden)
    runs.clear()
    found = LATE[name](hidden, loss)
    assert sum(runs) == 6
    by = 7.0
    for _ in range(2):
        torch.testing.assert_close(torch.autograd.grad(found * 0.37, hidden, retain_graph=True), expected)
    assert sum(runs) == 6
    with torch.no_grad():
        assert LATE[name](hidden, loss) > found


def test_any_callable_is_taken() -> None:
    def recursive(stats: Any, batch: Any, depth: int = 2) -> Tensor:
        return stats.lse if depth == 0 else recursive(stats, batch, depth - 1)

    owner = Owner()
    for function in (recursive, owner.method, partial(lambda s, b, c: c * s.lse, c=2.0)):
        assert summand(custom(function, scope="token")).function == function


@pytest.mark.gpu
@pytest.mark.parametrize("where", ["closure", "object", "global", "option"])
def test_the_check_runs_where_the_functions_tensors_are(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    by = torch.tensor([2.0, 3.0], device="cuda")
    monkeypatch.setitem(globals(), "BY", by)
    settings = Settings(by)
    functions: dict[str, Callable] = {
        "closure": lambda s, b: s.lse * by[0], "object": lambda s, b: s.lse * settings.beta[0],
        "global": lambda s, b: s.lse * BY[0], "option": lambda s, b, by: s.lse * by[0],
    }  # fmt: skip
    state = torch.cuda.get_rng_state()
    loss = custom(functions[where], scope="token", options={"by": by} if where == "option" else None)
    assert torch.equal(torch.cuda.get_rng_state(), state)
    call = {name: tensor.cuda() for name, tensor in HEAD.items()}
    torch.testing.assert_close(linear_loss(**call, loss=loss).loss, 2 * linear_logprobs(**call, lse=True).lse.mean())
    with pytest.raises(ValueError, match=SCOPE):
        custom(lambda s, b: s.lse * (by[0] * s.lse).mean(), scope="token")


BY = torch.ones(2)


def test_where_a_functions_tensors_are() -> None:
    """Found in closures, defaults, objects and globals; the meta device stands for a GPU."""
    far = torch.empty(2, device="meta")
    holder = Settings([{"a": (far,)}])
    for function in (
        Named(1, far), Slots(far), lambda s, b: far, lambda s, b: holder.beta, partial(lambda s, b, by: by, by=far),
        Settings(far), lambda s, b, by=far: by, of(lambda: far),
    ):  # fmt: skip
        assert torch.device("meta") in closures.Contents(function).devices
    assert closures.Contents(lambda s, b: BY).devices == [torch.device("cpu")]


def test_a_second_making_runs_nothing() -> None:
    calls = []

    def counted(stats: Any, batch: Any) -> Tensor:
        COUNTER.append(1)
        return stats.lse * batch["advantages"]

    COUNTER.clear()
    first = summand(custom(counted, scope="token"))
    calls.append(len(COUNTER))
    second = summand(custom(counted, scope="token"))
    assert calls[0] > 2 and len(COUNTER) == calls[0]
    assert (second.fields, second.needs) == (first.fields, first.needs)
    # another scope is another question
    custom(counted, scope="segment")
    assert len(COUNTER) > calls[0]


COUNTER: list[int] = []


def test_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(closures, "ALIKE", Cache(4))
    for beta in range(101, 110):
        assert runs_of(of(beta)) > 2
    assert len(closures.ALIKE) <= 4 and runs_of(of(109)) == 0 and runs_of(of(101)) > 2


# ---- a plain function in the place of a loss

HEAD = {"hidden": torch.randn(6, 8), "weight": torch.randn(11, 8), "target": torch.arange(6)}
LOGITS = HEAD["hidden"] @ HEAD["weight"].t()


def squared(stats: Any, batch: Any) -> Tensor:
    return stats.logprob.square()


class Owner:
    def __init__(self) -> None:
        self.by = torch.tensor(2.0)

    def method(self, stats: Any, batch: Any) -> Tensor:
        COUNTER.append(1)
        return self.by * stats.logprob.square()


def test_a_plain_function_is_a_loss_of_tokens() -> None:
    right = linear_loss(**HEAD, loss=custom(squared, scope="token") + 0.1 * losses.z_loss())
    added = squared + 0.1 * losses.z_loss()
    for loss in (added, 0.1 * losses.z_loss() + squared, 1.0 * added):
        found = linear_loss(**HEAD, loss=loss)
        torch.testing.assert_close(found.loss, right.loss)
        assert set(found.parts) == {"squared", "z_loss"}
    assert torch.equal(linear_loss(**HEAD, loss=squared).loss, right.parts["squared"])
    on_logits = logits_loss(LOGITS, HEAD["target"], squared, metrics=[metrics.entropy()])
    torch.testing.assert_close(on_logits.loss, right.parts["squared"])
    assert plan(6, 8, 11, torch.float32, loss=squared, device="cpu").chunks == 1
    difference = linear_loss(**HEAD, loss=squared - losses.z_loss()).loss
    torch.testing.assert_close(linear_loss(**HEAD, loss=losses.z_loss() - squared).loss, -difference)
    with pytest.raises(ValueError, match=SCOPE):
        linear_loss(**HEAD, loss=lambda s, b: -s.logprob / len(s.logprob))


def test_a_plain_function_is_checked_once() -> None:
    owner, by = Owner(), torch.tensor(3.0)

    def over_a_tensor(stats: Any, batch: Any) -> Tensor:
        COUNTER.append(1)
        return by * stats.logprob

    def plain(stats: Any, batch: Any) -> Tensor:
        COUNTER.append(1)
        return 3.0 * stats.logprob

    makers: list[Callable[[], Callable]] = [
        lambda: plain, lambda: over_a_tensor, lambda: owner.method,
        lambda: lambda s, b: (COUNTER.append(1), -s.logprob)[1],  # another object each time, of the same code
    ]  # fmt: skip
    closures.ALIKE.clear()
    for made in makers:
        COUNTER.clear()
        linear_loss(**HEAD, loss=made())
        first = len(COUNTER)
        COUNTER.clear()
        linear_loss(**HEAD, loss=made())
        assert len(COUNTER) < first and len(COUNTER) <= 1


def test_a_plain_function_is_let_go_of() -> None:
    """With what it closes over, made anew at every call."""

    def weak_ref() -> Any:
        by = torch.tensor(3.0)
        linear_loss(**HEAD, loss=lambda stats, batch: by * stats.logprob)
        return weakref.ref(by)

    found = [weak_ref() for _ in range(3)]
    gc.collect()
    assert [reference() for reference in found] == [None, None, None]


@pytest.mark.compiled
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_what_is_made_anew_is_let_go_of_and_not_checked_again(device: str) -> None:
    found = made_anew.grown(device, 300)
    assert found.process <= 8 and found.device <= 1, found
    assert not found.checks


@pytest.mark.parametrize("kind", ["function", "custom", "metric"])
def test_a_function_breaks_the_graph(kind: str) -> None:
    """It may read what changes, which no graph would see."""
    measured = [metrics.Metric("squared", squared)] if kind == "metric" else []
    loss = {"function": squared, "custom": custom(squared, scope="token"), "metric": losses.cross_entropy()}[kind]

    def step(hidden: Tensor) -> Tensor:
        return linear_loss(torch.tanh(hidden), HEAD["weight"], HEAD["target"], loss, metrics=measured).loss * 2

    compiled = torch.compile(step, backend="aot_eager")
    torch.testing.assert_close(compiled(HEAD["hidden"]), step(HEAD["hidden"]))
    torch.compiler.reset()
    with pytest.raises(Exception, match=r"no graph holds this call: functions of your own"):
        torch.compile(step, backend="aot_eager", fullgraph=True)(HEAD["hidden"])
