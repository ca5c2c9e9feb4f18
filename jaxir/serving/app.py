"""The FastAPI application: routers, errors as one-sentence JSON, the page at /, the reference at /docs."""

import base64
import contextlib
import hashlib
import importlib.resources
import re
import sys
from collections.abc import AsyncIterator
from http import HTTPStatus

from fastapi import APIRouter, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, JSONResponse
from starlette.exceptions import HTTPException

from jaxir.core.errors import UserError
from jaxir.serving.batcher import Busy
from jaxir.serving.embedder import Unfit
from jaxir.serving.encode_routes import encode_router
from jaxir.serving.metrics import Metrics
from jaxir.serving.openai_routes import openai_router
from jaxir.serving.problems import ABSENT, COHERE_PATHS, problem_body
from jaxir.serving.reference import reference_page
from jaxir.serving.rerank_routes import rerank_router
from jaxir.serving.schemas import PROBLEMS
from jaxir.serving.search_routes import search_router
from jaxir.serving.service import Service
from jaxir.serving.status_routes import status_router
from jaxir.serving.tei_routes import tei_router
from jaxir.serving.token_routes import token_router
from jaxir.version import __version__


def build_app(service: Service, metrics: Metrics) -> FastAPI:
    """Returns the FastAPI application of a service. The service starts and stops with the application."""

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        async with service:
            yield

    app = FastAPI(
        title="jaxir",
        version=__version__,
        description="Embeds and ranks texts, and searches indexes made by jaxir.",
        lifespan=lifespan,
        docs_url=None,  # FastAPI's own /docs loads scripts from another host; `_page_router` replaces it
        redoc_url=None,
        # A redirect would go to the Host header's name, which a proxy may set to localhost.
        redirect_slashes=False,
        responses=PROBLEMS,
        exception_handlers={
            RequestValidationError: _invalid,
            HTTPException: _http_problem,
            Unfit: _unfit,
            UserError: _failed,
            Busy: _busy,
            Exception: _fault,
        },
    )
    for router in (
        search_router(service),
        encode_router(service),
        openai_router(service),
        tei_router(service),
        token_router(service),
        rerank_router(service),
        status_router(service, metrics),
        _page_router(app, has_index=bool(service.opened)),
    ):
        app.include_router(router)
    return app


def _page_router(app: FastAPI, *, has_index: bool) -> APIRouter:
    router = APIRouter(include_in_schema=False)
    page = importlib.resources.files("jaxir.serving").joinpath("page.html").read_text(encoding="utf-8")

    @router.get("/")
    async def root() -> HTMLResponse:
        return _html(page) if has_index else await docs()

    @router.get("/docs")
    async def docs() -> HTMLResponse:
        return _html(reference_page(app.openapi()))

    return router


def _html(text: str) -> HTMLResponse:
    """Returns an HTML page whose Content-Security-Policy allows only its own scripts and styles."""

    def hashes(tag: str) -> str:
        found = re.findall(rf"<{tag}>(.*?)</{tag}>", text, re.DOTALL)
        digests = (base64.b64encode(hashlib.sha256(each.encode()).digest()).decode() for each in found)
        return " ".join(f"'sha256-{digest}'" for digest in digests) or "'none'"

    policy = (
        f"default-src 'none'; script-src {hashes('script')}; style-src {hashes('style')}; connect-src 'self';"
        " img-src data:; base-uri 'none'; form-action 'self'; frame-ancestors 'none'"
    )
    return HTMLResponse(text, headers={"content-security-policy": policy})


def _problem(
    request: Request, status: int, sentence: str, field: str | None = None, **headers: str
) -> JSONResponse:
    return JSONResponse(problem_body(request.url.path, status, sentence, field), status, headers=headers)


async def _invalid(request: Request, error: RequestValidationError) -> JSONResponse:
    first = error.errors()[0]
    if first["type"] == "json_invalid":
        return _problem(request, 400, "the request's body is not valid JSON")
    where = ".".join(map(str, first["loc"][1:]))
    sentence = f"{where}: {first['msg']}" if where else first["msg"]
    if isinstance(error.body, bytes):  # not JSON's content type: a page of any site could send this
        sentence = "the request needs the header content-type: application/json"
    return _problem(request, _status_of_unfit(request), sentence, where or None)


async def _unfit(request: Request, error: Unfit) -> JSONResponse:
    status = 404 if error.field == "model" else _status_of_unfit(request)
    return _problem(request, status, str(error), error.field)


def _status_of_unfit(request: Request) -> int:
    """Returns the status of a request with a wrong field: 400 as OpenAI and Cohere answer, else 422."""
    path = request.url.path
    return 400 if path in COHERE_PATHS or path.startswith("/v1/") or path == "/embeddings" else 422


async def _http_problem(request: Request, error: HTTPException) -> JSONResponse:
    path, headers = request.url.path, error.headers or {}
    if error.status_code == 405:
        sentence = f"{path:.80} does not take {request.method}; send {headers.get('Allow', 'another method')}"
    elif error.detail != HTTPStatus.NOT_FOUND.phrase:  # not the default text: a router of jaxir wrote this
        sentence = error.detail
    elif path in ABSENT:
        sentence = f"{path} is not served: {ABSENT[path]}"
    else:
        sentence = f"there is no path {path:.80}; GET /docs lists the paths"
    return _problem(request, error.status_code, sentence, **headers)


async def _busy(request: Request, error: Busy) -> JSONResponse:
    return _problem(request, 503, str(error), **{"retry-after": "1"})


async def _failed(request: Request, error: UserError) -> JSONResponse:
    print(f"error: {error}", file=sys.stderr, flush=True)  # only to the log: the message may contain paths
    sentence = "the service cannot answer now; its standard error has the reason"
    return _problem(request, 503, sentence, **{"retry-after": "1"})


async def _fault(request: Request, error: Exception) -> JSONResponse:
    # Starlette re-raises the error after this response, and uvicorn prints it to standard error.
    return _problem(request, 500, f"internal error of the service ({type(error).__name__})")
