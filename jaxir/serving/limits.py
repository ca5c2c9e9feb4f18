"""What a client may ask of the service, and how long it may take over it."""

from __future__ import annotations

import dataclasses

from jaxir.core.errors import UserError
from jaxir.core.values import Count, Positive, checked


@dataclasses.dataclass(frozen=True, kw_only=True)
@checked
class Limits:
    """The bounds of a request. What lies beyond is refused with a sentence and costs next to nothing.

    Attributes:
      body_bytes: size of a request's body.
      queries: queries of a search, or texts to encode, in one request.
      query_characters: length of a query.
      passage_characters: length of a passage to encode; the model cuts it at its own maximum length.
      k: documents asked for each query. Every search has this depth, so that there is one program for it.
      whole_characters: length of all the whole documents, their metadata as JSON included, that one search
        may answer with.
      answer_seconds: time from a request's head to the end of the answer.
      waiting: queries of all clients that wait for one engine; no fewer than `queries`, which come at once.
      requests: requests under way.

    Raises:
      UserError: `waiting` is below `queries`: a request of so many would never be answered.
    """

    body_bytes: Count = 2_000_000
    queries: Count = 64
    query_characters: Count = 2_000
    passage_characters: Count = 20_000
    k: Count = 100
    whole_characters: Count = 10_000_000
    answer_seconds: Positive = 30.0
    waiting: Count = 10_000
    requests: Count = 500

    def __post_init__(self):
        if self.waiting < self.queries:
            raise UserError(
                f"Limits: waiting is {self.waiting}, but one request may have {self.queries} queries: make"
                " waiting larger, or queries smaller"
            )
