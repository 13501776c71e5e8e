"""Kernels that serve any number of tokens: what follows that number is an argument of compiled code, not part of it.

Triton compiles anew for an integer that is 1 or a multiple of 16 where another was not, and for a pointer that is a
multiple of 16 bytes; it need not where neither makes the code better. What the number of tokens still decides is
whether a chunk's products are stored or added to an earlier chunk's, whether tiles of dhidden are cut, and whether a
size needs 64 bits.
"""

from collections.abc import Callable

import triton

from .launcher import Launcher

# sizes that follow the number of tokens, as kernels name them
PER_CALL = (
    "each", "entries", "first_row", "length", "more_numel", "more_steps", "most_parts", "numel", "pieces",
    "programs", "rows", "steps", "tokens", "units",
)  # fmt: skip
# pointers to one number, or to one or a few per row: a chunk's start wherever its first row is, and no thread reads
# several rows at a time
PER_ROW = (
    "alpha2_ptr", "alpha_ptr", "argmax_ptr", "begin_ptr", "below_ptr", "beta_ptr", "column_ptr", "count_ptr",
    "counted_ptr", "dlogit_ptr", "end_ptr", "entropy_ptr", "eta2_ptr", "eta_ptr", "factor_ptr", "forward_kl_ptr",
    "gamma_ptr", "ids_ptr", "inverse_ptr", "jsd_ptr", "kappa_ptr", "kl_mixture_ptr", "level_ptr",
    "logit_ptr", "logprob_ptr", "lse_ptr", "mask_ptr", "offset_ptr", "one_or_nan_ptr", "order_ptr", "overlap_ptr",
    "paired_ptr", "rest2_ptr", "rest_ptr", "reverse_kl_ptr", "rho_ptr", "row_offset_ptr", "row_ptr", "row_scale_ptr",
    "softmax_factor_ptr", "sorted_ptr", "sorted_target_ptr", "source_ptr", "sparse_ptr", "start2_ptr", "start_ptr",
    "target_factor_ptr", "target_logit_ptr", "target_ptr", "tau_ptr", "teacher_entropy_ptr", "teacher_rest_ptr",
    "teacher_row_scale_ptr", "teacher_start_ptr", "theta_ptr", "top_ptr", "tvd_ptr", "weighted_sum_ptr",
    "zero_or_nan_ptr",
)  # fmt: skip


def kernel(function: Callable) -> Launcher:
    """``triton.jit`` of what is launched; functions that kernels call need no more than that."""
    return Launcher(triton.jit(function, do_not_specialize=PER_CALL, do_not_specialize_on_alignment=PER_ROW))
