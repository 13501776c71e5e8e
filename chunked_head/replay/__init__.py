"""Calls that have run before with tensors alike, done again from a tape."""
