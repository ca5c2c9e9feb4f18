"""Command: builds or updates a searchable index of vectors or texts."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Literal

from jaxir import cli
from jaxir.core.choices import settings_of, with_flags_of
from jaxir.core.errors import UserError
from jaxir.core.installation import how_to_install
from jaxir.retrieval.indexes.engine_settings import (
    SETTINGS,
    Bm25Settings,
    DatabaseSettings,
    ImpactSettings,
    LuceneSettings,
    MaxSimSettings,
    NearestSettings,
    SparseSettings,
    UpdateSettings,
)
from jaxir.storage.outputs import alone, check_output, writes

if TYPE_CHECKING:
    from jaxir.retrieval.encoding.stored_embeddings import StoredEmbeddings
    from jaxir.retrieval.indexes.base_index import Index, VectorIndex
    from jaxir.retrieval.indexes.tuning import Recall


@writes(unless="parts", output="directory", update="changed directory")
@with_flags_of(*dict.fromkeys(SETTINGS.values()))
def index(
    output: str | None = None,
    backend: Literal[
        "scann",
        "exact",
        "maxsim",
        "bm25s",
        "lucene",
        "lucene_impact",
        "sparse",
        "milvus",
        "qdrant",
        "pgvector",
    ]
    | None = None,
    update: str | None = None,
    **given: Any,
) -> None:
    """Builds an index of encoded passages, or of the words of a corpus; or updates an index (--update).

    scann, exact, maxsim and databases need --embeddings. bm25s and lucene rank by words (BM25): they need
    --corpus and no model. lucene is for comparison with published runs of Pyserini; it runs in a separate
    process, which is installed on first use. lucene_impact needs the --vectors of a learned sparse model.
    sparse needs such --vectors, or a sparse encoder (--model) and a --corpus.

    Args:
      output: the index directory.
      backend: scann (the default with --embeddings where it is installed; approximate, fast, exact up to some
        thousands of passages), exact, maxsim (the default with --embeddings of a multi-vector encoder), bm25s
        (the default with --corpus alone; BM25), lucene (BM25 by Lucene), sparse (a sparse encoder's weights,
        in numpy), lucene_impact (whole-number weights in Lucene), or a database: milvus, qdrant or pgvector
        (PostgreSQL), by --uri.
      update: an index to change, instead of --output: passages of --embeddings with their --corpus are added
        (a BM25 index needs only --corpus), those of --delete are removed. The new index replaces the old
        one when it is complete; a database is changed in place.
    """
    if update is not None:
        if output is not None or backend is not None:
            raise UserError("--output and --backend only apply to a new index: leave them out with --update")
        _update(update, settings_of(SETTINGS, "--update", given))
        return
    if output is None:
        raise UserError("give --output to build an index, or --update to change one")
    backend = backend or _default_backend(given)
    settings = settings_of(SETTINGS, f"--backend={backend}", given)
    match settings:
        case Bm25Settings() | LuceneSettings() | ImpactSettings():
            built, recall = _of_words(output, settings), None
        case SparseSettings():
            built, recall = _of_weights(settings), None
            built.save(output, corpus=settings.corpus)
        case NearestSettings(parts=int()):
            _in_parts(output, backend, settings)
            return
        case MaxSimSettings():
            built, recall = _of_tokens(settings), None
            built.save(output, corpus=settings.corpus)
        case _:
            stored = _opened(settings)
            built, recall = _built(backend, settings, stored)
            built.save(output, corpus=settings.corpus)
    print(f"{output}: {backend} index of {built.info.count:,} passages" + (f"; {recall}" if recall else ""))


def _default_backend(given: dict[str, Any]) -> str:
    """Returns bm25s for a corpus alone, maxsim for vectors of tokens, else scann.

    Where scann is not installed, prints a line and returns exact.
    """
    if given.get("corpus") is not None and given.get("embeddings") is given.get("vectors") is None:
        return "bm25s"
    if given.get("embeddings") is not None:
        from jaxir.retrieval.encoding.stored_embeddings import has_tokens

        if has_tokens(given["embeddings"]):
            return "maxsim"
    if importlib.util.find_spec("scann") is not None:
        return "scann"
    print(
        f"ScaNN is not installed, so the index is exact (for --backend=scann run: {how_to_install('scann')})",
        file=sys.stderr,
    )
    return "exact"


def _of_words(output: str, settings: Bm25Settings | LuceneSettings | ImpactSettings) -> Index:
    from jaxir.retrieval.indexes.bm25_index import build_bm25_index
    from jaxir.retrieval.indexes.lucene_index import build_impact_index, build_lucene_index
    from jaxir.sidecar.lucene_settings import Bm25

    how = {"on_bad_input": settings.on_bad_input}
    if isinstance(settings, Bm25Settings):
        bm25 = Bm25(k1=settings.k1, b=settings.b)
        return build_bm25_index(settings.corpus, output, bm25=bm25, **how)
    if isinstance(settings, LuceneSettings):
        return build_lucene_index(settings.corpus, output, fields=settings.fields, **how)
    return build_impact_index(settings.vectors, output, corpus=settings.corpus, **how)


def _of_weights(settings: SparseSettings) -> Index:
    from jaxir.retrieval.encoding.sparse_text_encoder import SparseEncoder
    from jaxir.retrieval.indexes.sparse_building import build_of_texts, build_of_vectors

    how = {"storage": settings.storage or "float32", "on_bad_input": settings.on_bad_input}
    encoder = None if settings.model is None else SparseEncoder.load(settings.model)
    if settings.vectors is None:
        return build_of_texts(encoder, settings.corpus, **how)
    return build_of_vectors(settings.vectors, encoder=encoder, **how)


def _of_tokens(settings: MaxSimSettings) -> Index:
    from jaxir.retrieval.indexes.maxsim_index import MaxSimIndex

    names = ("token_storage", "candidates", "model")
    return MaxSimIndex.build(_opened(settings), **{name: getattr(settings, name) for name in names})


def _opened(settings: NearestSettings | MaxSimSettings | DatabaseSettings) -> StoredEmbeddings:
    """Returns the vectors after checking that the corpus and the model belong to them."""
    from jaxir.retrieval.encoding.stored_embeddings import open_embeddings
    from jaxir.retrieval.indexes.documents import check_corpus

    stored = open_embeddings(settings.embeddings, tokens=isinstance(settings, MaxSimSettings))
    if settings.corpus is not None:  # fail now, although the texts are only read at the end
        check_corpus(settings.corpus, stored)
    if settings.model is not None:
        _check_model(settings.model, stored)
    return stored


def _built(
    backend: str, settings: NearestSettings | DatabaseSettings, stored: StoredEmbeddings
) -> tuple[VectorIndex, Recall | None]:
    from jaxir.retrieval.indexes.base_index import build_index

    if isinstance(settings, DatabaseSettings):
        where = {name: getattr(settings, name) for name in ("uri", "collection", "index_type")}
        return build_index(stored, backend=backend, model=settings.model, **where), None
    if settings.storage is None and settings.target_recall is None:
        return build_index(stored, backend=backend, model=settings.model), None
    from jaxir.retrieval.indexes.tuning import build_tuned

    return build_tuned(
        stored,
        backend=backend,
        storage=settings.storage or "float32",
        target=settings.target_recall,
        queries=settings.queries,
        model=settings.model,
    )


def _in_parts(output: str, backend: str, settings: NearestSettings) -> None:
    from jaxir.retrieval.indexes.parts_index import build_in_parts
    from jaxir.runtime.distributed import say

    stored = _opened(settings)
    how = {"backend": backend}
    how |= {name: getattr(settings, name) for name in ("model", "storage", "target_recall", "queries")}
    build = functools.partial(_built, backend, settings)
    with _together(output):
        build_in_parts(stored, output, settings.parts, build, how=how, corpus=settings.corpus)
        say(f"{output}: {backend} index of {stored.info.count:,} passages in {settings.parts} parts")


@contextlib.contextmanager
def _together(output: str) -> Iterator[None]:
    """Connects the processes that run this command in parallel; the first process locks the output."""
    import jax

    from jaxir.runtime import distributed

    with distributed.joined(), alone(output) if jax.process_index() == 0 else contextlib.nullcontext():
        check_output("--output", output, "directory")
        yield


def _check_model(model: str, encoded: StoredEmbeddings) -> None:
    """Checks now, and not only in jaxir.search, that queries can be encoded with a model."""
    from jaxir.interop import model_dir
    from jaxir.interop.model import identity
    from jaxir.retrieval.encoding.fixed_dimension_encoder import fingerprint_of

    of_tokens = encoded.lengths or encoded.info.fde
    found, known = model_dir.read(model, kind="multi_vector_encoder" if of_tokens else "dual_encoder")
    known = identity.quantized_fingerprint(known or identity.fingerprint(found), encoded.info.weights)
    if fingerprint_of(known, encoded.info.fde) != encoded.info.fingerprint:
        raise UserError(f"--model={model} did not encode the passages: give the model that did")


def _update(directory: str, settings: UpdateSettings) -> None:
    from jaxir.retrieval.indexes.updating import read_ids, update_index

    stored = None
    if settings.embeddings is not None:
        from jaxir.retrieval.encoding.stored_embeddings import open_embeddings

        stored = open_embeddings(settings.embeddings)
    ids = read_ids(settings.delete) if settings.delete is not None else []
    how = {"corpus": settings.corpus, "on_bad_input": settings.on_bad_input}
    print(f"{directory}: {update_index(directory, embeddings=stored, delete=ids, **how)}")


if __name__ == "__main__":
    cli.start("jaxir.index:index", "--embeddings=embeddings --corpus=corpus.jsonl --output=index")
