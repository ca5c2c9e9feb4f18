"""The command `python -m jaxir.index`: vectors or texts in, a searchable index out."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal

from jaxir import cli
from jaxir.core.errors import UserError
from jaxir.core.values import Count, Share, check_idle
from jaxir.storage.outputs import alone, check_output, writes

if TYPE_CHECKING:
    from jaxir.retrieval.encoding.stored_embeddings import StoredEmbeddings
    from jaxir.retrieval.indexes.base_index import VectorIndex
    from jaxir.retrieval.indexes.tuning import Recall


@writes(unless="parts", output="directory", update="changed directory")
def index(
    output: str | None = None,
    embeddings: str | None = None,
    backend: Literal["scann", "exact", "lucene", "lucene_impact", "milvus"] = "scann",
    corpus: str | None = None,
    vectors: str | None = None,
    model: str | None = None,
    storage: Literal["float32", "bfloat16", "int8"] | None = None,
    target_recall: Share | None = None,
    queries: str | None = None,
    fields: Literal["flat", "multifield"] | None = None,
    on_bad_input: Literal["stop", "skip"] = "stop",
    uri: str | None = None,
    collection: str | None = None,
    index_type: Literal["FLAT", "HNSW", "AUTOINDEX"] | None = None,
    update: str | None = None,
    delete: str | None = None,
    parts: Count | None = None,
) -> None:
    """Builds an index over encoded passages, or over the words of a corpus; or changes one (--update).

    scann, exact and milvus take --embeddings; lucene takes --corpus and no model (BM25, in a process of its
    own that is installed on first use), lucene_impact the --vectors of a learned sparse model.

    Args:
      output: the index directory.
      embeddings: what jaxir.encode wrote.
      backend: scann (approximate, fast, exact up to some thousands of passages), exact, lucene (BM25),
        lucene_impact (learned sparse vectors), or milvus (embedded, or a server by --uri).
      corpus: the corpus, a .jsonl[.gz] or a .txt[.gz] with a text on each line, whose number is the id; its
        titles and texts are stored, for jaxir.search to show. With --embeddings, the one that was encoded.
      vectors: for lucene_impact, .jsonl[.gz] lines of {"id": ..., "vector": {token: weight}}, the weights
        whole numbers, as Anserini's collections of SPLADE, uniCOIL and DeepImpact have them.
      model: the model that jaxir.search should load for queries (default: the one that encoded the
        passages).
      storage: for scann and exact, the type of the vectors that decide the order of answers (default:
        float32); a smaller one costs recall, which is measured and told.
      target_recall: for scann, search no further than this recall@10 needs, tuned and measured against exact
        search; without it 200 candidates of an eighth of the leaves are compared. For exact, what TPUs'
        approximate top-k shall find; on other devices an exact index finds all the same.
      queries: queries.jsonl[.gz] for --target_recall and --storage, half to tune on and half to measure on
        (default: passages are taken for queries).
      fields: for lucene, whether title and text are one field (flat, the default) or two of equal weight.
      on_bad_input: for lucene, stop at the first malformed line of --corpus, or skip and count them; likewise
        for lucene_impact and --vectors.
      uri: for milvus, a server (https://host:19530, its token in the variable MILVUS_TOKEN) or the path of an
        embedded Milvus (default: one in the index directory). Whatever opens the index later wants the same
        in the variable MILVUS_URI.
      collection: for milvus, the name of the collection to make (default: passages).
      index_type: for milvus, FLAT (the default) is exact, HNSW and AUTOINDEX (Milvus's choice) are not.
      update: an index to change, instead of --output: passages of --embeddings, with their --corpus, are
        added (of --corpus alone, to a lucene index), those of --delete taken out. It is written anew and
        then takes the old one's place; a Milvus elsewhere is changed where it is.
      delete: for --update, a file with the ids of passages to take out first, one on a line.
      parts: for scann and exact, build so many indexes, each of its part of the passages, which are searched
        together (docs/big_corpora.md). Run again after an interruption, the same command builds those that
        are missing; several machines that see the same files, started as for training, each build some.
    """
    if update is not None:
        others = {"output": output, "model": model, "storage": storage, "target_recall": target_recall}
        others |= {"queries": queries, "fields": fields, "uri": uri, "collection": collection}
        others |= {
            "vectors": vectors,
            "parts": parts,
            "index_type": index_type,
            "backend": None if backend == "scann" else backend,
        }
        if given := [f"--{name}" for name, value in others.items() if value is not None]:
            raise UserError(f"{' and '.join(given)}: not with --update, for the index stays what it is")
        _update(update, embeddings, corpus, delete, on_bad_input)
        return
    if output is None or delete is not None:
        raise UserError("--output must be given" if output is None else "--delete is for --update")
    milvus = {"uri": uri, "collection": collection, "index_type": index_type}
    milvus = {name: value for name, value in milvus.items() if value is not None}
    if milvus and backend != "milvus":
        raise UserError(f"{' and '.join(f'--{name}' for name in milvus)}: for --backend=milvus only")
    measured = {"storage": storage, "target_recall": target_recall, "queries": queries}
    if backend not in ("scann", "exact") and (
        given := [f"--{name}" for name, value in measured.items() if value is not None]
    ):
        raise UserError(f"{' and '.join(given)}: for --backend=scann and --backend=exact only")
    if queries is not None and storage is None and target_recall is None:
        raise UserError("--queries are what --target_recall is tuned and --storage is measured on")
    if (vectors is None) == (backend == "lucene_impact"):
        raise UserError("--vectors and --backend=lucene_impact go together: learned sparse vectors to index")
    if fields is not None and backend != "lucene":
        raise UserError("--fields is for --backend=lucene")
    if backend not in ("lucene", "lucene_impact"):
        check_idle(index, "--backend=lucene and --backend=lucene_impact", on_bad_input=on_bad_input)
    if parts is not None and backend not in ("scann", "exact"):
        raise UserError("--parts is for --backend=scann and --backend=exact only")
    recall = None
    if backend == "lucene_impact":
        from jaxir.retrieval.indexes.lucene_index import build_impact_index

        if embeddings is not None or model is not None:
            raise UserError("--backend=lucene_impact takes --vectors, not --embeddings or --model")
        built = build_impact_index(vectors, output, corpus=corpus, on_bad_input=on_bad_input)
    elif backend == "lucene":
        from jaxir.retrieval.indexes.lucene_index import build_lucene_index

        if embeddings is not None or model is not None:
            raise UserError("--backend=lucene indexes words: it takes --corpus, not --embeddings or --model")
        if corpus is None:
            raise UserError("--backend=lucene needs --corpus")
        built = build_lucene_index(corpus, output, fields=fields or "flat", on_bad_input=on_bad_input)
    else:
        from jaxir.retrieval.encoding.stored_embeddings import open_embeddings
        from jaxir.retrieval.indexes.base_index import build_index
        from jaxir.retrieval.indexes.documents import check_corpus

        if embeddings is None:
            raise UserError(f"--backend={backend} needs --embeddings")
        stored = open_embeddings(embeddings)
        if corpus is not None:  # its texts are read when all else is done
            check_corpus(corpus, stored)
        if model is not None:
            _check_model(model, stored.info.fingerprint)

        def build(some: StoredEmbeddings) -> tuple[VectorIndex, Recall | None]:
            if storage is None and target_recall is None:
                return build_index(some, backend=backend, model=model, **milvus), None
            from jaxir.retrieval.indexes.tuning import build_tuned

            how = {"storage": storage or "float32", "target": target_recall, "queries": queries}
            return build_tuned(some, backend=backend, model=model, **how)

        if parts is not None:
            from jaxir.retrieval.indexes.parts_index import build_in_parts
            from jaxir.runtime.distributed import say

            how = {"backend": backend, "model": model, **measured}
            with _together(output):
                build_in_parts(stored, output, parts, build, how=how, corpus=corpus)
                say(f"{output}: {backend} index of {stored.info.count:,} passages in {parts} parts")
            return
        built, recall = build(stored)
        built.save(output, corpus=corpus)
    print(f"{output}: {backend} index of {built.info.count:,} passages" + (f"; {recall}" if recall else ""))


@contextlib.contextmanager
def _together(output: str) -> Iterator[None]:
    """Joins the processes that this one is started with, of which the first holds the output."""
    import jax

    from jaxir.runtime import distributed

    distributed.maybe_initialize_distributed()
    with distributed.together(), alone(output) if jax.process_index() == 0 else contextlib.nullcontext():
        check_output("--output", output, "directory")
        yield


def _check_model(model: str, fingerprint: str) -> None:
    """Checks that queries can be encoded with a model; jaxir.search would find out otherwise."""
    from jaxir.interop import model_dir
    from jaxir.interop.model import stored

    found, known = model_dir.read(model)
    if (known or stored.fingerprint(found)) != fingerprint:
        raise UserError(f"--model={model} is not the model that encoded the passages: its vectors are others")


def _update(
    directory: str,
    embeddings: str | None,
    corpus: str | None,
    delete: str | None,
    on_bad_input: Literal["stop", "skip"],
) -> None:
    from jaxir.retrieval.indexes.updating import read_ids, update_index

    if embeddings is None and corpus is None and delete is None:
        raise UserError("--update needs --embeddings, --corpus or --delete")
    if embeddings is not None or corpus is None:
        check_idle(index, "the --corpus of a lucene index", on_bad_input=on_bad_input)
    if embeddings is not None:
        from jaxir.retrieval.encoding.stored_embeddings import open_embeddings

        stored = open_embeddings(embeddings)
    else:
        stored = None
    ids = read_ids(delete) if delete is not None else []
    change = update_index(directory, embeddings=stored, delete=ids, corpus=corpus, on_bad_input=on_bad_input)
    print(f"{directory}: {change}")


if __name__ == "__main__":
    cli.end(
        cli.main(
            "jaxir.index:index",
            example="python -m jaxir.index --embeddings=embeddings --corpus=corpus.jsonl --output=index",
        )
    )
