"""T5X's checkpoints: read, written, and started from."""

from jaxir.interop.t5x.checkpoint import describe, read, start_from, write

__all__ = ["describe", "read", "start_from", "write"]
