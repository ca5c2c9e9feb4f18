"""The endpoints /metrics and /healthz."""

from pathlib import Path
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from jaxir.serving.metrics import Metrics
from jaxir.serving.opened import Opened
from jaxir.serving.schemas import Health
from jaxir.serving.service import Service

SHOWN_LIMITS = ("body_bytes", "queries", "query_characters", "k", "answer_seconds")


def status_router(service: Service, metrics: Metrics) -> APIRouter:
    router = APIRouter()

    @router.get(
        "/metrics",
        response_class=Response,
        responses={200: {"content": {"text/plain": {}}, "description": "metrics in Prometheus's format"}},
    )
    async def prometheus(request: Request) -> Response:
        """Returns metrics for Prometheus: requests, their durations, queues and batch sizes."""
        text, content_type = metrics.text(request.headers.get("accept", ""))
        return Response(text, headers={"content-type": content_type})

    @router.get("/healthz", response_model=Health)
    async def healthz() -> JSONResponse:
        """Returns the served indexes, systems and limits."""
        reranker = Path(service.reranker.encoder.spec).name if service.reranker is not None else None
        return JSONResponse(
            {
                "status": "ok",
                "indexes": [_index_facts(opened) for opened in service.opened],
                "systems": service.systems,
                "reranker": reranker,
                "limits": {name: getattr(service.limits, name) for name in SHOWN_LIMITS},
            }
        )

    return router


def _index_facts(opened: Opened) -> dict[str, Any]:
    info, searcher = opened.index.info, opened.searcher
    encoder = searcher.any_encoder
    return {
        "name": opened.name,
        "kind": opened.kind,
        "engine": info.engine,
        "similarity": info.similarity,
        "documents": info.count,
        "has_texts": opened.index.documents is not None,
        # The model's name without its path, which would reveal the machine's directories.
        "model": Path(encoder.spec).name if encoder is not None and encoder.spec else None,
        "fingerprint": encoder.fingerprint if encoder is not None else None,
        "dimension": info.dimension,
        "query_tokens": encoder.text_settings("query")[1] if encoder is not None else None,
    }
