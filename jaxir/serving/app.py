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
from typing import Annotated, Any, Literal

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, JSONResponse
from pydantic import BaseModel, ConfigDict, Field, StringConstraints
from starlette.exceptions import HTTPException

from jaxir.errors import UserError, suggest
from jaxir.serving.batcher import Busy
from jaxir.serving.limits import Limits
from jaxir.serving.marks import Marker
from jaxir.serving.reference import reference_page
from jaxir.serving.service import Ranking, Service

Span = Annotated[list[int], Field(min_length=2, max_length=2)]


class Shown(BaseModel):
    """A text and where in it the question's words are: [start, end) in Unicode code points."""

    text: str
    matches: list[Span]


class Hit(BaseModel):
    """A document that was found."""

    rank: int = Field(description="from 1")
    id: str
    score: float = Field(description="cosine or inner product, BM25, or the sum of reciprocal ranks")
    title: Shown | None = Field(None, description="where documents are asked for; its text may be empty")
    snippet: Shown | None = Field(None, description="the part of the text with most words of the question")


class SystemResults(BaseModel):
    """What one system found, best first."""

    system: str
    hits: list[Hit]
    ms: dict[str, float] = Field(
        description="milliseconds: encode, search and fuse of the query's batch; total, with waiting"
    )


class QueryResults(BaseModel):
    """What all systems found for one query."""

    query: str
    systems: list[SystemResults]


class SearchResponse(BaseModel):
    """One entry for each query, in their order."""

    results: list[QueryResults]


class EncodeResponse(BaseModel):
    """One vector of `dimension` numbers for each text, in their order."""

    index: str = Field(description="the index whose model made them")
    fingerprint: str = Field(description="of the model: vectors of two fingerprints must not be compared")
    similarity: Literal["cosine", "dot"]
    dimension: int
    vectors: list[list[float]]


class IndexFacts(BaseModel):
    """An index that is served."""

    name: str
    kind: Literal["dense", "sparse"]
    engine: str
    similarity: str
    documents: int
    model: str | None
    fingerprint: str | None
    dimension: int


class Health(BaseModel):
    """The service answers."""

    status: Literal["ok"]
    indexes: list[IndexFacts]
    systems: list[str] = Field(description="what can be searched")
    limits: dict[str, float]


class Problem(BaseModel):
    """What is wrong, in a sentence."""

    detail: str


PROBLEMS: dict[int | str, dict[str, Any]] = {
    400: {"model": Problem, "description": "no JSON, or another host's name"},
    408: {"model": Problem, "description": "the request came too slowly"},
    413: {"model": Problem, "description": "the request is too large"},
    422: {"model": Problem, "description": "the request asks for what cannot be had"},
    503: {"model": Problem, "description": "too busy, or an engine fails; try again later"},
}


def build_app(service: Service) -> FastAPI:
    """Returns the application of a service, which it opens and closes with its own life."""
    limits = service.limits
    search_request, encode_request = _request_models(service.systems, limits)
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


def _request_models(known: list[str], limits: Limits) -> tuple[type[BaseModel], type[BaseModel]]:
    query = Annotated[
        str, StringConstraints(strip_whitespace=True, min_length=1, max_length=limits.query_characters)
    ]

    class SearchRequest(BaseModel):
        """Queries, and what to show of what is found."""

        model_config = ConfigDict(
            extra="forbid",
            strict=True,
            json_schema_extra={"examples": [{"queries": ["how to join two arrays"]}]},
        )
        queries: list[query] = Field(min_length=1, max_length=limits.queries)
        k: int = Field(min(10, limits.k), ge=1, le=limits.k, description="documents of each query and system")
        systems: list[str] | None = Field(
            None, max_length=len(known), description=f"some of {', '.join(known)}; all by default"
        )
        documents: bool = Field(True, description="whether titles and snippets come along, or ids only")

    class EncodeRequest(BaseModel):
        """Texts of one kind."""

        model_config = ConfigDict(
            extra="forbid",
            strict=True,
            json_schema_extra={"examples": [{"texts": ["how to join two arrays"]}]},
        )
        texts: list[str] = Field(min_length=1, max_length=limits.queries)
        tower: Literal["query", "passage"] = "query"
        index: str | None = Field(None, description="whose model; the first that has one by default")

    return SearchRequest, EncodeRequest


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
