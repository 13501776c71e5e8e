"""The part that only a traced graph needs: it imports the compiler, and so is imported where one is traced."""

import torch

from . import recipes

registered = torch.compiler.assume_constant_result(recipes.registered)
