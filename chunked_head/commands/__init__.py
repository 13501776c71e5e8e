"""The command line, ``python -m chunked_head``."""
