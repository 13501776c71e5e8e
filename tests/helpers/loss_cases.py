"""The list of losses that every backend is held to, with fields that make them work."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
import torch
from budget import assert_within_budget
from cases import PLACES, Place
from oracle import reference as oracle
from oracle.functions import alpha_divergence, hellinger, likely, power
from oracle.reference import Term
from oracle.rows import PAIRED, POLICY, ROWS, SEGMENTED
from tiers import tier
from torch import Tensor

from chunked_head import LossOutput, linear_loss, losses, metrics, reference
from chunked_head.losses import Losses
from chunked_head.metrics import Metric

TOKENS, HIDDEN, VOCAB, SEGMENTS, K = 97, 64, 331, 9, 5
FEWER = {"tokens": 41, "vocab": 131}  # for Triton's interpreter, which takes its time for every row and every tile


@dataclass(frozen=True)
class LossCase:
    """A sum of losses, the names of the fields that a call passes (``batch``), and options of the head (``head``)."""

    name: str
    terms: tuple[Term, ...]
    batch: tuple[str, ...] = ()
    head: Mapping[str, Any] = field(default_factory=dict)
    teacher_vocab: int = VOCAB
    target: bool = True

    @property
    def losses(self) -> Losses:
        total = None
        for coefficient, kind, options in self.terms:
            one = coefficient * getattr(losses, kind)(**options)
            total = one if total is None else total + one
        assert total is not None
        return total

    @property
    def segmented(self) -> bool:
        return "segments" in self.batch


@dataclass(frozen=True)
class LossInputs:
    hidden: Tensor
    weight: Tensor
    target: Tensor | None
    batch: dict[str, Tensor]
    head: dict[str, Any]
    num_segments: int | None

    def head_of(self, tokens: Callable[[Tensor], Tensor]) -> dict[str, Any]:
        """Options of the head. ``tokens`` selects the elements of a temperature per token."""
        return {k: tokens(v) if k == "temperature" and isinstance(v, Tensor) else v for k, v in self.head.items()}

    def to(self, dtype: torch.dtype) -> "LossInputs":
        """The inputs with operands of matmuls, also those of a dense teacher, in another dtype."""

        def cast(name: str, value: Any) -> Any:
            return value.to(dtype) if name in ("bias", "teacher_hidden", "teacher_weight", "teacher_bias") else value

        return LossInputs(
            self.hidden.to(dtype), self.weight.to(dtype), self.target,
            {k: cast(k, v) for k, v in self.batch.items()}, {k: cast(k, v) for k, v in self.head.items()},
            self.num_segments,
        )  # fmt: skip

    def on(self, device: str) -> "LossInputs":
        def moved(values: Mapping[str, Any]) -> dict[str, Any]:
            return {k: v.to(device) if isinstance(v, Tensor) else v for k, v in values.items()}

        operands = [None if t is None else t.to(device) for t in (self.hidden, self.weight, self.target)]
        hidden, weight, target = operands
        assert hidden is not None and weight is not None
        return LossInputs(hidden, weight, target, moved(self.batch), moved(self.head), self.num_segments)


def inputs_of(
    case: LossCase,
    dtype: torch.dtype,
    device: str,
    garbage: bool = False,
    seed: int = 3,
    tokens: int = TOKENS,
    vocab: int = VOCAB,
    more: tuple[str, ...] = (),  # fields beside the case's
) -> LossInputs:
    """Operands and fields; with ``garbage``, nan and the like wherever a token does not count."""
    made = torch.Generator().manual_seed(seed)
    teacher_vocab = case.teacher_vocab
    if vocab != VOCAB:  # a row more or fewer than the student, as there
        teacher_vocab = max(1, vocab + (teacher_vocab > VOCAB) - (teacher_vocab < VOCAB))
    names = tuple(dict.fromkeys((*case.batch, *more)))

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=made)

    hidden, weight = normal(tokens, HIDDEN), normal(vocab, HIDDEN) * 2.0 / HIDDEN**0.5
    target = torch.randint(0, vocab, (tokens,), generator=made)
    ignored = torch.rand(tokens, generator=made) < 0.2
    masked = torch.rand(tokens, generator=made) < 0.1
    # bf16 and fp32 see the same numbers: gradients may then be compared across paths
    hidden, weight = hidden.to(dtype).float(), weight.to(dtype).float()
    x = hidden @ weight.t() * case.head.get("logit_scale", 1.0)
    own = x.log_softmax(-1).gather(1, target[:, None])[:, 0]
    lengths = torch.tensor([11, 1, 17, 13, 7, 0, 20, 9, 12] if tokens > 60 else [5, 1, 7, 6, 3, 0, 8, 4, 3])
    segments = torch.cat([torch.full((int(n),), i) for i, n in enumerate(lengths)] + [torch.full((tokens,), -1)])[
        :tokens
    ]
    ignored |= segments == 7  # a segment of which no token counts
    teacher_x = normal(tokens, teacher_vocab) * 2.0
    top = teacher_x[:, :vocab].log_softmax(-1).topk(min(K, vocab, teacher_vocab))
    teacher_mask = torch.rand(top.indices.shape, generator=made) < 0.8
    ids = top.indices.clone()
    if "teacher_mask" in case.batch:
        ids[:, 1:2] = torch.where(teacher_mask[:, 1:2], ids[:, 1:2], 10**6)  # what is padding may be any number
    width = 48
    fields = {
        "mask": ~masked,
        "token_weights": torch.rand(tokens, generator=made) * 2.0,
        "old_logprobs": (own + 0.3 * normal(tokens)).clamp(max=0.0),
        "ref_logprobs": (own + 0.3 * normal(tokens)).clamp(max=0.0),
        "rollout_logprobs": (own + 0.3 * normal(tokens)).clamp(max=0.0),
        "advantages": normal(tokens),
        "segments": segments,
        "documents": segments.flip(0),
        "nll_mask": torch.rand(tokens, generator=made) < 0.5,
        "pairs": torch.tensor([[0, 1], [2, 3], [4, 6], [7, 8], [5, 0]]),
        "segment_labels": torch.tensor([True, False, True, True, False, True, False, False, True]),
        "kl_baseline": torch.tensor(0.3),
        "teacher_logits": teacher_x,
        "teacher_hidden": normal(tokens, width),
        "teacher_weight": normal(teacher_vocab, width) * 2.0 / width**0.5,
        "teacher_bias": normal(teacher_vocab),
        "teacher_ids": ids,
        "teacher_logprobs": top.values,
        "teacher_mask": teacher_mask,
        "kept_ids": kept_ids_of(made, tokens, vocab),
    }
    batch = {name: fields[name] for name in names}
    kept = ~ignored if case.target else torch.ones(tokens, dtype=torch.bool)
    kept = kept & fields["mask"] if "mask" in batch else kept
    if garbage:
        hidden[~kept] = torch.nan
        for name, value in batch.items():
            if name in ("mask", "pairs", "segment_labels", "kl_baseline", "teacher_weight", "teacher_bias"):
                continue
            value[~kept] = torch.nan if value.is_floating_point() else 10**9 if value.dtype == torch.int64 else True
    head: dict[str, Any] = dict(case.head)
    if head.get("bias"):
        head["bias"] = normal(vocab).to(device, dtype)
    if head.get("temperature") == "each":
        head["temperature"] = torch.where(kept, 0.4 + 1.6 * torch.rand(tokens, generator=made), torch.nan).to(device)
    operand = ("teacher_hidden", "teacher_weight", "teacher_bias")
    batch = {name: value.to(device, dtype if name in operand else None) for name, value in batch.items()}
    target = torch.where(ignored, -100, target).to(device)
    if garbage and "mask" in batch:
        target = torch.where(batch["mask"], target, 10**9)
    return LossInputs(
        hidden.to(device, dtype), weight.to(device, dtype), target if case.target else None, batch, head,
        SEGMENTS if "segments" in names or "documents" in names else None,
    )  # fmt: skip


def kept_ids_of(made: torch.Generator, tokens: int, vocab: int, most: int = 9, empty: float = 0.25) -> Tensor:
    """Sets of ids [tokens, most], -1 for none: some empty, some of one, some that name an id twice."""
    ids = torch.randint(0, vocab, (tokens, most), generator=made)
    sizes = torch.randint(1, most + 1, (tokens, 1), generator=made)
    ids = torch.where(torch.arange(most) < sizes, ids, -1)
    ids[::3, -1] = ids[::3, 0]
    return ids.masked_fill((torch.rand(tokens, generator=made) < empty)[:, None], -1)


def case(name: str, *terms: tuple, batch: str = "", head: Mapping[str, Any] | None = None, **more: Any) -> LossCase:
    made = tuple(Term(*(term if isinstance(term[0], float) else (1.0, *term))) for term in terms)
    return LossCase(name, made, tuple(batch.split()), head or {}, **more)


DENSE_HIDDEN = "teacher_hidden teacher_weight"
TOKEN_CASES = [
    case("cross-entropy", ("cross_entropy",)),
    case("smoothing", ("cross_entropy", {"label_smoothing": 0.1}), batch="mask token_weights"),
    case("dft", ("cross_entropy", {"token_scaling": True})),
    case("eaft", ("cross_entropy", {"entropy_scaling": 0.5}), batch="mask"),
    case("focal", ("focal", {"gamma": 1.5}), batch="token_weights"),
    case("unlikelihood", ("unlikelihood",), batch="token_weights"),
    case("entropy", ("entropy",), batch="mask", target=False),
    case("z-loss", ("z_loss",), target=False),
    case("sum", ("cross_entropy",), (1e-2, "z_loss"), (-0.1, "entropy"), batch="mask token_weights"),
    case("two-temperatures", ("cross_entropy",), (0.5, "entropy", {"temperature": 2.0}), (0.1, "z_loss")),
    case("temperature", ("cross_entropy",), (-0.1, "entropy"), head={"temperature": 0.7, "softcap": 9.0}),
    case("entropy-head", (1.0, "cross_entropy"), (-0.1, "entropy"), head={"bias": True, "logit_scale": 0.6, "softcap": 8.0}),
    case("temperatures", ("cross_entropy",), head={"temperature": "each", "logit_scale": 0.8}),
    case("temperatures-cap", ("grpo",), (-0.1, "entropy"), (0.1, "z_loss"), batch=POLICY + " mask", head={"temperature": "each", "softcap": 9.0, "bias": True}),
    case("kept", ("grpo",), (-0.1, "entropy"), (0.1, "z_loss"), batch=POLICY + " kept_ids mask token_weights"),
    case("kept-head", ("cispo",), (-0.1, "entropy", {"temperature": 2.0}), batch=POLICY + " kept_ids", head={"softcap": 8.0, "bias": True, "logit_scale": 0.7}),
    case("kept-temperatures", ("cross_entropy",), batch="kept_ids", head={"temperature": "each"}),
    case("reinforce", ("reinforce", {"rollout": "truncate"}), batch=POLICY + " rollout_logprobs mask"),
    case("grpo", ("grpo",), batch=POLICY + " mask token_weights"),
    case("grpo-dual", ("grpo", {"clip_high": 0.28, "dual_clip": 1.5}), batch=POLICY),
    case("grpo-sum", ("grpo",), (1e-3, "z_loss"), (-0.01, "entropy"), (0.1, "kl_to_reference"), batch=POLICY + " ref_logprobs"),
    case("cispo", ("cispo", {"clip_high": 0.2, "clip_low": 0.2}), batch=POLICY),
    case("sapo", ("sapo",), batch=POLICY),
    case("kl", ("kl_to_reference", {"estimator": "k3", "bias_correction": True}), batch="ref_logprobs old_logprobs"),
    case("reductions", ("grpo", {"reduction": "sum"}), (0.1, "cross_entropy", {"normalizer": 123.0}), batch=POLICY),
    case("nll-mask", ("cross_entropy", {"token_weights": "nll_mask"}), batch="nll_mask"),
]  # fmt: skip
SEGMENT_CASES = [
    case("gspo", ("gspo",), batch=SEGMENTED + " mask"),
    case("gspo-kept", ("gspo",), (0.01, "entropy"), batch=SEGMENTED + " kept_ids"),
    case("gspo-token", ("gspo", {"level": "token", "weighting": "token"}), (0.01, "entropy"), batch=SEGMENTED + " token_weights"),
    case("gmpo", ("gmpo",), batch=SEGMENTED),
    case("rloo", ("rloo",), (1e-2, "z_loss"), batch=SEGMENTED),
    case("dpo", ("dpo",), batch=PAIRED),
    case("aot", ("dpo", {"variant": "aot_unpaired"}), batch=PAIRED),
    case("f-dpo", ("dpo", {"divergence": "js"}), batch=PAIRED),
    case("vespo", ("vespo",), batch=SEGMENTED + " mask"),
    case("kl-segment", ("kl_to_reference", {"bias_correction": True, "level": "segment"}), batch=SEGMENTED + " ref_logprobs"),
    case("dpo-ipo", ("dpo", {"variant": "ipo"}), batch=PAIRED + " mask"),
    case("simpo", ("simpo", {"beta": 2.0}), batch="segments pairs"),
    case("cpo", ("cpo",), (0.5, "cross_entropy", {"token_weights": "nll_mask"}), batch="segments pairs nll_mask"),
    case("orpo", ("orpo",), batch="segments pairs"),
    case("kto", ("kto",), batch="ref_logprobs segments segment_labels kl_baseline"),
]  # fmt: skip
TEACHER_CASES = [
    case("forward-kl", ("forward_kl",), batch=DENSE_HIDDEN + " teacher_bias mask", target=False),
    case("forward-kl-logits", ("forward_kl", {"temperature": 2.0, "t_squared": True}), (0.5, "cross_entropy"), batch="teacher_logits"),
    case("reverse-kl", ("reverse_kl",), batch="teacher_logits mask", target=False),
    case("reverse-kl-hidden", ("reverse_kl", {"teacher_softcap": 5.0}), batch=DENSE_HIDDEN),
    case("jsd", ("jsd", {"beta": 0.3}), batch="teacher_logits token_weights"),
    case("jsd-hidden", ("jsd", {"temperature": 1.5}), (0.5, "cross_entropy"), batch=DENSE_HIDDEN),
    case("tvd", ("tvd",), batch="teacher_logits"),
    case("drafter", ("lk",), (0.5, "lk", {"form": "hybrid", "name": "hybrid"}), batch=DENSE_HIDDEN + " mask"),
    case("mixed", (0.5, "forward_kl"), (0.5, "reverse_kl"), (0.2, "jsd"), (0.1, "tvd"), batch="teacher_logits"),
    case("teacher-only", ("forward_kl", {"teacher_temperature": 2.0, "form": "cross_entropy"}), batch="teacher_logits"),
    case("divergence", ("divergence", {"function": alpha_divergence, "options": {"alpha": 0.3}}), batch="teacher_logits mask", target=False),
    case("divergence-hidden", ("divergence", {"function": hellinger, "temperature": 1.5}), (0.5, "cross_entropy"), batch=DENSE_HIDDEN),
    case("divergence-smaller", ("divergence", {"function": alpha_divergence, "options": {"alpha": 0.7}}), (0.3, "jsd"), batch="teacher_logits token_weights", teacher_vocab=256),
    case("divergences", ("jsd", {"beta": 0.3, "name": "a"}), (0.5, "jsd", {"beta": 0.8, "name": "b"}), (0.2, "tvd"), (0.3, "divergence", {"function": hellinger}), (2.0, "vocabulary_sum", {"function": power, "options": {"power": 2.0}}), batch="teacher_logits"),
    case("vocabulary-sum", ("vocabulary_sum", {"function": power, "options": {"power": 1.7}}), batch="mask token_weights", target=False),
    case("vocabulary-sums", ("cross_entropy",), (2.0, "vocabulary_sum", {"function": power, "options": {"power": 0.8}, "name": "tsallis"}), (0.5, "vocabulary_sum", {"function": likely, "temperature": 2.0}), head={"softcap": 5.0, "bias": True}),
    case("smaller-teacher", ("forward_kl",), (0.5, "cross_entropy"), batch="teacher_logits", teacher_vocab=256),
    case("smaller-teacher-alone", ("reverse_kl",), batch=DENSE_HIDDEN, teacher_vocab=301),
    case("larger-teacher", ("jsd",), (0.1, "entropy"), batch="teacher_logits", teacher_vocab=350),
    case("capped-teacher", ("forward_kl", {"teacher_softcap": 3.0, "teacher_logit_scale": 0.8}), batch="teacher_logits", head={"softcap": 6.0}),
    case("temperatures-teacher", ("reverse_kl", {"teacher_softcap": 5.0}), (0.5, "topk_kl"), batch=DENSE_HIDDEN + " teacher_ids teacher_logprobs", head={"temperature": "each", "softcap": 6.0}),
    case("temperatures-own-teacher", ("jsd", {"teacher_temperature": 2.0}), (0.5, "cross_entropy", {"label_smoothing": 0.1}), batch="teacher_logits", head={"temperature": "each"}),
    case("topk-tail", ("topk_kl",), batch="teacher_ids teacher_logprobs"),
    case("topk-vocab", ("topk_kl", {"normalize": "vocab"}), (0.5, "cross_entropy"), batch="teacher_ids teacher_logprobs teacher_mask mask"),
    case("topk-topk", ("topk_kl", {"normalize": "topk", "divergence": "jsd"}), batch="teacher_ids teacher_logprobs teacher_mask"),
    case("topk-reverse", ("topk_kl", {"divergence": "reverse", "temperature": 2.0}), (1.0, "cross_entropy", {"label_smoothing": 0.1}), batch="teacher_ids teacher_logprobs", head={"softcap": 8.0}),
    case("topk-and-dense", ("topk_kl",), (0.5, "forward_kl"), batch="teacher_ids teacher_logprobs teacher_logits"),
]  # fmt: skip
WRITTEN_CASES = [*TOKEN_CASES, *SEGMENT_CASES, *TEACHER_CASES]
# losses of the oracle that stand in none of these
OTHER_CASES = [
    case(kind, (kind, row.options[0]), batch=row.batch())
    for kind, row in ROWS.items() if not any(term.kind == kind for one in WRITTEN_CASES for term in one.terms)
]  # fmt: skip
EVERYTHING = case("everything", ("grpo",), (0.1, "gspo"), (0.2, "topk_kl"), (0.3, "forward_kl"), (0.01, "entropy"), (0.1, "cross_entropy", {"label_smoothing": 0.1}), batch=SEGMENTED + " teacher_ids teacher_logprobs teacher_logits mask")  # fmt: skip
LOSS_CASES = [*WRITTEN_CASES, *OTHER_CASES, EVERYTHING]
# of each kind some
SOME_CASES = (
    "cross-entropy", "kept-head", "sum", "entropy-head", "grpo-sum", "gspo", "jsd-hidden", "topk-reverse", "everything",
)  # fmt: skip


# what makes a loss or a metric
FACTORIES = [
    function for module in (losses, metrics) for function in vars(module).values()
    if inspect.isfunction(function) and function.__annotations__.get("return") in (Losses, Metric)
    and "function" not in inspect.signature(function).parameters  # of a user's own
]  # fmt: skip


def leaves_of(inputs: LossInputs) -> tuple[list[Tensor], dict[str, Any]]:
    """Copies of hidden states, weight and perhaps a bias that take gradients, and the head's options with that bias."""
    leaves = [t.detach().clone().requires_grad_() for t in (inputs.hidden, inputs.weight)]
    if "bias" not in inputs.head:
        return leaves, dict(inputs.head)
    bias = inputs.head["bias"].detach().clone().requires_grad_()
    return [*leaves, bias], inputs.head | {"bias": bias}


# losses and options that ``chunked_head.reference`` has
COVERED = {"cross_entropy": {"label_smoothing"}, "z_loss": set(), "entropy": set(), "grpo": {"clip_low", "clip_high"}}


def has_reference(case: LossCase) -> bool:
    covered = all(term.kind in COVERED and term.options.keys() <= COVERED[term.kind] for term in case.terms)
    return covered and "kept_ids" not in case.batch


Numbers = tuple[Tensor, dict[str, Tensor], list[Tensor]]  # loss, parts, and gradients of hidden, weight and a bias


def by_reference(case: LossCase, inputs: LossInputs, chunk_tokens: int = 40, shards: int = 3) -> Numbers:
    """Results of ``chunked_head.reference``, in chunks and shards."""
    mix = {t.kind: (t.coefficient, partial(getattr(reference, t.kind), **t.options)) for t in case.terms}
    target = torch.zeros(len(inputs.hidden), dtype=torch.int64) if inputs.target is None else inputs.target
    batch = dict(inputs.batch)
    found = reference.linear_loss(
        inputs.hidden, inputs.weight, target, mix, token_weights=batch.pop("token_weights", None), batch=batch,
        chunk_tokens=chunk_tokens, shards=shards, **inputs.head,
    )  # fmt: skip
    return found.loss, found.parts, [grad for grad in (found.dhidden, found.dweight, found.dbias) if grad is not None]


def by_oracle(case: LossCase, inputs: LossInputs) -> Numbers:
    """Results of the oracle on full logits."""
    leaves, head = leaves_of(inputs)
    loss, parts = oracle.linear_loss(
        *leaves[:2], inputs.target, case.terms, batch=inputs.batch, num_segments=inputs.num_segments, **head
    )
    return loss.detach(), {k: v.detach() for k, v in parts.items()}, list(torch.autograd.grad(loss, leaves))


def run_reference(case: LossCase, inputs: LossInputs) -> Numbers:
    """Results on the CPU: in float64 of ``chunked_head.reference`` if it has the losses, else of the oracle."""
    inputs = inputs.on("cpu")
    covered = inputs.hidden.dtype == torch.float64 and has_reference(case)
    return by_reference(case, inputs) if covered else by_oracle(case, inputs)


def run_step(
    case: LossCase,
    inputs: LossInputs,
    measured: Sequence[Metric],
    upstream: float = 0.7,
    declared: float | None = None,
    **options: Any,
) -> tuple[LossOutput, dict[str, Any]]:
    """Ours forward and backward: what it returned, and numbers of it on the CPU."""
    leaves, head = leaves_of(inputs)
    hidden, weight = leaves[:2]
    out = linear_loss(
        hidden, weight, inputs.target, case.losses, batch=inputs.batch, num_segments=inputs.num_segments,
        metrics=measured, upstream=declared, **head, **options,
    )  # fmt: skip
    (out.loss * upstream).backward()
    return out, {
        "loss": out.loss.detach().cpu(), "parts": {name: value.cpu() for name, value in out.parts.items()},
        "metrics": {name: value.value.cpu() for name, value in out.metrics.items()},
        "grads": [leaf.grad.cpu() for leaf in leaves if leaf.grad is not None],
    }  # fmt: skip


def assert_scalar(case: LossCase, dtype: torch.dtype, ours: Tensor, eager: Tensor, truth: Tensor, what: str) -> None:
    """The budget of one number. Eager's error of it is one draw, which may happen to be next to nothing: where that
    alone breaks the budget, eager's is the largest of several draws of operands."""
    wide = torch.promote_types(dtype, torch.float32)
    try:
        assert_within_budget(ours, eager, truth, wide, what)
    except AssertionError:
        errors = [(eager.double() - truth).abs()]
        for seed in range(4, 12):
            inputs = inputs_of(case, dtype, str(ours.device), seed=seed)
            plain, exact = run_reference(case, inputs), run_reference(case, inputs.to(torch.float64))
            pair = (plain[0], exact[0]) if what == "loss" else (plain[1][what], exact[1][what])
            errors.append((pair[0].double() - pair[1]).abs())
        assert_within_budget(ours, truth + torch.stack(errors).amax(), truth, wide, what)


# interpreted, each step is slow: a path per loss, in turn, and all of them on a GPU
SCHEDULES: list[dict[str, Any]] = [{"chunk_tokens": 32}, {}, {"chunk_tokens": 64 if torch.cuda.is_available() else 16}]


def loss_combinations() -> list:
    """Cases x places, each in one dtype in turn; in every dtype exhaustive. Interpreted, two of four, in fp16 or fp32."""
    found = []
    for place in PLACES:
        for i, case in enumerate(LOSS_CASES):
            for j, dtype in enumerate((torch.float32, torch.bfloat16, torch.float16)):
                interpreted = place.id == "triton-interpreted"
                if interpreted and dtype != (torch.float16, torch.float32)[i % 2]:
                    continue
                param = pytest.param(
                    case, dtype, place.values[0], SCHEDULES[(i + i // 3) % 3], marks=place.marks,
                    id=f"{case.name}-{str(dtype)[6:]}-{place.id}",
                )  # fmt: skip
                always = dtype == torch.bfloat16 and place.id == "triton-cuda"
                turn = i % 4 > 1 or case.name in (*SOME_CASES, "two-temperatures") if interpreted else i % 3 == j
                found += tier(param, always or turn)
    return found


def run_ours(case: LossCase, inputs: Any, place: Place, **more: Any) -> tuple[LossOutput, list[torch.Tensor]]:
    leaves, head = leaves_of(inputs)
    hidden, weight = leaves[:2]
    out = linear_loss(
        hidden, weight, inputs.target, case.losses, batch=inputs.batch, num_segments=inputs.num_segments,
        backend=place.backend, **head, **more,
    )  # fmt: skip
    return out, list(torch.autograd.grad(out.loss, leaves, torch.full_like(out.loss, 0.37)))


def hold(case: LossCase, dtype: torch.dtype, place: Place, schedule: dict[str, Any]) -> None:
    """Checks a call against the budget, which the oracle on full logits defines."""
    sizes = FEWER if place == Place("triton", "cpu") else {}
    inputs = inputs_of(case, dtype, place.device, **sizes)
    truth = run_reference(case, inputs.to(torch.float64))
    eager = run_reference(case, inputs)
    garbage = inputs_of(case, dtype, place.device, garbage=True, **sizes)
    out, grads = run_ours(case, garbage, place, **schedule)
    wide = torch.promote_types(dtype, torch.float32)
    assert out.loss.dtype == wide and out.loss.shape == ()
    assert out.parts.keys() == truth[1].keys()
    for name, value in out.parts.items():
        assert_scalar(case, dtype, value, eager[1][name], truth[1][name], name)
    assert_scalar(case, dtype, out.loss, eager[0], truth[0], "loss")
    for name, ours, plain, exact in zip(("hidden", "weight", "bias"), grads, eager[2], truth[2], strict=False):
        assert ours.dtype == dtype
        assert_within_budget(ours, 0.37 * plain.double(), 0.37 * exact, dtype, f"gradient of {name}")
