"""Sentences and the passages around them, for the inverse cloze task."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Annotated

from jaxir.core.errors import UserError
from jaxir.core.features import Record
from jaxir.core.values import Within, checked
from jaxir.data.batches.text_data import RecordSource
from jaxir.data.formats.lines import OnBadInput
from jaxir.data.sets.texts import Texts, named
from jaxir.data.text.sentences import sentences_of


@dataclasses.dataclass(frozen=True, kw_only=True)
@checked
class Clozes(RecordSource):
    """Passages cut from texts, with the field `passage`, and the lists `sentences` and `contexts`.

    Context i of a passage is the passage without sentence i. A text is split into passages of
    `passage_sentences` sentences (`jaxir.data.text.sentences`). A single remaining sentence is added to the
    passage before it; a text of one sentence is left out.

    Attributes:
      path: file or folder of texts, as in `jaxir.data.sets.texts.Texts`.
      passage_sentences: number of sentences per passage; memory holds a passage's tokens this many times.
    """

    path: str
    passage_sentences: Annotated[int, Within(2)] = 5

    def records(self, on_bad_input: OnBadInput) -> Iterator[Record]:
        some = False
        for record in Texts(path=self.path).records(on_bad_input):
            _, text = record["text"]
            for sentences in self._passages(sentences_of(text)):
                some = True
                yield _cloze(sentences)
        if not some:
            raise UserError(f"{self.path}: no text has two sentences, as ICT needs: give longer texts")

    def _passages(self, sentences: list[str]) -> Iterator[list[str]]:
        size, start = self.passage_sentences, 0
        while len(sentences) - start >= 2:
            end = start + size if len(sentences) - start - size >= 2 else start + size + 1
            yield sentences[start:end]
            start = end


def _cloze(sentences: list[str]) -> Record:
    rests = (sentences[:left_out] + sentences[left_out + 1 :] for left_out in range(len(sentences)))
    return {
        "passage": named(" ".join(sentences)),
        "sentences": [named(sentence) for sentence in sentences],
        "contexts": [named(" ".join(rest)) for rest in rests],
    }
