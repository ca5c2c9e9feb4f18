"""What an hour of a chip costs, and so a run."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from jaxir.core.errors import UserError, suggest
from jaxir.costs.chips import CHIPS
from jaxir.costs.targets import Target

HOUR = 3600.0


def read(prices: Sequence[str] | None, targets: Sequence[Target]) -> dict[str, float] | None:
    """Returns the price of a chip and hour by the chip's name; None if no prices are given.

    Args:
      prices: such as "v5e=1.2".
      targets: whose chips must have a price.

    Raises:
      UserError: a price is no number above 0, is of no chip, comes twice or is missing.
    """
    if prices is None:
        return None
    found: dict[str, float] = {}
    example = f"{targets[0].chip.name}=1.2"
    for text in prices:
        name, _, number = text.partition("=")
        name = name.strip().lower()
        if name in found:
            raise UserError(f"--prices has two prices of {name}")
        try:
            found[name] = float(number)
        except ValueError:
            raise UserError(
                f"--prices={text}: write CHIP=PRICE, of a chip and hour, such as {example}"
            ) from None
        if name not in CHIPS:
            meant = suggest(name, CHIPS) or f" (there are {', '.join(CHIPS)})"
            raise UserError(f"--prices={text}: no chip {name!r}{meant}")
    for target in targets:
        if not 0 < found.get(target.chip.name, 0) < math.inf:
            name = target.chip.name
            raise UserError(f"--prices must say what {name} costs, above 0, such as {name}=1.2")
    return found


def cost(seconds: float, target: Target, prices: Mapping[str, float]) -> float:
    """Returns what so long on all chips of a target costs."""
    return seconds / HOUR * target.count * prices[target.chip.name]
