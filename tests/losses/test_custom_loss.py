"""A loss of the user's own: what it reads is found out, what it claims is checked, what is equal is one."""

import gc
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from cases import PLACES, Place
from torch import Tensor

from chunked_head import linear_logprobs, linear_loss, logits_loss, losses, metrics, plan
from chunked_head.losses import Field, Losses, Summand, Teacher, custom


def summand(losses: Losses) -> Summand:
    ((coefficient, only),) = losses.terms
    assert coefficient == 1.0
    return only


def nll(stats: Any, batch: Any) -> Tensor:
    return -stats.logprob


# ---- what it reads


FIELDS_OF_SIX: dict[str, Tensor] = {
    "advantages": torch.linspace(-1.0, 1.0, 6), "segments": torch.tensor([0, 0, 1, 1, 1, -1]),
    "documents": torch.tensor([1, 1, 0, 0, 0, 0]), "pairs": torch.tensor([[0, 1]]), "kinds": torch.tensor([1, 2]),
    "teacher_ids": torch.arange(12).view(6, 2) % 11, "teacher_logits": torch.linspace(-2.0, 2.0, 66).view(6, 11),
    "table": torch.linspace(0.0, 1.0, 24).view(6, 2, 2), "scale": torch.tensor(3.0),
}  # fmt: skip


@pytest.mark.parametrize(
    ("function", "needs", "fields", "more"),
    [
        (lambda s, b: -s.logprob, [], "target", {}),
        (lambda s, b: s.lse.square(), [], "", {}),
        (lambda s, b: s.entropy + s.mean_logit, ["entropy", "mean_logit"], "", {}),
        (lambda s, b: s.lse * (s.argmax != b.target), ["argmax"], "target", {}),
        (lambda s, b: -s.logprob * b["advantages"], [], "target advantages", {}),
        (lambda s, b: -s.logprob * b.fields["advantages"], [], "target advantages", {}),
        (lambda s, b: s.lse if b.get("advantages") is None else s.lse * b["advantages"], [], "target advantages", {}),
        (lambda s, b: -s.topk_logprobs.sum(-1), ["topk_logprobs"], "teacher_ids", {}),
        (lambda s, b: s.forward_kl, ["forward_kl"], "teacher_logits", {"teacher": Teacher()}),
        (lambda s, b: s.jsd, ["jsd"], "teacher_logits", {"teacher": Teacher(beta=0.3)}),
        (lambda s, b: b.segment_mean(s.entropy), ["entropy"], "segments", {"scope": "segment", "unit": "segment"}),
        (lambda s, b: s.lse * b.per_token(b.segment_count("documents"), "documents"), [], "documents",
         {"scope": "segment"}),
        (lambda s, b: s.lse.sum() + 0.0 * b["pairs"][:, 0] + 0.0 * b["segments"].sum(), [], "segments pairs",
         {"scope": "segment", "unit": "pair"}),
        (lambda s, b: s.lse * b["table"].sum((-1, -2)), [], "table", {"fields": {"table": Field("row", "float", 2)}}),
        (lambda s, b: s.lse * b["kinds"].sum(), [], "kinds", {"fields": {"kinds": Field("segment", "int")}}),
        (lambda s, b: s.lse * b["scale"], [], "scale", {"fields": {"scale": "constant"}}),
        (lambda s, b, power: s.lse**power, [], "", {"options": {"power": 2.0}, "temperature": 0.5}),
        (lambda s, b, class_weights: s.weighted_sum, ["weighted_sum"], "",
         {"tensors": {"class_weights": torch.linspace(0, 1, 11)}}),
    ],
)  # fmt: skip
def test_what_it_reads(function: Callable, needs: list[str], fields: str, more: dict[str, Any]) -> None:
    """A call gives what the function was found to read: the same as where all of that is declared."""
    names = fields.split()
    batch = {name: FIELDS_OF_SIX[name] for name in names if name != "target"}

    def call(target: Tensor | None, **told: Any) -> Tensor:
        loss = custom(function, **{"scope": "token", **more, **told})
        return linear_loss(HEAD["hidden"], HEAD["weight"], target, loss, batch=batch, num_segments=2).loss

    known = {"fields": list(batch), **more}["fields"]
    told = call(HEAD["target"], check=False, needs=needs, fields=known)
    torch.testing.assert_close(call(HEAD["target"] if "target" in names else None), told, rtol=0, atol=0)
    assert told.isfinite() and told != 0


@pytest.mark.parametrize("place", PLACES)
def test_gradients_laid_out_by_ids(place: Place) -> None:
    """A function may lay its statistics otherwise, and autograd then the gradients of them: each stays its id's."""
    made = torch.Generator().manual_seed(1)
    hidden, weight = (torch.randn(n, 16, generator=made).to(place.device) for n in (9, 40))
    target, ids = (torch.randint(0, 40, shape, generator=made).to(place.device) for shape in ((9,), (9, 4)))
    batch = {"teacher_ids": ids, "teacher_logprobs": torch.full((9, 4), -2.0, device=place.device)}
    factors = torch.tensor([1.0, 3.0, 0.5, 2.0], device=place.device)

    def by_tokens(stats: Any, batch: Any) -> Tensor:
        return -(stats.topk_logprobs * factors).sum(1)

    def by_ids(stats: Any, batch: Any) -> Tensor:
        return -(stats.topk_logprobs.t() * factors[:, None]).sum(0)

    found = []
    for function in (by_tokens, by_ids):
        leaves = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
        loss = custom(function, scope="token")
        out = linear_loss(*leaves, target, loss, batch=batch, backend=place.backend, chunk_tokens=4)
        found.append([out.loss.detach(), *torch.autograd.grad(out.loss, leaves)])
    torch.testing.assert_close(*found)


def test_what_another_branch_reads_is_declared() -> None:
    def either(stats: Any, batch: Any) -> Tensor:
        return stats.lse * batch["advantages"] if "advantages" in batch else stats.entropy * batch["ref_logprobs"]

    known = {"fields": ["ref_logprobs"], "needs": ["entropy"]}
    found = linear_loss(**HEAD, loss=custom(either, scope="token", **known), batch={"ref_logprobs": -torch.ones(6)})
    torch.testing.assert_close(found.loss, linear_loss(**HEAD, loss=-losses.entropy()).loss)
    with pytest.raises(AttributeError, match=r"'entropy' was not asked for.*losses.custom\(needs=\['entropy'\]\)"):
        linear_loss(**HEAD, loss=custom(either, scope="token"), batch={"ref_logprobs": -torch.ones(6)})
    with pytest.raises(KeyError, match="'ref_logprobs' is not in the batch of this call; it has old_logprobs"):
        loss = custom(either, scope="token", needs=["entropy"])
        linear_loss(**HEAD, loss=loss, batch={"old_logprobs": -torch.ones(6)})


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
        (lambda s, b: s.lse * b["mine"], {}, "reads batch.'mine'., .* declare it.* fields={'mine': 'token'}"),
        (lambda s, b: s.lse * b.get("mine", 1.0), {}, "reads batch.'mine'., .* declare.* fields={'mine': 'token'}"),
        (lambda s, b: s.lse + ("mine" in b), {}, "reads batch.'mine'., .* declare it.* fields={'mine': 'token'}"),
        (lambda s, b: s.lse + sum(b.values()), {}, "raised RuntimeError on 24 made-up tokens"),
        (lambda s, b: s.logprobs, {}, "AttributeError .* statistic 'logprobs' was not asked for.*check=False"),
        (lambda s, b: s.lse / 0 + [], {}, "raised TypeError on 24 made-up tokens.*check=False with needs= and fields="),
        (lambda s, b: s.weighted_sum, {}, 'tensors={"class_weights"'),
        (lambda s, b: s.jsd, {}, "pass teacher=Teacher"),
        (nll, {"needs": ["logits"]}, "no statistic 'logits'"),
        (nll, {"fields": {"mine": "tokens"}}, "field 'mine' .* must be one of 'token'.* got 'tokens'"),
        (nll, {"fields": ("mine",)}, "fields of .* has 'mine', .* give its kind too: fields={'mine': 'token'}"),
        (nll, {"fields": {"advantages": "segment"}}, "field 'advantages' .* cannot be another"),
        (3.0, {}, "takes a function"),
        (nll, {"fields": "advantages"}, "several names"),
        (nll, {"scope": "batch"}, "scope of losses.custom.* got 'batch'"),
        (nll, {"unit": "row"}, "unit of losses.custom"),
        (nll, {"temperature": 0}, "temperature of losses.custom"),
    ],
)  # fmt: skip
def test_refusals(function: Callable, known: dict[str, Any], words: str) -> None:
    with pytest.raises((ValueError, TypeError), match=words):
        custom(function, **{"scope": "token", **known})


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
    found = summand(custom(picky, scope="token", check=False, fields={"mine": "row"}))
    assert found.extra_fields == {"mine": Field("row")}


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
    switch = Settings(False)

    def loss(stats: Any, batch: Any) -> Tensor:
        return stats.lse * (1.0 if switch.beta and batch.get(name) is None else 2.0)

    batch = {"segments": torch.zeros(6, dtype=torch.int64), "teacher_logits": torch.randn(6, 11)}
    linear_loss(**HEAD, loss=loss, batch=batch)
    switch.beta = True
    with pytest.raises(ValueError, match=rf"field '{name}' of this call was not asked for; declare it, losses.custom"):
        linear_loss(**HEAD, loss=loss, batch=batch)


def of(beta: Any) -> Callable:
    return lambda s, b: (COUNTER.append(1), -s.logprob * b["advantages"] + 0 * s.lse * (beta is COUNTER))[1]


def runs_of(function: Callable, **options: Any) -> int:
    COUNTER.clear()
    custom(function, scope="token", **options)
    return len(COUNTER)


class Settings:
    def __init__(self, beta: Any):
        self.beta = beta


def test_functions_alike_are_checked_once() -> None:
    """Of the same code over values of which nothing else is to be expected, or over the same object."""
    settings = Settings(0.5)
    for one, other in (
        (0.25, 0.75), ((1, "a"), (1, "a")), (torch.ones(3), torch.zeros(5)), (settings, settings), (of(21), of(21)),
        ({"a": 1}, {"a": 1}), (partial(of, beta=2), partial(of, beta=2)),
    ):  # fmt: skip
        assert runs_of(of(one)) > 2 and runs_of(of(other)) == 0, one
    # each told from all others
    for other in (2, True, 1, 0.0, -1.5, "1", None, (3,), torch.ones(2, 2), torch.ones(3).double(), Settings([1]),
                  {"a": 2}, of(22), {1, 2}, [1] * 99, object):  # fmt: skip
        assert runs_of(of(other)) > 2, other
    kept = of(2.0)
    assert runs_of(kept, fields=()) == runs_of(kept, options={}) == 0
    assert custom(kept, scope="segment") and COUNTER  # another question


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


COUNTER: list[int] = []


# ---- a plain function in the place of a loss

HEAD = {"hidden": torch.randn(6, 8), "weight": torch.randn(11, 8), "target": torch.arange(6)}
LOGITS = HEAD["hidden"] @ HEAD["weight"].t()


def squared(stats: Any, batch: Any) -> Tensor:
    return stats.logprob.square()


def test_a_plain_function_is_a_loss_of_tokens() -> None:
    right = linear_loss(**HEAD, loss=custom(squared, scope="token") + 0.1 * losses.z_loss())
    added = squared + 0.1 * losses.z_loss()
    for loss in (added, 0.1 * losses.z_loss() + squared, (2.0 * added) / 2):
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


def test_a_plain_function_is_let_go_of() -> None:
    """With what it closes over, made anew at every call."""

    def weak_ref(of_closure: bool) -> Any:
        by, settings = torch.tensor(3.0), Settings(torch.tensor(2.0))
        loss = custom(lambda stats, batch: stats.lse * settings.beta, scope="token", name="settings")
        measured = [metrics.Metric("by", lambda stats, batch: stats.lse * by)]
        linear_loss(**HEAD, loss=(lambda stats, batch: by * stats.logprob) + loss, metrics=measured)
        return weakref.ref(by if of_closure else settings.beta)

    found = [weak_ref(i % 2 == 0) for i in range(6)]
    gc.collect()
    assert [reference() for reference in found] == [None] * 6


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
