"""Importing this module calls ``patch_verl()``: for ``actor_rollout_ref.model.external_lib``, which verl imports in
each of its workers. For options, name a module of your own there that calls ``patch_verl`` with them."""

from . import patch_verl

patch_verl()
