"""Commands that write pairs or a published data set as a BEIR folder, or training data as records on disk."""

from __future__ import annotations

import itertools
import re
import sys
import textwrap
from pathlib import Path
from typing import Any, Literal

from jaxir import cli
from jaxir.core.choices import Rules, check_idle, with_flags_of
from jaxir.core.errors import UserError, suggest
from jaxir.core.values import NotNegative, Seed
from jaxir.data.formats.collection_names import FORMS, MADE
from jaxir.storage.outputs import writes
from jaxir.training.run.recipe import Recipe

MADE_FORMS = {kind: FORMS[kind] for kind in MADE}
SOURCES = {
    "pairs": "FILE",
    "msmarco": "DIR",
    "multireqa": "MRQA_FILE,CANDIDATES_FILE",
    "nq": "FILE",
    "tfds": "beir/NAME",
    **MADE_FORMS,
}
COUNTED = 10_000  # count truncated texts among this many queries or passages, which takes seconds
# Fields of a recipe that determine how its data are tokenised.
OF_RECORDS = ("model", "objective", "data", "num_negatives", "on_bad_input")
EXAMPLES = {
    "prepare": """--dataset=pairs:faq.csv --output=faq
--dataset=msmarco:DIR --splits=train,dev.small --output=beir
--output=squad-test\
 --dataset=multireqa:mrqa/dev/SQuAD.jsonl.gz,MultiReQA/data/dev/SQuAD/candidates.json.gz""",
    "records": "records --gin_file=gin/samtone_base.gin --data=msmarco --output=records",
}


@writes(output="directory")
def prepare(
    *,
    dataset: str,
    output: str,
    query: str | None = None,
    passage: str | None = None,
    negatives: str | None = None,
    title: str | None = None,
    query_id: str | None = None,
    passage_id: str | None = None,
    dev: NotNegative | None = None,
    test: NotNegative | None = None,
    seed: Seed = 0,
    splits: list[str] | None = None,
    with_context: bool = True,
    data_dir: str | None = None,
    on_bad_input: Literal["stop", "skip"] = "stop",
) -> None:
    """Writes pairs of your own, or a published data set, as a BEIR folder.

    The folder holds a corpus, queries and judgements. Training reads it (gin/pairs.gin), and so do encode,
    index, mine, rounds, grid and evaluate. --dataset is one of

      pairs:FILE                                 pairs of texts: .jsonl, .json, .tsv, .csv (or .gz), .parquet
      msmarco:DIR                                MS MARCO passages: collection.tsv, queries.*.tsv, qrels.*.tsv
      multireqa:MRQA_FILE,CANDIDATES_FILE        MultiReQA: an MRQA file (SQuAD.jsonl.gz) and its sentences
      nq:FILE                                    Natural Questions' long answers, from a simplified file
      tfds:beir/NAME                             a set of BEIR that TensorFlow Datasets has prepared
      hf:NAME                                    a data set of the hub in BEIR's, MTEB's or BRIGHT's layout
      ir_datasets:ID                             a data set of the package ir_datasets

    For pairs:FILE, queries are held out for dev and test; pairs that share a query or a passage stay in one
    split. Columns are found by their usual names: query, question, anchor, sentence1, text1 or title, and
    passage, positive, answer, context, document, pos, sentence2, text2, body or text. A passage may be a list
    of passages. TSV and CSV files have a header line; for a file without one, give the columns by number:
    --query=1 --passage=2. Quotes have no meaning in TSV.

    `python -m jaxir.prepare records` writes training data larger than memory.

    Args:
      dataset: the data set to read.
      output: the folder to write.
      query: for pairs: the column, or key, of the query.
      passage: for pairs: the column of the passage.
      negatives: for pairs: the column of irrelevant passages, one or a list; also written to negatives.jsonl.
      title: for pairs: the column of the passage's title.
      query_id: for pairs: the column of the query's id; by default a hash of the text.
      passage_id: for pairs: the column of the passage's id; by default a hash of the text.
      dev: for pairs: queries to hold out for evaluation while training, a number or a share such as 0.1; 0
        for none. The default is a twentieth, at most 1,000; a tenth if there are few queries.
      test: for pairs: queries to hold out for testing, like --dev, but by default at most 2,000.
      seed: for pairs: seed for choosing the held-out queries.
      splits: for published data sets: splits whose judgements are written (default: test; for hf: and
        ir_datasets: all), such as dev.small of MS MARCO or validation of TFDS. A data set that is one file
        has one split, which gets this name.
      with_context: for multireqa: whether a passage is the sentence followed by its context, or the sentence.
      data_dir: for tfds: the directory of TFDS's data sets (default: TFDS's own default).
      on_bad_input: stop at the first malformed record, or skip and count malformed ones. Pairs without a
        query or a passage are always left out and counted.
    """
    from jaxir.data.formats.pair_table import PairColumns

    kind, where = _kind_of(dataset)
    columns = PairColumns(query, passage, negatives, title, query_id, passage_id)
    if kind == "pairs":
        how = {"splits": splits, "with_context": with_context, "data_dir": data_dir}
        check_idle(prepare, "published data sets, not to --dataset=pairs:FILE", **how)
        _prepare_pairs(where, output, columns, {"dev": dev, "test": test}, seed, on_bad_input)
        return
    how = {**columns._asdict(), "dev": dev, "test": test, "seed": seed}
    check_idle(prepare, "--dataset=pairs:FILE", **how)
    if kind != "multireqa":
        check_idle(prepare, "--dataset=multireqa:", with_context=with_context)
    if kind != "tfds":
        check_idle(prepare, "--dataset=tfds:", data_dir=data_dir)
    splits = splits or (None if kind in MADE_FORMS else ["test"])
    _prepare_collection(kind, where, output, splits, with_context, data_dir, on_bad_input)


def _kind_of(dataset: str) -> tuple[str, str]:
    kind, _, where = dataset.partition(":")
    if kind not in SOURCES or not where:
        forms = ", ".join(f"{name}:{form}" for name, form in SOURCES.items())
        raise UserError(f"--dataset must be one of {forms}, not {dataset!r}{suggest(kind, SOURCES)}")
    return kind, where


def _prepare_collection(
    kind: str,
    where: str,
    output: str,
    splits: list[str] | None,
    with_context: bool,
    data_dir: str | None,
    policy: Literal["stop", "skip"],
) -> None:
    from jaxir.data.formats.collection_files import write_collection
    from jaxir.data.formats.collection_names import write_folder
    from jaxir.data.formats.lines import OnBadInput
    from jaxir.storage.files import atomic_directory

    # Strict, because a judgement of a missing document is a sign of an incomplete download.
    splits = None if splits is None else list(dict.fromkeys(splits))
    on_bad_input = OnBadInput(policy, strict=kind not in MADE_FORMS)
    for split in splits or ():
        if not re.fullmatch(r"\w[\w.-]*", split):
            raise UserError(f"--splits has {split!r}, which cannot be SPLIT in the file name qrels/SPLIT.tsv")
    with atomic_directory(output) as folder:
        if kind in MADE_FORMS:
            counts = write_folder(f"{kind}:{where}", folder, splits, on_bad_input)
        else:
            collection = _read(kind, where, splits, with_context, data_dir, on_bad_input)
            counts = write_collection(folder, **collection)
    on_bad_input.report()
    judged = ", ".join(f"{count:,} judgements ({split})" for split, count in counts.qrels.items())
    print(f"{output}: {counts.documents:,} passages, {counts.queries:,} queries, {judged}")
    if (cut := _cut_by_default(output)) is not None:
        print(cut)
    split = next(iter(counts.qrels))
    print(f"evaluate on it: python -m jaxir.evaluate --model=MODEL --dataset=beir:{output} --split={split}")


def _prepare_pairs(
    path: str,
    output: str,
    columns: Any,
    sizes: dict[str, float | None],
    seed: int,
    policy: Literal["stop", "skip"],
) -> None:
    from jaxir.data.formats.lines import OnBadInput
    from jaxir.data.formats.pair_table import USUAL, PairTable, named_columns
    from jaxir.data.sets.pair_collection import NEGATIVES, write_pairs
    from jaxir.storage.files import atomic_directory

    on_bad_input = OnBadInput(policy)
    with atomic_directory(output) as folder:
        table = PairTable(path, columns, prefix="--")
        print(f"{path}: {named_columns(table.columns)}", flush=True)
        if table.unused:
            free = ", ".join(f"--{name}=COLUMN" for name in USUAL if name not in table.columns)
            flags = f" (flags that use one: {free})" if free else ""
            print(f"  not used: {', '.join(table.unused)}{flags}", flush=True)
        made = write_pairs(folder, table, on_bad_input, **sizes, seed=seed)
    on_bad_input.report()
    print(f"{output}: {made.counts.documents:,} passages")
    for split, queries in made.queries.items():
        print(f"  {split:5} {made.counts.qrels[split]:9,} pairs of {queries:9,} queries")
    for split, wanted in zip(made.held_out.names, made.held_out.wanted, strict=True):
        if made.queries[split] < 0.5 * wanted:
            print(
                f"warning: {split} should have {wanted:,} queries, but fewer can be held out, because"
                f" {made.held_out.largest:,} queries share passages with each other and stay in one split",
                file=sys.stderr,
            )
    if (cut := _cut_by_default(output)) is not None:
        print(f"  {cut}")
    query, passage = made.example.query.text, made.example.passage.contents
    for name, text in (("query", query), ("passage", passage)):
        print(f"  {name:8} {textwrap.shorten(text, 100, placeholder=' ...')}")
    train = f"--data={output}{'' if 'dev' in made.queries else ' --dev_split=None'}"
    if made.with_negatives:
        print(f"{output}/{NEGATIVES}: {made.with_negatives:,} of the pairs to train on, with their negatives")
    print(f"train on it: python -m jaxir.train --gin_file=gin/pairs.gin {train} --output_dir=run")
    if made.with_negatives:
        mined = f"--gin_file=gin/experiments/mined.gin --mined={output}/{NEGATIVES} --negatives=1"
        print(f"with a negative for each pair: add {mined} (pairs without one are left out)")
    if "test" in made.queries:
        print(f"evaluate: python -m jaxir.evaluate --model=run --dataset=beir:{output}")


def _cut_by_default(folder: str) -> str | None:
    """Returns a line that says how many texts of a BEIR folder the model of gin/pairs.gin truncates.

    Returns None if the model is not on this machine; `jaxir.train` fetches it and reports the counts too.
    """
    from jaxir.data.formats.lines import OnBadInput
    from jaxir.data.formats.sources import read_corpus, read_queries
    from jaxir.data.text.truncation import FLAGS, Truncation, truncation_note
    from jaxir.interop.build import Pretrained, outline_of
    from jaxir.interop.hub import hub

    try:
        if (directory := hub.local_minilm()) is None:
            return None
        _, settings, tokenizer = outline_of(Pretrained(source=f"st:{directory}"), weights=False)
    except UserError:  # the model's files are damaged; a later command reports it
        return None
    path, counts = Path(folder), {}
    texts = {
        "queries": (query.text for query in read_queries(path / "queries.jsonl", OnBadInput("skip"))),
        "passages": (
            document.contents for document in read_corpus(path / "corpus.jsonl", OnBadInput("skip"))
        ),
    }
    for what, length in zip(texts, (settings.query_max_length, settings.passage_max_length), strict=True):
        some = list(itertools.islice(texts[what], COUNTED + 1))
        name = f"the first {COUNTED:,} {what}" if len(some) > COUNTED else what
        counts[name] = Truncation(length)
        tokenizer.encode_batch(some[:COUNTED], max_length=length, truncation=counts[name])
    return truncation_note(counts, f"{' and '.join(FLAGS)} of jaxir.train set this for gin/pairs.gin")


def _read(
    kind: str, where: str, splits: list[str], with_context: bool, data_dir: str | None, on_bad_input: Any
) -> dict[str, Any]:
    """Returns a published data set's documents, queries and judgements, as `write_collection` takes them."""
    if kind == "msmarco":
        from jaxir.data.sets.msmarco import MsMarcoFolder

        documents, queries, qrels = MsMarcoFolder(where, on_bad_input).collection(splits)
        return {"documents": documents, "queries": queries, "qrels": qrels}
    if kind == "tfds":
        from jaxir.data.sets.tfds_beir import TfdsBeir

        whole = TfdsBeir(where, data_dir, on_bad_input)
        qrels = {split: whole.qrels(split) for split in splits}
        return {"documents": whole.documents(), "queries": whole.queries(), "qrels": qrels}
    if len(splits) > 1:
        raise UserError(f"{kind}: has one split: give one --splits, not {', '.join(splits)} ({len(splits)})")
    if kind == "multireqa":
        from jaxir.data.sets.multireqa import MultiReqaPairs

        mrqa, comma, candidates = where.partition(",")
        if not comma:
            raise UserError("--dataset=multireqa: takes two files, MRQA_FILE,CANDIDATES_FILE")
        source = MultiReqaPairs(mrqa=mrqa, candidates=candidates, with_context=with_context)
    else:
        from jaxir.data.sets.natural_questions import NaturalQuestionsPairs

        source = NaturalQuestionsPairs(path=where)
    documents, queries, judged = source.collection(on_bad_input)
    return {"documents": documents, "queries": queries, "qrels": {splits[0]: judged}}


@writes(output="directory")
@Rules(bound_as="jaxir.train:train")
@with_flags_of(Recipe, only=OF_RECORDS)
def records(*, output: str, **settings: Any) -> None:
    """Writes a recipe's training data as records that training reads from the disk, batch by batch.

    This is for data larger than memory (docs/datasets.md). The data are tokenised once, for the recipe's
    model, lengths, prompts and fields, into ArrayRecord files. Training then draws the same batches as from
    the data. Only some thousand examples are in memory at a time, besides what their source needs: a line of
    a file of pairs, or the corpus of a BEIR folder.

    Args:
      output: the directory to write.
    """
    from jaxir.data.batches.record_files import write_records
    from jaxir.data.batches.text_data import RecordSource
    from jaxir.data.batches.with_prompts import WithPrompts
    from jaxir.data.formats.lines import OnBadInput
    from jaxir.data.text.truncation import FLAGS, dataset_truncation_note
    from jaxir.interop.build import outline_of

    recipe = Recipe(steps=1, batch_size=1, **settings)
    data = recipe.data.data if isinstance(recipe.data, WithPrompts) else recipe.data
    if not isinstance(data, RecordSource):
        raise UserError(f"data must be a source of records, such as BeirPairs(...), not {data!r:.80}")
    _, encoder, tokenizer = outline_of(recipe.model, weights=False)
    if tokenizer is None:
        raise UserError(
            f"{type(recipe.model).__name__} has no tokenizer until its model is built: use another model"
        )
    features = recipe.objective.features(encoder.text_format_of(tokenizer, recipe.num_negatives))
    if isinstance(recipe.data, WithPrompts):
        features = recipe.data.prompted(features, tokenizer)
    on_bad_input = OnBadInput(recipe.on_bad_input)
    written = write_records(output, data.records(on_bad_input), tokenizer, features)
    on_bad_input.report()
    size = sum(size for _, size in written.files.values())
    files = f"{len(written.files):,} file{'s' if len(written.files) > 1 else ''}"
    print(f"{output}: {written.counts.examples:,} examples in {files}, {size / 1e6:,.1f} MB")
    print(dataset_truncation_note(written, encoder.text_format(), FLAGS))
    how = f"--gin_file=gin/data/records.gin --records={output}"
    if isinstance(recipe.data, WithPrompts):
        how = f"@grain_records.GrainRecords() of {output} in WithPrompts.data"
    print(f"train on it: the same recipe, and {how}")


def main(arguments: list[str]) -> int:
    """Runs `records` if it is the first argument, else `prepare`."""
    action = "records" if arguments[:1] == ["records"] else ""
    name = action or "prepare"
    example = cli.command_lines("jaxir.prepare", EXAMPLES[name])
    return cli.main(f"jaxir.prepare:{name}", arguments[bool(action) :], example=example, action=action)


if __name__ == "__main__":
    cli.end(main(sys.argv[1:]))
