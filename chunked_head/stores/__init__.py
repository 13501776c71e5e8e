"""Ways of keeping a chunk's logits, and the two backends that make them."""

from .backend import Backend, backend_of

__all__ = ["Backend", "backend_of"]
