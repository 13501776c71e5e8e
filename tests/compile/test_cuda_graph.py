"""A step captured in a CUDA graph, and replayed with other inputs in the same memory; and that no step waits."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from graph_calls import SEGMENTS, Data, chosen, make_data, named, outcome, weighted
from graph_calls import grpo as policy
from graph_calls import logprobs as all_statistics
from torch import Tensor, nn
from tracking import no_host_synchronisation

from chunked_head import LossOutput, linear_cross_entropy, linear_loss, losses, metrics

# the losses' arithmetic has kernels, as it has for a user, and so they are captured
pytestmark = pytest.mark.gpu
WIDTH, VOCAB = 256, 5003
Step = Callable[[Data], Any]


def cross_entropy(d: Data) -> Tensor:
    return linear_cross_entropy(d.hidden, d.weight, d.target, z_loss=1e-4, normalizer=d.scalar)


def segments(d: Data) -> LossOutput:
    """Gradients that wait for all statistics, at a temperature where some ratios are not clipped."""
    return linear_loss(
        d.hidden, d.weight, d.target, 1e3 * losses.gspo(), batch=chosen(d, "old_logprobs", "advantages", "segments"),
        temperature=16.0, num_segments=SEGMENTS, chunk_tokens=256,
        metrics=[metrics.kl_old(weighting="segment"), metrics.accuracy()],
    )  # fmt: skip


def own(d: Data) -> LossOutput:
    """Functions made anew, which close over tensors."""
    entropies = losses.custom(lambda stats, batch: stats.entropy * d.scalar, scope="segment", name="entropies")
    loss = 0.1 * entropies + (lambda stats, batch: -stats.logprob * batch.advantages * d.scalar)
    measured = [metrics.Metric("scaled", lambda stats, batch: stats.lse * d.scalar)]
    return linear_loss(d.hidden, d.weight, d.target, loss, batch=chosen(d, "advantages"), metrics=measured)


STEPS: list[Step] = [cross_entropy, weighted, policy, segments, all_statistics]
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
IN_TURN = [(step, DTYPES[(i + k) % 3]) for i, step in enumerate([*STEPS, own]) for k in (0, 1)]


def data_of(dtype: torch.dtype, seed: int) -> Data:
    return make_data(dtype, "cuda", 350, seed, VOCAB, WIDTH)


def tensors_of(data: Data) -> list[Tensor]:
    return [*(value for value in data if isinstance(value, Tensor)), *data.fields.values()]


def run(step: Step, data: Data) -> dict[str, Tensor]:
    """All that the step returns, and its gradients."""
    found, grads = outcome(step, data, data.scalar)
    values = {name: value.detach() for name, value in named(found).items()}
    return values | {f"gradient {i}": grad for i, grad in enumerate(grads) if grad is not None}


def captured(step: Step, data: Data) -> tuple[torch.cuda.CUDAGraph, dict[str, Tensor]]:
    """The step as a graph, with the memory that its results come in."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            run(step, data)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = run(step, data)
    return graph, found


def assert_equal(ours: Tensor, expected: Tensor, what: str) -> None:
    if not ours.is_floating_point():
        assert torch.equal(ours, expected), what
        return
    error, size = (ours.double() - expected.double()).norm(), expected.double().norm()
    # a graph has a workspace of its own, and so a product may be summed in another order, as segments always may
    # (of terms about 1, which cancel)
    allowed = max(1e-5, torch.finfo(ours.dtype).eps) * size + (1e-7 if ours.dim() == 0 else 0.0)
    assert error <= allowed, f"{what}: {error:.3e} of {size:.3e}"


@pytest.mark.parametrize(
    ("step", "dtype"), IN_TURN, ids=[f"{step.__name__}-{str(dtype)[6:]}" for step, dtype in IN_TURN]
)
def test_replay(step: Step, dtype: torch.dtype) -> None:
    static = data_of(dtype, 1)
    graph, found = captured(step, static)
    for seed in (2, 3, 1):
        fresh = data_of(dtype, seed)
        expected = run(step, fresh)
        with torch.no_grad():
            for mine, new in zip(tensors_of(static), tensors_of(fresh), strict=True):
                mine.copy_(new)
        graph.replay()
        assert found.keys() == expected.keys() and expected["gradient 1"].count_nonzero()
        for name, value in expected.items():
            assert_equal(found[name], value, f"{name}, seed {seed}")


def test_replay_with_an_id_out_of_range() -> None:
    """Found on the device, at whichever replay it comes."""
    static = data_of(torch.bfloat16, 1)
    graph, found = captured(cross_entropy, static)
    for bad in (True, False):
        static.target[1, 5] = VOCAB if bad else 5
        graph.replay()
        assert found["value"].isnan().item() is bad
        assert bool(found["gradient 1"].isnan().all()) is bad


@pytest.mark.parametrize(
    ("step", "fullgraph"), [(step, whole) for step in STEPS for whole in (False, True)] + [(own, False)]
)
def test_a_step_waits_for_nothing(step: Step, fullgraph: bool) -> None:
    """The model before the head, the head, backward and the optimizer; eager and compiled as a whole."""
    data = data_of(torch.bfloat16, 1)
    body = nn.Linear(WIDTH, WIDTH, device="cuda", dtype=torch.bfloat16)
    optimizer = torch.optim.SGD([*body.parameters(), data.weight], lr=1e-3)
    hidden = data.hidden.detach()

    def forward() -> Any:
        return step(data._replace(hidden=torch.tanh(body(hidden))))

    torch._dynamo.reset()
    call = torch.compile(forward, fullgraph=True) if fullgraph else forward

    def whole() -> None:
        sum(value.sum() for value in named(call()).values() if value.requires_grad).backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(2):
        whole()
    with no_host_synchronisation():
        whole()
