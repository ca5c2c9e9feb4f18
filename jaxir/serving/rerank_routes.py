"""Endpoints that order texts: /rerank of text-embeddings-inference, /v1/rerank of Cohere and Jina."""

import uuid
from collections.abc import Sequence

import numpy as np
from fastapi import APIRouter, Response
from starlette.exceptions import HTTPException

from jaxir.serving.embedder import Unfit, served_name
from jaxir.serving.embedding_schemas import (
    RerankResponse,
    TeiRank,
    rerank_request_model,
    tei_rerank_request_model,
)
from jaxir.serving.fast_json import FastJson
from jaxir.serving.reranker import Judged
from jaxir.serving.schemas import UNFIT, UNKNOWN
from jaxir.serving.service import Service

NO_RERANKER = "no reranker is served: start jaxir.serve with --reranker=MODEL, a cross-encoder"


def rerank_router(service: Service) -> APIRouter:
    router, limits = APIRouter(), service.limits
    tei_request, request_model = tei_rerank_request_model(limits), rerank_request_model(limits)

    async def judged(query: str, texts: Sequence[str], field: str) -> tuple[list[int], list[Judged]]:
        """Returns the positions of the texts, best first, and what the reranker found for each text."""
        if service.reranker is None:
            raise HTTPException(404, NO_RERANKER)
        for number, text in enumerate(texts):
            if len(text) > limits.passage_characters:
                place = f"{field}.{number}"
                raise Unfit(place, f"{place} may have at most {limits.passage_characters:,} characters")
        found = await service.reranker.judge_texts(query, texts)
        return sorted(range(len(found)), key=lambda n: -found[n].logit), found

    @router.post("/rerank", response_model=list[TeiRank], responses=UNFIT | UNKNOWN)
    async def tei_rerank(request: tei_request) -> Response:
        """Orders texts by their relevance to a query, as text-embeddings-inference does."""
        order, found = await judged(request.query, request.texts, "texts")
        ranks = []
        for n in order:
            score = found[n].logit if request.raw_scores else _probability(found[n].logit)
            text = {"text": request.texts[n]} if request.return_text else {}
            ranks.append({"index": n, **text, "score": score})
        return FastJson(ranks)

    async def rerank(request: request_model) -> Response:
        """Orders documents by their relevance to a query, as Cohere's and Jina's APIs do."""
        texts = request.texts
        order, found = await judged(request.query, texts, "documents")
        results = []
        for n in order[: request.top_n]:
            document = {"document": {"text": texts[n]}} if request.return_documents else {}
            results.append({"index": n, "relevance_score": _probability(found[n].logit), **document})
        tokens = sum(each.tokens for each in found)
        return FastJson(
            {
                "id": str(uuid.uuid4()),
                "object": "list",
                "model": served_name(service.reranker.encoder.spec),
                "results": results,
                "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
                "meta": {"api_version": {"version": "2"}, "billed_units": {"search_units": 1}},
            }
        )

    for path in ("/v1/rerank", "/v2/rerank"):
        router.post(path, response_model=RerankResponse, responses=UNKNOWN)(rerank)
    return router


def _probability(logit: float) -> float:
    return float(1 / (1 + np.exp(-np.float64(logit))))
