"""Commands that generate texts (such as queries from documents) and search with them; each is a function."""

from __future__ import annotations

import dataclasses
import sys
from typing import TYPE_CHECKING, Annotated, Any, Literal

from jaxir import cli
from jaxir.core.choices import check_idle, with_flags_of
from jaxir.core.decoding_settings import Decoding
from jaxir.core.errors import UserError, suggest
from jaxir.core.values import Count, Within, checked, hints_of
from jaxir.storage.outputs import writes

if TYPE_CHECKING:
    from jaxir.data.expanded.candidates import Candidates

EXAMPLES = {
    "generate": "generate --model=hf:castorini/doc2query-t5-base-msmarco --input=corpus.jsonl"
    " --output=queries.jsonl --num_outputs=10 --top_k=10",
    "plan": "plan --model=hf:t5-base --topology=v5e:2x2 --num_outputs=10 --top_k=10",
    "targets": "targets --kind=answer --queries=q.jsonl --answers=a.jsonl --output=t.jsonl",
    "folds": "folds --targets=targets.jsonl --queries=queries.jsonl --output=FOLDS",
    "retrieve": "retrieve --index=bm25 --queries=queries.jsonl --expansions=expansions.jsonl"
    " --answers=answers.jsonl --output=candidates.jsonl",
    "rerank": "rerank --model=RUN --candidates=candidates.jsonl --output=ear.jsonl",
    "choose": "choose --candidates=candidates.jsonl --by=oracle --output=best.jsonl",
}


@writes(output="shared outputs file")
@with_flags_of(Decoding)
def generate(
    *,
    model: str,
    input: str,
    output: str,
    batch_tokens: Count | None = None,
    dtype: Literal["float32", "bfloat16"] = "float32",
    on_bad_input: Literal["stop", "skip"] = "stop",
    ray: str | None = None,
    **decoding: Any,
) -> None:
    """Generates texts from texts, such as queries from documents.

    Decodes greedily, unless num_beams, temperature, top_k or top_p is given. After an interruption, the same
    command continues where it stopped. Repeated outputs of a text are written once. Several machines that
    share a file system divide the work if each runs the command as for training (docs/sharding.md). See also
    --ray.

    Args:
      model: the generator: a jaxir run or model directory, or hf: and a directory or hub name of a T5.
      input: .jsonl[.gz] of _id, text and optionally title, such as corpus.jsonl or queries.jsonl.
      output: the .jsonl to write, of _id and outputs.
      batch_tokens: input tokens per batch on one device; lower it if memory is short (default: by
        platform).
      dtype: type of the matrix products.
      on_bad_input: stop at the first malformed line, or skip and count them.
      ray: generate on the machines of a Ray cluster (docs/big_corpora.md): HOST:PORT of its head, or auto for
        this machine's cluster. They need jaxir and the model, but no other file.
    """
    from jaxir.retrieval.encoding.cluster import Cluster
    from jaxir.retrieval.encoding.generator import Generator
    from jaxir.retrieval.encoding.outputs_file import write_outputs
    from jaxir.retrieval.encoding.windowed_file import summary
    from jaxir.runtime import distributed
    from jaxir.storage.files import local_path

    how = Decoding(**decoding)
    local_path(output, "written to")
    if not how.samples:
        check_idle(generate, "sampling: --temperature, --top_k or --top_p", seed=how.seed)
    cluster = None if ray is None else Cluster.connect(ray, batch_tokens=batch_tokens)
    with distributed.joined(with_others=cluster is None):
        generator = Generator.load(model, dtype=dtype, batch_tokens=batch_tokens)
        report = write_outputs(generator, input, output, how, on_bad_input=on_bad_input, cluster=cluster)
        distributed.say(summary(output, report, f", by {model}"))


@with_flags_of(Decoding, only=hints_of(Decoding).keys() - {"seed"})
def plan(
    *,
    model: str,
    topology: str,
    max_length: Count | None = None,
    batch_tokens: Count | None = None,
    dtype: Literal["float32", "bfloat16"] = "bfloat16",
    prices: list[str] | None = None,
    **decoding: Any,
) -> int:
    """Plans generation: compiles it for TPUs without having them, and prints its memory and speed.

    Reads no weights. Prints whether the program fits into memory, then memory, work, and tokens a second by
    roofline. The exit status is 1 if the chips have too little memory.

    Args:
      model: the generator: as for `generate`, or t5x: and a checkpoint.
      topology: the chips, such as v5e:2x2.
      max_length: tokens per text (default: the model's maximum).
      batch_tokens: input tokens per batch on one device (default: the default of `generate` on
        accelerators).
      dtype: type of the matrix products.
      prices: price per chip and hour, such as v5e=1.2; prints the cost of a million texts.
    """
    from jaxir.planning import decoding_plan
    from jaxir.retrieval.encoding.batch_runner import ACCELERATOR_BATCH_TOKENS

    return decoding_plan.run(
        topology,
        model,
        Decoding(**decoding),
        batch_tokens=batch_tokens or ACCELERATOR_BATCH_TOKENS,
        max_length=max_length,
        dtype=dtype,
        prices=prices,
        words=cli.TYPED,
    )


@writes(output="shared outputs file")
def retrieve(
    *,
    index: str,
    queries: str,
    expansions: list[str],
    output: str,
    answers: str | None = None,
    answers_in: Literal["text", "document"] = "text",
    depth: Count = 100,
    num_candidates: Count | None = None,
    with_question: bool = False,
    lines_each: Count = 1,
    on_bad_input: Literal["stop", "skip"] = "stop",
) -> None:
    """Searches with each expansion of each question, and records the rank of the first answer.

    Writes a file of candidates: rerankers of queries are trained on it, and order it (docs/ear.md). After an
    interruption, the same command continues where it stopped. Several machines that share a file system
    divide the work if each runs the command as for training (docs/sharding.md).

    Args:
      index: an index of BM25 or of vectors; with --answers it must hold the texts of its passages.
      queries: the questions, queries.jsonl[.gz].
      expansions: texts generated for the questions: files or folders, in the format of `generate` or others
        (docs/generation.md); a question gets the expansions of all of them.
      output: the .jsonl to write: a line for each question, with its expansions and what they find.
      answers: file of lines {"_id": question, "answers": [text, ...]} for all questions; not needed to
        apply a reranker.
      answers_in: look for answers in a passage's text, as DPR does, or in the document, its title included.
      depth: passages retrieved per query, in which an answer is looked for.
      num_candidates: number of a question's first expansions to use (default: all).
      with_question: add the question itself as the last candidate (the EAR paper does not).
      lines_each: for files with an expansion on each line: number of successive lines per question.
      on_bad_input: stop at the first malformed line, or skip and count them.
    """
    from jaxir.data.expanded.candidates import read_questions
    from jaxir.data.formats.answers import read_answers
    from jaxir.evaluation.query_candidates import Retriever, check_answers, write_found
    from jaxir.retrieval.encoding.windowed_file import summary
    from jaxir.runtime import distributed

    if answers is None:
        check_idle(retrieve, "--answers", depth=depth, answers_in=answers_in)
    with distributed.joined():
        questions = read_questions(
            queries,
            expansions,
            lines_each=lines_each,
            limit=num_candidates,
            with_question=with_question,
            on_bad_input=on_bad_input,
        )
        known = None if answers is None else read_answers(answers)
        if known is not None:
            check_answers(questions, known, answers)
        retriever = Retriever(index, depth=depth, answers=known, answers_in=answers_in)
        report = write_found(retriever, questions, output)
        distributed.say(summary(output, report, f", searched in {index}"))


@dataclasses.dataclass(frozen=True, kw_only=True)
@checked
class CandidateFiles:
    """The files that have the expansions of each question.

    Attributes:
      candidates: the output of `retrieve` or `rerank`; required by `choose --by=oracle` and by a reranker
        that reads passages.
      queries: instead of --candidates, the questions, queries.jsonl[.gz].
      expansions: the expansions of --queries.
      num_candidates: number of a question's first expansions to use (default: all).
      lines_each: with --expansions, as for `retrieve`.
    """

    candidates: str | None = None
    queries: str | None = None
    expansions: list[str] | None = None
    num_candidates: Count | None = None
    lines_each: Count = 1

    def read(self) -> list[Candidates]:
        """Returns the questions with their candidates."""
        from jaxir.data.expanded.candidates import read_candidates, read_questions

        if (self.candidates is None) == (self.queries is None) or (self.queries is None) != (
            self.expansions is None
        ):
            raise UserError("give --candidates, or --queries and --expansions")
        limit = self.num_candidates
        if self.candidates is None:
            return read_questions(self.queries, self.expansions, lines_each=self.lines_each, limit=limit)
        check_idle(CandidateFiles, "--expansions", lines_each=self.lines_each)
        return [some.of(range(len(some.outputs))[:limit]) for some in read_candidates(self.candidates)]


@writes(output="shared outputs file")
@with_flags_of(CandidateFiles)
def rerank(
    *,
    model: str,
    output: str,
    corpus: str | None = None,
    keep: Count | None = None,
    batch_tokens: Count | None = None,
    **files: Any,
) -> None:
    """Orders the expansions of each question by a reranker of queries, best first.

    The output is both a queries.jsonl of the best queries (`_id`, `text`) for `jaxir.search`, and a file of
    candidates in their new order for `choose`. After an interruption, the same command continues where it
    stopped. Several machines that share a file system divide the work if each runs the command.

    Args:
      model: the reranker, trained with gin/ear_ri.gin or gin/ear_rd.gin: a jaxir run or model directory, or
        hf: and a directory.
      output: the .jsonl to write.
      corpus: corpus.jsonl[.gz] with the passages, for a reranker that reads them.
      keep: number of best expansions to write per question (default: all).
      batch_tokens: tokens per batch on one device; lower it if memory is short (default: by platform).
    """
    from jaxir.retrieval.encoding.query_reranker import QueryReranker
    from jaxir.retrieval.encoding.windowed_file import summary
    from jaxir.retrieval.ranking.query_choice import write_reranked
    from jaxir.runtime import distributed

    with distributed.joined():
        questions = CandidateFiles(**files).read()
        reranker = QueryReranker.load(model, batch_tokens=batch_tokens)
        report = write_reranked(reranker, questions, output, corpus=corpus, keep=keep)
        distributed.say(summary(output, report, f", by {model}"))


@writes(output="shared outputs file")
@with_flags_of(CandidateFiles)
def choose(
    *,
    output: str,
    by: Literal["place", "concat", "oracle"] = "place",
    place: Count = 1,
    **files: Any,
) -> None:
    """Chooses an expanded query for each question without a model: as GAR does, or by the answers it finds.

    Writes a queries.jsonl for `jaxir.search`.

    Args:
      output: the .jsonl to write, of _id and text.
      by: the expansion at --place; all expansions concatenated; or (oracle) the one with the best-ranked
        answer.
      place: the expansion's rank, from 1; questions with fewer expansions are left out.
    """
    from jaxir.retrieval.encoding.windowed_file import summary
    from jaxir.retrieval.ranking.query_choice import write_chosen

    if by != "place":
        check_idle(choose, "--by=place", place=place)
    questions = CandidateFiles(**files).read()
    print(summary(output, write_chosen(questions, output, by=by, place=place)))


@writes(output="shared outputs file")
def targets(
    *,
    kind: Literal["answer", "sentence", "title"],
    queries: str,
    answers: str,
    output: str,
    run: str | None = None,
    qrels: str | None = None,
    corpus: str | None = None,
    answers_in: Literal["text", "document"] = "text",
) -> None:
    """Writes training targets for a generator: answers, or sentences or titles of passages with answers.

    gin/experiments/targets.gin trains a generator on them (GAR, Mao et al. 2021). A question's first passage
    that contains an answer is used; questions without one are left out.

    Args:
      kind: answer (the first), sentence (the first with an answer) or title (of a passage with an answer).
      queries: the questions, queries.jsonl[.gz].
      answers: file of lines {"_id": question, "answers": [text, ...]}.
      output: the .jsonl to write, of source and target.
      run: TREC run file with the passages, best first.
      qrels: instead of --run, judgements that name the relevant passages.
      corpus: corpus.jsonl[.gz] with the passages.
      answers_in: for --kind=title, look for answers in a passage's text, as DPR does, or in the document, its
        title included.
    """
    from jaxir.data.formats.answers import read_answers
    from jaxir.evaluation.expansion_targets import write_targets
    from jaxir.evaluation.judgements import read_judgements
    from jaxir.retrieval.ranking.runs import rank, read_run

    if kind != "title":
        check_idle(targets, "--kind=title", answers_in=answers_in)
    if kind == "answer":
        check_idle(targets, "--kind=sentence and --kind=title", run=run, qrels=qrels, corpus=corpus)
    elif (run is None) == (qrels is None) or corpus is None:
        raise UserError(f"--kind={kind} needs --corpus, and either --run or --qrels, to find passages")
    passages = None
    if run is not None:
        passages = {query_id: rank(found) for query_id, found in read_run(run).items()}
    elif qrels is not None:
        judged = read_judgements(qrels)
        passages = {q: [d for d, score in found.items() if score > 0] for q, found in judged.items()}
    known = read_answers(answers)
    report = write_targets(
        kind, queries, known, output, passages=passages, corpus=corpus, answers_in=answers_in
    )
    print(f"{output}: {report}")


@writes(output="directory")
def folds(*, targets: str, queries: str, output: str, folds: Annotated[int, Within(2)] = 5) -> None:
    """Splits targets into folds, so that no question is expanded by a generator that was trained on it.

    Writes for each fold K targets-K.jsonl, the targets outside of the fold, to train on, and queries-K.jsonl,
    the fold's questions, to expand (docs/ear.md). A question's fold depends only on its text.

    Args:
      targets: a .jsonl of {"source", "target"}, or GAR's NAME.source with NAME.target beside it.
      queries: the questions, queries.jsonl[.gz], spelled as in the sources.
      output: the directory to write.
      folds: number of folds.
    """
    from jaxir.data.expanded.folds import write_folds

    report = write_folds(targets, queries, output, folds)
    print(f"{output}: {report}")


def main(arguments: list[str]) -> int:
    """Generates texts (`generate`), searches with them (`retrieve`) and ranks them (`rerank`)."""
    action, *rest = arguments or [""]
    if action in EXAMPLES:
        example = cli.command_lines("jaxir.expand", EXAMPLES[action])
        return cli.main(f"jaxir.expand:{action}", rest, example=example, action=action)
    if action in ("--help", "-h"):
        print("usage: python -m jaxir.expand ACTION [--FLAG=VALUE ...]\n")
        for name in EXAMPLES:
            print(f"  {name:9} {globals()[name].__doc__.splitlines()[0]}")
        print("\n`python -m jaxir.expand ACTION --help` has its flags and an example.")
        return 0
    problem = f"there is no action {action!r}{suggest(action, EXAMPLES)}" if action else "no action is given"
    print(f"error: {problem} (`python -m jaxir.expand --help` lists the actions)", file=sys.stderr)
    return 2


if __name__ == "__main__":
    cli.end(main(sys.argv[1:]))
