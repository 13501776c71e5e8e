"""The head in torch operations, for every device."""
