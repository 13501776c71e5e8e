"""A module whose import calls ``patch_verl()``, for ``actor_rollout_ref.model.external_lib``: verl imports the module
of that setting in each worker. To pass options, write such a module that calls ``patch_verl`` with them."""

from . import patch_verl

patch_verl()
