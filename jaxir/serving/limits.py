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
      passage_characters: maximum number of characters per passage to encode, and per text to embed or rank;
        the model may truncate it more.
      inputs: maximum number of texts to embed or rank in one request.
      k: maximum number of documents per query. Every search finds this many, so that it compiles once.
      filter_depth: maximum number of documents of each index that a search with a filter looks at.
      whole_characters: maximum total characters of an answer's full documents, including metadata as JSON.
      answer_seconds: maximum time from the start of a request to the end of its answer, in seconds.
      waiting: maximum number of queries, of all clients, that wait for one engine; at least `queries`.
      requests: maximum number of concurrent requests.
      client_requests: maximum number of concurrent requests of one client, an IP address with an API key;
        None: no limit. Behind a proxy, all clients have the proxy's address.
      held_bytes: maximum total size of the bodies of concurrent requests, in bytes; at least `body_bytes`.

    Raises:
      UserError: `waiting` is below `queries`, or `held_bytes` below `body_bytes`, so that a full request
        could never be answered.
    """

    body_bytes: Count = 10_000_000
    queries: Count = 64
    query_characters: Count = 2_000
    passage_characters: Count = 100_000
    inputs: Count = 2_048
    k: Count = 100
    filter_depth: Count = 10_000
    whole_characters: Count = 10_000_000
    answer_seconds: Positive = 30.0
    waiting: Count = 10_000
    requests: Count = 500
    client_requests: Count | None = None
    held_bytes: Count = 500_000_000

    def __post_init__(self):
        if self.waiting < self.queries:
            raise UserError(
                f"Limits: waiting is {self.waiting}, but one request may have {self.queries} queries:"
                " increase waiting or reduce queries"
            )
        if self.held_bytes < self.body_bytes:
            raise UserError(
                f"Limits: held_bytes is {self.held_bytes}, but one body may have {self.body_bytes} bytes:"
                " increase held_bytes or reduce body_bytes"
            )
