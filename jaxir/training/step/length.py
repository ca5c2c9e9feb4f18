"""How long a run is, and what is told as a share of that."""

import math

from jaxir.core.errors import UserError
from jaxir.core.values import MOST_STEPS

_ROUNDING = 1e-9  # .1 of 30 is 3, whatever floating point makes of it


def check_length(steps: int | None, epochs: float | None, min_steps: int) -> None:
    """Raises a UserError unless a run is told either in steps or in epochs, and in possible ones."""
    if steps is not None and epochs is not None:
        raise UserError(f"steps is {steps} and epochs is {epochs}: keep one, and set the other to None")
    if steps is None and epochs is None:
        raise UserError("steps or epochs must be given, to say how long to train")
    if epochs is not None and not 0 < epochs < math.inf:
        raise UserError(f"epochs must be more than 0, not {epochs}")
    if min_steps < 1:
        raise UserError(f"min_steps must be at least 1, not {min_steps}")


def steps_of(epochs: float, *, pairs: int, batch_size: int, min_steps: int) -> int:
    """Returns the steps that go through `pairs` training pairs `epochs` times; at least `min_steps`.

    Raises:
      UserError: these are more than a run can have.
    """
    steps = epochs * pairs / batch_size - _ROUNDING
    if steps > MOST_STEPS:
        raise UserError(
            f"epochs={epochs:g} of {pairs:,} examples are {steps:.3g} steps of {batch_size}; a run has at"
            f" most {MOST_STEPS:,} steps: give fewer epochs"
        )
    return max(min_steps, math.ceil(steps))


def lengthened(epochs: float | None, *, pairs: int, batch_size: int, min_steps: int) -> str | None:
    """Returns a note where `min_steps` makes a run longer than its epochs; None where it does not."""
    if (
        epochs is None
        or (own := steps_of(epochs, pairs=pairs, batch_size=batch_size, min_steps=1)) >= min_steps
    ):
        return None
    steps = "1 step" if own == 1 else f"{own:,} steps"
    return (
        f"epochs={epochs:g} of {pairs:,} examples is {steps} of {batch_size}; min_steps makes the run"
        f" {min_steps:,} steps; for {steps} set min_steps=1"
    )


def in_steps(name: str, value: float, steps: int) -> int:
    """Returns a number of steps that is told as such or, between 0 and 1, as a share of the run, rounded up.

    Args:
      name: of the setting, for the error.
      value: what it is.
      steps: of the run.

    Raises:
      UserError: a number above 1 that is not whole.
    """
    if 0 < value < 1:
        return math.ceil(value * steps - _ROUNDING)
    if value != int(value):
        raise UserError(f"{name} must be a whole number of steps, or a share of them below 1, not {value}")
    return int(value)
