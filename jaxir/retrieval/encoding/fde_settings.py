"""Flags of `encode` for vectors of fixed dimension (MUVERA)."""

from __future__ import annotations

import dataclasses

from jaxir.core.values import Count, checked


@dataclasses.dataclass(frozen=True, kw_only=True)
@checked
class FdeSettings:
    """Flags for one vector per text from a multi-vector encoder; see `fixed_dimension.FixedDimension`.

    Attributes:
      fde: one vector of this many components for each text of a multi-vector encoder (MUVERA), such as 2560.
        Products approximate MaxSim, and every engine of jaxir.index takes these vectors.
      fde_repetitions: with --fde, the number of independent partitions of the tokens (default: as few as give
        --fde components). More are mapped to --fde components at random.
      fde_bits: with --fde, hyperplanes of a partition, which has 2^bits clusters (default: 3).
      fde_projection: with --fde, components of a token after a random projection (default: 16).
    """

    fde: Count | None = None
    fde_repetitions: Count | None = None
    fde_bits: Count | None = None
    fde_projection: Count | None = None

    def given(self) -> dict[str, int]:
        """Returns the given arguments of `FixedDimension.of` besides the dimension."""
        found = {n.removeprefix("fde_"): x for n, x in dataclasses.asdict(self).items() if n != "fde"}
        return {name: value for name, value in found.items() if value is not None}
