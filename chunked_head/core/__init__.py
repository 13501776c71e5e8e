"""Records and helpers that every layer reads; nothing here imports another layer."""
