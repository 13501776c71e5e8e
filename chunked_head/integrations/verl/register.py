"""A module that calls ``patch_verl()`` when it is imported. With ``actor_rollout_ref.model.external_lib`` set to this
module, verl imports it in each worker. To pass options, write a module that calls ``patch_verl(...)``."""

from . import patch_verl

patch_verl()
