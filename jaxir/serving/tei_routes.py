"""text-embeddings-inference's endpoints: /embed, /similarity, /info and /health."""

import os
from typing import Any

import numpy as np
from fastapi import APIRouter, Request, Response
from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError
from starlette.exceptions import HTTPException

from jaxir.serving.embedder import served_name
from jaxir.serving.embedding_schemas import Info, embed_request_model, similarity_request_model
from jaxir.serving.fast_json import FastJson
from jaxir.serving.openai_routes import embedders_of
from jaxir.serving.schemas import UNFIT, UNKNOWN
from jaxir.serving.service import Service
from jaxir.version import __version__


def tei_router(service: Service) -> APIRouter:
    router = APIRouter()
    embed_request, similarity_request = (
        embed_request_model(service.limits),
        similarity_request_model(service.limits),
    )

    @router.post("/embed", response_model=list[list[float]], responses=UNFIT | UNKNOWN)
    async def embed(request: embed_request) -> Response:
        """Embeds texts, as text-embeddings-inference does."""
        embedder = embedders_of(service)[0]
        embedder.check_dimensions(request.dimensions)
        embedded = await embedder.embed(
            embedder.texts(request.inputs, "inputs"),
            embedder.reading(request.prompt_name),
            dimensions=request.dimensions,
            normalize=request.normalize is not False,
            truncate=request.truncate is not False,
            field="inputs",
        )
        return FastJson(np.ascontiguousarray(embedded.vectors))

    @router.post("/", include_in_schema=False)
    async def by_task(request: Request) -> Response:
        """Embeds texts posted to "/", because huggingface_hub's InferenceClient posts to the bare address."""
        try:
            return await embed(embed_request.model_validate_json(await request.body()))
        except ValidationError as error:
            raise RequestValidationError(
                [{**e, "loc": ("body", *e["loc"])} for e in error.errors()]
            ) from None

    @router.post("/similarity", response_model=list[float], responses=UNFIT | UNKNOWN)
    async def similarity(request: similarity_request) -> Response:
        """Returns the cosine of a sentence with each of the others."""
        embedder = embedders_of(service)[0]
        parameters = request.parameters
        embedded = await embedder.embed(
            embedder.texts([request.inputs.source_sentence, *request.inputs.sentences], "inputs"),
            embedder.reading(parameters.prompt_name if parameters else None),
            normalize=True,
            truncate=parameters is None or parameters.truncate is not False,
            field="inputs",
        )
        return FastJson(embedded.vectors[1:] @ embedded.vectors[0])

    @router.get("/info", response_model=Info, responses=UNKNOWN)
    async def info() -> Response:
        """Describes the model (without one, the reranker) and the limits."""
        return FastJson(_info(service))

    @router.get("/health", response_model=dict[str, str])
    async def health() -> Response:
        """Answers with status 200 while the server runs; needs no API key."""
        return FastJson({"status": "ok"})

    return router


def _info(service: Service) -> dict[str, Any]:
    limits = service.limits
    if service.embedders:
        embedder = service.embedders[0]
        encoder, name, longest = embedder.engine.encoder, embedder.name, embedder.max_length
        kind: dict[str, Any] = {"embedding": {"pooling": "+".join(encoder.model.config.poolings)}}
    elif service.reranker is not None:
        encoder = service.reranker.encoder
        name, longest = served_name(encoder.spec), encoder.max_length
        kind = {"reranker": {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}}
    else:
        raise HTTPException(
            404, "no model is served: start jaxir.serve with --model=MODEL or --reranker=MODEL"
        )
    return {
        "model_id": name,
        "model_sha": encoder.fingerprint,
        "model_dtype": str(encoder.model.config.backbone.dtype),
        "served_model_name": name,
        "model_type": kind,
        "max_concurrent_requests": limits.requests,
        "max_input_length": longest,
        "max_batch_tokens": encoder.runner.batch_tokens,
        "max_batch_requests": None,
        "max_client_batch_size": limits.inputs,
        "auto_truncate": True,
        "tokenization_workers": os.cpu_count() or 1,
        "version": __version__,
        "sha": None,
        "docker_label": None,
    }
