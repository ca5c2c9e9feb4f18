"""The endpoints /search, /document and /examples."""

import asyncio
import json
from collections.abc import Sequence
from typing import Annotated, Any

from fastapi import APIRouter, Query
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from jaxir.core.errors import suggest
from jaxir.serving.highlight import Highlighter
from jaxir.serving.schemas import (
    UNFIT,
    UNKNOWN,
    DocumentResponse,
    Examples,
    SearchResponse,
    search_request_model,
)
from jaxir.serving.service import Ranking, Service

EXAMPLES = 4


def search_router(service: Service) -> APIRouter:
    router, limits = APIRouter(), service.limits
    search_request = search_request_model(service.systems, limits)

    @router.post("/search", response_model=SearchResponse, responses=UNFIT)
    async def search(request: search_request) -> JSONResponse:
        """Searches for queries. The waiting queries of all clients are searched in one batch."""
        systems = service.systems if request.systems is None else request.systems
        for name in systems:
            _check_named(name, service.systems, "system")
        if not systems:
            raise HTTPException(404, "no index is served: start jaxir.serve with --index=DIR")
        if request.k + request.offset > limits.k:
            raise HTTPException(422, f"offset: k + offset may be at most {limits.k}")
        if request.filter is not None and not service.has_documents:
            sentence = (
                "filter: the indexes here were built without jaxir.index --corpus, so fields are not stored"
            )
            raise HTTPException(422, sentence)
        wanted = list(dict.fromkeys(systems))
        found = await service.search(request.queries, request.k + request.offset, wanted, request.filter)
        return await asyncio.to_thread(_search_response, service, request, found)

    @router.get("/document/{doc_id:path}", response_model=DocumentResponse, responses=UNFIT | UNKNOWN)
    async def document(
        doc_id: str,
        index: Annotated[
            str | None, Query(description="the index to read from; by default the first that has the id")
        ] = None,
        query: Annotated[
            str,
            Query(max_length=limits.query_characters, description="a question whose words are highlighted"),
        ] = "",
    ) -> JSONResponse:
        """Returns a document with all of its text. Percent-encode special characters of the id: ? as %3F."""
        _check_named(index, [o.name for o in service.opened], "index")
        return await asyncio.to_thread(_document_response, service, doc_id, index, query)

    @router.get("/examples", response_model=Examples)
    async def examples() -> JSONResponse:
        """Returns a few phrases from random documents as example queries."""
        return JSONResponse({"examples": await asyncio.to_thread(service.examples, EXAMPLES)})

    return router


def _check_named(name: str | None, known: Sequence[str], what: str) -> None:
    if name is not None and name not in known:
        names = ", ".join(known)
        raise HTTPException(422, f"unknown {what} {name!r}; give one of {names}{suggest(name, known)}")


def _search_response(service: Service, request: Any, found: list[dict[str, Ranking]]) -> JSONResponse:
    results, whole_characters = [], 0
    for query, rankings in zip(request.queries, found, strict=True):
        highlighter = Highlighter(query) if request.documents else None
        shown: dict[str, dict[str, Any]] = {}
        systems = []
        for system, ranking in rankings.items():
            hits = []
            pairs = list(zip(ranking.ids, ranking.scores, strict=True))[request.offset :]
            for rank, (doc_id, score) in enumerate(pairs, start=1 + request.offset):
                if doc_id not in shown:
                    shown[doc_id] = _shown(service, highlighter, doc_id, full=request.full)
                hits.append({"rank": rank, "id": doc_id, "score": score, **shown[doc_id]})
                whole_characters += _length(shown[doc_id].get("document"))
                if whole_characters > service.limits.whole_characters:
                    most = f"{service.limits.whole_characters:,} characters"
                    raise HTTPException(422, f"full: these documents have more than {most} in all; reduce k")
            ms = {part: round(value, 3) for part, value in ranking.ms.items()}
            systems.append({"system": system, "hits": hits, "cut_at": ranking.cut_at, "ms": ms})
        results.append({"query": query, "systems": systems})
    return JSONResponse({"results": results})


def _shown(service: Service, highlighter: Highlighter | None, doc_id: str, *, full: bool) -> dict[str, Any]:
    if highlighter is None and not full:
        return {}
    found = service.document(doc_id)
    document = found[1] if found is not None else None
    shown: dict[str, Any] = {}
    if highlighter is not None:
        title, text = (document.title[:500], document.text) if document is not None else ("", "")
        parts = {
            "title": highlighter.highlight(title),
            "heading": highlighter.heading(title, text),
            "snippet": highlighter.snippet(text),
        }
        shown |= {name: part._asdict() for name, part in parts.items()}
    if full:
        shown["document"] = document._asdict() if document is not None else None
    return shown


def _length(document: dict[str, Any] | None) -> int:
    """Returns the number of characters of a document's title, text, and metadata as JSON."""
    if document is None:
        return 0
    metadata = json.dumps(document["metadata"], ensure_ascii=False)
    return len(document["title"]) + len(document["text"]) + len(metadata)


def _document_response(service: Service, doc_id: str, index: str | None, query: str) -> JSONResponse:
    stored = [o.name for o in service.opened if o.index.documents is not None and index in (None, o.name)]
    if not stored:
        which = f"the index {index} was" if index else "the indexes here were"
        raise HTTPException(404, f"{which} built without jaxir.index --corpus, so texts are not stored")
    found = service.document(doc_id, index)
    if found is None:
        raise HTTPException(404, f"there is no document {doc_id!r} in {' or '.join(stored)}")
    opened, document = found
    highlighter = Highlighter(query)
    positions = {
        f"{field}_matches": highlighter.matches(getattr(document, field)) for field in ("title", "text")
    }
    return JSONResponse({**document._asdict(), "index": opened.name, **positions})
