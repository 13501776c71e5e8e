"""Recipes for a compiler: this module imports the compiler, and is imported where a graph is traced."""

import torch

from . import recipes

registered = torch.compiler.assume_constant_result(recipes.registered)
