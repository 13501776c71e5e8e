"""Calls inside of ``torch.compile``: custom operators whose arguments are tensors and the key of a recipe, which holds
all other arguments."""
