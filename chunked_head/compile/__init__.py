"""Calls inside of ``torch.compile``: custom operators of tensors, and recipes that hold all the rest."""
