"""Questions with passages and answers, the data of a reader."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import numpy as np

from jaxir.core.errors import UserError
from jaxir.core.features import Features, Tokens
from jaxir.core.values import checked
from jaxir.data.batches.batch_plan import Batch, Batching, Plan, StepExamples, in_one_order, uniforms
from jaxir.data.batches.dataset import Dataset
from jaxir.data.batches.text_data import TextData
from jaxir.data.batches.text_table import TableBuilder, TextTable
from jaxir.data.formats.answers import read_answers
from jaxir.data.formats.beir_folder import BeirFolder
from jaxir.data.formats.lines import OnBadInput
from jaxir.data.text.tokenizer import Tokenizer
from jaxir.retrieval.answering.questions import Questions, read_questions
from jaxir.storage import fingerprints

PASSAGES, ANSWER = "passages", "answer"  # the fields of a reader's objective


@dataclasses.dataclass(frozen=True, kw_only=True)
@checked
class AnsweredQuestions(TextData):
    """The questions of a run, with their answers and with the passages that the run found.

    Attributes:
      run: a TREC run file, of any retriever, for queries of the folder.
      directory: a BEIR folder, which has the queries and the corpus.
      answers: a file of lines {"_id", "answers"}, at least for all questions that are read.
      split: only read questions of the run for which the folder's qrels/SPLIT.tsv has judgements; None, or a
        folder without judgements: all questions.
    """

    run: str
    directory: str
    answers: str
    split: str | None = None

    def dataset(self, tokenizer: Tokenizer, features: Features, on_bad_input: OnBadInput) -> AnsweredDataset:
        """Reads and tokenises the questions, passages and answers."""
        fields = {f.field: f for f in features.values() if isinstance(f, Tokens)}
        if len(features) != 2 or fields.keys() != {PASSAGES, ANSWER} or fields[PASSAGES].count is None:
            wanted = ", ".join(f.field for f in features.values())
            raise UserError(
                f"AnsweredQuestions only fits the objective FusionInDecoder, but this one reads {wanted}"
            )
        source, target = fields[PASSAGES], fields[ANSWER]
        folder = BeirFolder(self.directory, on_bad_input)
        answers = read_answers(self.answers)
        split = self.split if folder.splits else None
        questions = read_questions(
            self.run,
            folder.queries_path,
            folder.corpus_path,
            tokenizer,
            passages=source.count,
            length=source.length,
            prompt=source.prompt,
            of=None if split is None else {judged.query_id for judged in folder.qrels(split)},
            on_bad_input=on_bad_input,
        )
        if lacking := [query_id for query_id in questions.ids if query_id not in answers]:
            raise UserError(
                f"{self.answers} lacks answers to {lacking[0]!r}, a question of {self.run}"
                f" ({len(lacking):,} of {len(questions):,} lack answers): add these answers"
            )
        texts = [answers[query_id] for query_id in questions.ids]
        builder = TableBuilder(tokenizer, target.length, target.prompt, what="answers")
        rows = np.array([builder.row(text, text) for some in texts for text in some], np.int64)
        offsets = np.concatenate([[0], np.cumsum([len(some) for some in texts])])
        return AnsweredDataset(features, questions, texts, builder.table(), rows, offsets)


def dev_questions(
    run: str | None, directory: str, answers: str, split: str | None = None
) -> AnsweredQuestions | None:
    """Returns the data that a reader is evaluated on while it trains; None if `run` is None."""
    if run is None:
        return None
    return AnsweredQuestions(run=run, directory=directory, answers=answers, split=split)


class AnsweredDataset(Dataset):
    """Questions with passages and, drawn anew at each step, one answer, as in Fusion-in-Decoder."""

    def __init__(
        self,
        features: Features,
        questions: Questions,
        answers: list[list[str]],
        targets: TextTable,
        rows: np.ndarray,
        offsets: np.ndarray,
    ):
        """The answers of question q are the rows rows[offsets[q]:offsets[q + 1]] of the table `targets`."""
        self.features, self.num_examples = dict(features), len(questions)
        self.questions, self.answers = questions, answers
        self._targets, self._rows, self._offsets = targets, rows, offsets
        self._names = {f.field: name for name, f in features.items()}

    def __repr__(self) -> str:
        passages, length = self.questions.passages, self.questions.length
        return (
            f"AnsweredDataset({self.num_examples:,} questions, {passages} passages of {length} tokens each)"
        )

    @property
    def fingerprint(self) -> str:
        """A hash of all questions, passages and answers."""
        arrays = {"rows": self._rows, "offsets": self._offsets, **self._targets._asdict()}
        digest = fingerprints.of_values(self.questions.fingerprint, fingerprints.of_arrays(arrays))
        return (
            f"{self.num_examples:,} questions of {self.questions.passages} passages,"
            f" hash {digest[: fingerprints.DIGITS]}"
        )

    def batched(self, how: Batching) -> Iterator[Batch]:
        def batch(one: StepExamples) -> Batch:
            places = one.first + np.arange(len(one.examples))
            return self._batch(one.examples, uniforms(how.seed, np.array([one.step]), places))

        return map(batch, Plan(self.num_examples, how))

    def once(self, count: int | None = None) -> Batch:
        examples = in_one_order(self.num_examples, count)
        return self._batch(examples, np.zeros(len(examples)))

    def _batch(self, examples: np.ndarray, luck: np.ndarray) -> Batch:
        """Returns a batch; `luck`, in [0, 1), chooses an example's target among its answers."""
        starts = self._offsets[examples]
        chosen = starts + (luck * (self._offsets[examples + 1] - starts)).astype(np.int64)
        target = self._names[ANSWER]
        return {
            self._names[PASSAGES]: self.questions.sources(examples),
            target: self._targets.ids(self._rows[chosen], self.features[target].length),
        }
