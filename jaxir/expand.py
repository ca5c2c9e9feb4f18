"""The commands `python -m jaxir.expand generate`, `plan`: texts that a model writes for texts; what questions
find with them and which are best: `retrieve`, `rerank`, `choose`, `folds`."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any, Literal

from jaxir import cli
from jaxir.core.decoding_settings import Decoding
from jaxir.core.errors import UserError, suggest
from jaxir.core.values import Count, Within, check_idle, hints_of
from jaxir.storage.outputs import writes

if TYPE_CHECKING:
    from jaxir.data.expanded.candidates import Candidates

EXAMPLE = (
    "python -m jaxir.expand generate --model=hf:castorini/doc2query-t5-base-msmarco --input=corpus.jsonl"
    " --output=queries.jsonl --num_outputs=10 --top_k=10"
)
RETRIEVE = (
    "python -m jaxir.expand retrieve --index=bm25 --queries=queries.jsonl --expansions=expansions.jsonl"
    " --answers=answers.jsonl --output=candidates.jsonl"
)
RERANK = "python -m jaxir.expand rerank --model=RUN --candidates=candidates.jsonl --output=ear.jsonl"
CHOOSE = "python -m jaxir.expand choose --candidates=candidates.jsonl --by=oracle --output=best.jsonl"
TARGETS = "python -m jaxir.expand targets --kind=answer --queries=q.jsonl --answers=a.jsonl --output=t.jsonl"
FOLDS = "python -m jaxir.expand folds --targets=targets.jsonl --queries=queries.jsonl --output=FOLDS"
PLAN = "python -m jaxir.expand plan --model=hf:t5-base --topology=v5e:2x2 --num_outputs=10 --top_k=10"


@writes(output="shared outputs file")
@cli.takes(Decoding)
def generate(
    how: Decoding,
    *,
    model: str,
    input: str,
    output: str,
    batch_tokens: Count | None = None,
    dtype: Literal["float32", "bfloat16"] = "float32",
    on_bad_input: Literal["stop", "skip"] = "stop",
    ray: str | None = None,
) -> None:
    """Writes texts for texts with a generator: queries for documents, say.

    Greedily, unless there are beams, or a temperature, top_k or top_p to sample with. Run again after an
    interruption, the same command continues where it stopped. Outputs of a text that say the same are one.
    Several machines that see the same files share the work, started as for training (docs/sharding.md); so do
    those of a Ray cluster.

    Args:
      model: the generator: a run or a model directory of ours, or hf: and a directory or hub name of a T5.
      input: .jsonl[.gz] of _id, text and maybe title; as corpus.jsonl and queries.jsonl.
      output: the .jsonl to write, of _id and outputs.
      batch_tokens: tokens of the texts of a batch on one device; lower it where memory is short (default:
        suits the platform).
      dtype: type of the matrix products.
      on_bad_input: stop at the first malformed line, or skip and count them.
      ray: have the machines of a Ray cluster generate (docs/big_corpora.md): HOST:PORT of its head, or auto
        for the cluster that this machine is of. They need jaxir and the model, and no other file.
    """
    from jaxir.retrieval.encoding.cluster import Cluster
    from jaxir.retrieval.encoding.generator import Generator
    from jaxir.retrieval.encoding.outputs_file import write_outputs
    from jaxir.retrieval.encoding.windowed_file import summary
    from jaxir.runtime import distributed
    from jaxir.storage.files import local_path

    local_path(output, "written to")
    if not how.samples:
        check_idle(generate, "sampling: --temperature, --top_k or --top_p", seed=how.seed)
    cluster = None if ray is None else Cluster.connect(ray, batch_tokens=batch_tokens)
    if cluster is None:
        distributed.maybe_initialize_distributed()
    with distributed.together():
        generator = Generator.load(model, dtype=dtype, batch_tokens=batch_tokens)
        report = write_outputs(generator, input, output, how, on_bad_input=on_bad_input, cluster=cluster)
        distributed.say(summary(output, report, f", by {model}"))


@cli.takes(Decoding, only=[name for name in hints_of(Decoding) if name != "seed"])
def plan(
    how: Decoding,
    *,
    model: str,
    topology: str,
    max_length: Count | None = None,
    batch_tokens: Count | None = None,
    dtype: Literal["float32", "bfloat16"] = "bfloat16",
    prices: list[str] | None = None,
) -> int:
    """Plans generation: compiles it for TPUs that are not there, and says what it needs and how fast it is.

    Reads no weights. Prints whether it fits, then memory, work, and tokens a second by roofline; the exit
    status is 1 if the chips lack the memory.

    Args:
      model: the generator: as `generate` takes it, or t5x: and a checkpoint.
      topology: the chips, such as v5e:2x2.
      max_length: tokens of each text (default: as many as the model keeps).
      batch_tokens: tokens of the texts of a batch on one device (default: as `generate` has on accelerators).
      dtype: type of the matrix products.
      prices: of a chip and hour, such as v5e=1.2: what a million texts cost.
    """
    from jaxir.planning import decoding_plan
    from jaxir.retrieval.encoding.batch_runner import ACCELERATOR_BATCH_TOKENS

    return decoding_plan.run(
        topology,
        model,
        how,
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
    """Searches with each expansion of each question, and tells where the first answer is found.

    Writes a file of candidates, which rerankers of queries learn from and order (docs/ear.md). Run again
    after an interruption, the same command continues where it stopped. Several machines that see the same
    files share the work, started as for training.

    Args:
      index: an index, of BM25 or of vectors; with --answers one that has the texts of its passages.
      queries: the questions, queries.jsonl[.gz].
      expansions: what was written for them: files or folders, as `generate` writes them or others do; of
        several a question has those of all.
      output: the .jsonl to write: a line for each question, with its expansions and what they find.
      answers: lines of {"_id": question, "answers": [text, ...]}, of all questions (default: not known, as
        when a reranker is used).
      answers_in: where in a passage they are looked for: in its text, as DPR does, or in the document, its
        title too.
      depth: passages of a query among which an answer is looked for.
      num_candidates: expansions of a question that are taken, the first ones (default: all).
      with_question: whether the question alone is a candidate after them (the paper's lists are without).
      lines_each: where a line is an expansion: how many of a question follow each other.
      on_bad_input: stop at the first malformed line, or skip and count them.
    """
    from jaxir.data.expanded.candidates import read_questions
    from jaxir.data.formats.answers import read_answers
    from jaxir.evaluation.query_candidates import Retriever, check_answers, write_found
    from jaxir.retrieval.encoding.windowed_file import summary
    from jaxir.runtime import distributed

    if answers is None:
        check_idle(retrieve, "--answers", depth=depth, answers_in=answers_in)
    distributed.maybe_initialize_distributed()
    with distributed.together():
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


@writes(output="shared outputs file")
def rerank(
    *,
    model: str,
    output: str,
    candidates: str | None = None,
    queries: str | None = None,
    expansions: list[str] | None = None,
    corpus: str | None = None,
    keep: Count | None = None,
    num_candidates: Count | None = None,
    lines_each: Count = 1,
    batch_tokens: Count | None = None,
) -> None:
    """Orders the expansions of each question by a reranker of queries, the most promising first.

    The output is a queries.jsonl of the best queries, `_id` and `text`, for `jaxir.search`, and a file of
    candidates in their new order, from which `choose` takes others. Run again after an interruption, the same
    command continues where it stopped. Several machines that see the same files share the work.

    Args:
      model: the reranker, trained by gin/ear_ri.gin or gin/ear_rd.gin: a run or a model directory of ours, or
        hf: and a directory.
      output: the .jsonl to write.
      candidates: what `retrieve` wrote; needed by a reranker that reads passages.
      queries: in its place, the questions, queries.jsonl[.gz].
      expansions: and what was written for them.
      corpus: corpus.jsonl[.gz] with the passages, for a reranker that reads them.
      keep: expansions of a question that are written, the best ones (default: all).
      num_candidates: expansions of a question that are looked at, the first ones (default: all).
      lines_each: with --expansions, as `retrieve` has it.
      batch_tokens: tokens of a batch on one device; lower it where memory is short (default: suits the
        platform).
    """
    from jaxir.retrieval.encoding.query_reranker import QueryReranker
    from jaxir.retrieval.encoding.windowed_file import summary
    from jaxir.retrieval.ranking.query_choice import write_reranked
    from jaxir.runtime import distributed

    distributed.maybe_initialize_distributed()
    with distributed.together():
        questions = _questions(rerank, candidates, queries, expansions, lines_each, num_candidates)
        reranker = QueryReranker.load(model, batch_tokens=batch_tokens)
        report = write_reranked(reranker, questions, output, corpus=corpus, keep=keep)
        distributed.say(summary(output, report, f", by {model}"))


@writes(output="shared outputs file")
def choose(
    *,
    output: str,
    candidates: str | None = None,
    queries: str | None = None,
    expansions: list[str] | None = None,
    by: Literal["place", "concat", "oracle"] = "place",
    place: Count = 1,
    num_candidates: Count | None = None,
    lines_each: Count = 1,
) -> None:
    """Chooses an expanded query of each question, without a model: GAR's, or by the answers it finds.

    Writes a queries.jsonl for `jaxir.search`.

    Args:
      output: the .jsonl to write, of _id and text.
      candidates: what `retrieve` or `rerank` wrote; needed by oracle.
      queries: in its place, the questions, queries.jsonl[.gz].
      expansions: and what was written for them.
      by: the expansion at --place; all of them behind each other; or the one that finds an answer first.
      place: which expansion, counted from 1; questions that have fewer are left out.
      num_candidates: expansions of a question that are looked at, the first ones (default: all).
      lines_each: with --expansions, as `retrieve` has it.
    """
    from jaxir.retrieval.encoding.windowed_file import summary
    from jaxir.retrieval.ranking.query_choice import write_chosen

    if by != "place":
        check_idle(choose, "--by=place", place=place)
    questions = _questions(choose, candidates, queries, expansions, lines_each, num_candidates)
    print(summary(output, write_chosen(questions, output, by=by, place=place)))


def _questions(
    command: Callable[..., Any],
    candidates: str | None,
    queries: str | None,
    expansions: list[str] | None,
    lines_each: int,
    num_candidates: int | None,
) -> list[Candidates]:
    """Returns the questions with their candidates, of one of the two sources that the flags name."""
    from jaxir.data.expanded.candidates import read_candidates, read_questions

    if (candidates is None) == (queries is None) or (queries is None) != (expansions is None):
        raise UserError("give --candidates, or --queries and --expansions")
    if candidates is not None:
        check_idle(command, "--expansions", lines_each=lines_each)
        return [some.of(range(len(some.outputs))[:num_candidates]) for some in read_candidates(candidates)]
    return read_questions(queries, expansions, lines_each=lines_each, limit=num_candidates)


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
    """Writes what a generator is to write for questions: answers, or sentences or titles of their passages.

    They are what gin/experiments/targets.gin trains a generator on (GAR, Mao et al. 2021). Of the passages of
    a question the first that holds an answer counts; a question without one is left out.

    Args:
      kind: the first answer; the first sentence that holds one; or the passage's title.
      queries: the questions, queries.jsonl[.gz].
      answers: lines of {"_id": question, "answers": [text, ...]}.
      output: the .jsonl to write, of source and target.
      run: TREC run file with the passages, best first.
      qrels: in its place, judgements that name the relevant ones.
      corpus: corpus.jsonl[.gz] with the passages.
      answers_in: of --kind=title, where in a passage an answer is looked for: in its text, as DPR does, or in
        the document, its title too.
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
        raise UserError(f"--kind={kind} needs --corpus, and --run or --qrels: passages with an answer")
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
    """Splits targets into folds, so that each question is written for by a generator that never saw it.

    Writes targets-K.jsonl, all but those of fold K, to train on, and queries-K.jsonl, the questions of fold
    K, to write for (docs/ear.md). A question's fold follows from its text alone.

    Args:
      targets: a .jsonl of {"source", "target"}, or GAR's NAME.source with NAME.target beside it.
      queries: the questions, queries.jsonl[.gz], as they stand in the sources.
      output: the directory to write.
      folds: how many.
    """
    from jaxir.data.expanded.folds import write_folds

    report = write_folds(targets, queries, output, folds)
    print(f"{output}: {report}")


ACTIONS = ("generate", "plan", "targets", "folds", "retrieve", "rerank", "choose")


def main(arguments: list[str]) -> int:
    """Writes texts for texts (`generate`), searches with them (`retrieve`) and chooses of them (`rerank`)."""
    action, *rest = arguments or [""]
    match action:
        case "generate":
            return cli.main("jaxir.expand:generate", rest, example=EXAMPLE, action=action)
        case "plan":
            return cli.main("jaxir.expand:plan", rest, example=PLAN, action=action)
        case "targets":
            return cli.main("jaxir.expand:targets", rest, example=TARGETS, action=action)
        case "folds":
            return cli.main("jaxir.expand:folds", rest, example=FOLDS, action=action)
        case "retrieve":
            return cli.main("jaxir.expand:retrieve", rest, example=RETRIEVE, action=action)
        case "rerank":
            return cli.main("jaxir.expand:rerank", rest, example=RERANK, action=action)
        case "choose":
            return cli.main("jaxir.expand:choose", rest, example=CHOOSE, action=action)
        case "--help" | "-h":
            print("usage: python -m jaxir.expand ACTION [--FLAG=VALUE ...]\n")
            for name in ACTIONS:
                print(f"  {name:9} {globals()[name].__doc__.splitlines()[0]}")
            print("\n`python -m jaxir.expand ACTION --help` has its flags and an example.")
            return 0
    told = f"there is no {action!r}{suggest(action, ACTIONS)}" if action else "say what to do"
    print(f"error: {told} (`python -m jaxir.expand --help` lists what there is)", file=sys.stderr)
    return 2


if __name__ == "__main__":
    cli.end(main(sys.argv[1:]))
