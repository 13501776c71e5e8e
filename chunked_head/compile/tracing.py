"""What only a compiler meets. To make it imports the compiler, so this is imported where a graph is being traced."""

import torch

from . import recipes

registered = torch.compiler.assume_constant_result(recipes.registered)
