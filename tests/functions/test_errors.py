"""Bad input: a clear error that names the argument, before any work."""

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from oracle.rows import ROWS
from tracking import NoProducts

from chunked_head import (
    ChunkedHead,
    CrossEntropyLoss,
    gathered_topk_kl,
    linear_cross_entropy,
    linear_divergence,
    linear_logprobs,
    linear_loss,
    logits_logprobs,
    logits_loss,
    losses,
    metrics,
    plan,
    weights,
)
from chunked_head.integrations.liger import LigerFusedLinearCrossEntropyLoss
from chunked_head.integrations.trl import patch_trl
from chunked_head.losses.distillation import TeacherOptions
from chunked_head.losses.policy import PolicyOptions
from chunked_head.metrics import Metric, MetricOptions, MetricValue, merge


def call(dtype: torch.dtype = torch.float32, **changes: Any) -> torch.Tensor:
    arguments: dict[str, Any] = {
        "hidden": torch.randn(4, 6, 8, dtype=dtype, requires_grad=True),
        "weight": torch.randn(11, 8, dtype=dtype, requires_grad=True),
        "target": torch.randint(0, 11, (4, 6)),
    }
    return linear_cross_entropy(**(arguments | changes))


HALF = torch.float16
WRONG: list[tuple[str, type[Exception], str, dict[str, Any]]] = [
    ("hidden-0d", ValueError, r"hidden must have shape \[..., hidden\], got \(\)", {"hidden": torch.tensor(1.0)}),
    ("hidden-int", TypeError, "hidden must be one of float32.*int64", {"hidden": torch.ones(4, 6, 8, dtype=torch.int64)}),
    ("weight-3d", ValueError, r"weight must have shape \[vocab, hidden\]", {"weight": torch.randn(1, 11, 8)}),
    ("weight-columns", ValueError, r"weight must be .* the 8 columns of hidden .* got \(11, 9\)", {"weight": torch.randn(11, 9)}),
    ("vocab-size", ValueError, "vocab_size is 12, and weight has 11 rows", {"vocab_size": 12}),
    ("weight-empty", ValueError, "gather it first", {"weight": torch.randn(0, 8)}),
    ("weight-dtype", TypeError, "weight must have the dtype of hidden, float32, got float16", {"weight": torch.randn(11, 8, dtype=HALF)}),
    ("target-shape", ValueError, r"target must have shape \(4, 6\), the leading shape", {"target": torch.randint(0, 11, (24,))}),
    ("target-float", TypeError, r'class probabilities p .* call linear_loss .*forward_kl\("cross_entropy"\).*p\.log\(\)', {"target": torch.rand(4, 6)}),
    ("target-int32", TypeError, "use target.long", {"target": torch.zeros(4, 6, dtype=torch.int32)}),
    ("bias-shape", ValueError, r"bias must have shape \(11,\)", {"bias": torch.randn(8)}),
    ("bias-dtype", TypeError, "bias must have the dtype of hidden", {"bias": torch.randn(11, dtype=HALF)}),
    ("class-weights-shape", ValueError, r"class_weights of cross_entropy must have shape \(11,\)", {"class_weights": torch.rand(4)}),
    ("class-weights-grad", ValueError, "class_weights .* takes no gradient", {"class_weights": torch.rand(11, requires_grad=True)}),
    ("token-weights-shape", ValueError, r"token_weights must have shape \(4, 6\)", {"token_weights": torch.rand(4, 1)}),
    ("token-weights-grad", ValueError, "token_weights takes no gradient", {"token_weights": torch.rand(4, 6, requires_grad=True)}),
    ("token-weights-int", TypeError, "token_weights must be floating-point", {"token_weights": torch.ones(4, 6, dtype=torch.int64)}),
    ("ignore-index", TypeError, "ignore_index must be an int, got 1.5", {"ignore_index": 1.5}),
    ("normalizer-sum", ValueError, 'normalizer goes with reduction="mean"', {"normalizer": 3.0, "reduction": "sum"}),
    ("smoothing-large", ValueError, r"label_smoothing must be a number in \[0, 1\], got 1.5", {"label_smoothing": 1.5}),
    ("softcap-zero", ValueError, r"softcap must be a number in \(0, inf\), got 0.0", {"softcap": 0.0}),
    ("shift-0d", ValueError, "needs a target with a dimension", {"shift": 1, "hidden": torch.randn(8), "target": torch.tensor(1)}),
    ("budget-row", ValueError, r"too small: one row of logits and what goes with it needs \d+ bytes beside the gradients; raise", {"memory_budget": 10}),
    ("option", TypeError, "linear_cross_entropy has no option 'labelsmoothing'; did you mean 'label_smoothing'", {"labelsmoothing": 0.1}),
    ("budget-float", TypeError, "memory_budget must be an int", {"memory_budget": 0.5}),
    ("chunk-zero", ValueError, "chunk_tokens must be a positive int, got 0", {"chunk_tokens": 0}),
    ("chunk-against-budget", ValueError, "lower chunk_tokens", {"chunk_tokens": 24, "memory_budget": 1000}),
    ("accumulate", ValueError, "accumulate_dtype must be None or float32", {"accumulate_dtype": HALF}),
    ("accumulate-half", ValueError, "float16 cannot hold sums of unscaled gradients", {"dtype": HALF, "accumulate_dtype": HALF}),
    ("accumulate-chunks", ValueError, "accurate over at most 8 chunks", {"dtype": torch.bfloat16, "accumulate_dtype": torch.bfloat16, "chunk_tokens": 2}),
    ("upstream-none", ValueError, 'upstream goes with reduction="mean" or "sum"', {"upstream": 2.0, "reduction": "none"}),
    ("upstream-zero", ValueError, "upstream must not be 0", {"upstream": 0}),
    ("target-range", IndexError, r"target must be in \[0, 11\) .* got 11 for row 0.*; if ranks share the vocabulary, pass parallel=VocabParallel", {"target": torch.full((4, 6), 11)}),
    ("weight-device", ValueError, "weight is on meta, hidden on cpu; move one of them", {"weight": torch.randn(11, 8, device="meta")}),
    ("triton-float64", ValueError, r"(float64|CUDA device).*use backend='torch'", {"dtype": torch.float64, "backend": "triton"}),
    ("weight-transposed", ValueError, r"got \(8, 11\); the weight looks transposed: pass weight.T; or hidden looks like logits", {"weight": torch.randn(11, 8).T}),
    ("hidden-logits", ValueError, r"got \(11, 8\); hidden looks like logits, which logits_loss and logits_logprobs take; or the weight", {"hidden": torch.randn(4, 6, 11)}),
    ("swapped", ValueError, r"got \(24,\); hidden and weight look swapped: hidden comes first", {"hidden": torch.randn(11, 8), "weight": torch.randn(24, 8), "target": torch.zeros(24, dtype=torch.int64)}),
    ("swapped-3d", ValueError, r"got \(4, 6, 8\); hidden and weight look swapped: hidden comes first", {"hidden": torch.randn(11, 8), "weight": torch.randn(4, 6, 8)}),
    ("labels-shifted", ValueError, r"got \(4, 5\); .* pass all labels with shift=1, or hidden\[:, :-1\]", {"target": torch.zeros(4, 5, dtype=torch.int64)}),
    ("labels-shifted-flat", ValueError, r"got \(5,\); .* pass all labels with shift=1, or hidden\[:-1\]", {"hidden": torch.randn(6, 8), "target": torch.zeros(5, dtype=torch.int64)}),
    ("target-fewer", ValueError, r"got \(4, 4\); pass one id for each row of hidden", {"target": torch.zeros(4, 4, dtype=torch.int64)}),
    ("weight-module", TypeError, r"weight must be a torch.Tensor, got Linear; pass its .weight, and its .bias as bias=", {"weight": torch.nn.Linear(8, 11)}),
    ("temperature", TypeError, r"no option 'temperature'; linear_loss takes it: linear_loss\(..., losses.cross_entropy\(\), temperature=T\)", {"temperature": 2.0}),
    ("mask", TypeError, "mask must be bool, got float32", {"mask": torch.ones(4, 6)}),
    ("mask-shape", ValueError, r"mask must have shape \(4, 6\)", {"mask": torch.ones(4, dtype=torch.bool)}),
    ("num-items", TypeError, "no option 'num_items_in_batch'; pass normalizer=num_items_in_batch", {"num_items_in_batch": 3}),
    ("deterministic-cpu", ValueError, r"deterministic=True runs on GPUs of docs/gpus.md alone, and these operands are on cpu; leave it False", {"deterministic": True, "backend": "torch"}),
    ("target-negative", IndexError, "got -1 for row 0, leading dimensions flattened; mask it with ignore_index$", {"target": torch.full((4, 6), -1)}),
]  # fmt: skip


@pytest.mark.parametrize(("error", "message", "changes"), [w[1:] for w in WRONG], ids=[w[0] for w in WRONG])
def test_wrong_argument(error: type[Exception], message: str, changes: dict[str, Any]) -> None:
    with NoProducts(), pytest.raises(error, match=message):
        call(**changes)


def test_plan_arguments() -> None:
    for changes, message in (
        ({"tokens": -1}, "tokens must be at least 0"),
        ({"vocab": 0}, "vocab must be at least 1"),
        ({"dtype": torch.int8}, "dtype must be one of"),
        ({"dtype": "float32"}, "dtype must be a torch.dtype, such as torch.float32, got 'float32'"),
        ({"teacher_hidden": 0}, "teacher_hidden must be at least 1, got 0"),
        (
            {"loss": losses.cross_entropy},
            r"loss is what makes a loss, cross_entropy, .* call it: losses\.cross_entropy\(\)",
        ),
        ({"metrics": metrics.entropy()}, "metrics must be a list of chunked_head.metrics, got one, 'entropy'"),
        ({"device": "nowhere"}, "device must be a torch.device or its name"),
        ({"device": "sm_12345"}, "or a GPU's architecture"),
        ({"reduction": "all"}, "reduction must be one of"),
    ):
        with pytest.raises((ValueError, TypeError), match=message):
            plan(**({"tokens": 10, "hidden": 8, "vocab": 11, "dtype": torch.float32, "device": "cpu"} | changes))


def test_module_arguments() -> None:
    with pytest.raises(TypeError, match=r"unknown option 'smoothing'; options are .*did you mean 'label_smoothing'"):
        ChunkedHead(8, 11, smoothing=0.1)
    with pytest.raises(TypeError, match=r"from_linear takes an nn.Linear, got Embedding"):
        ChunkedHead.from_linear(torch.nn.Embedding(11, 8))  # type: ignore[arg-type]


# ---- every argument of every public function

HIDDEN, WEIGHT, TARGET = torch.randn(4, 6, 8), torch.randn(11, 8), torch.randint(0, 11, (4, 6))
HEAD = {"hidden": HIDDEN, "weight": WEIGHT, "target": TARGET}
LOGITS = {"logits": torch.randn(4, 6, 11), "target": TARGET}
GATHERED = {"student_logits": torch.randn(4, 3), "teacher_logprobs": -1 - torch.rand(4, 3), "lse": torch.rand(4)}
SIZES = {"tokens": 10, "hidden": 8, "vocab": 11, "dtype": torch.float32, "device": "cpu"}
MASK = {"mask": torch.ones(2, 3, dtype=torch.bool)}
SEGMENTS = MASK | {"segments": torch.zeros(2, 3, dtype=torch.int64), "num_segments": 2}
PUBLIC: list[tuple[Callable[..., Any], dict[str, Any]]] = [
    (linear_cross_entropy, HEAD), (linear_loss, HEAD | {"loss": losses.cross_entropy()}), (linear_logprobs, HEAD),
    (linear_divergence, HEAD | {"teacher_logits": torch.randn(4, 6, 11)}),
    (logits_loss, LOGITS | {"loss": losses.cross_entropy()}), (logits_logprobs, LOGITS), (gathered_topk_kl, GATHERED),
    (plan, SIZES), (CrossEntropyLoss, {}), (ChunkedHead, {"hidden_size": 8, "vocab_size": 11}),
    (LigerFusedLinearCrossEntropyLoss, {}),
    (weights.token_mean, {"total": 3}), (weights.sequence_mean, MASK), (weights.sequence_mean, SEGMENTS),
    (weights.sequence_sum, {"num_sequences": 3}), (weights.dr_grpo, {"num_sequences": 3, "max_completion_length": 4}),
]  # fmt: skip
LOSSES = [name for name in losses.__all__ if name.islower() and name != "custom"]
METRICS = [
    name for name in metrics.__all__
    if inspect.isfunction(getattr(metrics, name)) and name not in ("all_reduce", "combine", "merge")
]  # fmt: skip
OWN: dict[str, dict[str, Any]] = {
    "divergence": {"function": lambda log_p, log_q: log_p - log_q}, "vocabulary_sum": {"function": lambda log_p: log_p},
}  # fmt: skip
PUBLIC += [(getattr(losses, name), OWN.get(name, {})) for name in LOSSES]
PUBLIC += [(getattr(metrics, name), OWN.get(name, {})) for name in METRICS]
WHOLE = {"weight", "ce_weight", "name"}  # a module's weights are looked at when it is called; a metric's name is not
# options of losses that their rows try with a number below 0
BELOW_ZERO = {
    name for row in ROWS.values() for options in row.options for name, value in options.items()
    if isinstance(value, float) and value < 0
}  # fmt: skip
# what may stand in the place of an argument, and the names that take it
NONSENSE: list[tuple[Any, set[str] | None]] = [
    (None, None), (True, None), (1.5, None),
    ("x", {"name", "token_weights", "normalizer", "accumulate_into"}),  # fields of the batch and attributes, by name
    ([1], {"name"}), ({"x": 1}, {"name"}), (float("nan"), {"name"}), (object, {"name"}),
    (float("inf"), {"clip_low", "clip_high", "delta", "dual_clip", "kl_clamp", "log_ratio_clamp", "ratio_clamp", "name"}),
    (-1, {"divergence_alpha", "gamma", "ignore_index", "logit_scale", "teacher_logit_scale", "upstream", "name"} | BELOW_ZERO),
    (torch.ones(2), WHOLE | {"class_weights", "token_weights"}),
    (torch.ones(4, 6, dtype=torch.complex64), WHOLE), (torch.ones((), requires_grad=True), WHOLE),
]  # fmt: skip
OF_TORCH = ("device", "dtype")  # of ChunkedHead: what nn.Linear says of them


def parameters(function: Callable[..., Any]) -> list[str]:
    """By name, those behind ``**`` too."""
    named = inspect.signature(function).parameters.values()
    behind: dict[str, list[str]] = {
        "summand": list(losses.base.SUMMAND_OPTION_NAMES), "policy": list(PolicyOptions.__annotations__),
        "teacher": list(TeacherOptions.__annotations__),
        "metric_options": list(MetricOptions.__annotations__),
        "options": [p.name for p in inspect.signature(linear_cross_entropy).parameters.values()
                    if p.kind is p.KEYWORD_ONLY and p.name != "bias"],
    }  # fmt: skip
    return [name for p in named for name in (behind[p.name] if p.kind is p.VAR_KEYWORD else [p.name])]


@pytest.mark.parametrize(("function", "right"), PUBLIC, ids=lambda given: getattr(given, "__name__", ""))
def test_an_error_names_the_argument(function: Callable[..., Any], right: dict[str, Any]) -> None:
    """Whatever stands in the place of an argument: it is among what the argument takes, or an error of ours says which
    it is before any work."""
    complaints = []
    for name in parameters(function):
        for value, taking in NONSENSE:
            # a module's tensors are looked at when it is called
            if function is ChunkedHead and (name in OF_TORCH or isinstance(value, torch.Tensor)):
                continue
            taken = "was taken"
            try:
                with NoProducts():
                    function(**(right | {name: value}))
            except AssertionError as begun:
                taken = str(begun)
            except (TypeError, ValueError) as error:
                others = function is gathered_topk_kl and name == "student_logits"  # whose shape others must have
                taken = "" if name in str(error) or others else repr(error)
                taking = {name} if not taken else set()
            except Exception as error:
                taken, taking = repr(error), set()
            if taking is not None and name not in taking:
                complaints.append(f"{name}={value!r}: {taken}")
    assert not complaints, "\n".join(complaints)


# ---- options of losses and metrics

EITHER: Any = (TypeError, ValueError)


def of_mine(stats: Any, batch: Any) -> torch.Tensor:
    return stats.logprob * batch["mine"]


ONES = torch.ones(2, 3)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: losses.grpo(clip=0.2), TypeError, r"losses\.grpo has no option 'clip'; did you mean 'clip_low'\?; its options "
         "are clip_low, clip_high, delta, dual_clip, ratio_clamp, temperature, .*, rollout_min"),
        (lambda: losses.cross_entropy(smoothing=0.1), TypeError, "did you mean 'label_smoothing'"),
        (lambda: losses.cross_entropy(unit="segment"), TypeError, r"losses\.cross_entropy has no option 'unit'"),
        (lambda: losses.gspo(scope="token"), TypeError, r"losses\.gspo has no option 'scope'"),
        (lambda: losses.custom(lambda s, b: s.lse, scope="token", need=()), TypeError, "did you mean 'needs'"),
        (lambda: metrics.entropy(weight=2), TypeError, r"metrics\.entropy has no option 'weight'; did you mean 'weighting'"),
        (lambda: linear_loss(*torch.ones(3, 2, 2), losses.forward_kl(), teacher_weight=1), TypeError, r"no option 'teacher_weight'; "
         r'it is a field: batch=\{"teacher_weight": '),
        (lambda: linear_loss(**HEAD, loss=losses.cross_entropy(), cu_seqlens=None), TypeError, r"; pass segment_lengths=cu_seqlens\.cpu\(\)"),
        (lambda: linear_loss(**HEAD, loss=losses.cross_entropy(), z_loss=0.1), TypeError, r"no option 'z_loss'; add it to the loss: \+ z_loss \* "),
        (lambda: linear_loss(**HEAD, loss=losses.cross_entropy(), label_smoothing=0.1), TypeError, r"losses\.cross_entropy\(label_smoothing=\.\.\.\)"),
        (lambda: losses.grpo(beta=0.1), TypeError, r"no option 'beta'; add the KL to the loss: \+ beta \* losses\.kl_to_reference\(\); its"),
        (lambda: losses.custom(of_mine, scope="token"), ValueError, r"reads batch\['mine'\], a field that is not the library's; declare it, .*"
         r"losses\.custom\(function, scope='token', fields=\{'mine': 'token'\}\)"),
        (lambda: losses.custom(of_mine, scope="token", fields=["mine"]), ValueError, r"fields of .* has 'mine', .* fields=\{'mine': 'token'\}"),
        (lambda: Metric("mine", of_mine, fields="mine"), TypeError, r"fields of metrics\.mine must be a mapping or several names, got 'mine'"),
        (lambda: Metric("mine", of_mine, fields={"mine": "tokens"}), ValueError, r"field 'mine' of metrics\.mine must be one of 'token'"),
        (lambda: metrics.combine([MetricValue("max")]), TypeError, r"list with the out\.metrics of each call, got a MetricValue"),
        (lambda: metrics.combine({"entropy": MetricValue("max")}), TypeError, r"list with the out\.metrics .* put it into a list"),
        (lambda: losses.grpo(clip_low=2), ValueError, r"clip_low of losses\.grpo must be a number in \[0, 1\], got 2"),
        (lambda: metrics.clip_fraction(clip_low=2), ValueError, r"clip_low of metrics\.clip_fraction must be a number in \[0, 1\]"),
        (lambda: losses.z_loss(token_weights=torch.ones(2, dtype=torch.int64)), ValueError, "token_weights of .* floating-point"),
        (lambda: losses.z_loss() * float("nan"), ValueError, r"coefficient of a loss must be a number in .*, got nan"),
        (lambda: losses.z_loss() * "a", TypeError, "the coefficient of a loss must be a number in .*, got 'a'"),
        (lambda: None * losses.z_loss(), TypeError, "the coefficient of a loss must be a number in .*, got None"),
        (lambda: losses.z_loss() * torch.tensor(1j), ValueError, r"a number or a 0-d tensor .* torch\.complex64"),
        (lambda: losses.cross_entropy(1.1), EITHER, "label_smoothing of losses.cross_entropy"),
        (lambda: losses.cross_entropy(token_scaling=1), EITHER, "token_scaling of losses.cross_entropy"),
        (lambda: losses.cross_entropy(class_weights=torch.ones(2, 2)), EITHER, r"shape \[vocab\], got \(2, 2\)"),
        (lambda: losses.cross_entropy(class_weights=torch.ones(3).long()), EITHER, "torch.int64"),
        (lambda: losses.focal(-1.0), EITHER, "gamma of losses.focal"),
        (lambda: losses.grpo(delta=0.0), EITHER, "delta of losses.grpo"),
        (lambda: losses.grpo(dual_clip=1.0), EITHER, "dual_clip of losses.grpo"),
        (lambda: losses.grpo(delta=4.0, dual_clip=3.0), EITHER, "delta or dual_clip"),
        (lambda: losses.cispo(-0.3), EITHER, "clip_high of losses.cispo"),
        (lambda: losses.dpo(variant="kto"), EITHER, "variant of losses.dpo must be one of 'sigmoid'"),
        (lambda: losses.cpo(variant="robust"), EITHER, "variant of losses.cpo must be one of"),
        (lambda: losses.grpo(ratio_clamp=0.0), EITHER, "ratio_clamp of losses.grpo"),
        (lambda: losses.sapo(tau_pos=0.0), EITHER, "tau_pos of losses.sapo"),
        (lambda: losses.grpo(rollout="mask", rollout_min=4.0), EITHER, "rollout_max of losses.grpo"),
        (lambda: losses.grpo(rollout_max=4.0), EITHER, "rollout_max .* of losses.grpo go with"),
        (lambda: losses.kl_to_reference("k3+", True), EITHER, "bias_correction of losses.kl_to_reference"),
        (lambda: losses.kl_to_reference("k3", 1), EITHER, "bias_correction of losses.kl_to_reference"),
        (lambda: losses.dpo(beta=0.0), EITHER, "beta of losses.dpo must be a number in"),
        (lambda: losses.dpo(variant="exo_pair"), EITHER, "must be above 0 and below 1 for variant 'exo_pair'"),
        (lambda: losses.dpo(variant="robust", label_smoothing=0.5), EITHER, "must be below 0.5 for variant 'robust'"),
        (lambda: losses.dpo(variant="hinge", label_smoothing=0.1), EITHER, "does not apply for variant 'hinge'"),
        (lambda: losses.dpo(variant="discopop", discopop_tau=0.0), EITHER, "discopop_tau of losses.dpo"),
        (lambda: losses.dpo(token_weights="token_weights"), EITHER, "values are per pair"),
        (lambda: losses.forward_kl(temperature=0), EITHER, "for T = 0 train on the argmax"),
        (lambda: losses.forward_kl(teacher_temperature=0), EITHER, "for T = 0 train on the argmax"),
        (lambda: losses.reverse_kl(teacher_softcap=0.0), EITHER, "teacher_softcap of losses.reverse_kl must be a number in"),
        (lambda: losses.reverse_kl(t_squared=True), EITHER, "t_squared of losses.reverse_kl needs the loss's own"),
        (lambda: losses.jsd(1.5), EITHER, "beta of losses.jsd must be a number in"),
        (lambda: losses.topk_kl(normalize="vocab", teacher_temperature=2.0), EITHER, "pass teacher_renormalize=True"),
        (lambda: losses.topk_kl(teacher_temperature=0.0), EITHER, "teacher_temperature of losses.topk_kl must be a number"),
        (lambda: gathered_topk_kl(ONES, ONES), EITHER, "lse is needed with normalize='tail'"),
        (lambda: gathered_topk_kl(ONES, torch.ones(2, 4), normalize="topk"), EITHER, r"teacher_logprobs must have shape \(2, 3\), got \(2, 4\)"),
        (lambda: gathered_topk_kl(ONES, ONES, normalize="topk", reduction="sum", normalizer=2.0), EITHER, "normalizer goes with"),
        (lambda: gathered_topk_kl(ONES.long(), ONES, normalize="topk"), EITHER, "floating-point"),
        (lambda: gathered_topk_kl(ONES, ONES, normalize="topk", temperature=0.0), EITHER, "temperature of losses.gathered_topk_kl must be a number"),
        (lambda: metrics.entropy("max", weighting="segment"), EITHER, "weighting of metrics.entropy"),
        (lambda: metrics.ratio(level="segment", weighting="segment"), EITHER, "weighting of metrics.ratio"),
        (lambda: metrics.effective_sample_size(weighting="segment"), EITHER, "metrics.effective_sample_size"),
        (lambda: metrics.entropy(temperature=0), EITHER, "temperature of metrics.entropy"),
        (lambda: Metric("mine", max, unit="segment"), EITHER, 'scope="segment"'),
        (lambda: merge(MetricValue("max"), MetricValue("min")), EITHER, "cannot be merged"),
        (lambda: losses.z_loss() + losses.entropy, TypeError, r"a summand is what makes a loss, entropy, .* losses\.entropy\(\)"),
    ],
)  # fmt: skip
def test_options_of_losses_and_metrics(make: Callable[[], Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        make()


# ---- what a call is given


@pytest.mark.parametrize("given", ["hidden", "logits"])
@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"loss": losses.cross_entropy}, TypeError, r"loss is what makes a loss, cross_entropy, .* losses\.cross_entropy\(\)"),
        ({"loss": losses.custom}, TypeError, r"call it: losses\.custom\(function, scope=...\)"),
        ({"loss": metrics.entropy()}, TypeError, "loss must be made of chunked_head.losses, got .* a function .* is taken"),
        ({"loss": lambda stats, batch: stats.logprob.sum()}, ValueError, r"one value per token.*leave out \.sum\(\)"),
        ({"metrics": metrics.entropy()}, TypeError, "metrics must be a list of chunked_head.metrics, got one, 'entropy'; put it"),
        ({"metrics": [lambda stats, batch: stats.lse]}, TypeError, r"must hold .* becomes one by metrics\.Metric\(\"name\", function\)"),
        ({"metrics": [3]}, TypeError, r"must hold chunked_head.metrics, got int; call its factory, such as"),
        ({"metrics": [metrics.entropy]}, TypeError, "metrics must hold chunked_head.metrics, got function; call its factory, metrics.entropy"),
        ({"batch": {"mask": TARGET > 1}, "mask": TARGET > 1}, ValueError, "mask stands in batch and in an argument of its own; pass one"),
        ({"batch": {"token_weights": torch.ones(4, 6)}, "token_weights": torch.ones(4, 6)}, ValueError, "token_weights stands in batch"),
        ({"batch": [1], "mask": TARGET > 1}, TypeError, "batch must be a mapping"),
        ({"batch": [1]}, TypeError, "batch must be a mapping of names to tensors, such as .* got list"),
        ({"batch": {"advantage": torch.ones(4, 6)}}, ValueError, "field 'advantage' .*did you mean 'advantages'"),
        ({"batch": {3: torch.ones(4, 6)}}, ValueError, "batch has a field 3 "),
        ({"loss": losses.gspo(), "batch": {"old_logprobs": -torch.ones(4, 6), "advantages": torch.ones(4, 6)}}, ValueError,
         r"loss gspo needs batch\['segments'\], which is missing; pass it with num_segments, or .* segment_lengths"),
        ({"loss": losses.topk_kl(), "batch": {"teacher_offsets": torch.arange(25)}}, ValueError,
         r"field 'teacher_offsets' .*; known are"),
        ({"temperature": float("nan")}, ValueError, r"temperature must be a number in \(0, inf\), got nan"),
        ({"temperature": torch.ones(6)}, ValueError, r"temperature must have shape \(4, 6\), that of the target, got \(6,\)"),
        ({"temperature": torch.ones(4, 6).long()}, TypeError, "temperature must be a number or floating-point, got"),
        ({"temperature": torch.ones(4, 6, requires_grad=True)}, ValueError, "temperature takes no gradient here"),
        ({"temperature": torch.ones(4, 6), "batch": {"temperature": torch.ones(4, 6)}}, ValueError, "is an argument of the call"),
        ({"temperature": torch.zeros(4, 6)}, ValueError, "temperature must be positive and finite, got 0"),
        ({"temperature": torch.ones(4, 6), "loss": losses.entropy(temperature=2.0)}, ValueError, "entropy has a temperature"),
    ],
)  # fmt: skip
def test_what_a_call_is_given(given: str, changes: dict[str, Any], error: type[Exception], message: str) -> None:
    function, right = (linear_loss, HEAD) if given == "hidden" else (logits_loss, LOGITS)
    with pytest.raises(error, match=message):
        function(**(right | {"loss": losses.cross_entropy()} | changes))


@pytest.mark.parametrize("function", [logits_loss, logits_logprobs])
def test_hidden_states_in_the_place_of_logits(function: Callable[..., Any]) -> None:
    loss = [losses.cross_entropy()] if function is logits_loss else []
    with pytest.raises(
        IndexError, match=r"in \[0, 8\).* got 9 .* or these are hidden states: pass them to linear_loss"
    ):
        function(HIDDEN, torch.full((4, 6), 9), *loss)


def test_what_pytorchs_module_is_given() -> None:
    module = CrossEntropyLoss()
    with pytest.raises(TypeError, match=r"for class probabilities p .* call linear_loss or logits_loss"):
        module(LOGITS["logits"], torch.rand(4, 6, 11))
    with pytest.raises(TypeError, match=r"input must be a torch\.Tensor, got list"):
        module([1.0], TARGET)


@pytest.mark.parametrize("name", ["hidden", "weight", "target", "token_weights", "class_weights"])
def test_lazy_negation(name: str) -> None:
    """Kernels read memory, and a lazily negated tensor's has other values. Those of classes are copied."""
    call = {"hidden": HIDDEN, "weight": HEAD["weight"], "target": torch.ones(4, 6, dtype=torch.int64)}
    call |= {"token_weights": torch.rand(4, 6), "class_weights": torch.rand(len(HEAD["weight"]))}
    right = linear_cross_entropy(**call)
    call[name] = torch._neg_view(-call[name])
    if name == "class_weights":
        torch.testing.assert_close(linear_cross_entropy(**call), right)
        return
    with pytest.raises(ValueError, match=rf"{name} is negated lazily.*pass {name}.resolve_neg\(\)"):
        linear_cross_entropy(**call)


def test_what_no_loss_reads() -> None:
    """A known field that is no tensor, and the float that a loop over losses begins with."""
    total: Any = 0.0
    for one in (losses.cross_entropy(), losses.z_loss()):
        total += one
    call = HIDDEN, HEAD["weight"], torch.ones(4, 6, dtype=torch.int64), total
    assert torch.equal(linear_loss(*call, batch={"documents": ["a.txt"]}).loss, linear_loss(*call).loss)


@pytest.mark.parametrize("transform", ["grad", "vmap", "jvp"])
def test_transforms(transform: str) -> None:
    def of_head(hidden: torch.Tensor) -> torch.Tensor:
        return linear_cross_entropy(hidden, WEIGHT, TARGET[0])

    def of_logits(logits: torch.Tensor) -> torch.Tensor:
        return logits_loss(logits, TARGET[0], losses.cross_entropy()).loss

    def of_module(logits: torch.Tensor) -> torch.Tensor:
        return CrossEntropyLoss()(logits, TARGET[0])

    run: Callable[..., Any] = {
        "grad": lambda function, given: torch.func.grad(function)(given[0]),
        "vmap": lambda function, given: torch.vmap(function)(given),
        "jvp": lambda function, given: torch.func.jvp(function, (given[0],), (given[0],)),
    }[transform]
    for function, given in ((of_head, HIDDEN), (of_logits, LOGITS["logits"]), (of_module, LOGITS["logits"])):
        with pytest.raises(RuntimeError, match=r"torch\.func transforms .* use loss\.backward\(\) or torch\.autograd"):
            run(function, given)


@pytest.mark.parametrize(
    "make", [patch_trl, lambda **options: ChunkedHead.from_linear(torch.nn.Linear(8, 11), **options)]
)
def test_options_when_given(make: Callable[..., Any]) -> None:
    for wrong in ({"chunk_tokens": 0}, {"memory_budget": "lots"}, {"deterministic": "yes"}):
        with pytest.raises((TypeError, ValueError), match=f"{next(iter(wrong))} must be"):
            make(**wrong)


def test_options_of_what_there_may_be_later() -> None:
    ChunkedHead(8, 11, backend="triton", accumulate_into="main_grad")
    with torch.device("meta"):
        ChunkedHead(8, 11, memory_budget="1GiB")
