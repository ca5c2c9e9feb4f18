"""Prices of chip-hours, and the cost of a run."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from jaxir.core.errors import UserError, suggest
from jaxir.costs.chips import CHIPS
from jaxir.costs.targets import Target

HOUR = 3600.0


def read(prices: Sequence[str] | None, targets: Sequence[Target]) -> dict[str, float] | None:
    """Returns the price of a chip-hour by chip name, from texts such as "v5e=1.2"; None without prices."""
    if prices is None:
        return None
    found: dict[str, float] = {}
    example = f"{targets[0].chip.name}=1.2"
    for text in prices:
        name, _, number = text.partition("=")
        name = name.strip().lower()
        if name in found:
            raise UserError(f"--prices has two prices for {name}: give one")
        try:
            found[name] = float(number)
        except ValueError:
            raise UserError(
                f"--prices={text}: write CHIP=PRICE, the price of a chip-hour, such as {example}"
            ) from None
        if name not in CHIPS:
            meant = suggest(name, CHIPS) or f" (known chips: {', '.join(CHIPS)})"
            raise UserError(f"--prices={text}: no chip {name!r}{meant}")
    for target in targets:
        if not 0 < found.get(target.chip.name, 0) < math.inf:
            name = target.chip.name
            raise UserError(f"--prices lacks a price above 0 for {name}: add {name}=1.2 or the like")
    return found


def cost(seconds: float, target: Target, prices: Mapping[str, float]) -> float:
    """Returns the cost of `seconds` on all chips of a target."""
    return seconds / HOUR * target.count * prices[target.chip.name]
