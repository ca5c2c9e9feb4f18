"""Schemas of the endpoints of other servers: OpenAI's, text-embeddings-inference's, Cohere's and Jina's.

Unknown fields are ignored, because clients send fields of other servers; a misspelt field is an error.
"""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema, model_validator
from pydantic_core import PydanticCustomError

from jaxir.core.errors import suggest
from jaxir.serving.limits import Limits

MISSPELT = 0.8  # likeness from which an unknown field is taken for a misspelling of a known one

_STRINGS = {"type": "array", "items": {"type": "string"}}
_IDS = {"type": "array", "items": {"type": "integer"}}
_ANY_OF = [{"type": "string"}, _STRINGS, _IDS, {"type": "array", "items": _IDS}]


class _Lenient(BaseModel):
    @model_validator(mode="before")
    @classmethod
    def _check_keys(cls, body: Any) -> Any:
        for key in body if isinstance(body, dict) else ():
            if key not in cls.model_fields and (
                meant := suggest(key[:40], cls.model_fields, likeness=MISSPELT)
            ):
                known = {"key": repr(key[:40]), "meant": meant}
                raise PydanticCustomError("unknown_key", "unknown key {key}{meant}", known)
        return body


def _inputs(limits: Limits, *, has_ids: bool) -> Any:
    """Returns the type of the inputs: a text or a list of texts, and with `has_ids` also of token ids."""
    kinds = "a string or a list of strings" + (", or one or several lists of token ids" if has_ids else "")

    def check(value: Any) -> list[str | list[int]]:
        if isinstance(value, str) or (has_ids and _is_ids(value)):
            value = [value]
        good = isinstance(value, list) and all(isinstance(v, str) or (has_ids and _is_ids(v)) for v in value)
        if not good:
            raise PydanticCustomError("inputs", "give {kinds}", {"kinds": kinds})
        if not 1 <= len(value) <= limits.inputs:
            known = {"got": len(value), "most": f"{limits.inputs:,}"}
            raise PydanticCustomError("inputs", "it has {got} inputs; give 1 to {most}", known)
        for number, each in enumerate(value):
            if len(each) > limits.passage_characters:
                known = {"number": number, "got": len(each), "most": f"{limits.passage_characters:,}"}
                raise PydanticCustomError("inputs", "input {number} is longer than {most}", known)
            if isinstance(each, str) and not each.isascii() and _has_surrogate(each):
                raise PydanticCustomError("inputs", "input {number} is not valid Unicode", {"number": number})
        return value

    schema = {"anyOf": _ANY_OF if has_ids else _ANY_OF[:2]}
    return Annotated[Any, BeforeValidator(check), WithJsonSchema(schema)]


def _is_ids(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(i) is int for i in value)


def _has_surrogate(text: str) -> bool:
    return any("\ud800" <= character <= "\udfff" for character in text)


_PROMPT = "the name of one of the model's prompts, or query or passage"
_SIDE = "query or passage, or Cohere's names for them; the same as prompt_name"


def embeddings_request_model(limits: Limits) -> type[BaseModel]:
    """Returns the pydantic model of a /v1/embeddings body."""

    class EmbeddingsRequest(_Lenient):
        """Texts to embed, as in OpenAI's API; prompt_name, input_type and truncate are additions."""

        model_config = ConfigDict(json_schema_extra={"examples": [{"input": ["a text"], "model": "MODEL"}]})
        input: _inputs(limits, has_ids=True)
        model: str | None = Field(None, description="a name of /v1/models, or NAME:query or NAME:passage")
        dimensions: int | None = Field(None, description="the number of components to keep; null: all")
        encoding_format: Literal["float", "base64"] = Field(
            "float", description="base64 is of little-endian float32 numbers"
        )
        user: str | None = Field(None, description="ignored")
        prompt_name: str | None = Field(None, description=_PROMPT)
        input_type: str | None = Field(None, description=_SIDE)
        truncate: bool = Field(True, description="if false, a text that is too long is an error")

    return EmbeddingsRequest


class Embedding(BaseModel):
    """A vector, and the position of its text in the request."""

    object: Literal["embedding"]
    index: int
    embedding: list[float] | str = Field(description="numbers, or base64 of little-endian float32")


class Usage(BaseModel):
    """The tokens that the model read, special tokens and prompts included."""

    prompt_tokens: int
    total_tokens: int


class EmbeddingsResponse(BaseModel):
    """A vector for each text, in the order of the request."""

    object: Literal["list"]
    data: list[Embedding]
    model: str
    usage: Usage


class ModelFacts(BaseModel):
    """A model that is served."""

    id: str
    object: Literal["model"]
    created: int = Field(description="when the server started, in Unix seconds")
    owned_by: str
    kind: Literal["embedding", "reranker"]
    max_tokens: int = Field(description="maximum number of tokens per text or pair")
    dimension: int | None = Field(description="number of components of a vector; null for a reranker")
    prompts: list[str] = Field(description="values of prompt_name")


class ModelsResponse(BaseModel):
    """The models that are served."""

    object: Literal["list"]
    data: list[ModelFacts]


def embed_request_model(limits: Limits) -> type[BaseModel]:
    """Returns the pydantic model of an /embed body."""

    class EmbedRequest(_Lenient):
        """Texts to embed, as in text-embeddings-inference."""

        model_config = ConfigDict(json_schema_extra={"examples": [{"inputs": "What is Deep Learning?"}]})
        inputs: _inputs(limits, has_ids=True)
        normalize: bool | None = Field(True, description="whether vectors get length 1")
        truncate: bool | None = Field(True, description="if false, a text that is too long is an error")
        truncation_direction: Literal["right", "Right"] | None = Field(
            "right", description="which end is cut"
        )
        prompt_name: str | None = Field(None, description=_PROMPT)
        dimensions: int | None = Field(None, description="the number of components to keep; null: all")

    return EmbedRequest


def tokens_request_model(limits: Limits) -> type[BaseModel]:
    """Returns the pydantic model of an /embed_all or /embed_sparse body."""

    class TokensRequest(_Lenient):
        """Texts whose tokens to embed or to weight, as in text-embeddings-inference."""

        model_config = ConfigDict(json_schema_extra={"examples": [{"inputs": "What is Deep Learning?"}]})
        inputs: _inputs(limits, has_ids=False)
        truncate: bool | None = Field(True, description="if false, a text that is too long is an error")
        prompt_name: str | None = Field(None, description="query or passage (the default)")

        @property
        def texts(self) -> tuple[list[str], str]:
            """The texts, and the name of their field."""
            return self.inputs, "inputs"

    return TokensRequest


def pooling_request_model(limits: Limits) -> type[BaseModel]:
    """Returns the pydantic model of a /pooling body."""

    class PoolingRequest(_Lenient):
        """Texts whose tokens to embed, as in vLLM; prompt_name and truncate are additions."""

        model_config = ConfigDict(json_schema_extra={"examples": [{"input": ["a text"], "model": "MODEL"}]})
        input: _inputs(limits, has_ids=False)
        model: str | None = Field(None, description="ignored: the first multi-vector encoder answers")
        encoding_format: Literal["float"] = "float"
        truncate: bool | None = Field(True, description="if false, a text that is too long is an error")
        prompt_name: str | None = Field(None, description="query or passage (the default)")

        @property
        def texts(self) -> tuple[list[str], str]:
            """The texts, and the name of their field."""
            return self.input, "input"

    return PoolingRequest


class SparseWeight(BaseModel):
    """The weight of a token, by its id in the tokenizer's file."""

    index: int
    value: float


class Pooled(BaseModel):
    """The vectors of a text's tokens, and the text's place in the request."""

    index: int
    object: Literal["pooling"]
    data: list[list[float]]


class PoolingResponse(BaseModel):
    """The vectors of the tokens of each text, in the order of the request."""

    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[Pooled]
    usage: Usage


def similarity_request_model(limits: Limits) -> type[BaseModel]:
    """Returns the pydantic model of a /similarity body."""

    class SimilarityInputs(_Lenient):
        """A sentence, and the sentences to compare it with."""

        source_sentence: str = Field(min_length=1, max_length=limits.passage_characters)
        sentences: _inputs(limits, has_ids=False)

    class SimilarityParameters(_Lenient):
        """How to read the sentences."""

        truncate: bool | None = Field(True, description="if false, a text that is too long is an error")
        prompt_name: str | None = Field(None, description=_PROMPT)

    class SimilarityRequest(_Lenient):
        """A sentence to compare with others, as in text-embeddings-inference."""

        inputs: SimilarityInputs
        parameters: SimilarityParameters | None = None

    return SimilarityRequest


def tei_rerank_request_model(limits: Limits) -> type[BaseModel]:
    """Returns the pydantic model of a /rerank body."""

    class TeiRerankRequest(_Lenient):
        """A query, and texts to order, as in text-embeddings-inference."""

        query: str = Field(min_length=1, max_length=limits.query_characters)
        texts: _inputs(limits, has_ids=False)
        raw_scores: bool = Field(False, description="whether to return logits instead of probabilities")
        return_text: bool = False
        truncate: bool | None = Field(True, description="only true: longer pairs are truncated")

        @model_validator(mode="before")
        @classmethod
        def _check_texts(cls, body: Any) -> Any:
            if isinstance(body, dict) and "documents" in body and "texts" not in body:
                raise PydanticCustomError("documents", "/rerank takes texts; POST /v1/rerank takes documents")
            return body

    return TeiRerankRequest


class TextDocument(BaseModel):
    """A document of a rerank request or answer."""

    text: str


def rerank_request_model(limits: Limits) -> type[BaseModel]:
    """Returns the pydantic model of a /v1/rerank and /v2/rerank body."""

    class RerankRequest(_Lenient):
        """A query, and documents to order, as in the APIs of Cohere and Jina."""

        query: str = Field(min_length=1, max_length=limits.query_characters)
        documents: list[str | TextDocument] = Field(min_length=1, max_length=limits.inputs)
        model: str | None = Field(None, description="ignored: one reranker is served")
        top_n: int | None = Field(None, ge=1, description="the number of results; null: all")
        return_documents: bool = False

        @property
        def texts(self) -> list[str]:
            return [d if isinstance(d, str) else d.text for d in self.documents]

    return RerankRequest


class TeiRank(BaseModel):
    """A text's place in the request, and its score."""

    index: int
    score: float = Field(description="the probability (sigmoid of the logit), or the logit if raw_scores")
    text: str | None = None


class Ranked(BaseModel):
    """A document's place in the request, and its score."""

    index: int
    relevance_score: float = Field(description="the probability: the sigmoid of the logit")
    document: TextDocument | None = Field(None, description="if return_documents is true")


class RerankResponse(BaseModel):
    """Documents, best first. The fields are those of Cohere's and of Jina's answers."""

    id: str
    object: Literal["list"]
    model: str
    results: list[Ranked]
    usage: Usage
    meta: dict[str, Any]


class Info(BaseModel):
    """The first model and its limits, as in text-embeddings-inference."""

    model_id: str
    model_sha: str | None = Field(description="the model's fingerprint")
    model_dtype: str
    served_model_name: str
    model_type: dict[str, Any]
    max_concurrent_requests: int
    max_input_length: int
    max_batch_tokens: int
    max_batch_requests: int | None
    max_client_batch_size: int
    auto_truncate: bool
    tokenization_workers: int
    version: str
    sha: str | None
    docker_label: str | None
