"""Calls inside of ``torch.compile``: custom operators. Their arguments are tensors and the key of a recipe, which holds
all other arguments of the call."""
