"""OpenAI's endpoints: /v1/embeddings and /v1/models."""

import base64
import time
from typing import Any

import numpy as np
from fastapi import APIRouter, Response
from starlette.exceptions import HTTPException

from jaxir.serving.embedder import Embedder, Reading, Unfit, chosen, served_name
from jaxir.serving.embedding_schemas import (
    EmbeddingsResponse,
    ModelFacts,
    ModelsResponse,
    embeddings_request_model,
)
from jaxir.serving.fast_json import FastJson
from jaxir.serving.schemas import UNKNOWN
from jaxir.serving.service import Service

OF_TOKENS = (
    "the model makes no single vector of a text: POST /encode, /embed_all (tokens) or /embed_sparse (weights)"
)
NO_MODEL = "no embedding model is served: start jaxir.serve with --model=MODEL"


def openai_router(service: Service) -> APIRouter:
    router, started = APIRouter(), int(time.time())
    request_model = embeddings_request_model(service.limits)

    async def embeddings(request: request_model) -> Response:
        """Embeds texts, as OpenAI's API does. The waiting texts of all clients are embedded together."""
        embedder, side = chosen(embedders_of(service), request.model)
        reading = _reading(embedder, request, side)
        embedder.check_dimensions(request.dimensions)
        texts = embedder.texts(request.input, "input", request.model)
        embedded = await embedder.embed(
            texts, reading, dimensions=request.dimensions, truncate=request.truncate
        )
        vectors = np.ascontiguousarray(embedded.vectors, "<f4")
        rows: Any = vectors
        if request.encoding_format == "base64":
            rows = [base64.b64encode(vector.tobytes()).decode() for vector in vectors]
        tokens = sum(embedded.tokens)
        return FastJson(
            {
                "object": "list",
                "data": [{"object": "embedding", "index": n, "embedding": row} for n, row in enumerate(rows)],
                "model": embedder.name,
                "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
            }
        )

    for path in ("/v1/embeddings", "/embeddings"):
        router.post(path, response_model=EmbeddingsResponse, responses=UNKNOWN)(embeddings)

    def models() -> list[dict[str, Any]]:
        common = {"object": "model", "created": started, "owned_by": "jaxir"}
        facts = [common | _facts(embedder) for embedder in service.embedders]
        if service.reranker is not None:
            encoder = service.reranker.encoder
            more = {"kind": "reranker", "max_tokens": encoder.max_length, "dimension": None, "prompts": []}
            facts.append({"id": served_name(encoder.spec), **common, **more})
        return facts

    @router.get("/v1/models", response_model=ModelsResponse)
    async def list_models() -> Response:
        """Lists the models that are served."""
        return FastJson({"object": "list", "data": models()})

    @router.get("/v1/models/{model:path}", response_model=ModelFacts, responses=UNKNOWN)
    async def one_model(model: str) -> Response:
        """Describes a model."""
        for facts in models():
            if facts["id"] == model:
                return FastJson(facts)
        known = ", ".join(facts["id"] for facts in models())
        raise HTTPException(404, f"there is no model {model!r:.80}; give one of {known}")

    return router


def embedders_of(service: Service) -> list[Embedder]:
    """Returns the models that embed; raises status 404 if there are none."""
    if not service.embedders and service.token_engines:
        raise HTTPException(404, OF_TOKENS)
    if not service.embedders:
        raise HTTPException(404, NO_MODEL)
    return service.embedders


def _reading(embedder: Embedder, request: Any, side: str | None) -> Reading:
    given = {"prompt_name": request.prompt_name, "input_type": request.input_type}
    given = {field: name for field, name in given.items() if name is not None}
    if len(given) > 1:
        raise Unfit("input_type", "give prompt_name or input_type, not both")
    for field, name in given.items():
        return embedder.reading(name, field)
    return embedder.reading(side)


def _facts(embedder: Embedder) -> dict[str, Any]:
    encoder = embedder.engine.encoder
    return {
        "id": embedder.name,
        "kind": "embedding",
        "max_tokens": embedder.max_length,
        "dimension": encoder.dimension,
        "prompts": embedder.prompts,
    }
