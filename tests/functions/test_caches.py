"""What outlives a call: caches, each of a bound, which threads share; and no other table grows."""

import gc
import linecache
import random
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import pytest
import torch
from tables import EMPTIED, STAYING, Emptying, modules, object_at, tables
from torch import Tensor

from chunked_head import linear_cross_entropy, linear_logprobs, linear_loss, logits_loss, losses, metrics, plan
from chunked_head.call import spec
from chunked_head.core.memory import Cache

PARTS = losses.focal, losses.entropy, losses.z_loss


def sizes(holders: list[Any]) -> dict[str, int]:
    """Of all but caches."""
    return {
        name: each.cache_info().currsize if hasattr(each, "cache_info") else len(each)
        for name, each in tables(holders).items()
        if not isinstance(each, Cache)
    }


def caches(holders: list[Any]) -> list[Cache]:
    """Those of modules, which the collector may have frozen, and all others."""
    found = [*tables(holders).values(), *gc.get_objects()]
    return list({id(each): each for each in found if isinstance(each, Cache)}.values())


class Holder:
    def __init__(self, by: float):
        self.by = torch.tensor(by)

    def loss(self, stats: Any, batch: Any) -> Tensor:
        return stats.lse * self.by


def step(i: int, backend: str = "torch") -> list[Tensor]:
    """Calls as no other ``i`` makes them, and what comes of them."""
    made = torch.Generator().manual_seed(i)
    tokens, vocab = 5 + i, 31 + i
    hidden, weight = (torch.randn(size, 8, generator=made).requires_grad_() for size in (tokens, vocab))
    target, given = torch.randint(0, vocab, (tokens,), generator=made), (backend, 1.0 + i)
    batch = {"old_logprobs": -torch.rand(tokens, generator=made), "advantages": torch.randn(tokens, generator=made)}
    holder, loss = Holder(given[1]), losses.grpo(clip_high=0.3 + 0.01 * i)
    for part in [part for bit, part in enumerate(PARTS) if i >> bit & 1]:  # another sum of losses for each
        loss = loss + i * part()
    calls: list[Callable[[], Tensor]] = [
        lambda: linear_cross_entropy(
            hidden, weight, target, softcap=5.0 + i, label_smoothing=0.01 * i, backend=backend
        ),
        lambda: linear_loss(
            hidden, weight, target, loss,
            batch=batch, metrics=[metrics.entropy(name=f"m{i}")], backend=backend,
        ).loss,
        lambda: linear_logprobs(hidden, weight, target, temperature=1.0 + i, backend=backend).sum(),
    ]  # fmt: skip
    if backend == "torch":
        calls += [
            lambda: linear_loss(hidden, weight, target, lambda stats, _: stats.lse * given[1]).loss,
            lambda: linear_loss(hidden, weight, target, lambda stats, _: stats.lse * holder.by).loss,
            lambda: linear_loss(hidden, weight, target, holder.loss).loss,
            lambda: logits_loss(hidden @ weight.t(), target, losses.focal(gamma=2.0 + i)).loss,
        ]
        plan(tokens, 8, vocab, torch.bfloat16, device="cpu")
    found = []
    for call in calls:
        out = call()
        found += [out.detach(), *torch.autograd.grad(out, (hidden, weight), torch.tensor(0.5))]
    return found


def anew(rounds: range) -> None:
    for i in rounds:
        step(i)
        step(i, "triton")
    gc.collect()


def test_no_table_grows(monkeypatch: pytest.MonkeyPatch) -> None:
    holders = modules()
    anew(range(2))
    before = sizes(holders)
    everything = caches(holders)
    assert len(everything) >= 10 and sum(len(each) > 0 for each in everything) >= 4
    for each in everything:
        each.clear()
        monkeypatch.setattr(each, "capacity", min(each.capacity, 4))
    anew(range(2, 8))
    grown = {name: size for name, size in sizes(holders).items() if size > before.get(name, 0)}
    assert not grown
    assert all(len(each) <= each.capacity for each in caches(holders))
    for each in everything:
        each.clear()
    gc.collect()
    assert not [name for name in linecache.cache if "chunked_head arithmetic" in name]  # of kernels, which are gone


def test_all_caches_are_known() -> None:
    """A new one goes into tables.py: sequences of calls are compared with calls that find them empty."""
    named = {id(object_at(name)): name for name in (*EMPTIED, *STAYING)}
    kept = (Cache, WeakKeyDictionary, WeakSet)
    for name, each in tables(modules()).items():
        of_models = ".integrations." in name  # forwards that run and models that are patched: no call finds them
        if not of_models and (isinstance(each, kept) or hasattr(each, "cache_info")):
            assert id(each) in named or name.endswith(".compiled_by_key"), f"{name} is not in helpers/tables.py"
    anew(range(2))
    empty = Emptying(compiled=True)
    assert len(empty.everything) > len(EMPTIED) + 20
    empty()
    left = [name for name, size in sizes(modules()).items() if size and name.removeprefix("chunked_head.") in EMPTIED]
    assert not left and not any(len(each) for each in tables(modules()).values() if isinstance(each, Cache))


def test_threads_share_caches_that_forget_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every call of four threads meets caches from which others have just taken what it asked for, to the bit."""
    holders, expected = modules(), [step(i) for i in range(6)]
    for each in caches(holders):
        each.clear()
        monkeypatch.setattr(each, "capacity", 2)
    monkeypatch.setattr(spec, "MOST_PLANS", 2)
    orders = [random.Random(seed).sample(list(range(6)) * 3, 18) for seed in range(4)]
    switching = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        with ThreadPoolExecutor(4) as pool:
            found = list(pool.map(lambda order: [(i, step(i)) for i in order], orders))
    finally:
        sys.setswitchinterval(switching)
    for i, ours in [each for one in found for each in one]:
        for mine, other in zip(ours, expected[i], strict=True):
            torch.testing.assert_close(mine, other, rtol=0, atol=0)
    assert all(len(each) <= each.capacity for each in caches(holders))


def test_the_least_recently_used_goes_first() -> None:
    cache: Cache[int, str] = Cache(3)
    for i in range(3):
        cache[i] = str(i)
    assert cache.get(0) == "0" and cache.get_or_make(1, list) == "1"
    cache[3] = "3"
    assert len(cache) == 3 and 1 in cache and cache.get(2) is None
    cache[0] = "another"
    assert cache.get_or_make(4, lambda: "4") == "4" and 3 in cache and cache.get(0) == "another"
    assert 1 not in cache and len(cache) == 3
    cache.clear()
    assert len(cache) == 0


def test_a_destructor_may_come_back() -> None:
    cache: Cache[int, Any] = Cache(1)

    class Last:
        def __del__(self) -> None:
            cache[100 + len(cache)] = None

    for i in range(4):
        cache[i] = Last()
    assert len(cache) == 1


def test_threads_that_make_one_value_get_the_same() -> None:
    cache, both = Cache[str, object](8), threading.Barrier(2)

    def make() -> object:
        both.wait(10)
        return object()

    with ThreadPoolExecutor(2) as pool:
        one, other = pool.map(lambda _: cache.get_or_make("key", make), range(2))
    assert one is other is cache.get("key")


def test_a_factory_makes_one_object_of_equal_options() -> None:
    """Of options alike in value and type; one that holds a tensor is made at each call."""
    assert losses.grpo(clip_low=0.1) is losses.grpo(clip_low=0.1)
    assert metrics.kl_old(level="segment") is metrics.kl_old(level="segment")
    others = [losses.grpo(clip_low=value) for value in (0.0, -0.0, 0, 0.1)]
    assert len({id(each) for each in (*others, losses.grpo(0.1), losses.reinforce(), losses.cispo())}) == 7
    weights = torch.rand(5)
    assert losses.z_loss(token_weights=weights) is not losses.z_loss(token_weights=weights)
    for error, wrong in ((ValueError, 2.0), (ValueError, 2.0), (TypeError, True)):
        with pytest.raises(error, match=r"clip_low of losses\.grpo"):
            losses.grpo(clip_low=wrong)


def test_fields_that_must_fit_each_other_are_refused_after_some_that_do() -> None:
    """A call that was checked must not let pass one whose bias, baseline or weights are of another number."""
    hidden, weight = torch.randn(6, 8), torch.randn(16, 8)
    target, ids = torch.randint(16, (6,)), torch.randint(16, (6, 5))
    of_segments = {"ref_logprobs": -torch.ones(6), "segments": torch.zeros(6, dtype=torch.int64)}
    pairs, labels = torch.zeros(3, 2, dtype=torch.int64), torch.ones(4, dtype=torch.bool)

    def run(loss: losses.Losses, number: int | None = None, **batch: Tensor) -> None:
        linear_loss(hidden, weight, target, loss, batch=batch, num_segments=number)

    def sets(bias: int, each: int = 5) -> None:
        run(losses.cross_entropy(), kept_ids=ids[:, :each], candidate_bias=torch.zeros(6, bias))

    def flat_sets(bias: int) -> None:
        offsets = torch.arange(0, 31, 5)
        given = {"kept_ids": ids.flatten(), "kept_offsets": offsets, "candidate_bias": torch.zeros(bias)}
        run(losses.cross_entropy(), **given)

    def baseline(of: int, segments: int) -> None:
        given = {"segment_labels": labels[:segments], "kl_baseline": torch.zeros(of)}
        run(losses.kto(), segments, **of_segments, **given)

    def pair_weights(of: int, count: int) -> None:
        run(losses.dpo(), 1, **of_segments, pairs=pairs[:count], pair_weights=torch.ones(of))

    right: list[tuple[Callable[..., None], list[tuple[int, ...]], list[tuple[int, ...]]]] = [
        (sets, [(5,), (3, 3)], [(3,), (4,), (6,), (5, 3)]),
        (flat_sets, [(30,)], [(29,), (31,), (1,)]),
        (baseline, [(3, 3), (1, 3), (2, 2)], [(3, 1), (3, 2), (2, 3), (4, 1)]),
        (pair_weights, [(3, 3), (1, 1)], [(1, 3), (3, 1), (2, 3)]),
    ]
    for call, fitting, others in right:
        for numbers in fitting:
            call(*numbers)
        for numbers in others:
            with pytest.raises(ValueError, match=r"candidate_bias|kl_baseline|pair_weights"):
                call(*numbers)
