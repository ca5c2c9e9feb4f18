"""What requests and answers hold: the service checks requests against it, and /docs is made of it."""

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, StringConstraints, model_validator
from pydantic_core import PydanticCustomError

from jaxir.core.errors import suggest
from jaxir.data.formats.lines import has_text
from jaxir.serving.limits import Limits

Span = Annotated[list[int], Field(min_length=2, max_length=2)]


class Shown(BaseModel):
    """A text and where in it the question's words are: [start, end) in Unicode code points."""

    text: str
    matches: list[Span]


class Document(BaseModel):
    """A whole document, as the corpus has it."""

    id: str
    title: str
    text: str
    metadata: dict[str, Any] | None = Field(description="of the corpus, null where it has none")


class DocumentResponse(Document):
    """A whole document, and where in it a question's words are."""

    index: str = Field(description="the index that it is stored with")
    title_matches: list[Span] = Field(description="[start, end) in Unicode code points; none without `query`")
    text_matches: list[Span]


class Hit(BaseModel):
    """A document that was found."""

    rank: int = Field(description="from 1")
    id: str
    score: float = Field(description="cosine or inner product, BM25, the sum of reciprocal ranks, or a logit")
    title: Shown | None = Field(None, description="where documents are asked for; its text may be empty")
    heading: Shown | None = Field(
        None, description="the title, or the first words of the text if there is none"
    )
    snippet: Shown | None = Field(None, description="the part of the text with most words of the question")
    document: Document | None = Field(
        None, description="where `full` is asked for; null where its text is not stored"
    )


class SystemResults(BaseModel):
    """What one system found, best first."""

    system: str
    hits: list[Hit]
    cut_at: int | None = Field(
        description="how many characters of the query were read, null if all; a model has a maximum length"
    )
    ms: dict[str, float] = Field(
        description="milliseconds: encode, search and fuse of the query's batch; rerank; total, with waiting"
    )


class QueryResults(BaseModel):
    """What all systems found for one query."""

    query: str
    systems: list[SystemResults]


class SearchResponse(BaseModel):
    """One entry for each query, in their order."""

    results: list[QueryResults]


class EncodeResponse(BaseModel):
    """One vector of `dimension` numbers for each text, in their order."""

    index: str = Field(description="the index whose model made them")
    fingerprint: str = Field(description="of the model: vectors of two fingerprints must not be compared")
    similarity: Literal["cosine", "dot"]
    dimension: int
    vectors: list[list[float]]
    cut_at: list[int | None] = Field(
        description="how many characters of each text were read, null if all; a model has a maximum length"
    )


class IndexFacts(BaseModel):
    """An index that is served."""

    name: str
    kind: Literal["dense", "sparse"]
    engine: str
    similarity: str
    documents: int
    has_texts: bool = Field(description="whether titles and texts are stored with it")
    model: str | None
    fingerprint: str | None
    dimension: int
    query_tokens: int | None = Field(description="the model reads so many tokens of a query, null for all")


class Health(BaseModel):
    """The service answers."""

    status: Literal["ok"]
    indexes: list[IndexFacts]
    systems: list[str] = Field(description="what can be searched")
    reranker: str | None = Field(description="the model of the system `reranked`")
    limits: dict[str, float]


class Examples(BaseModel):
    """Something to begin with."""

    examples: list[str] = Field(description="titles or sentences of documents drawn at random; may be empty")


class Problem(BaseModel):
    """What is wrong, in a sentence."""

    detail: str


def _problems(**sentences: str) -> dict[int | str, dict[str, Any]]:
    return {int(s[1:]): {"model": Problem, "description": sentence} for s, sentence in sentences.items()}


# What every request may be answered, and what some may be beside.
PROBLEMS = _problems(
    _400="no HTTP, no JSON, or another host's name",
    _408="the request came too slowly",
    _413="the request is too large",
    _500="a fault of the service; its standard error says more",
    _503="too busy, or an engine fails: try again later; or the index was changed on disk",
)
UNFIT = _problems(_422="the request asks for what cannot be had")
UNKNOWN = _problems(_404="there is no such document, or its text is not stored")


# Names that other services give to what ours call otherwise, as far as they are not alike.
SYNONYMS = {
    "k": ("top_k", "topk", "top", "n", "num", "limit", "size", "count", "num_results", "max_results"),
    "queries": ("q", "text", "texts", "question", "questions", "input", "inputs"),
    "texts": ("q", "query", "queries", "input", "inputs", "passages", "documents", "sentences"),
    "systems": ("index", "indexes", "indices", "retriever", "retrievers"),
    "tower": ("type", "input_type", "kind", "side", "encoder"),
}


class _Request(BaseModel):
    """A JSON body. A key that it does not have is named, with the one that was meant."""

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
        raise PydanticCustomError("no_text", "there is no text in it")
    return text


# Blanks stay, as in every other command: some models read them.
Text = Annotated[str, StringConstraints(min_length=1), AfterValidator(_question)]


def search_request_model(known: list[str], limits: Limits) -> type[BaseModel]:
    """Returns what /search takes, with the limits of a service and the names of its systems."""
    query = Annotated[
        str,
        StringConstraints(min_length=1, max_length=limits.query_characters),
        AfterValidator(_question),
    ]

    class SearchRequest(_Request):
        """Queries, and what to show of what is found."""

        model_config = ConfigDict(json_schema_extra={"examples": [{"queries": ["how to join two arrays"]}]})
        queries: list[query] = Field(min_length=1, max_length=limits.queries)
        k: int = Field(min(10, limits.k), ge=1, le=limits.k, description="documents of each query and system")
        systems: list[str] | None = Field(
            None,
            min_length=1,
            max_length=len(known),
            description=f"some of {', '.join(known)}; all by default",
        )
        documents: bool = Field(True, description="whether titles and snippets come along, or ids only")
        full: bool = Field(False, description="whether whole documents come along, with their metadata")

    return SearchRequest


def encode_request_model(limits: Limits) -> type[BaseModel]:
    """Returns what /encode takes, with the limits of a service."""

    class EncodeRequest(_Request):
        """Texts of one kind."""

        model_config = ConfigDict(json_schema_extra={"examples": [{"texts": ["how to join two arrays"]}]})
        texts: list[Text] = Field(min_length=1, max_length=limits.queries)
        tower: Literal["query", "passage"] = "query"
        index: str | None = Field(None, description="whose model; the first that has one by default")

    return EncodeRequest
