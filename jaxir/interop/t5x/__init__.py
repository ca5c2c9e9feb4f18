"""Reads, writes and starts from T5X's checkpoints."""

from jaxir.interop.t5x.checkpoint import describe, read, start_from, write

__all__ = ["describe", "read", "start_from", "write"]
