"""Vectors of tokens and sparse weights: /embed_all and /embed_sparse (TEI's), and /pooling (vLLM's)."""

import time
import uuid
from typing import Any

from fastapi import APIRouter, Response
from starlette.exceptions import HTTPException

from jaxir.retrieval.encoding.hybrid_text_encoder import HybridEncoder
from jaxir.retrieval.encoding.multi_vector_encoder import MultiVectorEncoder
from jaxir.retrieval.encoding.sparse_text_encoder import SparseEncoder
from jaxir.serving.embedder import SIDES, Unfit, served_name
from jaxir.serving.embedding_schemas import (
    PoolingResponse,
    SparseWeight,
    pooling_request_model,
    tokens_request_model,
)
from jaxir.serving.engines import Answer
from jaxir.serving.fast_json import FastJson
from jaxir.serving.schemas import UNFIT, UNKNOWN
from jaxir.serving.service import Service
from jaxir.serving.token_engine import Heads, TokenEngine


def token_router(service: Service) -> APIRouter:
    router, limits = APIRouter(), service.limits
    tokens_request, pooling_request = tokens_request_model(limits), pooling_request_model(limits)

    @router.post("/embed_all", response_model=list[list[list[float]]], responses=UNFIT | UNKNOWN)
    async def embed_all(request: tokens_request) -> Response:
        """Embeds each token of texts with a multi-vector encoder, as text-embeddings-inference does."""
        engine = _engine(service, MultiVectorEncoder)
        return FastJson([_part(answer, "tokens") for answer in await _answers(service, engine, request)])

    @router.post("/embed_sparse", response_model=list[list[SparseWeight]], responses=UNFIT | UNKNOWN)
    async def embed_sparse(request: tokens_request) -> Response:
        """Weights the tokens of texts with a sparse encoder, as text-embeddings-inference does."""
        engine = _engine(service, SparseEncoder)
        ids = {token: number for number, token in enumerate(engine.encoder.token_names)}
        return FastJson(
            [
                [{"index": ids[token], "value": weight} for token, weight in _part(answer, "sparse").items()]
                for answer in await _answers(service, engine, request)
            ]
        )

    @router.post("/pooling", response_model=PoolingResponse, responses=UNFIT | UNKNOWN)
    async def pooling(request: pooling_request) -> Response:
        """Embeds each token of texts with a multi-vector encoder, as vLLM does."""
        engine = _engine(service, MultiVectorEncoder)
        answers = await _answers(service, engine, request)
        tokens = sum(answer.tokens for answer in answers)
        return FastJson(
            {
                "id": f"pool-{uuid.uuid4().hex}",
                "object": "list",
                "created": int(time.time()),
                "model": served_name(engine.encoder.spec),
                "data": [
                    {"index": n, "object": "pooling", "data": _part(answer, "tokens")}
                    for n, answer in enumerate(answers)
                ],
                "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
            }
        )

    return router


def _engine(service: Service, kind: type) -> TokenEngine:
    """Returns the first engine with a model of a kind; raises status 404 if there is none."""
    for engine in service.token_engines:
        if isinstance(engine.encoder, kind | HybridEncoder):
            return engine
    what = "sparse encoder" if kind is SparseEncoder else "multi-vector encoder"
    raise HTTPException(404, f"no {what} is served: start jaxir.serve with --model=MODEL, a {what}")


def _part(answer: Answer, head: str) -> Any:
    """Returns one head's output for a text from a hybrid encoder, or the whole output of another encoder."""
    return getattr(answer.vector, head) if isinstance(answer.vector, Heads) else answer.vector


async def _answers(service: Service, engine: TokenEngine, request: Any) -> list[Answer]:
    """Returns the answers to a request's texts, which are passages unless the request names another side."""
    texts, field = request.texts
    side = (request.prompt_name or "passage").lower()
    if side not in SIDES:
        raise Unfit("prompt_name", f"there is no prompt {side!r:.60}; give query or passage")
    if "" in texts:
        raise Unfit(field, f"{field}.{texts.index('')} is empty; leave it out")
    answers = await service.of_engine(engine, texts, SIDES[side])
    too_long = next((n for n, answer in enumerate(answers) if answer.cut_at is not None), None)
    if too_long is not None and request.truncate is False:
        most = engine.encoder.text_settings(SIDES[side])[1]
        place = f"{field}.{too_long}"
        raise Unfit(place, f"{place} has more than {most} tokens: shorten it, or leave truncate out")
    return answers
