"""JSON bodies, read on the event loop that all clients share: little work, whatever a client sends."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine, Iterable, Mapping
from typing import Any

from annotated_types import MaxLen
from fastapi import Request, Response
from fastapi.exceptions import HTTPException
from fastapi.routing import APIRoute
from pydantic import BaseModel

from jaxir.core.errors import suggest

BEGINNING = 65_536  # characters looked at first: enough to refuse most bodies without reading them whole
# Names that other services give to what ours call otherwise, as far as they are not alike.
SYNONYMS = {
    "k": ("top_k", "topk", "top", "n", "num", "limit", "size", "count", "num_results", "max_results"),
    "queries": ("q", "text", "texts", "question", "questions", "input", "inputs"),
    "texts": ("q", "query", "queries", "input", "inputs", "passages", "documents", "sentences"),
    "systems": ("index", "indexes", "indices", "retriever", "retrievers"),
    "tower": ("type", "input_type", "kind", "side", "encoder"),
}


def read_json(body: bytes, *, keys: Mapping[str, int | None], most: int) -> Any:
    """Returns what a body holds. The work is bounded by its length and by `most`.

    Args:
      body: JSON in UTF-8.
      keys: the keys that the request knows, and how many items a list under each may have.
      most: the most keys, values and nested lists or objects that a request can have. A body of more is not
        parsed: 2 MB of them take seconds to parse and to refuse one by one.

    Raises:
      HTTPException: the body has more, or an object has unknown keys.
      ValueError: it is not JSON in UTF-8.
    """
    text = body.decode("utf-8-sig")
    if _has_more(text[:BEGINNING], most) or _has_more(text, most):
        raise HTTPException(422, f"the body has more than {most:,} keys and values. {_known(keys)}")
    found = json.loads(text)
    unknown = [key for key in found if key not in keys] if isinstance(found, dict) else []
    if unknown:
        first = unknown[0]
        more = "" if len(unknown) == 1 else f" (and {len(unknown) - 1:,} more)"
        meant = _meant(first, keys) or "."
        raise HTTPException(422, f"unknown key {first[:40]!r}{more}{meant} {_known(keys)}")
    return found


def _has_more(text: str, most: int) -> bool:
    """Whether JSON has more than `most` strings, or more than `most` commas and opening brackets."""
    # Without escaped quotes, each quote begins or ends a string.
    parts = text.replace(r"\\", "").replace(r"\"", "").split('"', 2 * most)
    outside = "".join(parts[::2])
    return len(parts) > 2 * most or sum(map(outside.count, ",[{")) > most


def bounded_route(most: int) -> type[APIRoute]:
    """Returns a class of routes whose JSON bodies are read by `read_json`.

    Args:
      most: as `read_json` takes it.
    """
    turn = asyncio.Lock()

    class Route(APIRoute):
        def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
            handler = super().get_route_handler()
            keys = _keys(self.body_field.field_info.annotation) if self.body_field else {}

            class BoundedRequest(Request):
                async def json(self) -> Any:
                    async with turn:  # one at a time, and other work of the event loop after each
                        found = read_json(await self.body(), keys=keys, most=most)
                        await asyncio.sleep(0)
                    return found

            async def handle(request: Request) -> Response:
                return await handler(BoundedRequest(request.scope, request.receive))

            return handle

    return Route


def _keys(model: type[BaseModel]) -> dict[str, int | None]:
    """Returns the keys of a model, and how many items a list under each may have."""
    return {
        key: next((m.max_length for m in field.metadata if isinstance(m, MaxLen)), None)
        for key, field in model.model_fields.items()
    }


def _meant(key: str, keys: Iterable[str]) -> str:
    synonym = next((known for known in keys if key.lower() in SYNONYMS.get(known, ())), None)
    return f"; did you mean {synonym!r}?" if synonym else suggest(key[:40], keys)


def _known(keys: Mapping[str, int | None]) -> str:
    names = (f"{key} (at most {most:,})" if most else key for key, most in keys.items())
    return f"The keys are {', '.join(names)}"
