"""verl's fused log-probabilities and entropies by its names and signatures, computed by this library's head.

    from chunked_head.integrations.verl import patch_verl
    patch_verl(memory_budget="1GiB")

before a worker builds its model, with ``actor_rollout_ref.model.use_fused_kernels=True``. In verl's configuration
``actor_rollout_ref.model.external_lib=chunked_head.integrations.verl.register`` makes the call in every worker.
"""

from .functions import FusedLinearForPPO, linear_cross_entropy
from .patch import patch_verl, unpatch_verl

__all__ = ["FusedLinearForPPO", "linear_cross_entropy", "patch_verl", "unpatch_verl"]
