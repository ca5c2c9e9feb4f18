"""Slow training data, so that a test can interrupt the run; for gin files."""

import dataclasses
import os
import time
from typing import Any

from jaxir.data.batches.text_data import TextData
from tests.training import tiny_run


@dataclasses.dataclass(frozen=True, kw_only=True)
class Paced(TextData):
    """Pairs whose batches take PACE seconds each (an environment variable).

    Attributes:
      source: the source of the pairs.
    """

    source: Any

    def dataset(self, tokenizer, features, on_bad_input):
        pace = float(os.environ.get("PACE", "0"))
        return tiny_run.Hooked(
            self.source.build(tokenizer, features, on_bad_input=on_bad_input), lambda step: time.sleep(pace)
        )
