"""Every loss: no second buffer of a chunk's logits, peaks as the plan says, and nothing that waits for the device."""

from typing import Any

import pytest
import torch
from cases import PLACES, Place
from loss_cases import LOSS_CASES, VOCAB, LossCase, LossInputs, inputs_of
from tiers import tier
from tracking import MiB, Tracker, assert_predicted, no_host_synchronisation, peak_of

from chunked_head import LossOutput, linear_loss, losses, metrics, plan
from chunked_head.losses import Losses
from chunked_head.stores import matmul, torch_functions

CHUNK = 32
# the interpreter copies a kernel's arguments for itself
UNCOPIED = [place for place in PLACES if place.id != "triton-interpreted"]


def call(case: LossCase, inputs: LossInputs, place: Place, **more: Any) -> LossOutput:
    return linear_loss(
        inputs.hidden, inputs.weight, inputs.target, case.losses, batch=inputs.batch,
        num_segments=inputs.num_segments, backend=place.backend, **inputs.head, **more,
    )  # fmt: skip


@pytest.mark.parametrize("place", UNCOPIED)
@pytest.mark.parametrize("case", LOSS_CASES, ids=lambda case: case.name)
def test_one_buffer_of_logits(place: Place, case: LossCase, monkeypatch: pytest.MonkeyPatch) -> None:
    """One tensor of chunk x vocabulary elements at a time, and one more where there is a dense teacher."""
    # tiles much smaller than these small chunks, as they are beside real ones
    monkeypatch.setattr(torch_functions, "TILE_ELEMENTS", 1024)
    monkeypatch.setattr(torch_functions, "GATHERED_ELEMENTS", 1024)
    monkeypatch.setattr(matmul, "GPU_COLUMNS", 16)
    inputs = inputs_of(case, torch.float16 if place.backend == "triton" else torch.float32, place.device)
    weight = inputs.weight[:, :16].contiguous()  # its gradient is smaller than a chunk's logits
    hidden = inputs.hidden[:, :16].contiguous().requires_grad_()
    inputs = LossInputs(hidden, weight.requires_grad_(), inputs.target, inputs.batch, inputs.head, inputs.num_segments)
    given = [v for v in inputs.batch.values() if isinstance(v, torch.Tensor)]
    large = CHUNK * min(VOCAB, case.teacher_vocab) * 3 // 4
    with Tracker(hidden, weight, *given, large=large) as tracker:
        call(case, inputs, place, chunk_tokens=CHUNK).loss.backward()
    teacher = any(name.startswith(("teacher_logits", "teacher_hidden")) for name in case.batch)
    in_place = "teacher_logits" in case.batch
    of_columns = case.name == "topk-topk"  # needs the logits of a teacher's ids alone
    assert tracker.most_large == (0 if of_columns else 1 + (teacher and not in_place))
    if place.backend == "triton":
        touching = {"_softmax", "_log_softmax", "logsumexp", "exp", "gather", "sub", "mul", "where", "clone"}
        assert not tracker.large_operations & touching, tracker.large_operations


WIDE: dict[str, tuple[Losses, tuple, dict[str, Any]]] = {
    "metrics": (losses.cross_entropy(), (metrics.entropy(), metrics.accuracy()), {}),
    "entropy": (losses.cross_entropy() - 0.1 * losses.entropy(), (), {}),
    "two-temperatures": (losses.cross_entropy() - 0.1 * losses.entropy(temperature=2.0), (), {}),
    "gspo": (losses.gspo(), (metrics.ratio(level="segment"),), {}),
    "topk": (losses.topk_kl() + losses.cross_entropy(), (), {"teacher_k": 32}),
    "dense": (losses.forward_kl() + 0.1 * losses.jsd(), (), {"teacher_hidden": 96}),
    "dense-smaller": (losses.reverse_kl(), (), {"teacher_hidden": 96, "fewer": 1000}),
    "dense-last": (losses.forward_kl("cross_entropy"), (), {"teacher_hidden": 96}),
}


def predictions() -> list:
    """On the CPU each once, in a dtype and with a budget in turn; each pair of values exhaustive."""
    found = []
    for place in UNCOPIED:
        for i, name in enumerate(WIDE):
            for dtype in (torch.float32, torch.bfloat16):
                for budget in (None, "48MiB"):
                    if place.values[0].device == "cuda" or (i + (dtype == torch.bfloat16) + (budget is None)) % 2:
                        label = f"{name}-{dtype}-{budget}-{place.id}"
                        param = pytest.param(place.values[0], name, dtype, budget, marks=place.marks, id=label)
                        found += tier(param, (budget is None) == (i // 2) % 2)
    return found


@pytest.mark.parametrize(("place", "name", "dtype", "budget"), predictions())
def test_prediction(place: Place, name: str, dtype: torch.dtype, budget: str | None) -> None:
    loss, measured, teacher = WIDE[name]
    tokens, width, vocab = (2048, 512, 64000) if place == Place("triton", "cuda") else (1024, 64, 20000)
    if budget is not None and place == Place("triton", "cuda"):
        budget = "500MiB"
    if "fewer" in teacher:
        teacher = {"teacher_hidden": 96, "teacher_vocab": vocab - teacher["fewer"]}
    made = torch.Generator().manual_seed(1)

    def normal(*shape: int, kind: torch.dtype = dtype) -> torch.Tensor:
        return torch.randn(*shape, generator=made).to(place.device, kind)

    hidden, weight = normal(tokens, width).requires_grad_(), normal(vocab, width).requires_grad_()
    target = torch.randint(0, vocab, (tokens,), generator=made).to(place.device)
    fields: dict[str, torch.Tensor] = {}
    if name == "gspo":
        fields = {
            "old_logprobs": -normal(tokens, kind=torch.float32).abs(),
            "advantages": normal(tokens, kind=torch.float32),
        }
        fields["segments"] = (torch.arange(tokens) // 100).to(place.device)
    if "teacher_k" in teacher:
        fields["teacher_ids"] = torch.randint(0, vocab, (tokens, 32), generator=made).to(place.device)
        fields["teacher_logprobs"] = normal(tokens, 32, kind=torch.float32).log_softmax(-1)
    if "teacher_hidden" in teacher:
        fields["teacher_hidden"] = normal(tokens, 96)
        fields["teacher_weight"] = normal(teacher.get("teacher_vocab", vocab), 96)
    segments = 21 if name == "gspo" else None
    expected = plan(
        tokens, width, vocab, dtype, loss=loss, metrics=measured, memory_budget=budget, device=place.device,
        backend=place.backend, **teacher,
    )  # fmt: skip

    found: list[LossOutput] = []

    def step() -> None:
        hidden.grad = weight.grad = None
        found[:] = [
            linear_loss(
                hidden, weight, target, loss, batch=fields, num_segments=segments, metrics=measured,
                memory_budget=budget, backend=place.backend,
            )
        ]  # fmt: skip
        found[0].loss.backward()

    assert_predicted(peak_of(step, hidden, weight, target, *fields.values()), expected)
    assert found[0].plan == expected


@pytest.mark.parametrize("moved", ["segments", "those that count"])
def test_a_teacher_of_moved_rows(moved: str) -> None:
    """Hidden states of a teacher, most of the memory here, are read through the order of the rows, not copied."""
    lengths, width, vocab = [300, 101, 299, 324], 2048, 300
    made = torch.Generator().manual_seed(1)
    hidden, weight = (torch.randn(rows, 16, generator=made).requires_grad_() for rows in (sum(lengths), vocab))
    target = torch.randint(0, vocab, (len(hidden),), generator=made).masked_fill(torch.arange(len(hidden)) < 200, -100)
    fields = {name: torch.randn(rows, width, generator=made) for name, rows in
              (("teacher_hidden", len(hidden)), ("teacher_weight", vocab))}  # fmt: skip
    options: dict[str, Any] = {"skip_ignored": "wait"}
    loss = losses.reverse_kl()
    if moved == "segments":
        fields["advantages"] = torch.randn(len(hidden), generator=made)
        options, loss = {"segment_lengths": lengths}, loss + losses.gspo()
    with Tracker(hidden, weight, target, *fields.values()) as tracker:
        out = linear_loss(hidden, weight, target, loss, batch=fields, backend="torch", chunk_tokens=400, **options)
        out.loss.backward()
    assert out.plan is not None and out.plan.schedule == "forward" and out.plan.chunks > 1
    assert_predicted(tracker.peak_bytes, out.plan)


MIXED = losses.grpo() + 1e-3 * losses.z_loss() - 0.01 * losses.entropy()
MEASURED = metrics.clip_fraction(), metrics.kl_old(), metrics.entropy(), metrics.accuracy()
TEMPERED = losses.grpo() + losses.kl_to_reference() - 0.01 * losses.entropy(temperature=2.0)
PER_TOKEN: dict[str, tuple[Losses, tuple, dict[str, Any]]] = {
    "metrics": (MIXED, MEASURED, {}),
    "no-gradient": (MIXED, MEASURED, {}),
    "late": (TEMPERED, (), {"reduction": "none"}),
    "many-chunks": (MIXED, MEASURED, {"chunk_tokens": 1 << 12}),
    "two-temperatures-no-gradient": (TEMPERED, (), {}),
    "gspo": (losses.gspo(), (), {"chunk_tokens": 1 << 12}),
}


@pytest.mark.parametrize("name", PER_TOKEN)
def test_vectors_of_many_tokens(name: str) -> None:
    """Rows so short that a plan which forgets what lies in memory for each token errs by more than it may."""
    loss, measured, options = PER_TOKEN[name]
    tokens, width, vocab = 1 << 18, 4, 16
    made = torch.Generator().manual_seed(1)
    hidden, weight = torch.randn(tokens, width, generator=made), torch.randn(vocab, width, generator=made)
    if "no-gradient" not in name:
        hidden, weight = hidden.requires_grad_(), weight.requires_grad_()
    target = torch.randint(0, vocab, (tokens,), generator=made)
    fields = {key: -torch.rand(tokens, generator=made) for key in ("old_logprobs", "ref_logprobs", "advantages")}
    fields["mask"], options = target > 1, {"chunk_tokens": 1 << 14} | options
    grads = {"hidden_grad": hidden.requires_grad, "weight_grad": weight.requires_grad}
    expected = plan(
        tokens, width, vocab, torch.float32, loss=loss, metrics=measured, device="cpu", backend="torch",
        **grads, **options,
    )  # fmt: skip
    if name == "gspo":
        fields["segments"], options = torch.arange(tokens) // 4096, options | {"num_segments": tokens // 4096}
    with Tracker(hidden, weight, target, *fields.values()) as tracker:
        out = linear_loss(hidden, weight, target, loss, batch=fields, metrics=measured, backend="torch", **options)
        if out.loss.requires_grad:
            out.loss.sum().backward()
    assert out.plan == expected
    # 12 bytes for each token; those of the demanded statistics alone are 24 or more
    assert_predicted(tracker.peak_bytes, expected, share=0.0, least=3 * MiB)


@pytest.mark.gpu
@pytest.mark.parametrize("case", LOSS_CASES, ids=lambda case: case.name)
def test_no_host_synchronisation(case: LossCase) -> None:
    place = Place("triton", "cuda")
    inputs = inputs_of(case, torch.bfloat16, "cuda")
    hidden, weight = inputs.hidden.requires_grad_(), inputs.weight.requires_grad_()
    measured = [metrics.entropy(), metrics.lse(reduce="max")] + ([metrics.accuracy()] if case.target else [])

    def step() -> None:
        out = call(case, inputs, place, chunk_tokens=CHUNK, metrics=measured)
        out.loss.backward()
        assert len(out.metrics) == len(measured)
        hidden.grad = weight.grad = None

    step()
    with no_host_synchronisation():
        step()
