"""The public functions: signature, documentation and result of each."""
