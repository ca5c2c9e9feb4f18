"""Notes and warnings about models."""

import sys

import jax


def note(text: str) -> None:
    """Prints a line on standard error, in process 0 only."""
    if jax.process_index() == 0:
        print(text, file=sys.stderr, flush=True)
