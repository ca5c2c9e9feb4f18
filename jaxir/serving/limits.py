"""Limits on the requests to the HTTP service."""

from __future__ import annotations

import dataclasses

from jaxir.core.errors import UserError
from jaxir.core.values import Count, Positive, checked


@dataclasses.dataclass(frozen=True, kw_only=True)
@checked
class Limits:
    """Limits on requests; a request beyond them is refused at once.

    Attributes:
      body_bytes: maximum size of a request's body, in bytes.
      queries: maximum number of queries to search, or texts to encode, in one request.
      query_characters: maximum number of characters per query.
      passage_characters: maximum number of characters per passage to encode; the model may truncate it more.
      k: maximum number of documents per query. Every search finds this many, so that it compiles once.
      whole_characters: maximum total characters of an answer's full documents, including metadata as JSON.
      answer_seconds: maximum time from the start of a request to the end of its answer, in seconds.
      waiting: maximum number of queries, of all clients, that wait for one engine; at least `queries`.
      requests: maximum number of concurrent requests.

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
