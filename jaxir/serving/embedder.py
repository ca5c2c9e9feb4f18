"""Embeds texts for the endpoints of other servers: models and prompts by name, dimensions, token ids."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from jaxir.core.errors import suggest
from jaxir.interop import model_dir
from jaxir.retrieval.encoding.text_encoder import Tower
from jaxir.serving.batcher import Batcher
from jaxir.serving.engines import Answer, DenseEngine, Question

# At most this many texts of a request wait for the engine at once, so that small requests get a turn.
IN_TURN = 64
# Clients' names for the side of a text, by the APIs of Cohere, Jina, Voyage and sentence-transformers.
SIDES: dict[str, Tower] = {
    "query": "query",
    "search_query": "query",
    "retrieval.query": "query",
    "passage": "passage",
    "document": "passage",
    "search_document": "passage",
    "retrieval.passage": "passage",
}


class Unfit(Exception):
    """Raised for a request that this model cannot answer; `field` is the part of the body that is wrong."""

    def __init__(self, field: str, sentence: str):
        super().__init__(sentence)
        self.field = field


class Reading(NamedTuple):
    """How a text is read: by which tower, after which prompt."""

    tower: Tower
    prompt: str


class Embedded(NamedTuple):
    """Vectors of N texts (float32 [N, D]), and for each text the number of tokens that the model read."""

    vectors: np.ndarray
    tokens: list[int]


class Embedder:
    """Embeds texts of many clients with one model, in the batches of its engine.

    Attributes:
      name: the model's name for clients; a directory's name is its last part.
      engine: the engine, which other endpoints may share.
    """

    def __init__(self, name: str, engine: DenseEngine):
        self.name, self.engine = name, engine
        self._encoder = engine.encoder
        self.batchers: dict[Tower, Batcher[Question, Answer]] = {}  # the service sets these

    @property
    def max_length(self) -> int:
        """The maximum number of tokens per text, of a passage unless a client names another side."""
        return self._encoder.settings.passage_max_length

    @property
    def prompts(self) -> list[str]:
        """The names that `reading` takes, without their synonyms."""
        return list(dict.fromkeys([*self._encoder.settings.named_prompts, "query", "passage"]))

    def reading(self, name: str | None, field: str = "prompt_name") -> Reading:
        """Returns how to read a text, given the name of a prompt or of a side.

        If the name is None, the passage tower reads the text without a prompt, or with the model's default
        prompt, as in sentence-transformers. The model's own prompt names take precedence over the names in
        `SIDES`.

        Raises:
          Unfit: the model has no such prompt.
        """
        settings = self._encoder.settings
        named = dict(settings.named_prompts)
        if name is None:
            default = settings.default_prompt_name
            return Reading(SIDES.get(default or "", "passage"), named.get(default, "") if default else "")
        side = SIDES.get(name.lower())
        if side is not None:
            return Reading(side, named.get(name) or self._encoder.text_settings(side)[0])
        if name in named:
            return Reading("passage", named[name])
        known = self.prompts
        meant = suggest(name, known)
        sentence = f"{self.name} has no prompt {name!r:.60}; give one of {', '.join(known)}{meant}"
        raise Unfit(field, sentence)

    def texts(self, inputs: Sequence[str | list[int]], field: str, model: str | None = None) -> list[str]:
        """Returns the inputs as texts; lists of token ids are decoded.

        Ids are refused if the request names another `model`, because that model's tokenizer made them.

        Raises:
          Unfit: an input is an empty string or list, or the ids are not those of this model's tokenizer.
        """
        is_other = model is not None and not self.has_name(
            model.removesuffix(":query").removesuffix(":passage")
        )
        return [self._text(each, f"{field}.{number}", is_other) for number, each in enumerate(inputs)]

    def has_name(self, name: str) -> bool:
        return name in (self.name, self.name.rpartition("/")[2])

    def _text(self, given: str | list[int], field: str, is_other: bool) -> str:
        if not given:
            raise Unfit(field, f"{field} is empty; leave it out")
        if isinstance(given, str):
            return given
        tokenizer = self._encoder.tokenizer
        if not is_other and max(given) < tokenizer.vocab_size and min(given) >= 0:
            special = set(tokenizer.encode_batch([""], max_length=1000)[0].tolist())
            ids = [i for i in tokenizer.own_ids(given).tolist() if i not in special]
            text = tokenizer.decode(ids)
            again = tokenizer.encode_batch([text], max_length=len(given) + 1000)[0].tolist()
            if ids and [i for i in again if i not in special] == ids:
                return text
        raise Unfit(
            field,
            f"{field} has token ids that the tokenizer of {self.name} does not make: send texts; LangChain's"
            " OpenAIEmbeddings sends texts with check_embedding_ctx_length=False",
        )

    def check_dimensions(self, dimensions: int | None) -> None:
        """Raises `Unfit` if the model's vectors have fewer components than `dimensions`."""
        if dimensions is not None and not 1 <= dimensions <= self._encoder.dimension:
            raise Unfit(
                "dimensions",
                f"dimensions is {dimensions}, but vectors of {self.name} have {self._encoder.dimension}"
                f" components: give 1 to {self._encoder.dimension}",
            )

    async def embed(
        self,
        texts: Sequence[str],
        reading: Reading,
        *,
        dimensions: int | None = None,
        normalize: bool | None = None,
        truncate: bool = True,
        field: str = "input",
    ) -> Embedded:
        """Embeds N texts.

        Args:
          texts: N texts that are not empty.
          reading: how to read them, from `reading`.
          dimensions: the number of first components to keep; None: all. See `check_dimensions`.
          normalize: whether vectors get length 1; None: as the model's similarity needs.
          truncate: whether texts longer than the model's maximum length are truncated.
          field: the part of the request with the texts, for `Unfit`.

        Raises:
          Unfit: a text is too long and `truncate` is false.
          Busy: too many texts wait.
        """
        is_unit = self._encoder.similarity_fn_name == "cosine"
        wanted = is_unit if normalize is None else normalize
        questions = [self.question(text, reading, is_normalized=wanted) for text in texts]
        answers = await self._answers(questions, reading.tower)
        too_long = next((n for n, a in enumerate(answers) if a.cut_at is not None), None)
        if too_long is not None and not truncate:
            most = self._encoder.text_settings(reading.tower)[1]
            place = f"{field}.{too_long}"
            raise Unfit(place, f"{place} has more than {most} tokens: shorten it, or leave truncate out")
        vectors = np.stack([answer.vector for answer in answers])[:, :dimensions]
        if wanted and (dimensions is not None or not is_unit):
            vectors = vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)
        return Embedded(vectors, [answer.tokens for answer in answers])

    def question(self, text: str, reading: Reading, *, is_normalized: bool = True) -> Question:
        return Question(text, tower=reading.tower, prompt=reading.prompt, is_normalized=is_normalized)

    async def _answers(self, questions: Sequence[Question], tower: Tower) -> list[Answer]:
        """Returns the answers to questions; at most two parts of `IN_TURN` questions wait at a time."""
        batcher = self.batchers[tower]
        parts = [questions[at : at + IN_TURN] for at in range(0, len(questions), IN_TURN)]
        turn = asyncio.Semaphore(2)

        async def ask(part: Sequence[Question]) -> list[Answer]:
            async with turn:
                return await batcher.results(part)

        if len(parts) == 1:
            return await batcher.results(parts[0])
        tasks = [asyncio.ensure_future(ask(part)) for part in parts]
        try:
            return [answer for part in await asyncio.gather(*tasks) for answer in part]
        finally:
            for task in tasks:
                task.cancel()


def served_name(spec: str) -> str:
    """Returns a model's name for clients: a hub name as it is, a directory's last part."""
    kind, _, place = spec.partition(":")
    place = place if kind in model_dir.FORMS else spec
    return Path(place).resolve().name if Path(place).exists() else place


def chosen(embedders: Sequence[Embedder], model: str | None) -> tuple[Embedder, str | None]:
    """Returns the embedder that a request names, and the side after NAME: (`query` or `passage`), if any.

    A single served model answers to every name, because clients send the names of other services' models.

    Raises:
      Unfit: none of several models has this name.
    """
    name, colon, side = (model or "").rpartition(":")
    if not colon or side not in ("query", "passage"):
        name, side = model or "", None
    for embedder in embedders:
        if embedder.has_name(name):
            return embedder, side
    if len(embedders) == 1 or model is None:
        return embedders[0], None
    known = [embedder.name for embedder in embedders]
    raise Unfit(
        "model", f"there is no model {model!r:.80}; give one of {', '.join(known)}{suggest(name, known)}"
    )
