"""The HTTP application: /search, /encode, /healthz, the page at / and plain documentation at /docs."""

import asyncio
import base64
import contextlib
import hashlib
import importlib.metadata
import importlib.resources
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, JSONResponse
from starlette.exceptions import HTTPException

from jaxir.errors import UserError, suggest
from jaxir.serving.batcher import Busy
from jaxir.serving.marks import Marker
from jaxir.serving.reference import reference_page
from jaxir.serving.schemas import PROBLEMS, EncodeResponse, Health, SearchResponse, request_models
from jaxir.serving.service import Ranking, Service


def build_app(service: Service) -> FastAPI:
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
        version=importlib.metadata.version("jaxir"),
        description="Dense, sparse and hybrid retrieval over indexes made by jaxir.",
        lifespan=lifespan,
        docs_url=None,  # FastAPI's own pages load their code from another host
        redoc_url=None,
    )
    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_exception_handler(HTTPException, _http_problem)
    app.add_exception_handler(UserError, _failed)
    app.add_exception_handler(Busy, _failed)

    @app.post("/search", response_model=SearchResponse, responses=PROBLEMS)
    async def search(request: search_request) -> JSONResponse:
        """Searches for queries. Queries of all clients that wait are encoded and searched together."""
        systems = request.systems or service.systems
        for name in systems:
            if name not in service.systems:
                known = ", ".join(service.systems)
                raise HTTPException(
                    422, f"there is no system {name!r}; there are {known}{suggest(name, known)}"
                )
        found = await service.search(request.queries, request.k, list(dict.fromkeys(systems)))
        return await asyncio.to_thread(_search_response, service, request, found)

    @app.post("/encode", response_model=EncodeResponse, responses=PROBLEMS)
    async def encode(request: encode_request) -> JSONResponse:
        """Encodes texts with an index's model."""
        for number, text in enumerate(request.texts):
            longest = limits.query_characters if request.tower == "query" else limits.passage_characters
            if len(text) > longest:
                raise HTTPException(422, f"texts.{number}: a {request.tower} may have {longest:,} characters")
        try:
            opened, vectors = await service.encode(request.texts, request.tower, request.index)
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
            }
        )

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


def _search_response(service: Service, request: Any, found: list[dict[str, Ranking]]) -> JSONResponse:
    results = []
    for query, rankings in zip(request.queries, found, strict=True):
        marker = Marker(query) if request.documents else None
        shown: dict[str, dict[str, Any]] = {}
        systems = []
        for system, ranking in rankings.items():
            hits = []
            for rank, (doc_id, score) in enumerate(zip(ranking.ids, ranking.scores, strict=True), start=1):
                if marker is not None and doc_id not in shown:
                    shown[doc_id] = _shown(service, marker, doc_id)
                hits.append({"rank": rank, "id": doc_id, "score": score, **shown.get(doc_id, {})})
            ms = {part: round(value, 3) for part, value in ranking.ms.items()}
            systems.append({"system": system, "hits": hits, "ms": ms})
        results.append({"query": query, "systems": systems})
    return JSONResponse({"results": results})


def _shown(service: Service, marker: Marker, doc_id: str) -> dict[str, Any]:
    document = service.document(doc_id)
    title, text = (document.title, document.text) if document is not None else ("", "")
    return {"title": marker.mark(title[:500])._asdict(), "snippet": marker.snippet(text)._asdict()}


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
                # The path would tell clients about the machine.
                "model": Path(encoder.spec).name if encoder is not None and encoder.spec else None,
                "fingerprint": encoder.fingerprint if encoder is not None else None,
                "dimension": info.dimension,
            }
        )
    limits = {
        name: getattr(service.limits, name) for name in ("body_bytes", "queries", "query_characters", "k")
    }
    return {"status": "ok", "indexes": indexes, "systems": service.systems, "limits": limits}


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
    return JSONResponse({"detail": sentence.encode(errors="replace").decode()}, 422)


async def _http_problem(_: Request, error: HTTPException) -> JSONResponse:
    return JSONResponse({"detail": error.detail}, error.status_code, headers=error.headers)


async def _failed(_: Request, error: Exception) -> JSONResponse:
    return JSONResponse({"detail": str(error)}, 503, headers={"retry-after": "1"})
