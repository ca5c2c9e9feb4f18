"""Schemas of requests and answers; /docs is generated from them."""

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, StringConstraints, model_validator
from pydantic_core import PydanticCustomError

from jaxir.core.errors import suggest
from jaxir.data.formats.lines import has_text
from jaxir.serving.limits import Limits

Span = Annotated[list[int], Field(min_length=2, max_length=2)]


class Shown(BaseModel):
    """A text and the positions of the question's words in it: [start, end) in Unicode code points."""

    text: str
    matches: list[Span]


class Document(BaseModel):
    """A whole document as in the corpus."""

    id: str
    title: str
    text: str
    metadata: dict[str, Any] | None = Field(description="from the corpus, null if it has none")


class DocumentResponse(Document):
    """A whole document, and the positions of a question's words in it."""

    index: str = Field(description="the index that stores it")
    title_matches: list[Span] = Field(description="[start, end) in Unicode code points; none without `query`")
    text_matches: list[Span]


class Hit(BaseModel):
    """A document that was found."""

    rank: int = Field(description="from 1")
    id: str
    score: float = Field(description="cosine or inner product, BM25, the sum of reciprocal ranks, or a logit")
    title: Shown | None = Field(None, description="if `documents` is true; its text may be empty")
    heading: Shown | None = Field(
        None, description="the title, or the first words of the text if there is none"
    )
    snippet: Shown | None = Field(None, description="the part of the text with most words of the question")
    document: Document | None = Field(None, description="if `full` is true; null if its text is not stored")


class SystemResults(BaseModel):
    """Results of one system, best first."""

    system: str
    hits: list[Hit]
    cut_at: int | None = Field(description="characters of the query that the model read, null if all")
    ms: dict[str, float] = Field(
        description="milliseconds: encode, search, fuse (of the query's batch), rerank, total with waiting"
    )


class QueryResults(BaseModel):
    """Results of all systems for one query."""

    query: str
    systems: list[SystemResults]


class SearchResponse(BaseModel):
    """One entry for each query, in order."""

    results: list[QueryResults]


class EncodeResponse(BaseModel):
    """One vector of `dimension` numbers for each text, in order."""

    index: str = Field(description="the index whose model encoded the texts")
    fingerprint: str = Field(description="of the model; do not compare vectors of different fingerprints")
    similarity: Literal["cosine", "dot"]
    dimension: int
    vectors: list[list[float]]
    cut_at: list[int | None] = Field(description="characters of each text that the model read, null if all")


class IndexFacts(BaseModel):
    """An index that is served."""

    name: str
    kind: Literal["dense", "sparse"]
    engine: str
    similarity: str
    documents: int
    has_texts: bool = Field(description="whether it stores titles and texts")
    model: str | None
    fingerprint: str | None
    dimension: int
    query_tokens: int | None = Field(description="tokens of a query that the model reads, null for all")


class Health(BaseModel):
    """The service is running."""

    status: Literal["ok"]
    indexes: list[IndexFacts]
    systems: list[str] = Field(description="systems to search")
    reranker: str | None = Field(description="the model of the system `reranked`")
    limits: dict[str, float]


class Examples(BaseModel):
    """Queries to begin with."""

    examples: list[str] = Field(description="titles or sentences of random documents; may be empty")


class Problem(BaseModel):
    """An error as one sentence."""

    detail: str


def _problems(**sentences: str) -> dict[int | str, dict[str, Any]]:
    return {int(s[1:]): {"model": Problem, "description": sentence} for s, sentence in sentences.items()}


# Errors of every request, and of some requests.
PROBLEMS = _problems(
    _400="not HTTP, not JSON, or a host name that is not allowed",
    _408="the request arrived too slowly",
    _413="the request is too large",
    _500="internal error; see the service's standard error",
    _503="too busy, an engine failed, or the index changed on disk; try again later",
)
UNFIT = _problems(_422="the request is invalid")
UNKNOWN = _problems(_404="no such document, or its text is not stored")


# Names of these keys in other services.
SYNONYMS = {
    "k": ("top_k", "topk", "top", "n", "num", "limit", "size", "count", "num_results", "max_results"),
    "queries": ("q", "text", "texts", "question", "questions", "input", "inputs"),
    "texts": ("q", "query", "queries", "input", "inputs", "passages", "documents", "sentences"),
    "systems": ("index", "indexes", "indices", "retriever", "retrievers"),
    "tower": ("type", "input_type", "kind", "side", "encoder"),
}


class _Request(BaseModel):
    """A JSON body; the error for an unknown key suggests the intended one."""

    model_config = ConfigDict(strict=True)

    @model_validator(mode="before")
    @classmethod
    def _check_keys(cls, body: Any) -> Any:
        keys = cls.model_fields
        unknown = [key for key in body if key not in keys] if isinstance(body, dict) else []
        if unknown:
            key = unknown[0]
            synonym = next((known for known in keys if key.lower() in SYNONYMS.get(known, ())), None)
            meant = f"; did you mean {synonym!r}?" if synonym else suggest(key[:40], keys) or "."
            raise PydanticCustomError(
                "unknown_key",
                "unknown key {key}{meant} The keys are {keys}",
                {"key": repr(key[:40]), "meant": meant, "keys": ", ".join(keys)},
            )
        return body


def _question(text: str) -> str:
    if not has_text(text):
        raise PydanticCustomError("no_text", "it contains no text")
    return text


# Whitespace stays, as in every command, because some models read it.
Text = Annotated[str, StringConstraints(min_length=1), AfterValidator(_question)]


def search_request_model(known: list[str], limits: Limits) -> type[BaseModel]:
    """Returns the body of /search for a service's limits and systems."""
    query = Annotated[
        str,
        StringConstraints(min_length=1, max_length=limits.query_characters),
        AfterValidator(_question),
    ]

    class SearchRequest(_Request):
        """Queries, and what to return for each result."""

        model_config = ConfigDict(json_schema_extra={"examples": [{"queries": ["how to join two arrays"]}]})
        queries: list[query] = Field(min_length=1, max_length=limits.queries)
        k: int = Field(min(10, limits.k), ge=1, le=limits.k, description="documents of each query and system")
        systems: list[str] | None = Field(
            None,
            min_length=1,
            max_length=len(known),
            description=f"some of {', '.join(known)}; all by default",
        )
        documents: bool = Field(True, description="whether to return titles and snippets")
        full: bool = Field(False, description="whether to return whole documents with metadata")

    return SearchRequest


def encode_request_model(limits: Limits) -> type[BaseModel]:
    """Returns the body of /encode for a service's limits."""

    class EncodeRequest(_Request):
        """Texts of one kind."""

        model_config = ConfigDict(json_schema_extra={"examples": [{"texts": ["how to join two arrays"]}]})
        texts: list[Text] = Field(min_length=1, max_length=limits.queries)
        tower: Literal["query", "passage"] = "query"
        index: str | None = Field(
            None, description="the index whose model encodes; by default the first that has one"
        )

    return EncodeRequest
