"""TRL's trainers on this library's head: ``patch_trl()`` before a trainer computes its first loss, and nothing else.

TRL computes the losses of its trainers from per-token statistics that two autograd functions make of hidden states and
the head's weight: ``ChunkedLogProbFunction`` (SFT, DPO, KTO, GRPO, RLOO and what derives from them; in TRL 1.14 where
``use_liger_kernel=True`` asks for it, and not SFT) and ``ChunkedDivergenceFunction`` (distillation, from TRL 1.15 on).
Ours take their place:

    from chunked_head.integrations.trl import patch_trl
    patch_trl(memory_budget="1GiB")
    SFTTrainer(...).train()

Values are TRL's, but for logits that ours does not round to 16 bits: statistics come from fp32 sums. What TRL decides
before the seam stays as it is: which scale and cap a model's config names (``check_fused_head`` compares values), that
a sharded head is gathered.
"""

import contextlib
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Unpack

import torch
from torch import Tensor

from ..call.options import Execution
from ..functions.divergence import linear_divergence
from ..functions.logprobs import linear_logprobs
from .frameworks import Framework, Place, check_named

OPTIONS = ("memory_budget", "chunk_tokens", "accumulate_dtype", "deterministic", "backend")
OUTPUTS = ("log_probs", "entropy", "log_sum_sq_probs", "mean_logits", "is_top1")
Outputs = tuple[Tensor | None, ...]


@dataclass(frozen=True)
class LogProbSeam:
    """Stands for TRL's ``ChunkedLogProbFunction``."""

    options: Execution  # of each call
    returned: int = len(OUTPUTS)  # TRL 1.14's, which takes no ``outputs``, returns the first two

    def apply(
        self,
        hidden: Tensor,  # [N, H]
        weight: Tensor,  # [V, H]
        bias: Tensor | None,  # [V]
        targets: Tensor,  # [N] int64, all of which count
        temperature: float,
        chunk_size: int,  # of TRL's tiles: the plan makes ours
        final_logit_softcapping: float | None = None,
        logit_scale: float = 1.0,
        outputs: tuple[str, ...] = OUTPUTS,
    ) -> Outputs:
        """Log-probabilities, entropy, log of the sum of squared probabilities, mean logits, and True where the target
        is the first of the largest: each [N], None where not among ``outputs``. The first two are differentiable."""
        unknown = sorted(set(outputs) - set(OUTPUTS))
        if unknown:
            raise ValueError(f"outputs must be among {', '.join(map(repr, OUTPUTS))}, got {unknown[0]!r}")

        outputs = outputs if self.returned == len(OUTPUTS) else OUTPUTS[: self.returned]

        def run(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Outputs:
            weight, bias = operands(hidden, weight, bias)
            averaged, capped = "mean_logits" in outputs, final_logit_softcapping is not None
            found = linear_logprobs(
                hidden, weight, targets, bias=bias,
                entropy="entropy" in outputs, log_sum_sq_probs="log_sum_sq_probs" in outputs,
                mean_logit=averaged and capped, argmax="is_top1" in outputs, temperature=temperature,
                softcap=final_logit_softcapping, logit_scale=logit_scale, **self.options,
            )  # fmt: skip
            logprobs = found if isinstance(found, Tensor) else found.logprobs
            squares, mean = (getattr(found, name, None) for name in ("log_sum_sq_probs", "mean_logit"))
            if averaged and not capped:
                mean = mean_logits(hidden, weight, bias) * (logit_scale / temperature)
            return (
                logprobs, getattr(found, "entropy", None), None if squares is None else squares.detach(),
                None if mean is None else mean.detach(), found.argmax == targets if "is_top1" in outputs else None,
            )  # fmt: skip

        return where_gathered(run, hidden, weight, bias)[: self.returned]


@dataclass(frozen=True)
class DivergenceSeam:
    """Stands for TRL's ``ChunkedDivergenceFunction``."""

    options: Execution  # of each call

    def apply(
        self,
        student_hidden: Tensor,  # [N, H_s]
        student_weight: Tensor,  # [V, H_s]
        student_bias: Tensor | None,
        teacher_hidden: Tensor,  # [N, H_t]
        teacher_weight: Tensor,  # [V, H_t]
        teacher_bias: Tensor | None,
        beta: float,
        temperature: float = 1.0,
        student_logit_scale: float = 1.0,
        student_final_logit_softcapping: float | None = None,
        teacher_logit_scale: float = 1.0,
        teacher_final_logit_softcapping: float | None = None,
    ) -> Outputs:
        """The divergence, differentiable, and the student's entropy, without gradient, each [N]: forward KL for a
        ``beta`` of 0, reverse for 1, else the JSD."""

        def run(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Outputs:
            weight, bias = operands(hidden, weight, bias)
            rows = teacher_hidden.detach()
            if torch.is_autocast_enabled(rows.device.type):
                rows = rows.to(torch.get_autocast_dtype(rows.device.type))
            with gathered(teacher_weight, teacher_bias):
                vocabulary, offsets = (None if t is None else t.detach().to(rows.dtype) for t in teacher)
                found = linear_divergence(
                    hidden, weight, bias=bias, divergence="jsd", beta=beta, entropy=True, teacher_hidden=rows,
                    teacher_weight=vocabulary, teacher_bias=offsets, teacher_logit_scale=teacher_logit_scale,
                    teacher_softcap=teacher_final_logit_softcapping, temperature=temperature,
                    softcap=student_final_logit_softcapping, logit_scale=student_logit_scale, **self.options,
                )  # fmt: skip
                assert isinstance(found, tuple)
            return found.divergence, found.entropy.detach()

        teacher = (teacher_weight, teacher_bias)
        with gathered(student_weight, student_bias):
            return where_gathered(run, student_hidden, student_weight, student_bias)


@torch.no_grad()
def mean_logits(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """[N] fp32 or wider, products with the mean row of the weight: a pass over the logits would take longer."""
    with torch.autocast(hidden.device.type, enabled=False):
        dtype = torch.promote_types(hidden.dtype, torch.float32)
        mean = hidden.to(dtype) @ weight.mean(0, dtype=dtype)
        return mean if bias is None else mean + bias.mean(dtype=dtype)


def operands(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Weight and bias in the dtype of the matmul, as TRL casts them: autocast's, or that of the hidden states."""
    if torch.is_autocast_enabled(hidden.device.type):
        return weight, bias
    return weight.to(hidden.dtype), None if bias is None else bias.to(hidden.dtype)


def gathered(*parameters: Tensor | None) -> Any:
    """A context in which parameters that DeepSpeed's ZeRO-3 shards are complete."""
    if not any(hasattr(parameter, "ds_id") for parameter in parameters):
        return contextlib.nullcontext()
    from trl.trainer.utils import maybe_gather_lm_head_ctx

    return maybe_gather_lm_head_ctx(*parameters)


def where_gathered(
    run: Callable[[Tensor, Tensor, Tensor | None], Outputs], hidden: Tensor, weight: Tensor, bias: Tensor | None
) -> Outputs:
    """``run(hidden, weight, bias)``, whose backward gathers a weight again that ZeRO-3 shards in between."""
    if not hasattr(weight, "ds_id") or not torch.is_grad_enabled():
        return run(hidden, weight, bias)
    return Regathered.apply(hidden, weight, bias, run)


class Regathered(torch.autograd.Function):
    """A graph within the graph: its backward runs with the parameters gathered."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, run: Callable[..., Outputs]) -> Outputs:
        with torch.enable_grad():
            rows = hidden.detach().requires_grad_(hidden.requires_grad)
            made = run(rows, weight, bias)
        ctx.set_materialize_grads(False)
        ctx.operands, ctx.made = (rows, weight, bias), made
        outputs = tuple(None if value is None else value.detach() for value in made)
        fixed = [out for out, value in zip(outputs, made, strict=True) if value is not None and not value.requires_grad]
        ctx.mark_non_differentiable(*fixed)
        return outputs

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor | None) -> tuple[Tensor | None, ...]:
        _, weight, bias = ctx.operands
        wanted = [operand for operand in ctx.operands if operand is not None and operand.requires_grad]
        given = [(made, grad) for made, grad in zip(ctx.made, upstream, strict=True) if grad is not None]
        made, grads_of_made = zip(*given, strict=True)
        with gathered(weight, bias):
            found = iter(torch.autograd.grad(made, wanted, grads_of_made, allow_unused=True))
        grads = [next(found) if needed else None for needed in ctx.needs_input_grad[:3]]
        return *grads, None


# parameters of ours, which are TRL's; TRL 1.14 has another name for the first one and lacks the last one
LOGPROBS, DIVERGENCE = (
    ", ".join([*inspect.signature(seam.apply).parameters][1:]) for seam in (LogProbSeam, DivergenceSeam)
)
TRL = Framework(
    "trl", ("1.14.2", "1.15.0", "1.16.0"),
    {
        ("trl.trainer.utils", "_ChunkedLogProbFunction"): f"{LOGPROBS} | last_{LOGPROBS.removesuffix(', outputs')}",
        ("trl.kernels.chunked_divergence", "ChunkedDivergenceFunction"): DIVERGENCE,
    },
    bound=tuple(f"trl.trainer.{kind}_trainer" for kind in ("dpo", "kto", "grpo", "distillation")),
)  # fmt: skip


def seams(options: Execution) -> Callable[[Place, Any], Any]:
    """The replacement of each of TRL's functions."""
    check_named(options, OPTIONS)

    def ours(place: Place, theirs: Any) -> Any:
        if place[1] == "ChunkedDivergenceFunction":
            return DivergenceSeam(options)
        return LogProbSeam(options, len(OUTPUTS) if "outputs" in inspect.signature(theirs.forward).parameters else 2)

    return ours


def patch_trl(**options: Unpack[Execution]) -> None:
    """Puts this library's head behind TRL's losses, for models and trainers made before the call too.

    Args:
        options: ``memory_budget``, ``chunk_tokens``, ``accumulate_dtype``, ``deterministic``, ``backend`` of every
            call, as in ``linear_logprobs``. A second ``patch_trl`` puts its options in their place.

    A weight that has another dtype than the hidden states (fp32 masters with 16-bit activations without autocast, or
    ``cast_lm_head_to_fp32``) is cast in one piece, which the budget does not count.

    A function that is not as in TRL 1.14, 1.15 or 1.16 stays TRL's own, and a warning says what differs.

    Raises:
        TypeError, ValueError: for an option that is wrong by itself. ImportError: TRL is not installed.
    """
    TRL.replace(seams(options))


def unpatch_trl() -> None:
    """Gives TRL its functions back; without ``patch_trl`` before it, nothing happens.

    Raises:
        RuntimeError: somebody has replaced ours since.
    """
    TRL.give_back()


@contextlib.contextmanager
def patched_trl(**options: Unpack[Execution]) -> Iterator[None]:
    """``patch_trl(**options)`` for the length of a ``with`` block; what stood there before stands there after it."""
    with TRL.replaced(seams(options)):
        yield


@torch.no_grad()
def check_fused_head(model: Any, input_ids: Tensor | None = None, temperature: float = 1.0) -> float:
    """Largest difference in nats of log-probabilities by TRL's fused head and by ``model``; raises for a large one.

    TRL finds a model's logit scale and cap by names of its config that it knows, and takes the output embedding for all
    of the head: of other models it trains another distribution without a word. Once, after a trainer was made:

        check_fused_head(trainer.model, temperature=getattr(trainer, "temperature", 1.0))

    Args:
        model: the trainer's; its forward runs twice, in evaluation mode.
        input_ids: [batch, tokens] int64 to compare on; None: a few tokens from all over the vocabulary.
        temperature: that the trainer gave the fused head.

    Raises:
        RuntimeError: they differ by more than rounding, or no trainer of TRL's has given the model a fused head.
    """
    device = next(model.parameters()).device
    if input_ids is None:
        vocab = model.config.get_text_config().vocab_size
        input_ids = torch.linspace(1, vocab - 1, 12, dtype=torch.float64, device=device).long().view(2, 6)
    training = model.training
    model.eval()
    try:
        fused = getattr(model(input_ids=input_ids, labels=input_ids, fused_lm_head=True), "log_probs", None)
        if fused is None:
            raise RuntimeError(
                f"the forward of {type(model).__name__} has no fused head: TRL's trainers put it there when they are "
                "made; make the trainer first, then check_fused_head(trainer.model)"
            )
        logits = model(input_ids=input_ids).logits
    finally:
        model.train(training)
    plain = (logits[:, :-1].float() / temperature).log_softmax(-1)
    plain = plain.gather(-1, input_ids[:, 1:, None].to(plain.device)).squeeze(-1)
    difference = (fused.to(plain.device) - plain).abs()
    # logits of 16 bits are rounded by 2^-8 of their size, and a log-probability with them
    allowed = (1e-3 if logits.dtype == torch.float32 else 3e-2) * (1.0 + plain.abs())
    largest = float(difference.max())
    if not bool((difference <= allowed).all()):
        raise RuntimeError(
            f"TRL's fused head does not compute what {type(model).__name__} does: log-probabilities differ by up to "
            f"{largest:.3g} nats at temperature {temperature:g}; its config or its head has a scale, a cap or a layer "
            "that TRL does not know. Train it by logits (chunked_head.linear_logprobs has logit_scale, softcap, bias)"
        )
    return largest
