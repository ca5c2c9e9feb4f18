"""Training data that takes its time, so that a run can be interrupted; for gin files."""

import dataclasses
import os
import time
from typing import Any

from tests.training import tiny_run


@dataclasses.dataclass(frozen=True, kw_only=True)
class Paced:
    """Pairs whose batches take PACE seconds each, by the environment.

    Attributes:
      source: where the pairs come from.
    """

    source: Any

    def build(self, tokenizer, features, **how):
        pace = float(os.environ.get("PACE", "0"))
        return tiny_run.Hooked(self.source.build(tokenizer, features, **how), lambda step: time.sleep(pace))
