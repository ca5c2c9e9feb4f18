"""The FastAPI application: routers, errors as one-sentence JSON, the page at /, the reference at /docs."""

import base64
import contextlib
import hashlib
import importlib.resources
import re
import sys
from collections.abc import AsyncIterator

from fastapi import APIRouter, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, JSONResponse
from starlette.exceptions import HTTPException

from jaxir.core.errors import UserError
from jaxir.serving.batcher import Busy
from jaxir.serving.encode_routes import encode_router
from jaxir.serving.metrics import Metrics
from jaxir.serving.reference import reference_page
from jaxir.serving.schemas import PROBLEMS
from jaxir.serving.search_routes import search_router
from jaxir.serving.service import Service
from jaxir.serving.status_routes import status_router
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
        description="Dense, sparse and hybrid retrieval over indexes made by jaxir.",
        lifespan=lifespan,
        docs_url=None,  # FastAPI's own /docs loads scripts from another host; `_page_router` replaces it
        redoc_url=None,
        redirect_slashes=False,  # a redirect would use the Host header, which may be localhost behind a proxy
        responses=PROBLEMS,
        exception_handlers={
            RequestValidationError: _invalid,
            HTTPException: _http_problem,
            UserError: _failed,
            Busy: _busy,
            Exception: _fault,
        },
    )
    for router in (
        search_router(service),
        encode_router(service),
        status_router(service, metrics),
        _page_router(app),
    ):
        app.include_router(router)
    return app


def _page_router(app: FastAPI) -> APIRouter:
    router = APIRouter(include_in_schema=False)
    page = importlib.resources.files("jaxir.serving").joinpath("page.html").read_text(encoding="utf-8")

    @router.get("/")
    async def root() -> HTMLResponse:
        return _html(page)

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


async def _invalid(_: Request, error: RequestValidationError) -> JSONResponse:
    first = error.errors()[0]
    if first["type"] == "json_invalid":
        return JSONResponse({"detail": "the request's body is not valid JSON"}, 400)
    where = ".".join(map(str, first["loc"][1:]))
    sentence = f"{where}: {first['msg']}" if where else first["msg"]
    if isinstance(error.body, bytes):  # the content type is not JSON, so any site's page could send it
        sentence = "the request needs the header content-type: application/json"
    return JSONResponse({"detail": sentence}, 422)


async def _http_problem(_: Request, error: HTTPException) -> JSONResponse:
    return JSONResponse({"detail": error.detail}, error.status_code, headers=error.headers)


async def _busy(_: Request, error: Busy) -> JSONResponse:
    return JSONResponse({"detail": str(error)}, 503, headers={"retry-after": "1"})


async def _failed(_: Request, error: UserError) -> JSONResponse:
    print(f"error: {error}", file=sys.stderr, flush=True)  # not for clients: it may contain local paths
    sentence = "the service cannot answer now; its standard error has the reason"
    return JSONResponse({"detail": sentence}, 503, headers={"retry-after": "1"})


async def _fault(_: Request, error: Exception) -> JSONResponse:
    # Starlette re-raises the error after this response, and uvicorn prints it to standard error.
    return JSONResponse({"detail": f"internal error of the service ({type(error).__name__})"}, 500)
