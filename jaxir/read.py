"""Command: answers questions from retrieved passages."""

from __future__ import annotations

from typing import Literal

from jaxir import cli
from jaxir.core.values import Count
from jaxir.storage.outputs import writes


@writes(output="shared outputs file")
def read(
    *,
    model: str,
    run: str,
    queries: str,
    corpus: str,
    output: str,
    passages: Count = 100,
    passage_length: Count | None = None,
    max_new_tokens: Count = 50,
    num_beams: Count = 1,
    batch_tokens: Count | None = None,
    dtype: Literal["float32", "bfloat16"] = "float32",
) -> None:
    """Answers questions from retrieved passages with a reader, a Fusion-in-Decoder.

    Decodes greedily, unless num_beams is given. Questions that are not in the run are skipped. After an
    interruption, the same command continues where it stopped. Several machines that share a file system
    divide the work if each runs the command as for training (docs/sharding.md).

    Args:
      model: the reader: a jaxir run or model directory, or hf: and a directory or hub name of a T5.
      run: TREC run file, of any retriever.
      queries: queries.jsonl[.gz] of _id and text: the questions themselves, not their expansions.
      corpus: corpus.jsonl[.gz] of _id, text and optionally title.
      output: the .jsonl to write, of _id and outputs, which holds the answer.
      passages: number of best passages to read per question.
      passage_length: maximum number of tokens of a question with one passage (default: the model's).
      max_new_tokens: maximum number of tokens per answer.
      num_beams: beams per answer; 1: no beam search.
      batch_tokens: tokens of all passages per batch on one device; lower it if memory is short (default: by
        platform).
      dtype: type of the matrix products.
    """
    from jaxir.data.expanded.candidates import check_unexpanded
    from jaxir.models.decoding import Decoding
    from jaxir.retrieval.answering.answer_writer import Reader, write_answers
    from jaxir.retrieval.answering.questions import read_questions
    from jaxir.retrieval.encoding.windowed_file import summary
    from jaxir.runtime import distributed
    from jaxir.storage.files import local_path

    local_path(output, "written to")
    check_unexpanded(queries)
    how = Decoding(max_new_tokens=max_new_tokens, num_beams=num_beams)
    with distributed.joined():
        reader = Reader.load(model, dtype=dtype, batch_tokens=batch_tokens)
        settings = reader.settings
        questions = read_questions(
            run,
            queries,
            corpus,
            reader.tokenizer,
            passages=passages,
            length=passage_length or settings.passage_max_length,
            prompt=settings.passage_prompt,
        )
        report = write_answers(reader, questions, output, how)
        distributed.say(summary(output, report, f", by {model}"))


if __name__ == "__main__":
    cli.start(
        "jaxir.read:read",
        "--model=READER --run=run.trec --queries=queries.jsonl --corpus=corpus.jsonl --output=answers.jsonl",
    )
