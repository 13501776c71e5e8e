"""Mistakes put into the library one at a time, each of which the tests must find: ``python -m tests.mutate``.

A copy of the repository gets one of the changes below. First the tests named beside it run, then, where none of those
fails, all of ``make test``. What survives is a hole in the tests. ``--part 1`` to ``4`` takes a quarter, ``--only WORD``
those whose line has the word, ``--named`` leaves the second step out, ``--check`` looks only whether each text that is
to be changed stands in its file exactly once.
"""

import argparse
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
CROSS, LINEAR, LOGITS = (
    "tests/functions/test_cross_entropy.py",
    "tests/functions/test_linear_loss.py",
    "tests/functions/test_on_logits.py",
)
LOGPROBS, GRADIENTS, BUFFER = (
    "tests/functions/test_logprobs.py",
    "tests/functions/test_gradients.py",
    "tests/functions/test_accumulate_into.py",
)
FORMULAS, EXTREMES, CONTRACT, METRICS = (
    "tests/losses/test_formulas.py",
    "tests/losses/test_extremes.py",
    "tests/losses/test_contract_losses.py",
    "tests/losses/test_metrics.py",
)
KERNELS, GRAD_LOGITS = "tests/kernels/test_kernels.py", "tests/kernels/test_grad_logits.py"
RANKS, RANKS_CALLS = "tests/ranks/test_every_loss.py", "tests/ranks/test_calls.py"
MEMORY, LOSS_MEMORY, PLANS = "tests/plan/test_memory.py", "tests/plan/test_loss_memory.py", "tests/plan/test_plan.py"
TORCH = "chunked_head/stores/torch_functions.py"
EVALUATE = "chunked_head/arithmetic/evaluate.py"
KEYS = "tests/functions/test_keys.py"
DIVERGENCES, SUMS = "chunked_head/core/divergences.py", "kernels/common/sums.py"


class Mutation(NamedTuple):
    kind: str
    file: str
    old: str
    new: str
    tests: str


MUTATIONS = [Mutation(*row) for row in (
    # keys of caches, each without a part
    ("key: a metric without its number of values", "chunked_head/metrics/values.py", "self.weighting, self.components, self.scope", "self.weighting, self.scope", "tests/kernels/test_vectors.py -k one_function"),
    ("key: a loss without its unit", "chunked_head/losses/base.py", "return self.key_and_numbers[0], self.unit, self.scope, self.reads_target, tuple", "return self.key_and_numbers[0], self.scope, self.reads_target, tuple", KEYS + " -k 'arithmetic and losses'"),
    ("key: arithmetic without the fields of tokens", EVALUATE, "inputs.token_fields, tuple(inputs.metric_weights)", "tuple(inputs.metric_weights)", KEYS + " -k 'arithmetic and metrics'"),
    ("key: a Spec without what is returned", "chunked_head/call/spec.py", "call.outputs,\n        static_values,", "static_values,", KEYS + " -k specs"),
    ("key: a Spec without its metrics", "chunked_head/call/spec.py", "tuple([metric.signature for metric in metrics])", "len(metrics)", KEYS + " -k specs"),
    ("key: a plan without its tokens", "chunked_head/call/planning.py", "        len(tokens.targets),\n        makes_grads,", "        0,\n        makes_grads,", KEYS + " -k one_spec"),
    ("key: a plan without the request", "chunked_head/plan/planner.py", "PLANS.get_or_make((sizes, request), ", "PLANS.get_or_make((sizes, Request()), ", KEYS + " -k of_requests"),
    ("key: a recording without strides", "chunked_head/call/recording.py", "(x.dtype, x.shape, x.stride(), x", "(x.dtype, x.shape, x", KEYS + " -k one_spec"),
    ("key: a recipe without autocast", "chunked_head/compile/recipes.py", "text_of((FORMAT_VERSION, arguments, autocast_dtype))", "text_of((FORMAT_VERSION, arguments))", KEYS + " -k recipes"),
    ("key: a user's function without the question", "chunked_head/losses/user_checks.py", "key = values_key, check_key, ", "key = values_key, ", KEYS + " -k found_out"),
    ("key: a factory without its options", "chunked_head/losses/base.py", "repr((args, options))", "repr(args)", KEYS + " -k by_their_numbers"),
    ("key: cross-entropy without z-loss", "chunked_head/functions/cross_entropy.py", "LOSS_CACHE.get_or_make(numbers, ", "LOSS_CACHE.get_or_make(numbers[:1], ", KEYS + " -k by_their_numbers"),
    # PyTorch's operations
    ("sign: the target's term", TORCH, "(row_terms.target, -row_terms.beta, row_terms.target_logit)", "(row_terms.target, row_terms.beta, row_terms.target_logit)", CROSS),
    ("sign: label smoothing's term", TORCH, "gradient -= row_terms.kappa[:, None]", "gradient += row_terms.kappa[:, None]", CROSS),
    ("sign: entropy", "chunked_head/core/statistics.py", "log() - sum_of_products / block.total", "log() + sum_of_products / block.total", LINEAR + " -k 'test_loss and entropy'"),
    ("scale: log-probabilities at another temperature", TORCH, "- offset) * ratio - log_sum", "- offset) - log_sum", LINEAR + " -k test_loss"),
    ("sign: KL(q || p)", DIVERGENCES, "weighted(q, log_q - log_p), -q", "weighted(q, log_p - log_q), -q", LINEAR + " -k 'test_loss and kl'"),
    ("swapped: shares of a mixture", DIVERGENCES, "return beta * weighted(log_q.exp()", "return (1.0 - beta) * weighted(log_q.exp()", LINEAR + " -k 'test_loss and jsd'"),
    ("scale: total variation", DIVERGENCES, "(p - q).abs() / 2", "(p - q).abs()", LINEAR + " -k 'test_loss and tvd'"),
    ("offset: columns of a tile", TORCH, "ids = ids - first_column", "ids = ids - 0", RANKS + " -k 'budget and one'"),
    ("offset: a loss's own columns in a tile", TORCH, "(ids >= 0) & (ids < columns) & is_counted", "(ids >= 0) & is_counted", RANKS + " -k 'budget and everything'"),
    ("scale: bias", TORCH, "x = x + bias", "x = x - bias", CROSS + " -k bias"),
    ("scale: slope of scale and cap", TORCH, "neg_().add_(1.0).mul_(factor)", "neg_().add_(1.0).mul_(row_scale)", CROSS + " -k softcap"),
    ("sign: total variation's gradient", DIVERGENCES, "p * (1 - (p - q).sign())", "p * (1 + (p - q).sign())", LINEAR + " -k 'test_loss and tvd'"),
    ("swapped: logarithms of a mixture", DIVERGENCES, "log_q + math.log(beta), log_p + math.log1p(-beta)", "log_p + math.log(beta), log_q + math.log1p(-beta)", LINEAR + " -k 'test_loss and jsd'"),
    ("mask: an ignored token in a mean", TORCH, "count, paired = is_counted.sum()", "count, paired = torch.ones_like(is_counted).sum()", CROSS),
    ("mask: a mask that is not read", TORCH, "is_counted &= shift_left(mask, shift, 0)", "is_counted & shift_left(mask, shift, 0)", "tests/functions/test_targets.py"),
    # e4m3 operands
    ("scale: lengths of e4m3 rows", "kernels/e4m3/quantise.py", "row_divisor * tl.sqrt_rn(", "row_divisor * 1.0 * (", "tests/kernels/test_quantised.py"),
    ("scale: a weight whose numbers do not fit e4m3 is rounded again", "kernels/e4m3/launch.py", "for divisor in (None, second_divisor):", "for divisor in (None,):", "tests/kernels/test_quantised.py -k unlike"),
    ("scale: rows of e4m3 hidden states", "kernels/common/blocks.py", "other=0.0) * tl.load(weight_scale_ptr)", "other=0.0) * 1.0", "tests/kernels/test_quantised.py"),
    ("scale: what e4m3 hidden states have in common", "kernels/e4m3/quantise.py", "x -= dots[:, None] * direction", "x -= dots[:, None] * direction * 0.5", "tests/functions/test_fp8.py -k heavy"),
    ("offset: exact logits of heavy ids in a tile", "chunked_head/stores/store.py", "heavy[0].long() - tile.start", "heavy[0].long()", "tests/functions/test_fp8.py -k heavy"),
    ("lost: an exact logit of a heavy id in kernels", "kernels/statistics/heavy.py", "z = tl.where(is_heavy, (exact - shift) * log2_e, z)", "z = z + 0.0", "tests/functions/test_fp8.py -k heavy"),
    ("offset: a target's exact logit among e4m3 ones", "chunked_head/stores/operands.py", "target_columns = rows.target - first", "target_columns = rows.target", "tests/functions/test_fp8.py -k tiles"),
    ("stale: an e4m3 copy of a weight that has changed", "chunked_head/stores/quantised.py", "version_of(self.weight) != self.version or", "", "tests/functions/test_fp8.py -k changed"),
    ("stale: an e4m3 copy of other strides", "chunked_head/stores/quantised.py", "tensor.shape, strides, tensor.dtype", "tensor.shape, tensor.dtype", "tests/functions/test_fp8_kept.py -k another"),
    ("stale: a fingerprint that no call compares, by torch operations", "chunked_head/stores/quantised.py", "            if expected is not None:", "            if expected is ...:", "tests/functions/test_fp8_kept.py -k no_version"),
    ("stale: a fingerprint that no call compares, in kernels", "kernels/e4m3/quantise.py", "tl.where(prints == expected, dots, float(\"nan\"))", "dots", "tests/functions/test_fp8_kept.py -k no_version"),
    ("stale: a fingerprint without the numbers' order", "kernels/e4m3/quantise.py", "return (factor ^ (factor >> 13)) | 1", "return factor * 0 + 1", "tests/functions/test_fp8_kept.py -k fingerprints"),
    ("shared: statistics that a user's function writes to", EVALUATE, "Stats(Copies(statistics))", "Stats(statistics)", "tests/losses/test_custom_metric.py"),
    ("shared: fields that a user's function writes to", EVALUATE, "batch.copies()", "batch", "tests/losses/test_custom_metric.py"),
    ("lost: what a call that raised has left in the caller's buffer", "chunked_head/call/sweep.py", "grads.gradient_buffer.written = True", "pass", BUFFER),
    ("name: a process group that is gone", "chunked_head/metrics/values.py", "return group.group_name, GROUP_NUMBERS[group]", "return group.group_name, 0", METRICS + " -k group"),
    ("stale: an e4m3 copy of a weight that a fused optimizer has changed", "chunked_head/stores/quantised.py", " or self not in CURRENT:", ":", "tests/functions/test_fp8.py -k outdates"),
    # kernels
    ("sign: the target's term in kernels", "kernels/gradients/identity.py", "tl.where(is_target, grad - {}, grad)", "tl.where(is_target, grad + {}, grad)", GRAD_LOGITS),
    ("sign: smoothing in kernels", "kernels/gradients/identity.py", "grad -= {} * omega", "grad += {} * omega", GRAD_LOGITS),
    ("tie: total variation of equal probabilities", SUMS, "tl.where(p - q > max_difference, 0.0, tl.where(q - p > max_difference, 2.0 * p, p + 0.0 * q))", "tl.where(p - q > 0.0, 0.0, 2.0 * p)", LOGITS + " tests/functions/test_divergence.py -k 'known_columns or signs'"),
    ("scale: logit_scale left out of backward", "kernels/common/transform.py", "slope = slope * logit_scale", "slope = slope * 1.0", GRAD_LOGITS),
    ("scale: slope of a cap", "kernels/common/transform.py", "slope = 1.0 - capped * capped", "slope = 1.0 - capped", GRAD_LOGITS),
    ("scale: temperature of a token left out of backward", "kernels/common/transform.py", "slope = slope * row_scale", "slope = slope * 1.0", LOGPROBS + " -k temperature"),
    ("sign: entropy in kernels", "kernels/statistics/entropy.py", "log_sum - state[0] / total", "log_sum + state[0] / total", LINEAR + " -k 'test_loss and entropy'"),
    ("scale: sums of strips", "kernels/statistics/merge.py", "run_sum = run_sum * rescale + ", "run_sum = run_sum + ", KERNELS + " -k more_strips"),
    ("sign: the target's factor", "kernels/gradients/row_grad.py", "tl.exp2(logprob * log2_e) - beta", "tl.exp2(logprob * log2_e) + beta", KERNELS + " -k level"),
    ("scale: total variation in kernels", SUMS, "0.5 * tl.abs(p - q)", "tl.abs(p - q)", LINEAR + " -k tvd"),
    ("swapped: shares of a mixture in kernels", SUMS, "tl.fma(beta, ", "tl.fma(1.0 - beta, ", LINEAR + " -k jsd"),
    ("offset: sums of a target in several pieces", "kernels/products/dweight.py", "range(end, end_of_place, BLOCK_ENTRIES)", "range(end, end_of_place, 2 * BLOCK_ENTRIES)", KERNELS + " -k add_rows"),
    ("sign: offsets of strips", "kernels/common/transform.py", "offset = (offset - lse_base) + neg_log_sum", "offset = (offset - lse_base) - neg_log_sum", LINEAR + " -k test_loss"),
    ("offset: columns of dweight", "kernels/products/dweight.py", "column_start + BLOCK_N // 2", "column_start + BLOCK_N", KERNELS + " -k dweight"),
    ("mask: targets among kept columns", "kernels/statistics/row_stats.py", "in_row & (column == target)", "in_row", "tests/functions/test_kept.py"),
    ("sign: entropy over ranks, in kernels", "kernels/statistics/entropy.py", "share * (values[0] - log_share)", "share * (values[0] + log_share)", RANKS + " -k kernels"),
    ("mask: rows that no kernel wrote in a bias's gradient", "chunked_head/stores/triton/relative.py", "return ALL_ROWS if self.sizes.bias_grad else counted_of(rows)", "return counted_of(rows)", "tests/functions/test_skip_ignored.py -k trained_bias"),
    # from statistics to coefficients
    ("sign: entropy's coefficient", "chunked_head/core/statistics.py", '"alpha": -scaled_grad * entropy', '"alpha": scaled_grad * entropy', LINEAR + " -k 'test_loss and entropy'"),
    ("scale: slope of a second temperature", EVALUATE, 'slope = ratio * grads["logprob" + suffix]', 'slope = grads["logprob" + suffix]', LINEAR + " -k 'test_loss'"),
    ("swapped: the mixture's share in its gradient", SUMS, "(1.0 - beta) * tl.where(p != 0.0, ", "beta * tl.where(p != 0.0, ", LINEAR + " -k 'test_loss and jsd'"),
    ("scale: mean logit", "chunked_head/core/statistics.py", "(ratio / columns)", "(1 / columns)", LINEAR + " -k test_loss"),
    ("mask: slopes of a loss by a normalizer of 0", EVALUATE, "torch.where(is_zero, vector.detach(), vector) for", "vector for", GRADIENTS + " -k normalizer_of_zero"),
    ("field: a loss's own token weights", EVALUATE, '"token_weights" if summand.token_weights is None else summand.token_weights', '"token_weights"', CONTRACT),
    ("mean: a normalizer of 0", "chunked_head/call/objectives.py", "torch.where(denominator == 0, denominator, 1.0 / denominator) * one_or_nan", "1.0 / denominator * one_or_nan", GRADIENTS + " -k normalizer_of_zero " + CONTRACT),
    ("shift: off by one", TORCH, "values.shape[dim] - count, count))", "values.shape[dim] - count - 1, count))", CROSS + " -k shift"),
    ("shift: temperatures that stay behind", "chunked_head/call/tokens.py", 'if kind.kind == "token" and leading_dims:', 'if kind.kind == "token" and leading_dims and name != TEMPERATURE:', LOGPROBS + " -k temperature"),
    ("scale: temperatures of tokens", "chunked_head/call/tokens.py", "torch.where(ignored, 1.0, 1.0 / temperature)", "torch.where(ignored, 1.0, temperature)", LOGPROBS + " -k temperature"),
    ("range: an id too many", "chunked_head/call/tokens.py", "is_out_of_range = (ids < 0) | (ids >= id_count)", "is_out_of_range = (ids < 0) | (ids > id_count)", CONTRACT),
    ("buffer: a promise that is broken", "chunked_head/call/run.py", "one_or_nan = objective.one_or_nan_for(loss_upstream)", "one_or_nan = objective.one_or_nan", BUFFER),
    ("buffer: what was in a caller's buffer", "chunked_head/stores/gradients.py", "self.fresh = gradient_buffer is None or gradient_buffer.fresh", "self.fresh = True", BUFFER),
    ("checkpoint: gradients made twice", "chunked_head/call/run.py", "makes_grads is None and in_backward()", "False", "tests/functions/test_gradients.py -k checkpointing"),
    # losses
    ("bound: clip_high", "chunked_head/losses/policy.py", '1.0 + bound(loss_name, "clip_high", clip_high)', '1.0 + bound(loss_name, "clip_high", clip_low)', FORMULAS),
    ("bound: CISPO's lower one", "chunked_head/losses/policy.py", ".clamp(min=min_ratio, max=max_ratio)", ".clamp(max=max_ratio)", FORMULAS),
    ("swapped: SAPO's temperatures", "chunked_head/losses/policy.py", "torch.where(advantages > 0, positive_gate, negative_gate)", "torch.where(advantages > 0, negative_gate, positive_gate)", FORMULAS),
    ("sign: rollout weights", "chunked_head/losses/policy.py", 'old_logprobs(stats, batch) - batch["rollout_logprobs"]', 'batch["rollout_logprobs"] - old_logprobs(stats, batch)', FORMULAS),
    ("mask: GSPO's tokens of no segment", "chunked_head/losses/policy_segments.py", 'torch.where(batch["segments"] >= 0, advantages, 0.0)', 'advantages', FORMULAS),
    ("mean: GMPO's ratio", "chunked_head/losses/policy_segments.py", "batch.segment_mean(log_ratio).exp()", "batch.segment_sum(log_ratio).exp()", FORMULAS),
    ("mask: values of segments at tokens of none", "chunked_head/losses/batch.py", "torch.where(segment_ids >= 0, values[segment_ids.clamp(min=0)], 0.0)", "values[segment_ids.clamp(min=0)]", FORMULAS),
    ("swapped: pairs", "chunked_head/losses/preference.py", "values[pairs[:, 0]], values[pairs[:, 1]]", "values[pairs[:, 1]], values[pairs[:, 0]]", FORMULAS),
    ("bound: KTO's baseline", "chunked_head/losses/preference.py", "baseline.detach().clamp(min=0)", "baseline.detach()", FORMULAS),
    ("sign: KTO of desirable segments", "chunked_head/losses/preference.py", "desirable_weight * gate(-beta * segment_scores)", "desirable_weight * gate(beta * segment_scores)", FORMULAS),
    ("scale: IPO's margin", "chunked_head/losses/preference.py", "(first_scores - second_scores - 0.5 / beta).square()", "(first_scores - second_scores - 1 / beta).square()", FORMULAS),
    ("scale: label smoothing", "chunked_head/losses/label.py", "(1 - label_smoothing) * values + ", "values + ", FORMULAS),
    ("slope: token scaling", "chunked_head/losses/label.py", "values = values * stats.logprob.detach().exp()", "values = values * stats.logprob.exp()", FORMULAS),
    ("swapped: focal's probability", "chunked_head/losses/label.py", "wrong_probability = -torch.expm1(stats.logprob)", "wrong_probability = stats.logprob.exp()", FORMULAS),
    ("sign: unlikelihood", "chunked_head/losses/label.py", "return -torch.where(logprob < -0.5", "return torch.where(logprob < -0.5", FORMULAS),
    ("sign: KL to a reference", "chunked_head/losses/policy.py", 'batch["ref_logprobs"] - stats.logprob', 'stats.logprob - batch["ref_logprobs"]', FORMULAS),
    ("sign: k3", "chunked_head/losses/batch.py", "torch.expm1(difference) - difference", "torch.expm1(difference) + difference", FORMULAS),
    ("sign: the rest of a teacher's entries", "chunked_head/losses/distillation.py", "divergences = divergences + divergence_of(*rest_probabilities", "divergences = divergences - divergence_of(*rest_probabilities", FORMULAS),
    ("mask: padding among a teacher's entries", "chunked_head/losses/distillation.py", "is_counted = is_counted & mask", "is_counted = is_counted & is_counted", FORMULAS + " " + CONTRACT),
    ("tie: a teacher's entries of one id", "chunked_head/losses/distillation.py", "has_better_rival = (rival_logprobs > entry_logprobs) |", "has_better_rival = (rival_logprobs < entry_logprobs) |", FORMULAS),
    ("range: odds of a probability of 1", "chunked_head/losses/preference.py", "mean_logprobs = torch.where(mean_logprobs > -eps, mean_logprobs - (mean_logprobs + eps).detach(), mean_logprobs)", "mean_logprobs = mean_logprobs + 0", EXTREMES),
    ("range: a KL's slope behind its clamp", "chunked_head/losses/policy.py", "kl_estimate(torch.where(is_outside, 0.0, log_ratio_to_policy), estimator)", "kl_estimate(log_ratio_to_policy, estimator)", EXTREMES),
    ("range: a saturated sigmoid's slope", "chunked_head/losses/batch.py", "torch.where(x > 0, 1 - torch.sigmoid(-x), torch.sigmoid(x))", "torch.sigmoid(x)", EXTREMES),
    # metrics
    ("mean: perplexity", "chunked_head/metrics/values.py", "_mean(value_sum, count).exp()", "_mean(value_sum, count)", METRICS),
    ("mean: metrics of two micro-batches", "chunked_head/metrics/values.py", "count=a.count + b.count", "count=a.count", METRICS + " " + CONTRACT),
    ("ranks: the largest of all ranks'", "chunked_head/metrics/values.py", '"max": torch.amax', '"max": torch.sum', METRICS + " " + RANKS),
    # ranks
    ("ranks: offset of targets", "chunked_head/parallel/shard.py", "columns, last_column = target - self.local_ids.start,", "columns, last_column = target - self.local_ids.start - 1,", RANKS + " -k cross-entropy"),
    ("ranks: offset of the likeliest id", "chunked_head/parallel/shard.py", "[name].add_(self.local_ids.start)", "[name].add_(self.local_ids.start + 1)", RANKS + " -k 'cross-entropy or everything'"),
    ("ranks: a gradient that is not summed", "chunked_head/parallel/shard.py", "SummedRows(self.group) if self.parallel.reduce_dhidden else None", "None", RANKS + " -k cross-entropy"),
    ("recording: where in a tensor", "kernels/common/recording.py", "addresses[slot] + offset for", "addresses[slot] for", "tests/kernels/test_launcher.py -k function_in_c"),
    ("recording: writes of operators", "kernels/common/recording.py", "tensor._version != version", "False", "tests/functions/test_recording.py -k no_recording"),
    ("recording: the plan of a key", "chunked_head/call/recording.py", "key = id(plan), ", "key = ", "tests/functions/test_recording.py -k plan_is"),
    ("recording: alignment of a key", "chunked_head/call/recording.py", "x.stride(), x.data_ptr() % ALIGNED", "x.stride()", "tests/functions/test_recording.py -k another_kind"),
    ("sums of losses: a coefficient", "kernels/statistics/merge.py", "* factor * coefficient", "* factor", "tests/kernels/test_kernels.py -k sums_of_losses"),
    ("ranks: gradients on their way that are written again", "chunked_head/parallel/merge.py", "by_rank.clone(memory_format=torch.contiguous_format)", "by_rank.contiguous()", RANKS_CALLS + " -k late_messages"),
    ("ranks: numbers in what the device compares", "chunked_head/parallel/agreement.py", "agreements[:, :NUM_HASHES] != message[:NUM_HASHES]", "agreements[:, :1] != message[:1]", "tests/ranks/test_agreement.py -k schedule"),
    ("ranks: a call that differs, in vocabularies", "chunked_head/parallel/shard.py", "torch.where(is_same_token.all(), self.zero_or_nan, torch.nan)", "torch.where(is_same_token.all(), 0.0, torch.nan)", "tests/ranks/test_agreement.py -k schedule"),
    ("ranks: a call that differs, in tokens", "chunked_head/call/objectives.py", "one_or_nan = tokens.one_or_nan + zero_or_nan", "one_or_nan = tokens.one_or_nan", "tests/ranks/test_agreement.py -k schedule"),
    ("ranks: shares of the probability", TORCH, "(lse_bases - top_base) - (neg_log_sums", "(lse_bases - top_base) + (neg_log_sums", RANKS + " -k cross-entropy"),
    ("ranks: entropy", "chunked_head/core/statistics.py", "p * (vectors[0] - log_p)", "p * (vectors[0] + log_p)", RANKS + " -k entropy"),
    ("ranks: the largest logit", "chunked_head/core/statistics.py", "logits.amax(0)", "logits.amin(0)", RANKS + " -k cross-entropy"),
    ("ranks: whose share a segment is", "chunked_head/parallel/tokens.py", "% self.parallel.ranks == self.parallel.rank", "% self.parallel.ranks >= 0", RANKS + " -k gspo"),
    ("ranks: gradients of sums over segments", "chunked_head/parallel/tokens.py", "return AddOverRanks.apply(gradient, ctx.group), None", "return gradient, None", RANKS + " -k gspo"),
    ("ranks: counts of all ranks' tokens", "chunked_head/call/objectives.py", "counted=counted, one_or_nan", "counted=tokens.counted, one_or_nan", RANKS + " -k cross-entropy"),
    # plans
    ("plan: the bias's gradient", "chunked_head/plan/plans.py", "if sizes.bias_grad:", "if False:", PLANS + " " + MEMORY),
    ("plan: vectors of tokens", "chunked_head/plan/plans.py", "(tokens, demand.numbers_per_token)", "(0, 5)", LOSS_MEMORY),
    ("plan: logits of a chunk", "chunked_head/stores/store.py", 'Buffer("logits", (rows, sizes.vocab)', 'Buffer("logits", (0, sizes.vocab)', MEMORY + " -k test_prediction"),
    ("plan: a tile of logits", "chunked_head/stores/store.py", 'yield Buffer("logits of a tile", (rows, columns)', 'yield Buffer("logits of a tile", (0, columns)', MEMORY + " -k test_prediction"),
    ("plan: a teacher's logits", "chunked_head/stores/store.py", 'Buffer("teacher\'s logits", (buffer_rows, columns)', 'Buffer("teacher\'s logits", (0, columns)', LOSS_MEMORY + " -k test_prediction"),
    # models and frameworks
    ("patch: labels given by position", "chunked_head/integrations/huggingface/patch.py", "(0 <= position < len(args) and args[position] is not None)", "False", "tests/huggingface/test_patch_model.py tests/huggingface/test_patch_edges.py"),
    ("patch: the scale of a model's logits", "chunked_head/integrations/huggingface/fused.py", '"logit_scale": tail.logit_scale', '"logit_scale": 1.0', "tests/huggingface/test_patch_model.py tests/huggingface/test_lazy_logits.py"),
    ("patch: a division taken for a product", "chunked_head/integrations/huggingface/virtual.py", "else 1.0 / argument", "else argument", "tests/huggingface/test_lazy_logits.py tests/huggingface/test_patch_model.py"),
    ("patch: a bias added behind a scale", "chunked_head/integrations/huggingface/virtual.py", "else vector[:num_columns] / factor", "else vector[:num_columns]", "tests/huggingface/test_lazy_logits.py tests/huggingface/test_patch_edges.py"),
    ("Trainer: metrics of an evaluation", "chunked_head/integrations/huggingface/patch.py", "take_metrics(training=metric_prefix is None)", "take_metrics(training=True)", "tests/huggingface/test_patch_trainer.py"),
    ("frameworks: parameters in another order", "chunked_head/integrations/frameworks.py", "if parameter_names[:num_leading] == leading_names and", "if set(parameter_names) >= set(leading_names) and", "tests/frameworks/test_changed_seams.py"),
    ("frameworks: a name that changed", "chunked_head/integrations/frameworks.py", "            if difference:\n", "            if theirs is None:\n", "tests/frameworks/test_changed_seams.py"),
    ("PyTorch's op: a mean over nothing", "chunked_head/integrations/pytorch/__init__.py", "torch.where(has_counted, one_or_nan, torch.nan)", "one_or_nan", "tests/frameworks/test_pytorch.py"),
    ("PyTorch's op: another schema", "chunked_head/integrations/pytorch/__init__.py", "    if schema != SCHEMA:\n", "    if operator is None:\n", "tests/frameworks/test_pytorch.py"),
    ("TRL 1.14: outputs", "chunked_head/integrations/trl.py", "return results[: self.num_outputs]", "return results", "tests/frameworks/test_trl_seams.py"),
    ("verl: a gradient summed twice", "chunked_head/integrations/verl/__init__.py", "== GATHER_BACKWARD:\n        return False", "== GATHER_BACKWARD:\n        return True", "tests/frameworks/test_framework_seams.py"),
    ("Liger: z-loss's factor", "chunked_head/integrations/liger.py", "loss += z_loss_factor * (make", "loss += (make", "tests/frameworks/test_drop_ins.py"),
    ("Liger: predictions of tokens that do not count", "chunked_head/integrations/liger.py", "torch.where(is_counted, token_outputs.argmax, -1)", "token_outputs.argmax", "tests/frameworks/test_drop_ins.py"),
    ("CCE: values that predict nothing", "chunked_head/integrations/cut_cross_entropy.py", "return loss[..., shift_steps:] if", "return loss if", "tests/frameworks/test_drop_ins.py"),
    ("Megatron: labels that stand across", "chunked_head/integrations/megatron.py", "rank_layout.local_values(labels.t())", "rank_layout.local_values(labels)", "tests/frameworks/test_framework_seams.py"),
    ("TRL: which targets are the likeliest", "chunked_head/integrations/trl.py", "results.argmax == targets", "results.argmax != targets", "tests/frameworks/test_trl_seams.py"),
    ("TRL: a gradient that was not foreseen", "chunked_head/integrations/trl.py", "<= 1e-5 * magnitude", "<= 1e9 * magnitude", "tests/frameworks/test_trl_seams.py"),
    ("TRL: direction of a divergence", "chunked_head/integrations/trl.py", '"beta": beta, "entropy": True', '"beta": 1.0 - beta, "entropy": True', "tests/frameworks/test_trl_seams.py"),
    ("frozen: rows without their factors", "kernels/gradients/row_grad.py", "factor = tl.load(factor_ptr + row)", "factor = tl.load(factor_ptr + row) * 0.0 + 1.0", "tests/functions/test_frozen_head.py -k upstream"),
    ("frozen: factors in another order than rows", "chunked_head/call/sweep.py", "factors = self.packing.unpack(factors)", "factors = factors", "tests/functions/test_frozen_head.py -k upstream"),
    ("frozen: losses of lse taken for losses of log-probabilities", "chunked_head/arithmetic/demand.py", "summand.is_builtin and summand.reads_target for", "summand.is_builtin for", "tests/functions/test_frozen_head.py -k products"),
    ("frozen: a gradient of entropies that rows do not have", "chunked_head/call/run.py", "all(gradient is None for gradient in upstream[1:])", "True", "tests/functions/test_frozen_head.py -k entropies"),
)]  # fmt: skip


def misplaced() -> list[str]:
    """Mutations whose text does not stand in its file exactly once."""
    found = []
    for mutation in MUTATIONS:
        path = ROOT / mutation.file
        count = path.read_text().count(mutation.old) if path.is_file() else 0
        if count != 1:
            found.append(f"{mutation.file}: {mutation.old!r} stands there {count} times ({mutation.kind})")
    return found


def copied(folder: Path) -> None:
    """What git knows, and what it does not ignore."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        check=True,
    )
    for name in filter(None, listed.stdout.decode().split("\0")):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)


def run(folder: Path, *words: str) -> int:
    """pytest's exit status."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *words]
    environment = os.environ | {"PYTHONPATH": str(folder)}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True).returncode


def outcome(mutation: Mutation, folder: Path, named: bool) -> str:
    """ "killed", "killed late" by a test that is not named beside it, "survived", or "broken" where no test ran."""
    path = folder / mutation.file
    text = path.read_text()
    path.write_text(text.replace(mutation.old, mutation.new))
    try:
        status = run(folder, *shlex.split(mutation.tests))
        if status == 0 and not named:
            # whether the texts of the table stand in their files, which is not so now
            places = "tests/docs/test_layers.py::test_mutations_have_their_places"
            status = run(folder, "-n", "2", "--dist", "worksteal", f"--deselect={places}")
            return {0: "survived", 1: "killed late", 2: "killed late"}.get(
                status, "broken"
            )  # 2: -x stopped the workers
        return {0: "survived", 1: "killed"}.get(status, "broken")
    finally:
        path.write_text(text)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--part", type=int, choices=(1, 2, 3, 4))
    parser.add_argument("--only", default="")
    parser.add_argument("--named", action="store_true")
    parser.add_argument("--check", action="store_true")
    given = parser.parse_args()
    wrong = misplaced()
    print("\n".join(wrong or [f"{len(MUTATIONS)} mutations, each of which has its place"]))
    if wrong or given.check:
        return len(wrong) > 0
    chosen = MUTATIONS[given.part - 1 :: 4] if given.part else MUTATIONS
    chosen = [mutation for mutation in chosen if given.only in f"{mutation.kind} {mutation.file}"]
    outcomes = []
    with tempfile.TemporaryDirectory() as folder:
        copied(Path(folder))
        for mutation in chosen:
            start = time.monotonic()
            outcomes.append(outcome(mutation, Path(folder), given.named))
            print(
                f"{outcomes[-1]:12} {time.monotonic() - start:6.1f} s  {mutation.kind:58} {mutation.file}", flush=True
            )
    killed = sum(word.startswith("killed") for word in outcomes)
    print(f"{killed} of {len(outcomes)} killed")
    return killed < len(outcomes)


if __name__ == "__main__":
    sys.exit(main())
