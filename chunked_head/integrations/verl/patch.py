"""verl's workers on this library's head: its two functions of the head in their places."""

import functools
from typing import Unpack

from ...call.options import Execution
from ..frameworks import Framework, check_named
from .functions import FusedLinearForPPO, linear_cross_entropy

VERL = Framework(
    "verl", "0.9", "0.10", "verl",
    places={  # which verl looks up at every call
        ("verl.utils.kernel.linear_cross_entropy", "linear_cross_entropy"): (),
        ("verl.utils.experimental.torch_functional", "FusedLinearForPPO"): (),
    },
    bound=("verl.models.mcore.model_forward_fused", "verl.models.mcore.model_forward_1f1b_overlap"),
)  # fmt: skip


def patch_verl(*, reduce_dhidden: bool | None = None, **options: Unpack[Execution]) -> None:
    """Puts this library's head behind ``use_fused_kernels``, whichever ``impl_backend``, in this process.

    Args:
        reduce_dhidden: as in ``linear_cross_entropy``: True for Megatron's tensor parallelism without sequence
            parallelism.
        options: of every call, as in ``chunked_head.Execution`` without ``parallel``.

    Raises:
        TypeError, ValueError: for an option that is wrong by itself.
        ImportError: verl is not installed. RuntimeError: it is a version that was not tested. Nothing is changed then.
    """
    check_named(options, Execution.__annotations__.keys() - {"parallel"})
    function = functools.partial(linear_cross_entropy, reduce_dhidden=reduce_dhidden, **options)
    VERL.replace(function, type("FusedLinearForPPO", (FusedLinearForPPO,), {"options": dict(options)}))


def unpatch_verl() -> None:
    """Gives verl its functions back; without ``patch_verl`` before it, nothing happens."""
    VERL.give_back()
