"""A step captured in a CUDA graph, and replayed with other inputs in the same memory; and that no step waits."""

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from tracking import no_host_synchronisation

from chunked_head import LossOutput, linear_cross_entropy, linear_logprobs, linear_loss, losses, metrics

# the losses' arithmetic has kernels, as it has for a user, and so they are captured
pytestmark = [pytest.mark.gpu, pytest.mark.compiled]
TOKENS, HIDDEN, VOCAB, SEGMENTS = 700, 256, 5003, 7
DEVICE = "cuda"


class Inputs(NamedTuple):
    """Memory that stays where it is."""

    hidden: Tensor
    weight: Tensor
    target: Tensor
    mask: Tensor
    old_logprobs: Tensor
    advantages: Tensor
    segments: Tensor
    count: Tensor  # [] the denominator
    scale: Tensor  # [] the upstream gradient


def make_inputs(dtype: torch.dtype, seed: int) -> Inputs:
    made = torch.Generator().manual_seed(seed)

    def normal(*size: int) -> Tensor:
        return torch.randn(size, generator=made)

    target = torch.randint(0, VOCAB, (TOKENS,), generator=made)
    target[torch.rand(TOKENS, generator=made) < 0.1 * seed] = -100
    inputs = Inputs(
        normal(TOKENS, HIDDEN).to(dtype), normal(VOCAB, HIDDEN).to(dtype) * 0.2, target, normal(TOKENS) > -1,
        normal(TOKENS) * 0.1 - 8.0, normal(TOKENS), torch.randint(-1, SEGMENTS, (TOKENS,), generator=made),
        torch.tensor(100.0 + seed), torch.tensor(0.37 * seed),
    )  # fmt: skip
    inputs = Inputs(*(t.to(DEVICE) for t in inputs))
    inputs.hidden.requires_grad_()
    inputs.weight.requires_grad_()
    return inputs


Found = dict[str, Tensor]
Step = Callable[[Inputs], tuple[Tensor, Found]]


def cross_entropy(i: Inputs) -> tuple[Tensor, Found]:
    return linear_cross_entropy(i.hidden, i.weight, i.target, z_loss=1e-4, normalizer=i.count), {}


def smoothed(i: Inputs) -> tuple[Tensor, Found]:
    """On the second path, in several chunks."""
    return linear_cross_entropy(i.hidden, i.weight, i.target, label_smoothing=0.1, softcap=20.0, chunk_tokens=256), {}


def found_in(out: LossOutput) -> tuple[Tensor, Found]:
    return out.loss, {**out.parts, **{name: metric.value for name, metric in out.metrics.items()}}


MEASURED = (metrics.clip_fraction(), metrics.kl_old(), metrics.effective_sample_size(), metrics.entropy(reduce="max"))


def policy(i: Inputs) -> tuple[Tensor, Found]:
    batch = {"old_logprobs": i.old_logprobs, "advantages": i.advantages, "mask": i.mask}
    loss = losses.grpo() - 0.01 * losses.entropy() + losses.z_loss().times(i.scale)
    return found_in(linear_loss(i.hidden, i.weight, i.target, loss, batch=batch, metrics=MEASURED, chunk_tokens=256))


def segments(i: Inputs) -> tuple[Tensor, Found]:
    """Gradients that wait for all statistics."""
    batch = {"old_logprobs": i.old_logprobs, "advantages": i.advantages, "segments": i.segments}
    out = linear_loss(
        i.hidden, i.weight, i.target, losses.gspo(), batch=batch, num_segments=SEGMENTS, chunk_tokens=256,
        metrics=(metrics.kl_old(weighting="segment"), metrics.accuracy()),
    )  # fmt: skip
    return found_in(out)


def logprobs(i: Inputs) -> tuple[Tensor, Found]:
    found = linear_logprobs(i.hidden, i.weight, i.target, entropy=True, argmax=True, top_k=4, mask=i.mask)
    return (found.logprobs * i.advantages).sum() - 0.1 * found.entropy.mean(), found._asdict()


def own(i: Inputs) -> tuple[Tensor, Found]:
    """Functions made anew, which close over tensors."""
    entropies = losses.custom(lambda stats, batch: stats.entropy * i.scale, scope="segment", name="entropies")
    loss = 0.1 * entropies + (lambda stats, batch: -stats.logprob * batch.advantages * i.scale)
    measured = [metrics.Metric("scaled", lambda stats, batch: stats.lse * i.scale)]
    return found_in(
        linear_loss(i.hidden, i.weight, i.target, loss, batch={"advantages": i.advantages}, metrics=measured)
    )


STEPS: list[Step] = [cross_entropy, smoothed, policy, segments, logprobs]


def run(step: Step, inputs: Inputs) -> tuple[Tensor, Found]:
    loss, found = step(inputs)
    (loss * inputs.scale).backward()
    return loss.detach(), {name: value.detach() for name, value in found.items()}


def captured(step: Step, inputs: Inputs) -> tuple[torch.cuda.CUDAGraph, Tensor, Found]:
    """The step as a graph, with the memory that its results come in; gradients come in ``.grad``."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            run(step, inputs)
            inputs.hidden.grad = inputs.weight.grad = None
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss, found = run(step, inputs)
    return graph, loss, found


def assert_equal(ours: Tensor, expected: Tensor, what: str) -> None:
    if ours.is_floating_point():
        error, size = (ours.double() - expected.double()).norm(), expected.double().norm()
        # a graph has a workspace of its own, and so a product may be summed in another order, as segments always may
        # (of terms about 1, which cancel)
        allowed = max(1e-5, torch.finfo(ours.dtype).eps) * size + (1e-7 if ours.dim() == 0 else 0.0)
        assert error <= allowed, f"{what}: {error:.3e} of {size:.3e}"
    else:
        assert torch.equal(ours, expected), what


DTYPES = (torch.bfloat16, torch.float16, torch.float32)
IN_TURN = [(step, DTYPES[(i + k) % 3]) for i, step in enumerate([*STEPS, own]) for k in (0, 1)]


@pytest.mark.parametrize(
    ("step", "dtype"), IN_TURN, ids=[f"{step.__name__}-{str(dtype)[6:]}" for step, dtype in IN_TURN]
)
def test_replay(step: Step, dtype: torch.dtype) -> None:
    static = make_inputs(dtype, seed=1)
    graph, loss, found = captured(step, static)
    for seed in (2, 3, 1):
        fresh = make_inputs(dtype, seed)
        expected_loss, expected = run(step, fresh)
        with torch.no_grad():
            for mine, new in zip(static, fresh, strict=True):
                mine.copy_(new)
        graph.replay()
        assert_equal(loss, expected_loss, "loss")
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            assert_equal(found[name], value, name)
        for name in ("hidden", "weight"):
            mine, grad = getattr(static, name).grad, getattr(fresh, name).grad
            assert grad.count_nonzero(), name
            assert_equal(mine, grad, f"gradient of {name}, seed {seed}")


def test_replay_with_an_id_out_of_range() -> None:
    """Found on the device, at whichever replay it comes."""
    static = make_inputs(torch.bfloat16, seed=1)
    graph, loss, _ = captured(cross_entropy, static)
    for bad in (True, False):
        static.target[5] = VOCAB if bad else 5
        graph.replay()
        assert loss.isnan().item() is bad
        assert static.weight.grad is not None and bool(static.weight.grad.isnan().all()) is bad


@pytest.mark.parametrize(
    ("step", "fullgraph"), [(step, whole) for step in STEPS for whole in (False, True)] + [(own, False)]
)
def test_a_step_waits_for_nothing(step: Step, fullgraph: bool) -> None:
    """The model before the head, the head, backward and the optimizer; eager and compiled as a whole."""
    inputs = make_inputs(torch.bfloat16, seed=1)
    body = nn.Linear(HIDDEN, HIDDEN, device=DEVICE, dtype=torch.bfloat16)
    optimizer = torch.optim.SGD([*body.parameters(), inputs.weight], lr=1e-3)
    hidden = inputs.hidden.detach()

    def forward() -> tuple[Tensor, Any]:
        return step(inputs._replace(hidden=torch.tanh(body(hidden))))

    torch._dynamo.reset()
    call = torch.compile(forward, fullgraph=True) if fullgraph else forward

    def whole() -> None:
        loss, _ = call()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(2):
        whole()
    with no_host_synchronisation():
        whole()
