"""The HTTP application: searching, encoding, documents and metrics, the page at /, documentation at /docs."""

import asyncio
import base64
import contextlib
import hashlib
import importlib.resources
import json
import re
import sys
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Annotated, Any

from fastapi import FastAPI, Query, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, JSONResponse
from starlette.exceptions import HTTPException

from jaxir.core.errors import ChangedError, DamagedError, UserError, suggest
from jaxir.serving.batcher import Busy
from jaxir.serving.bodies import bounded_route
from jaxir.serving.highlight import Marker
from jaxir.serving.metrics import Metrics
from jaxir.serving.reference import reference_page
from jaxir.serving.schemas import (
    PROBLEMS,
    UNFIT,
    UNKNOWN,
    DocumentResponse,
    EncodeResponse,
    Examples,
    Health,
    SearchResponse,
    request_models,
)
from jaxir.serving.service import Ranking, Service
from jaxir.version import __version__

EXAMPLES = 4


def build_app(service: Service, metrics: Metrics) -> FastAPI:
    """Returns the application of a service, which it opens and closes with its own life."""
    limits = service.limits
    search_request, encode_request = request_models(service.systems, limits)
    page = importlib.resources.files("jaxir.serving").joinpath("page.html").read_text(encoding="utf-8")

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        async with service:
            yield

    app = FastAPI(
        title="jaxir",
        version=__version__,
        description="Dense, sparse and hybrid retrieval over indexes made by jaxir.",
        lifespan=lifespan,
        docs_url=None,  # FastAPI's own pages load their code from another host
        redoc_url=None,
        redirect_slashes=False,  # a redirection is to the Host header's name: behind a proxy to localhost
        responses=PROBLEMS,
    )
    app.router.route_class = bounded_route(4 * (limits.queries + len(service.systems)) + 100)
    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_exception_handler(HTTPException, _http_problem)
    app.add_exception_handler(ChangedError, _changed)
    app.add_exception_handler(DamagedError, _damaged)
    app.add_exception_handler(UserError, _failed)
    app.add_exception_handler(Busy, _busy)
    app.add_exception_handler(Exception, _fault)

    @app.post("/search", response_model=SearchResponse, responses=UNFIT)
    async def search(request: search_request) -> JSONResponse:
        """Searches for queries. Queries of all clients that wait are encoded and searched together."""
        systems = service.systems if request.systems is None else request.systems
        for name in systems:
            _check_named(name, service.systems, "system")
        found = await service.search(request.queries, request.k, list(dict.fromkeys(systems)))
        return await asyncio.to_thread(_search_response, service, request, found)

    @app.post("/encode", response_model=EncodeResponse, responses=UNFIT)
    async def encode(request: encode_request) -> JSONResponse:
        """Encodes texts with an index's model."""
        for number, text in enumerate(request.texts):
            longest = limits.query_characters if request.tower == "query" else limits.passage_characters
            if len(text) > longest:
                raise HTTPException(422, f"texts.{number}: a {request.tower} may have {longest:,} characters")
        try:
            opened, vectors, cuts = await service.encode(request.texts, request.tower, request.index)
        except KeyError as error:
            raise HTTPException(422, error.args[0]) from None
        info = opened.index.info
        return JSONResponse(
            {
                "index": opened.name,
                "fingerprint": opened.searcher.encoder.fingerprint,
                "similarity": info.similarity,
                "dimension": info.dimension,
                "vectors": vectors.tolist(),
                "cut_at": cuts,
            }
        )

    @app.get("/document/{doc_id:path}", response_model=DocumentResponse, responses=UNFIT | UNKNOWN)
    async def document(
        doc_id: str,
        index: Annotated[
            str | None, Query(description="the index to take it from; the first that has it by default")
        ] = None,
        query: Annotated[
            str, Query(max_length=limits.query_characters, description="a question whose words are marked")
        ] = "",
    ) -> JSONResponse:
        """Gives a whole document. What is special in an address is quoted in the id: ? as %3F."""
        _check_named(index, [o.name for o in service.opened], "index")
        return await asyncio.to_thread(_document_response, service, doc_id, index, query)

    @app.get("/examples", response_model=Examples)
    async def examples() -> JSONResponse:
        """Gives a few phrases to search for, out of the documents; other ones each time."""
        return JSONResponse({"examples": await asyncio.to_thread(service.examples, EXAMPLES)})

    @app.get(
        "/metrics",
        response_class=Response,
        responses={200: {"content": {"text/plain": {}}, "description": "metrics in Prometheus's format"}},
    )
    async def prometheus(request: Request) -> Response:
        """Gives counts and times of requests, what waits, and sizes of batches, for Prometheus."""
        text, content_type = metrics.text(request.headers.get("accept", ""))
        return Response(text, headers={"content-type": content_type})

    @app.get("/healthz", response_model=Health)
    async def healthz() -> JSONResponse:
        """Says that the service answers, what it serves, and its limits."""
        return JSONResponse(_health(service))

    @app.get("/", include_in_schema=False)
    async def root() -> HTMLResponse:
        return _html(page)

    @app.get("/docs", include_in_schema=False)
    async def docs() -> HTMLResponse:
        return _html(reference_page(app.openapi()))

    return app


def _check_named(name: str | None, known: Sequence[str], what: str) -> None:
    if name is not None and name not in known:
        there = ", ".join(known)
        raise HTTPException(422, f"there is no {what} {name!r}; there are {there}{suggest(name, known)}")


def _search_response(service: Service, request: Any, found: list[dict[str, Ranking]]) -> JSONResponse:
    results, whole_characters = [], 0
    for query, rankings in zip(request.queries, found, strict=True):
        marker = Marker(query) if request.documents else None
        shown: dict[str, dict[str, Any]] = {}
        lengths: dict[str, int] = {}
        systems = []
        for system, ranking in rankings.items():
            hits = []
            for rank, (doc_id, score) in enumerate(zip(ranking.ids, ranking.scores, strict=True), start=1):
                if (marker is not None or request.full) and doc_id not in shown:
                    shown[doc_id] = _shown(service, marker, doc_id, full=request.full)
                    lengths[doc_id] = _length(shown[doc_id].get("document"))
                hit = {"rank": rank, "id": doc_id, "score": score, **shown.get(doc_id, {})}
                whole_characters += lengths.get(doc_id, 0)
                hits.append(hit)
                if whole_characters > service.limits.whole_characters:
                    most = f"{service.limits.whole_characters:,} characters"
                    raise HTTPException(422, f"full: these documents have more than {most}: ask for fewer")
            ms = {part: round(value, 3) for part, value in ranking.ms.items()}
            systems.append({"system": system, "hits": hits, "cut_at": ranking.cut_at, "ms": ms})
        results.append({"query": query, "systems": systems})
    return JSONResponse({"results": results})


def _shown(service: Service, marker: Marker | None, doc_id: str, *, full: bool) -> dict[str, Any]:
    found = service.document(doc_id)
    document = found[1] if found is not None else None
    shown: dict[str, Any] = {}
    if marker is not None:
        title, text = (document.title, document.text) if document is not None else ("", "")
        title = title[:500]
        parts = {
            "title": marker.mark(title),
            "heading": marker.heading(title, text),
            "snippet": marker.snippet(text),
        }
        shown |= {name: part._asdict() for name, part in parts.items()}
    if full:
        shown["document"] = document._asdict() if document is not None else None
    return shown


def _length(document: dict[str, Any] | None) -> int:
    """Returns the characters of a whole document, its metadata as they are sent."""
    if document is None:
        return 0
    metadata = json.dumps(document["metadata"], ensure_ascii=False)
    return len(document["title"]) + len(document["text"]) + len(metadata)


def _document_response(service: Service, doc_id: str, index: str | None, query: str) -> JSONResponse:
    stored = [o.name for o in service.opened if o.index.documents is not None and index in (None, o.name)]
    if not stored:
        which = f"the index {index} was" if index else "the indexes here were"
        raise HTTPException(404, f"{which} built without --corpus: it is not known what documents say")
    found = service.document(doc_id, index)
    if found is None:
        raise HTTPException(404, f"there is no document {doc_id!r} in {' or '.join(stored)}")
    opened, document = found
    marker = Marker(query)
    matches = {f: marker.matches(getattr(document, f)) if query else [] for f in ("title", "text")}
    marked = {f"{field}_matches": spans for field, spans in matches.items()}
    return JSONResponse({**document._asdict(), "index": opened.name, **marked})


def _health(service: Service) -> dict[str, Any]:
    indexes = []
    for opened in service.opened:
        info, encoder = opened.index.info, opened.searcher.encoder
        indexes.append(
            {
                "name": opened.name,
                "kind": opened.kind,
                "engine": info.engine,
                "similarity": info.similarity,
                "documents": info.count,
                "has_texts": opened.index.documents is not None,
                # The path would tell clients about the machine.
                "model": Path(encoder.spec).name if encoder is not None and encoder.spec else None,
                "fingerprint": encoder.fingerprint if encoder is not None else None,
                "dimension": info.dimension,
                "query_tokens": encoder.text_settings("query")[1] if encoder is not None else None,
            }
        )
    limits = {
        name: getattr(service.limits, name)
        for name in ("body_bytes", "queries", "query_characters", "k", "answer_seconds")
    }
    reranker = Path(service.reranker.encoder.spec).name if service.reranker is not None else None
    served = {"indexes": indexes, "systems": service.systems, "reranker": reranker}
    return {"status": "ok", **served, "limits": limits}


def _html(text: str) -> HTMLResponse:
    """Returns a page that may run only the scripts and styles it holds, and speak only to this service."""

    def hashes(tag: str) -> str:
        found = re.findall(rf"<{tag}>(.*?)</{tag}>", text, re.DOTALL)
        digests = (base64.b64encode(hashlib.sha256(each.encode()).digest()).decode() for each in found)
        return " ".join(f"'sha256-{digest}'" for digest in digests) or "'none'"

    policy = (
        f"default-src 'none'; script-src {hashes('script')}; style-src {hashes('style')}; connect-src 'self';"
        " img-src data:; base-uri 'none'; form-action 'self'; frame-ancestors 'none'"
    )
    return HTMLResponse(text, headers={"content-security-policy": policy})


async def _invalid(_: Request, error: RequestValidationError) -> JSONResponse:
    first = error.errors()[0]
    where = ".".join(str(part) for part in first["loc"][1:] if not isinstance(part, str) or len(part) <= 40)
    if first["type"] == "json_invalid":
        return JSONResponse({"detail": "the body is not JSON"}, 400)
    sentence = f"{where}: {first['msg']}" if where else first["msg"]
    if isinstance(error.body, bytes):  # it was not read as JSON: a page of another site could send it
        sentence = "the request needs the header content-type: application/json"
    return JSONResponse({"detail": sentence.encode(errors="replace").decode()}, 422)


async def _http_problem(_: Request, error: HTTPException) -> JSONResponse:
    return JSONResponse({"detail": error.detail}, error.status_code, headers=error.headers)


async def _busy(_: Request, error: Busy) -> JSONResponse:
    return JSONResponse({"detail": str(error)}, 503, headers={"retry-after": "1"})


async def _failed(_: Request, error: UserError) -> JSONResponse:
    print(f"error: {error}", file=sys.stderr, flush=True)  # with paths and addresses of this machine
    sentence = "the service cannot answer this now; its standard error says why"
    return JSONResponse({"detail": sentence}, 503, headers={"retry-after": "1"})


async def _changed(_: Request, error: ChangedError) -> JSONResponse:
    print(f"error: {error}", file=sys.stderr, flush=True)
    return JSONResponse({"detail": "the index was changed on disk; the service must be started again"}, 503)


async def _damaged(_: Request, error: DamagedError) -> JSONResponse:
    print(f"error: {error}", file=sys.stderr, flush=True)  # with the path, which is no client's affair
    return JSONResponse({"detail": f"the index is damaged: {error.reason}"}, 500)


async def _fault(_: Request, error: Exception) -> JSONResponse:
    # Starlette raises it again once this is sent, and uvicorn prints it.
    return JSONResponse({"detail": f"a fault of the service ({type(error).__name__})"}, 500)
