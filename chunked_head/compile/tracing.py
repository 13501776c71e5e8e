"""``store_recipe`` as a function that a compiler calls while it traces. This module imports the compiler; hence it is
imported only while a graph is traced."""

import torch

from . import recipes

store_recipe = torch.compiler.assume_constant_result(recipes.store_recipe)
