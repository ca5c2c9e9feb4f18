"""How a generator decodes: greedily, by beam search or by sampling.

This module is separate, so that the `--help` of commands with these flags does not import JAX.
"""

from __future__ import annotations

import dataclasses
from typing import Annotated

from jaxir.core.errors import UserError
from jaxir.core.values import Count, Seed, Temperature, Within, checked


@dataclasses.dataclass(frozen=True, kw_only=True)
@checked
class Decoding:
    """How outputs are decoded: greedily, unless num_beams or a setting of sampling is given.

    Attributes:
      max_new_tokens: maximum number of tokens per output, its end token included.
      num_outputs: outputs per text: samples, or the best beams.
      num_beams: beams per text; 1: no beam search.
      temperature: sample from the logits divided by this number; None: 1, if top_k or top_p is given.
      top_k: sample from this number of most likely tokens.
      top_p: sample from the fewest most likely tokens whose probabilities sum to this.
      seed: seed for sampling.
    """

    max_new_tokens: Count = 64
    num_outputs: Count = 1
    num_beams: Count = 1
    temperature: Temperature | None = None
    top_k: Count | None = None
    top_p: Annotated[float, Within(0, 1, without="low")] | None = None
    seed: Seed = 0

    def __post_init__(self):
        if self.samples and self.num_beams > 1:
            raise UserError(
                "beam search does not sample: set num_beams, or temperature, top_k and top_p, not both"
            )
        if not self.samples and self.num_outputs > self.num_beams:
            raise UserError(
                f"num_outputs is {self.num_outputs}, but num_beams is {self.num_beams} and nothing is"
                f" sampled: set num_beams to {self.num_outputs}, or sample with temperature, top_k or top_p"
            )

    @property
    def samples(self) -> bool:
        """Whether tokens are sampled."""
        return any(x is not None for x in (self.temperature, self.top_k, self.top_p))
