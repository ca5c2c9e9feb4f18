"""The number of steps of a run, and settings that may be given as a share of it."""

import math

from jaxir.core.errors import UserError
from jaxir.core.values import MOST_STEPS

_ROUNDING = 1e-9  # subtracted before rounding up, so that 0.1 of 30 is 3


def check_length(steps: int | None, epochs: float | None) -> None:
    """Raises a UserError unless a run's length is given either in steps or in epochs."""
    if steps is not None and epochs is not None:
        raise UserError(f"steps is {steps} and epochs is {epochs}: keep one, and set the other to None")
    if steps is None and epochs is None:
        raise UserError("steps or epochs must be given: set the length of the run by one of them")


def steps_of(epochs: float, *, pairs: int, batch_size: int, min_steps: int) -> int:
    """Returns the number of steps to train on `pairs` pairs `epochs` times, at least `min_steps`."""
    steps = epochs * pairs / batch_size - _ROUNDING
    if steps > MOST_STEPS:
        raise UserError(
            f"epochs={epochs:g} of {pairs:,} examples are {steps:.3g} steps at batch_size {batch_size}, but a"
            f" run has at most {MOST_STEPS:,} steps: give fewer epochs"
        )
    return max(min_steps, math.ceil(steps))


def lengthened(epochs: float | None, *, pairs: int, batch_size: int, min_steps: int) -> str | None:
    """Returns a note if `min_steps` makes a run longer than its epochs, else None."""
    if epochs is None:
        return None
    own = steps_of(epochs, pairs=pairs, batch_size=batch_size, min_steps=1)
    if own >= min_steps:
        return None
    steps = "1 step" if own == 1 else f"{own:,} steps"
    return (
        f"epochs={epochs:g} of {pairs:,} examples is {steps} at batch_size {batch_size}; min_steps makes the"
        f" run {min_steps:,} steps long; for {steps} set min_steps=1"
    )


def in_steps(name: str, value: float, steps: int) -> int:
    """Returns the setting `name` as a number of steps: a value between 0 and 1 is a share, rounded up."""
    if 0 < value < 1:
        return math.ceil(value * steps - _ROUNDING)
    if value != int(value):
        raise UserError(f"{name} must be a whole number of steps, or a share of them below 1, not {value}")
    return int(value)
