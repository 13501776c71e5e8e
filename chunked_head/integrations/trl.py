"""TRL's trainers on this library's head: ``patch_trl()`` before a trainer computes its first loss, and nothing else.

    from chunked_head.integrations.trl import patch_trl
    patch_trl(memory_budget="1GiB")
    SFTTrainer(...).train()

Two autograd functions of TRL's make per-token statistics of hidden states and the head's weight, and ours take their
place: ``ChunkedLogProbFunction`` (SFT, DPO, KTO, GRPO, RLOO and what derives from them; in TRL 1.14 where
``use_liger_kernel=True`` asks for it, and not SFT) and ``ChunkedDivergenceFunction`` (distillation, from TRL 1.15 on).
Values are TRL's, but for logits that ours does not round to 16 bits.

Gradients wait for the loss that TRL computes of them: four matmuls. ``patch_trl(losses=("SFT",))`` foresees SFT's loss
from its config and batch, and makes gradients along with the statistics: three. TRL computes its loss all the same;
backward compares its gradient with the foreseen one, and where it is another computes the logits again.
"""

import contextlib
import functools
import inspect
import warnings
from collections.abc import Callable, Collection, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Unpack

import torch
from torch import Tensor

from .. import losses as mixes
from .. import metrics
from ..call.options import Call, Execution, call_of
from ..call.run import on_device
from ..call.run import run as run_call
from ..call.spec import spec_of
from ..functions.divergence import linear_divergence
from ..functions.logprobs import linear_logprobs
from ..losses.base import Losses
from .frameworks import Framework, Place, check_named
from .huggingface.fused import mean_logits

OPTIONS = ("memory_budget", "chunk_tokens", "accumulate_dtype", "deterministic", "backend")
OUTPUTS = ("log_probs", "entropy", "log_sum_sq_probs", "mean_logits", "is_top1")
Outputs = tuple[Tensor | None, ...]
Run = Callable[[Tensor, Tensor, Tensor | None], Any]
STEP: ContextVar[tuple[Any, Any] | None] = ContextVar("step", default=None)  # SFTTrainer, and the batch of its step


@dataclass(frozen=True)
class LogProbSeam:
    """Stands for TRL's ``ChunkedLogProbFunction``."""

    options: Execution  # of each call
    returned: int = len(OUTPUTS)  # TRL 1.14's, which takes no ``outputs``, returns the first two
    foresees: bool = False  # SFT's loss

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
        entropy, top1 = "entropy" in outputs, "is_top1" in outputs
        head: dict[str, Any] = {
            "temperature": temperature, "softcap": final_logit_softcapping, "logit_scale": logit_scale, **self.options
        }  # fmt: skip

        def run(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Outputs:
            weight, bias = operands(hidden, weight, bias)
            averaged, capped = "mean_logits" in outputs, final_logit_softcapping is not None
            found = linear_logprobs(
                hidden, weight, targets, bias=bias, entropy=entropy, log_sum_sq_probs="log_sum_sq_probs" in outputs,
                mean_logit=averaged and capped, argmax=top1, **head,
            )  # fmt: skip
            logprobs = found if isinstance(found, Tensor) else found.logprobs
            squares, mean = (getattr(found, name, None) for name in ("log_sum_sq_probs", "mean_logit"))
            if averaged and not capped:
                mean = mean_logits(hidden, weight, bias) * (logit_scale / temperature)
            return (
                logprobs, getattr(found, "entropy", None), None if squares is None else squares.detach(),
                None if mean is None else mean.detach(), found.argmax == targets if top1 else None,
            )  # fmt: skip

        def at_once(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor, Outputs]:
            weight, bias = operands(hidden, weight, bias)
            assert foreseen is not None
            measured = (metrics.entropy(),) * entropy + (metrics.accuracy(),) * top1
            total, expected, stats = one_pass(hidden, weight, targets, *foreseen, measured, bias=bias, **head)
            values = [stats[name].clone().requires_grad_() for name in ("logprob", *["entropy"] * entropy)]
            found = (*values, *[None] * (4 - len(values)), stats["argmax"] == targets if top1 else None)
            return total, expected, found

        plain = self.foresees and {"log_sum_sq_probs", "mean_logits"}.isdisjoint(outputs)
        foreseen = sft_loss(len(targets)) if plain else None
        found = inner_graph(run, hidden, weight, bias, foreseen and at_once)
        return found[: self.returned]


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
        head: dict[str, Any] = {
            "temperature": temperature, "softcap": student_final_logit_softcapping, "logit_scale": student_logit_scale,
            "teacher_logit_scale": teacher_logit_scale, "teacher_softcap": teacher_final_logit_softcapping,
            **self.options,
        }  # fmt: skip

        def run(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Outputs:
            weight, bias = operands(hidden, weight, bias)
            rows = teacher_hidden.detach()
            if torch.is_autocast_enabled(rows.device.type):
                rows = rows.to(torch.get_autocast_dtype(rows.device.type))
            with gathered(teacher_weight, teacher_bias):
                teacher: dict[str, Any] = {
                    "teacher_hidden": rows,
                    "teacher_weight": teacher_weight.detach().to(rows.dtype),
                }
                if teacher_bias is not None:
                    teacher["teacher_bias"] = teacher_bias.detach().to(rows.dtype)
                found = linear_divergence(
                    hidden, weight, bias=bias, divergence="jsd", beta=beta, entropy=True, **teacher, **head
                )
            assert isinstance(found, tuple)
            return found.divergence, found.entropy.detach()

        with gathered(student_weight, student_bias):
            return inner_graph(run, student_hidden, student_weight, student_bias)


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


def one_pass(
    hidden: Tensor, weight: Tensor, target: Tensor, loss: Losses, batch: dict[str, Tensor],
    measured: tuple[metrics.Metric, ...], temperature: float, **head: Any,
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:  # fmt: skip
    """The sum of a loss over all tokens, whose gradients exist; its derivatives by log-probabilities [N]; statistics
    [N]."""
    options: Any = head
    call: Call[Any] = call_of(
        "linear_loss", hidden, weight, target, options, temperature=temperature, losses=loss, metrics=measured,
        batch=batch, reduction="sum", result=tuple,
    )  # fmt: skip
    with on_device(call.device):
        ran = run_call(call, spec_of(call))
        with torch.no_grad():
            return ran.outputs[0], -ran.objective.coefficients_at_once(ran.stats)["beta"], ran.stats.named()


def inner_graph(run: Run, hidden: Tensor, weight: Tensor, bias: Tensor | None, at_once: Run | None = None) -> Outputs:
    """``run(hidden, weight, bias)``. Its backward gathers a weight again that ZeRO-3 shards in between, or has the
    gradients of a loss that was foreseen: ``at_once`` gives that loss, its derivatives [N], and what ``run`` gives."""
    if not torch.is_grad_enabled() or (at_once is None and not hasattr(weight, "ds_id")):
        return run(hidden, weight, bias)
    return InnerGraph.apply(hidden, weight, bias, run, at_once)


class InnerGraph(torch.autograd.Function):
    """A graph within the graph: its backward runs with the parameters gathered."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, run: Run, at_once: Run | None
    ) -> Outputs:
        kind, ctx.foreseen = hidden.device.type, None
        ctx.autocast = torch.autocast(kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind))
        ctx.set_materialize_grads(False)
        with torch.enable_grad():
            ctx.run, ctx.operands = run, (hidden.detach().requires_grad_(hidden.requires_grad), weight, bias)
            if at_once is None:
                made = run(*ctx.operands)
            else:
                *ctx.foreseen, made = at_once(*ctx.operands)
        ctx.made = made
        outputs = tuple(None if value is None else value.detach() for value in made)
        fixed = [out for out, value in zip(outputs, made, strict=True) if value is not None and not value.requires_grad]
        ctx.mark_non_differentiable(*fixed)
        return outputs

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor | None) -> tuple[Tensor | None, ...]:
        _, weight, bias = ctx.operands
        made, given = ctx.made, upstream
        wanted = [operand for operand in ctx.operands if operand is not None and operand.requires_grad]
        with gathered(weight, bias):
            if ctx.foreseen is not None:
                factor = factor_of(ctx.foreseen[1], upstream)
                if factor is not None:
                    made, given = ctx.foreseen[:1], (factor,)
                else:
                    with torch.enable_grad(), ctx.autocast:
                        made = ctx.run(*ctx.operands)
            pairs = [(value, grad) for value, grad in zip(made, given, strict=True) if grad is not None]
            made, given = zip(*pairs, strict=True)
            # kept for a second backward, as the operands are: both go with the graph around
            how = {"retain_graph": True, "create_graph": torch.is_grad_enabled(), "allow_unused": True}
            found = iter(torch.autograd.grad(made, wanted, given, **how))
        return *[next(found) if needed else None for needed in ctx.needs_input_grad[:3]], None, None


def factor_of(foreseen: Tensor, upstream: Outputs) -> Tensor | None:
    """[] factor by which the first output's upstream gradient is the foreseen one; None where it is another one."""
    given, *others = upstream
    if given is not None and all(other is None for other in others):
        total = foreseen.square().sum()
        factor = torch.where(total > 0, (given * foreseen).sum() / total, 1.0)
        size = (factor * foreseen).abs()
        if bool(((given - factor * foreseen).abs() <= 1e-5 * size + 1e-6 * size.max()).all()):
            return factor
    warnings.warn(
        "TRL's loss has another gradient than patch_trl(losses=...) foresaw from its config. It is computed from the "
        "logits, again: leave losses= out here, which takes longer than without",
        stacklevel=2,
    )
    return None


def sft_loss(tokens: int) -> tuple[Losses, dict[str, Tensor]] | None:
    """The loss of SFT's step that runs, and its fields [tokens]; None outside of one. TRL makes the rows that count, or
    all of them."""
    step = STEP.get()
    if step is None or not tokens or torch.compiler.is_compiling():
        return None
    trainer, inputs = step
    try:
        labels = inputs["shift_labels"] if "shift_labels" in inputs else inputs["labels"][:, 1:]
        loss = mixes.cross_entropy(token_scaling=trainer.args.loss_type == "dft")
    except (AttributeError, KeyError):  # another version's
        return None
    sequences, length = inputs.get("labels", labels).shape
    virtual = tokens // sequences - length  # labels of a prompt's own tokens, which PEFT puts in front of the batch's
    if labels.numel() != tokens and "shift_labels" not in inputs and virtual >= 0 and not tokens % sequences:
        labels = torch.nn.functional.pad(inputs["labels"], (virtual, 0), value=-100)
    return loss, {"mask": (labels != -100).flatten()} if labels.numel() == tokens else {}


def with_step(place: Place, theirs: Callable[..., Any]) -> Callable[..., Any]:
    """SFT's ``compute_loss``, whose head finds the step's batch in ``STEP``."""

    @functools.wraps(theirs)
    def compute_loss(trainer: Any, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        before = STEP.set((trainer, inputs) if torch.is_grad_enabled() else None)
        try:
            return theirs(trainer, model, inputs, *args, **kwargs)
        finally:
            STEP.reset(before)

    return compute_loss


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
SFT = Framework("trl", TRL.tested, {("trl.trainer.sft_trainer", "SFTTrainer.compute_loss"): "model, inputs, *"})


def seams(options: Execution, losses: Collection[str] = ()) -> list[tuple[Framework, Callable[[Place, Any], Any]]]:
    """The replacement of each of TRL's functions."""
    check_named(options, OPTIONS)
    if tuple(losses) not in ((), ("SFT",)):
        raise ValueError(f'losses must be () or ("SFT",), the trainer whose loss is foreseen, got {losses!r}')

    def ours(place: Place, theirs: Any) -> Any:
        if place[1] == "ChunkedDivergenceFunction":
            return DivergenceSeam(options)
        outputs = "outputs" in inspect.signature(theirs.forward).parameters
        return LogProbSeam(options, len(OUTPUTS) if outputs else 2, bool(losses))

    return [(TRL, ours), *[(SFT, with_step)] * bool(losses)]


def patch_trl(*, losses: Collection[str] = (), **options: Unpack[Execution]) -> None:
    """Puts this library's head behind TRL's losses, for models and trainers made before the call too.

    Args:
        losses: ``("SFT",)`` makes the gradients of ``SFTTrainer`` along with log-probabilities, in three matmuls
            instead of four. TRL computes loss and metrics as ever. Where its gradient is not the foreseen one, it is
            computed, with a warning.
        options: ``memory_budget``, ``chunk_tokens``, ``accumulate_dtype``, ``deterministic``, ``backend`` of every
            call, as in ``linear_logprobs``. A second ``patch_trl`` puts its options in their place.

    A weight that has another dtype than the hidden states (fp32 masters with 16-bit activations without autocast, or
    ``cast_lm_head_to_fp32``) is cast in one piece, which the budget does not count.

    Raises:
        TypeError, ValueError: for an option that is wrong by itself. ImportError: TRL is not installed.
    """
    for framework, ours in seams(options, losses):
        framework.replace(ours)


def unpatch_trl() -> None:
    """Gives TRL its functions back; without ``patch_trl`` before it, nothing happens.

    Raises:
        RuntimeError: somebody has replaced ours since.
    """
    for framework in (TRL, SFT):
        framework.give_back()


@contextlib.contextmanager
def patched_trl(*, losses: Collection[str] = (), **options: Unpack[Execution]) -> Iterator[None]:
    """``patch_trl(losses=..., **options)`` for the length of a ``with`` block, and ``unpatch_trl()`` after it."""
    patch_trl(losses=losses, **options)
    try:
        yield
    finally:
        unpatch_trl()
