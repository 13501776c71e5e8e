"""Calls inside of ``torch.compile``: custom operators of tensors and the key of a recipe, which holds all the rest."""
