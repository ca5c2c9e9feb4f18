"""Limits of requests."""

from __future__ import annotations

import dataclasses

from jaxir.core.errors import UserError
from jaxir.core.values import Count, Positive, checked


@dataclasses.dataclass(frozen=True, kw_only=True)
@checked
class Limits:
    """Limits of requests; requests beyond them are refused at once.

    Attributes:
      body_bytes: size of a request's body.
      queries: queries of a search, or texts to encode, in one request.
      query_characters: length of a query.
      passage_characters: length of a passage to encode; the model cuts it at its own maximum length.
      k: documents for each query. Every search has this depth, so that one program suffices.
      whole_characters: total length of the whole documents in an answer, including metadata as JSON.
      answer_seconds: time from the start of a request to the end of the answer.
      waiting: queries of all clients that may wait for one engine; at least `queries`.
      requests: concurrent requests.

    Raises:
      UserError: `waiting` is below `queries`, so that a full request could never be answered.
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
                f"Limits: waiting is {self.waiting}, but one request may have {self.queries} queries:"
                " increase waiting or reduce queries"
            )
