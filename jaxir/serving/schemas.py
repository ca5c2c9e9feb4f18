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
    """A document with all of its text, as in the corpus."""

    id: str
    title: str
    text: str
    metadata: dict[str, Any] | None = Field(description="metadata in the corpus; null if there is none")


class DocumentResponse(Document):
    """A document with all of its text, and the positions of a question's words in it."""

    index: str = Field(description="the index that stores the document")
    title_matches: list[Span] = Field(description="[start, end) in code points; empty without `query`")
    text_matches: list[Span]


class Hit(BaseModel):
    """A document that a search found."""

    rank: int = Field(description="the document's rank; the best has 1")
    id: str
    score: float = Field(
        description="an index's similarity or BM25, hybrid: sum of reciprocal ranks, reranked: logit"
    )
    title: Shown | None = Field(None, description="the title, if `documents` is true; may be empty")
    heading: Shown | None = Field(None, description="the title, or the first words of a text without a title")
    snippet: Shown | None = Field(None, description="the part of the text with most of the query's words")
    document: Document | None = Field(None, description="if `full` is true; null if no text is stored")


class SystemResults(BaseModel):
    """Results of one system: an index, `hybrid` or `reranked`."""

    system: str
    hits: list[Hit]
    cut_at: int | None = Field(description="the query's characters that the model read; null if all")
    ms: dict[str, float] = Field(
        description="milliseconds: encode, search, fuse (of the query's batch), rerank, total with waiting"
    )


class QueryResults(BaseModel):
    """Results of all systems for one query."""

    query: str
    systems: list[SystemResults]


class SearchResponse(BaseModel):
    """The results of each query, in the order of the request."""

    results: list[QueryResults]


class HeadsOfText(BaseModel):
    """A hybrid encoder's encoding of a text: a vector, {token: weight}, and a vector for each token."""

    dense: list[float]
    sparse: dict[str, float]
    tokens: list[list[float]]


class EncodeResponse(BaseModel):
    """The encoding of each text, in the order of the request."""

    index: str | None = Field(description="the index whose model encoded the texts; null without an index")
    fingerprint: str = Field(description="identifies the model; only compare vectors of equal fingerprints")
    similarity: Literal["cosine", "dot", "maxsim", "meanmaxsim", "impact", "sum"]
    dimension: int = Field(description="numbers of a vector; tokens of a sparse encoder")
    vectors: list[list[float]] | list[list[list[float]]] | list[dict[str, float]] | list[HeadsOfText] = Field(
        description="per text a vector, a vector for each token (multi-vector encoder), {token: weight}, or"
        " all three (hybrid encoder)"
    )
    cut_at: list[int | None] = Field(description="per text, the characters that the model read; null if all")


class IndexFacts(BaseModel):
    """An index that is served."""

    name: str
    kind: Literal["dense", "multi_vector", "sparse"]
    engine: str
    similarity: str
    documents: int
    has_texts: bool = Field(description="whether the index stores titles and texts")
    model: str | None
    fingerprint: str | None
    dimension: int
    query_tokens: int | None = Field(description="maximum number of tokens per query; null if none")


class Health(BaseModel):
    """What a running service serves, and its limits."""

    status: Literal["ok"]
    indexes: list[IndexFacts]
    systems: list[str] = Field(description="names for the `systems` of a search")
    reranker: str | None = Field(description="the model of the system `reranked`, if any")
    limits: dict[str, float]


class Examples(BaseModel):
    """Example queries."""

    examples: list[str] = Field(description="titles or sentences of random documents; may be empty")


class Problem(BaseModel):
    """An error as one sentence."""

    detail: str


def _problems(**sentences: str) -> dict[int | str, dict[str, Any]]:
    return {int(s[1:]): {"model": Problem, "description": sentence} for s, sentence in sentences.items()}


# HTTP errors of every endpoint. `UNFIT` and `UNKNOWN` below are errors of some endpoints only.
PROBLEMS = _problems(
    _400="the request is not HTTP or not JSON, or its host name is not allowed",
    _408="the request arrived too slowly",
    _413="the request is too large",
    _500="internal error; see the service's standard error",
    _503="the service is too busy, an engine failed, or the index changed on disk; try again later",
)
UNFIT = _problems(_422="the request is invalid")
UNKNOWN = _problems(_404="the document does not exist, or its text is not stored")


# Maps other services' names of request keys to jaxir's, which the error for an unknown key suggests.
SYNONYMS = {
    "k": ("top_k", "topk", "top", "n", "num", "limit", "size", "count", "num_results", "max_results"),
    "queries": ("q", "text", "texts", "question", "questions", "input", "inputs"),
    "texts": ("q", "query", "queries", "input", "inputs", "passages", "documents", "sentences"),
    "systems": ("index", "indexes", "indices", "retriever", "retrievers"),
    "offset": ("skip", "start", "from"),
    "filter": ("filters", "where", "conditions"),
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
        raise PydanticCustomError("no_text", "the text has no visible characters")
    return text


# White space is kept, because some models read it; every command keeps it, too.
Text = Annotated[str, StringConstraints(min_length=1), AfterValidator(_question)]


_Scalar = str | int | float | bool | None
_Condition = _Scalar | Annotated[list[_Scalar], Field(min_length=1, max_length=1000)]


def search_request_model(known: list[str], limits: Limits) -> type[BaseModel]:
    """Returns the pydantic model of a /search body, for a service's systems and limits."""
    query = Annotated[
        str,
        StringConstraints(min_length=1, max_length=limits.query_characters),
        AfterValidator(_question),
    ]

    class SearchRequest(_Request):
        """Queries, and what to return for each result."""

        model_config = ConfigDict(json_schema_extra={"examples": [{"queries": ["how to join two arrays"]}]})
        queries: list[query] = Field(min_length=1, max_length=limits.queries)
        k: int = Field(min(10, limits.k), ge=1, le=limits.k, description="documents per query and system")
        offset: int = Field(
            0, ge=0, lt=limits.k, description=f"best documents to leave out; k + offset is at most {limits.k}"
        )
        filter: dict[str, _Condition] | None = Field(
            None,
            min_length=1,
            max_length=20,
            description="for each field (id, title, a key of the metadata) a value, or a list of which one"
            " must be equal; other documents are left out",
        )
        systems: list[str] | None = Field(
            None,
            min_length=1,
            max_length=len(known),
            description=f"what to search: any of {', '.join(known)}; by default all",
        )
        documents: bool = Field(True, description="whether to return titles and snippets")
        full: bool = Field(False, description="whether to return whole documents with metadata")

    return SearchRequest


def encode_request_model(limits: Limits) -> type[BaseModel]:
    """Returns the pydantic model of an /encode body, for a service's limits."""

    class EncodeRequest(_Request):
        """Texts to encode, all as queries or all as passages."""

        model_config = ConfigDict(json_schema_extra={"examples": [{"texts": ["how to join two arrays"]}]})
        texts: list[Text] = Field(min_length=1, max_length=limits.queries)
        tower: Literal["query", "passage"] = "query"
        index: str | None = Field(
            None, description="the index whose model encodes; by default the first with a model"
        )

    return EncodeRequest
