"""Errors as JSON, in the form that each path's clients read. For unknown paths, suggests the paths to use."""

from __future__ import annotations

from typing import Any

TEI_PATHS = (
    "/embed",
    "/rerank",
    "/similarity",
    "/info",
    "/decode",
    "/embed_all",
    "/embed_sparse",
    "/predict",
    "/tokenize",
)
COHERE_PATHS = ("/v1/rerank", "/v2/rerank")
_EMBED = "this server embeds and ranks texts, and generates none; POST /v1/embeddings embeds"
_OWN = "POST /v1/embeddings or /embed embeds texts"
# Paths of other servers that are not served, and what to use instead.
ABSENT = {
    "/v1/completions": _EMBED,
    "/v1/chat/completions": _EMBED,
    "/v1/responses": _EMBED,
    "/v1/embed": f"Cohere's embed is not served; {_OWN}, with input_type",
    "/v2/embed": f"Cohere's embed is not served; {_OWN}, with input_type",
    "/predict": "classifiers are not served; POST /rerank scores pairs of texts",
    "/classify": "classifiers are not served; POST /rerank scores pairs of texts",
    "/score": "POST /rerank scores a query with texts",
    "/v1/score": "POST /v1/rerank scores a query with documents",
    "/tokenize": "POST /v1/embeddings counts tokens (usage.prompt_tokens)",
    "/decode": "POST /v1/embeddings takes token ids",
    "/vertex": _OWN,
    "/invocations": _OWN,
    "/api/embed": f"Ollama's paths are not served; {_OWN}",
    "/api/embeddings": f"Ollama's paths are not served; {_OWN}",
    "/api/tags": "GET /v1/models lists the models",
    "/models": "GET /v1/models lists the models",
    "/ping": "GET /health is the probe",
}
# Names of errors by status, for OpenAI and for text-embeddings-inference (TEI).
_OPENAI_TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
_OPENAI_CODES = {401: "invalid_api_key", 404: "not_found", 429: "rate_limit_exceeded"}
_TEI_TYPES = {400: "empty", 424: "backend", 429: "overloaded", 500: "backend", 503: "overloaded"}


def problem_body(path: str, status: int, sentence: str, field: str | None = None) -> dict[str, Any]:
    """Returns the body of an error.

    It has OpenAI's form for paths below /v1/, TEI's form for TEI's paths, Cohere's and Jina's (`message` and
    `detail`) for their rerank paths, and `{"detail": sentence}` elsewhere. `field` is the part of the request
    that is wrong.
    """
    if path in COHERE_PATHS:
        return {"message": sentence, "detail": sentence}
    if path.startswith(("/v1/", "/v2/")) or path == "/embeddings":
        kind = _OPENAI_TYPES.get(status, "server_error" if status >= 500 else "invalid_request_error")
        return {
            "error": {"message": sentence, "type": kind, "param": field, "code": _OPENAI_CODES.get(status)}
        }
    if path in TEI_PATHS:
        return {"error": sentence, "error_type": _TEI_TYPES.get(status, "validation")}
    return {"detail": sentence}
