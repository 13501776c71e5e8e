"""TRL's trainers on this library's head: ``patch_trl()`` before a trainer computes its first loss, and nothing else.

    from chunked_head.integrations.trl import patch_trl
    patch_trl(memory_budget="1GiB")
    SFTTrainer(...).train()

Two autograd functions of TRL's make per-token statistics of hidden states and the head's weight, and ours take their
place: ``ChunkedLogProbFunction`` (SFT, DPO, KTO, GRPO, RLOO and what derives from them; in TRL 1.14 where
``use_liger_kernel=True`` asks for it, and not SFT) and ``ChunkedDivergenceFunction`` (distillation, from TRL 1.15 on).
Values are TRL's, but for logits that ours does not round to 16 bits.

Gradients wait for the loss that TRL computes of them: four matmuls, and two where the head is frozen, as it is under
LoRA. Where the loss has a gradient of entropies too, as GRPO's with ``entropy_coef``, a frozen head takes three.
``patch_trl(losses=("SFT",))`` foresees SFT's loss from its config and batch, and makes gradients along with the
statistics: three matmuls. TRL computes its loss all the same; backward compares its gradient with the foreseen one, and
where it is another computes the logits again.
"""

import contextlib
import functools
import inspect
import warnings
from collections.abc import Callable, Collection, Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Unpack

import torch
from torch import Tensor

from .. import losses as mixes
from .. import metrics
from ..call.options import Call, Execution, call_of
from ..call.run import on_device
from ..call.run import run as run_call
from ..call.spec import spec_of
from ..functions.divergence import linear_divergence
from ..functions.logprobs import LogprobsOfTrainer, with_first_planned
from ..losses.base import Losses
from .frameworks import Framework, Place, check_named
from .huggingface.fused import mean_logits

OPTIONS = ("memory_budget", "chunk_tokens", "accumulate_dtype", "deterministic", "backend")
OUTPUTS = ("log_probs", "entropy", "log_sum_sq_probs", "mean_logits", "is_top1")
Outputs = tuple[Tensor | None, ...]
Run = Callable[[Tensor, Tensor, Tensor | None], Outputs]
RunWithLoss = Callable[[Tensor, Tensor, Tensor | None], tuple["ForeseenLoss", Outputs]]
STEP: ContextVar[tuple[Any, Any] | None] = ContextVar("step", default=None)  # SFTTrainer, and the batch of its step


class ForeseenLoss(NamedTuple):
    """A loss [] whose gradients are made already, and its derivatives [N] by the tokens' log-probabilities."""

    loss: Tensor
    slopes: Tensor


@dataclass(frozen=True)
class LogProbSeam:
    """The object that replaces TRL's autograd function ``ChunkedLogProbFunction``."""

    options: Execution  # of each call
    returned: int = len(OUTPUTS)  # TRL 1.14's, which takes no ``outputs``, returns the first two
    foresees: bool = False  # SFT's loss
    logprobs: LogprobsOfTrainer = field(default_factory=LogprobsOfTrainer)

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
        has_entropy, has_top1 = "entropy" in outputs, "is_top1" in outputs
        head: dict[str, Any] = {
            "temperature": temperature, "softcap": final_logit_softcapping, "logit_scale": logit_scale, **self.options
        }  # fmt: skip

        def run(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Outputs:
            weight, bias = operands(hidden, weight, bias)
            has_mean_logits, has_softcap = "mean_logits" in outputs, final_logit_softcapping is not None
            results = self.logprobs(
                hidden, weight, targets, bias=bias, entropy=has_entropy, log_sum_sq_probs="log_sum_sq_probs" in outputs,
                mean_logit=has_mean_logits and has_softcap, argmax=has_top1, **head,
            )  # fmt: skip
            logprobs = results if isinstance(results, Tensor) else results.logprobs
            squares, mean = (getattr(results, name, None) for name in ("log_sum_sq_probs", "mean_logit"))
            if has_mean_logits and not has_softcap:
                mean = mean_logits(hidden, weight, bias) * (logit_scale / temperature)
            return (
                logprobs, getattr(results, "entropy", None), None if squares is None else squares.detach(),
                None if mean is None else mean.detach(), results.argmax == targets if has_top1 else None,
            )  # fmt: skip

        def run_with_loss(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[ForeseenLoss, Outputs]:
            weight, bias = operands(hidden, weight, bias)
            assert foreseen is not None
            measured = (metrics.entropy(),) * has_entropy + (metrics.accuracy(),) * has_top1
            loss, stats = one_pass(hidden, weight, targets, *foreseen, measured, bias=bias, **head)
            values = [stats[name].clone().requires_grad_() for name in ("logprob", *["entropy"] * has_entropy)]
            return loss, (*values, *[None] * (4 - len(values)), stats["argmax"] == targets if has_top1 else None)

        is_foreseeable = self.foresees and {"log_sum_sq_probs", "mean_logits"}.isdisjoint(outputs)
        foreseen = sft_loss(len(targets)) if is_foreseeable else None
        results = inner_graph(run, hidden, weight, bias, foreseen and run_with_loss)
        return results[: self.returned]


@dataclass(frozen=True)
class DivergenceSeam:
    """The object that replaces TRL's autograd function ``ChunkedDivergenceFunction``."""

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
                options = {"bias": bias, "divergence": "jsd", "beta": beta, "entropy": True, **teacher, **head}
                if torch.compiler.is_compiling():
                    results: Any = linear_divergence(hidden, weight, **options)
                else:  # the entropy takes no gradient
                    results = with_first_planned("linear_divergence", hidden, weight, **options)
            return results.divergence, results.entropy.detach()

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
) -> tuple[ForeseenLoss, dict[str, Tensor]]:  # fmt: skip
    """The sum of a loss over all tokens, with gradients made in this pass, and statistics [N] by name."""
    options: Any = head
    call: Call[Any] = call_of(
        "linear_loss", hidden, weight, target, options, temperature=temperature, losses=loss, metrics=measured,
        batch=batch, reduction="sum", result=tuple,
    )  # fmt: skip
    outcome = run_call(call, spec_of(call))
    with on_device(call.device), torch.no_grad():
        slopes = -outcome.objective.coefficients_at_once(outcome.stats)["beta"]
        return ForeseenLoss(outcome.outputs[0], slopes), outcome.stats.by_name


def inner_graph(
    run: Run, hidden: Tensor, weight: Tensor, bias: Tensor | None, run_with_loss: RunWithLoss | None = None
) -> Outputs:
    """``run(hidden, weight, bias)``. Its backward gathers a weight again that ZeRO-3 shards in between, or has the
    gradients of a foreseen loss: ``run_with_loss`` returns that loss beside what ``run`` returns."""
    if not torch.is_grad_enabled() or (run_with_loss is None and not hasattr(weight, "ds_id")):
        return run(hidden, weight, bias)
    return InnerGraph.apply(hidden, weight, bias, run, run_with_loss)


class InnerGraph(torch.autograd.Function):
    """A graph inside of autograd's graph, whose backward runs with the parameters gathered."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, run: Run, run_with_loss: RunWithLoss | None
    ) -> Outputs:
        kind, ctx.foreseen = hidden.device.type, None
        ctx.autocast = torch.autocast(kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind))
        ctx.set_materialize_grads(False)
        with torch.enable_grad():
            ctx.run, ctx.operands = run, (hidden.detach().requires_grad_(hidden.requires_grad), weight, bias)
            if run_with_loss is None:
                values = run(*ctx.operands)
            else:
                ctx.foreseen, values = run_with_loss(*ctx.operands)
        ctx.values = values
        outputs = tuple(None if value is None else value.detach() for value in values)
        needs_grad = [value is None or value.requires_grad for value in values]
        ctx.mark_non_differentiable(*[out for out, needs in zip(outputs, needs_grad, strict=True) if not needs])
        return outputs

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor | None) -> tuple[Tensor | None, ...]:
        _, weight, bias = ctx.operands
        values, upstreams = ctx.values, upstream
        inputs = [operand for operand in ctx.operands if operand is not None and operand.requires_grad]
        with gathered(weight, bias):
            if ctx.foreseen is not None:
                factor = factor_of(ctx.foreseen.slopes, upstream)
                if factor is not None:
                    values, upstreams = (ctx.foreseen.loss,), (factor,)
                else:
                    with torch.enable_grad(), ctx.autocast:
                        values = ctx.run(*ctx.operands)
            pairs = [(value, grad) for value, grad in zip(values, upstreams, strict=True) if grad is not None]
            values, upstreams = zip(*pairs, strict=True)
            # the graph is retained for a second backward, as the operands are, until the outer graph goes
            options = {"retain_graph": True, "create_graph": torch.is_grad_enabled(), "allow_unused": True}
            grads = iter(torch.autograd.grad(values, inputs, upstreams, **options))
        return *[next(grads) if needs else None for needs in ctx.needs_input_grad[:3]], None, None


def factor_of(slopes: Tensor, upstream: Outputs) -> Tensor | None:
    """Factor [] by which the upstream gradient of the first output is ``slopes``; None, with a warning, where it is any
    other gradient, or another output has one."""
    upstream_logprobs, *upstream_rest = upstream
    if upstream_logprobs is not None and all(grad is None for grad in upstream_rest):
        total = slopes.square().sum()
        factor = torch.where(total > 0, (upstream_logprobs * slopes).sum() / total, 1.0)
        size = (factor * slopes).abs()
        if bool(((upstream_logprobs - factor * slopes).abs() <= 1e-5 * size + 1e-6 * size.max()).all()):
            return factor
    warnings.warn(
        "TRL's loss has another gradient than patch_trl(losses=...) foresaw from its config. It is computed from the "
        "logits, again: leave losses= out here, which takes longer than without",
        stacklevel=2,
    )
    return None


def sft_loss(tokens: int) -> tuple[Losses, dict[str, Tensor]] | None:
    """The loss of the SFT step that runs, and its fields [tokens]; None outside of one. ``tokens``: how many rows TRL
    passes on, all of the batch's or those that count."""
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
    prompt_tokens = tokens // sequences - length  # of PEFT's virtual prompt, in front of each sequence
    if labels.numel() != tokens and "shift_labels" not in inputs and prompt_tokens >= 0 and not tokens % sequences:
        labels = torch.nn.functional.pad(inputs["labels"], (prompt_tokens, 0), value=-100)
    return loss, {"mask": (labels != -100).flatten()} if labels.numel() == tokens else {}


def with_step(place: Place, theirs: Callable[..., Any]) -> Callable[..., Any]:
    """SFT's ``compute_loss``, which puts the step's batch into ``STEP`` for the head."""

    @functools.wraps(theirs)
    def compute_loss(trainer: Any, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        token = STEP.set((trainer, inputs) if torch.is_grad_enabled() else None)
        try:
            return theirs(trainer, model, inputs, *args, **kwargs)
        finally:
            STEP.reset(token)

    return compute_loss


# our parameters, which are TRL's; in TRL 1.14 the first has another name and the last is missing
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
            instead of four; a frozen head takes two in any case. TRL computes loss and metrics as ever. Where its
            gradient is not the foreseen one, it is computed, with a warning.
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
