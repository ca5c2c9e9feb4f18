"""The endpoint /encode."""

from typing import Any

from fastapi import APIRouter
from starlette.exceptions import HTTPException

from jaxir.serving.fast_json import FastJson
from jaxir.serving.schemas import UNFIT, EncodeResponse, encode_request_model
from jaxir.serving.service import Service
from jaxir.serving.token_engine import Heads


def encode_router(service: Service) -> APIRouter:
    router, limits = APIRouter(), service.limits
    encode_request = encode_request_model(limits)

    @router.post("/encode", response_model=EncodeResponse, responses=UNFIT)
    async def encode(request: encode_request) -> FastJson:
        """Encodes texts with the model of an index or with the served model.

        A text gets one vector, a vector for each token, or weights of tokens; a hybrid encoder gives all
        three.
        """
        longest = limits.query_characters if request.tower == "query" else limits.passage_characters
        for number, text in enumerate(request.texts):
            if len(text) > longest:
                raise HTTPException(
                    422, f"texts.{number}: a {request.tower} may have at most {longest:,} characters"
                )
        try:
            opened, encoder, answers = await service.encode(request.texts, request.tower, request.index)
        except KeyError as error:
            raise HTTPException(422, error.args[0]) from None
        return FastJson(
            {
                "index": opened.name if opened is not None else None,
                "fingerprint": encoder.fingerprint,
                "similarity": opened.index.info.similarity
                if opened is not None
                else encoder.similarity_fn_name,
                "dimension": encoder.dimension,
                "vectors": [_in_json(a.vector) for a in answers],
                "cut_at": [a.cut_at for a in answers],
            }
        )

    return router


def _in_json(vector: Any) -> Any:
    if isinstance(vector, Heads):
        return {name: _in_json(part) for name, part in vector._asdict().items()}
    return vector
