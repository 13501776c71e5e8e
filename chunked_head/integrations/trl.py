"""TRL's trainers on this library's head, by a call of ``patch_trl()`` before a trainer computes its first loss.

    from chunked_head.integrations.trl import patch_trl
    patch_trl(memory_budget="1GiB")
    SFTTrainer(...).train()

Two autograd functions of TRL make statistics per token of hidden states and the head's weight. ``patch_trl`` replaces
both:

- ``ChunkedLogProbFunction``, for SFT, DPO, KTO, GRPO, RLOO and trainers derived from them. TRL 1.14 uses this function
  only with ``use_liger_kernel=True``, and never for SFT.
- ``ChunkedDivergenceFunction``, for distillation, from TRL 1.15 on.

Values differ from TRL's only where TRL rounds logits to 16 bits.

Gradients are made in backward, when the loss that TRL computes from the statistics is known. This takes four matmuls.
With a frozen head (under LoRA) it takes two, or three if the loss has a gradient by entropies too (GRPO with
``entropy_coef``).

``patch_trl(losses=("SFT",))`` derives SFT's loss from its config and batch, and makes gradients along with the
statistics: three matmuls. TRL computes its loss all the same. Backward compares the gradient of TRL's loss with the
gradient of the derived loss. If they differ, backward computes logits and gradients again.
"""

import contextlib
import functools
import inspect
import itertools
import warnings
from collections.abc import Callable, Collection, Iterator
from contextvars import ContextVar
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
from ..functions.logprobs import LogprobsOfTrainer, with_first_planned
from ..losses.base import Losses
from .frameworks import Framework, ObjectPath, check_named
from .huggingface.fused import mean_logits

OPTIONS = ("memory_budget", "chunk_tokens", "accumulate_dtype", "deterministic", "backend")  # names that users pass
OUTPUT_NAMES = ("log_probs", "entropy", "log_sum_sq_probs", "mean_logits", "is_top1")
OutputTuple = tuple[Tensor | None, ...]  # a tensor [N] or None for each output
RunFunction = Callable[[Tensor, Tensor, Tensor | None], OutputTuple]  # (hidden, weight, bias) -> outputs for TRL
# Returns the foreseen loss [], its derivatives [N] by the tokens' log-probabilities, and what a RunFunction returns
RunWithLossFunction = Callable[[Tensor, Tensor, Tensor | None], tuple[Tensor, Tensor, OutputTuple]]
# the SFTTrainer whose step runs, and the batch of that step; None outside of a step
SFT_STEP: ContextVar[tuple[Any, Any] | None] = ContextVar("step", default=None)


class LogProbSeam:
    """The object that replaces TRL's autograd function ``ChunkedLogProbFunction``."""

    def __init__(
        self,
        options: Execution,  # options of every call
        num_outputs: int = len(OUTPUT_NAMES),  # 2 for TRL 1.14, whose function takes no ``outputs``
        foresees_loss: bool = False,  # gradients of SFT's loss are made along with the statistics
    ):
        self.options, self.num_outputs, self.foresees_loss = options, num_outputs, foresees_loss
        self.logprobs = LogprobsOfTrainer()

    def apply(
        self,
        hidden: Tensor,  # [N, H]
        weight: Tensor,  # [V, H]
        bias: Tensor | None,  # [V]
        targets: Tensor,  # [N] int64, all of which count
        temperature: float,
        chunk_size: int,  # of TRL's tiles; not read, since the plan decides
        final_logit_softcapping: float | None = None,
        logit_scale: float = 1.0,
        outputs: tuple[str, ...] = OUTPUT_NAMES,  # names of requested outputs
    ) -> OutputTuple:
        """Returns log-probabilities, entropies, logarithms of the sum of squared probabilities, mean logits, and a
        mask of the targets that are the first id with the largest logit. Each result is [N], or None if ``outputs``
        does not name it. Log-probabilities and entropies are differentiable."""
        unknown_names = sorted(set(outputs) - set(OUTPUT_NAMES))
        if unknown_names:
            raise ValueError(f"outputs must be among {', '.join(map(repr, OUTPUT_NAMES))}, got {unknown_names[0]!r}")

        outputs = outputs if self.num_outputs == len(OUTPUT_NAMES) else OUTPUT_NAMES[: self.num_outputs]
        has_entropy, has_top1 = "entropy" in outputs, "is_top1" in outputs
        head_options: dict[str, Any] = {
            "temperature": temperature, "softcap": final_logit_softcapping, "logit_scale": logit_scale, **self.options
        }  # fmt: skip

        def run(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> OutputTuple:
            weight, bias = product_operands(hidden, weight, bias)
            has_mean_logits, has_softcap = "mean_logits" in outputs, final_logit_softcapping is not None
            results = self.logprobs(
                hidden, weight, targets, bias=bias, entropy=has_entropy, log_sum_sq_probs="log_sum_sq_probs" in outputs,
                mean_logit=has_mean_logits and has_softcap, argmax=has_top1, **head_options,
            )  # fmt: skip
            logprobs = results if isinstance(results, Tensor) else results.logprobs
            log_sum_sq_probs, mean_logit = (getattr(results, name, None) for name in ("log_sum_sq_probs", "mean_logit"))
            if has_mean_logits and not has_softcap:
                mean_logit = mean_logits(hidden, weight, bias) * (logit_scale / temperature)
            return (
                logprobs, getattr(results, "entropy", None), detached(log_sum_sq_probs), detached(mean_logit),
                results.argmax == targets if has_top1 else None,
            )  # fmt: skip

        def run_with_loss(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor, OutputTuple]:
            weight, bias = product_operands(hidden, weight, bias)
            assert loss_and_fields is not None
            metric_functions = (metrics.entropy(),) * has_entropy + (metrics.accuracy(),) * has_top1
            loss, slopes, statistics = loss_and_statistics(
                hidden, weight, targets, *loss_and_fields, metric_functions, bias=bias, **head_options
            )
            inner_outputs = [
                statistics[name].clone().requires_grad_() for name in ("logprob", *["entropy"] * has_entropy)
            ]
            is_top1 = statistics["argmax"] == targets if has_top1 else None
            return loss, slopes, (*inner_outputs, *[None] * (4 - len(inner_outputs)), is_top1)

        is_foreseeable = self.foresees_loss and {"log_sum_sq_probs", "mean_logits"}.isdisjoint(outputs)
        loss_and_fields = sft_loss(len(targets)) if is_foreseeable else None
        results = run_inner_graph(run, hidden, weight, bias, loss_and_fields and run_with_loss)
        return results[: self.num_outputs]


class DivergenceSeam:
    """The object that replaces TRL's autograd function ``ChunkedDivergenceFunction``."""

    def __init__(self, options: Execution):
        self.options = options

    def apply(
        self,
        student_hidden: Tensor,  # [N, H_s]
        student_weight: Tensor,  # [V, H_s]
        student_bias: Tensor | None,  # [V]
        teacher_hidden: Tensor,  # [N, H_t]
        teacher_weight: Tensor,  # [V, H_t]
        teacher_bias: Tensor | None,  # [V]
        beta: float,  # weight of the teacher in the JSD; 0: forward KL, 1: reverse KL
        temperature: float = 1.0,
        student_logit_scale: float = 1.0,
        student_final_logit_softcapping: float | None = None,
        teacher_logit_scale: float = 1.0,
        teacher_final_logit_softcapping: float | None = None,
    ) -> OutputTuple:
        """Returns the divergence [N], differentiable, and the student's entropy [N], without gradient. The divergence
        is forward KL for ``beta`` 0, reverse KL for 1, else the JSD."""
        head_options: dict[str, Any] = {
            "temperature": temperature, "softcap": student_final_logit_softcapping, "logit_scale": student_logit_scale,
            "teacher_logit_scale": teacher_logit_scale, "teacher_softcap": teacher_final_logit_softcapping,
            **self.options,
        }  # fmt: skip

        def run(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> OutputTuple:
            weight, bias = product_operands(hidden, weight, bias)
            teacher_rows = teacher_hidden.detach()
            if torch.is_autocast_enabled(teacher_rows.device.type):
                teacher_rows = teacher_rows.to(torch.get_autocast_dtype(teacher_rows.device.type))
            with gathered_parameters(teacher_weight, teacher_bias):
                teacher_options: dict[str, Any] = {
                    "teacher_hidden": teacher_rows,
                    "teacher_weight": teacher_weight.detach().to(teacher_rows.dtype),
                }
                if teacher_bias is not None:
                    teacher_options["teacher_bias"] = teacher_bias.detach().to(teacher_rows.dtype)
                options = {"bias": bias, "divergence": "jsd", "beta": beta, "entropy": True, **teacher_options}
                options |= head_options
                if torch.compiler.is_compiling():
                    results: Any = linear_divergence(hidden, weight, **options)
                else:  # the entropy takes no gradient
                    results = with_first_planned("linear_divergence", hidden, weight, **options)
            return results.divergence, results.entropy.detach()

        with gathered_parameters(student_weight, student_bias):
            return run_inner_graph(run, student_hidden, student_weight, student_bias)


def product_operands(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Weight and bias, cast to the dtype of the hidden states as in TRL; under autocast unchanged."""
    if torch.is_autocast_enabled(hidden.device.type):
        return weight, bias
    return weight.to(hidden.dtype), None if bias is None else bias.to(hidden.dtype)


def detached(values: Tensor | None) -> Tensor | None:
    """``values`` without a gradient; None for None."""
    return None if values is None else values.detach()


def gathered_parameters(*parameters: Tensor | None) -> Any:
    """A context in which this rank holds complete parameters, also those that DeepSpeed's ZeRO-3 shards."""
    if not any(hasattr(parameter, "ds_id") for parameter in parameters):
        return contextlib.nullcontext()
    from trl.trainer.utils import maybe_gather_lm_head_ctx

    return maybe_gather_lm_head_ctx(*parameters)


def loss_and_statistics(
    hidden: Tensor, weight: Tensor, targets: Tensor, loss: Losses, batch: dict[str, Tensor],
    metric_functions: tuple[metrics.Metric, ...], temperature: float, **head_options: Any,
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:  # fmt: skip
    """Returns the sum [] of ``loss`` over all tokens, the derivatives [N] of the sum by the tokens' log-probabilities,
    and the statistics [N] of the tokens by name. The sum's gradients are computed in the same pass."""
    options: Any = head_options
    call: Call[Any] = call_of(
        "linear_loss", hidden, weight, targets, options, temperature=temperature, losses=loss, metrics=metric_functions,
        batch=batch, reduction="sum", result=tuple,
    )  # fmt: skip
    (loss_sum,), work = run_call(call, spec_of(call))
    objective: Any = work.objective
    with on_device(call.device), torch.no_grad():
        slopes = -objective.coefficients_at_once(objective.stats)["beta"]
        return loss_sum, slopes, objective.stats.by_name


def run_inner_graph(
    run: RunFunction,
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    run_with_loss: RunWithLossFunction | None = None,
) -> OutputTuple:
    """Returns the outputs of ``run(hidden, weight, bias)``. ``run_with_loss`` also makes the loss that TRL's trainer is
    expected to compute from them, and its gradients for backward. With it, or if ZeRO-3 shards the weight, which
    backward has to gather again, the outputs come from one node of autograd's graph."""
    if not torch.is_grad_enabled() or (run_with_loss is None and not hasattr(weight, "ds_id")):
        return run(hidden, weight, bias)
    return InnerGraphFunction.apply(hidden, weight, bias, run, run_with_loss)


class InnerGraphFunction(torch.autograd.Function):
    """An autograd function. Its forward builds an inner graph of ``run``. Its backward gathers complete parameters, and
    runs the backward of the inner graph."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        run: RunFunction,
        run_with_loss: RunWithLossFunction | None,
    ) -> OutputTuple:
        device_type, ctx.loss, ctx.slopes = hidden.device.type, None, None
        ctx.autocast = torch.autocast(
            device_type, torch.get_autocast_dtype(device_type), torch.is_autocast_enabled(device_type)
        )
        ctx.set_materialize_grads(False)
        with torch.enable_grad():
            ctx.run, ctx.operands = run, (hidden.detach().requires_grad_(hidden.requires_grad), weight, bias)
            if run_with_loss is None:
                inner_outputs = run(*ctx.operands)
            else:
                ctx.loss, ctx.slopes, inner_outputs = run_with_loss(*ctx.operands)
        ctx.inner_outputs = inner_outputs
        outputs = tuple(None if value is None else value.detach() for value in inner_outputs)
        is_constant = [value is not None and not value.requires_grad for value in inner_outputs]
        ctx.mark_non_differentiable(*itertools.compress(outputs, is_constant))
        return outputs

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor | None) -> tuple[Tensor | None, ...]:
        _, weight, bias = ctx.operands
        inner_outputs, upstreams = ctx.inner_outputs, upstream
        inputs = [operand for operand in ctx.operands if operand is not None and operand.requires_grad]
        with gathered_parameters(weight, bias):
            if ctx.loss is not None:
                factor = factor_of(ctx.slopes, upstream)
                if factor is not None:
                    inner_outputs, upstreams = (ctx.loss,), (factor,)
                else:
                    with torch.enable_grad(), ctx.autocast:
                        inner_outputs = ctx.run(*ctx.operands)
            outputs_with_grads = [
                (value, grad) for value, grad in zip(inner_outputs, upstreams, strict=True) if grad is not None
            ]
            inner_outputs, upstreams = zip(*outputs_with_grads, strict=True)
            # the graph is retained for a second backward, as the operands are, until the outer graph goes
            options = {"retain_graph": True, "create_graph": torch.is_grad_enabled(), "allow_unused": True}
            grads = iter(torch.autograd.grad(inner_outputs, inputs, upstreams, **options))
        return *[next(grads) if needs_grad else None for needs_grad in ctx.needs_input_grad[:3]], None, None


def factor_of(slopes: Tensor, upstream: OutputTuple) -> Tensor | None:
    """The factor [] for which ``factor * slopes`` is the upstream gradient of the log-probabilities. Returns None and
    warns if there is no such factor, or if another output has a gradient."""
    logprobs_grad, *other_grads = upstream
    if logprobs_grad is not None and all(grad is None for grad in other_grads):
        square_sum = slopes.square().sum()
        factor = torch.where(square_sum > 0, (logprobs_grad * slopes).sum() / square_sum, 1.0)
        magnitude = (factor * slopes).abs()
        if bool(((logprobs_grad - factor * slopes).abs() <= 1e-5 * magnitude + 1e-6 * magnitude.max()).all()):
            return factor
    warnings.warn(
        "TRL's loss has another gradient than patch_trl(losses=...) foresaw from its config. It is computed from the "
        "logits, again: leave losses= out here, which takes longer than without",
        stacklevel=2,
    )
    return None


def sft_loss(num_tokens: int) -> tuple[Losses, dict[str, Tensor]] | None:
    """Returns the loss of the SFT step that runs, and the loss's fields [tokens] by name; None if no SFT step runs.
    ``num_tokens``: number of rows that TRL passes to the head: all tokens of the batch, or all that count."""
    trainer_and_batch = SFT_STEP.get()
    if trainer_and_batch is None or not num_tokens or torch.compiler.is_compiling():
        return None
    trainer, inputs = trainer_and_batch
    try:
        labels = inputs["shift_labels"] if "shift_labels" in inputs else inputs["labels"][:, 1:]
        loss = mixes.cross_entropy(token_scaling=trainer.args.loss_type == "dft")
    except (AttributeError, KeyError):  # a batch or config of another version
        return None
    num_sequences, sequence_length = inputs.get("labels", labels).shape
    num_prompt_tokens = num_tokens // num_sequences - sequence_length  # PEFT's virtual prompt in front of each sequence
    if (
        labels.numel() != num_tokens
        and "shift_labels" not in inputs
        and num_prompt_tokens >= 0
        and not num_tokens % num_sequences
    ):
        labels = torch.nn.functional.pad(inputs["labels"], (num_prompt_tokens, 0), value=-100)
    return loss, {"mask": (labels != -100).flatten()} if labels.numel() == num_tokens else {}


def with_sft_step(object_path: ObjectPath, original: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps ``original``, the ``compute_loss`` of SFTTrainer: ``SFT_STEP`` holds the trainer and the step's batch while
    ``original`` runs."""

    @functools.wraps(original)
    def compute_loss(trainer: Any, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        reset_token = SFT_STEP.set((trainer, inputs) if torch.is_grad_enabled() else None)
        try:
            return original(trainer, model, inputs, *args, **kwargs)
        finally:
            SFT_STEP.reset(reset_token)

    return compute_loss


# names of the parameters of ``apply``, as in TRL; in TRL 1.14 the first has another name, and ``outputs`` is missing
LOGPROB_PARAMETERS, DIVERGENCE_PARAMETERS = (
    ", ".join([*inspect.signature(seam_class.apply).parameters][1:]) for seam_class in (LogProbSeam, DivergenceSeam)
)
TRL = Framework(
    "trl", ("1.14.2", "1.15.0", "1.16.0"),
    {
        ("trl.trainer.utils", "_ChunkedLogProbFunction"):
            f"{LOGPROB_PARAMETERS} | last_{LOGPROB_PARAMETERS.removesuffix(', outputs')}",
        ("trl.kernels.chunked_divergence", "ChunkedDivergenceFunction"): DIVERGENCE_PARAMETERS,
    },
    importing_modules=tuple(f"trl.trainer.{name}_trainer" for name in ("dpo", "kto", "grpo", "distillation")),
)  # fmt: skip
SFT = Framework(
    "trl", TRL.tested_versions, {("trl.trainer.sft_trainer", "SFTTrainer.compute_loss"): "model, inputs, *"}
)


def replacement_functions(
    options: Execution, losses: Collection[str] = ()
) -> list[tuple[Framework, Callable[[ObjectPath, Any], Any]]]:
    """Pairs of a framework and the argument for ``framework.replace``: a function that returns the replacement of an
    object. TypeError or ValueError for wrong arguments."""
    check_named(options, OPTIONS)
    if tuple(losses) not in ((), ("SFT",)):
        raise ValueError(f'losses must be () or ("SFT",), the trainer whose loss is foreseen, got {losses!r}')

    def replacement(object_path: ObjectPath, original: Any) -> Any:
        if object_path[1] == "ChunkedDivergenceFunction":
            return DivergenceSeam(options)
        takes_outputs = "outputs" in inspect.signature(original.forward).parameters
        return LogProbSeam(options, len(OUTPUT_NAMES) if takes_outputs else 2, bool(losses))

    return [(TRL, replacement), *[(SFT, with_sft_step)] * bool(losses)]


def patch_trl(*, losses: Collection[str] = (), **options: Unpack[Execution]) -> None:
    """Makes TRL's losses use this library's head, also in trainers that were made before the call.

    Args:
        losses: ``("SFT",)`` makes the gradients of ``SFTTrainer`` along with log-probabilities, in three matmuls
            instead of four; a frozen head takes two in both cases. TRL still computes its loss and metrics. If the
            gradient of TRL's loss differs from the foreseen gradient, gradients are computed again, with a warning.
        options: ``memory_budget``, ``chunk_tokens``, ``accumulate_dtype``, ``deterministic``, ``backend`` of every
            call, as in ``linear_logprobs``. A later call of ``patch_trl`` replaces all options of an earlier call.

    If weight and hidden states have different dtypes, the weight is cast as a whole, and the budget does not count the
    copy. Examples: an fp32 weight with 16-bit activations and no autocast; ``cast_lm_head_to_fp32``.

    Raises:
        TypeError, ValueError: an option is wrong for every call. ImportError: TRL is not installed.
    """
    for framework, replacement in replacement_functions(options, losses):
        framework.replace(replacement)


def unpatch_trl() -> None:
    """Undoes ``patch_trl``. Nothing happens if TRL is not patched.

    Raises:
        RuntimeError: other code has replaced our functions since.
    """
    for framework in (TRL, SFT):
        framework.restore()


@contextlib.contextmanager
def patched_trl(*, losses: Collection[str] = (), **options: Unpack[Execution]) -> Iterator[None]:
    """A context that calls ``patch_trl(losses=losses, **options)`` at its begin, and ``unpatch_trl()`` at its end."""
    patch_trl(losses=losses, **options)
    try:
        yield
    finally:
        unpatch_trl()
