"""Command: encodes texts into vectors."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from jaxir import cli
from jaxir.core.choices import check_idle, with_flags_of
from jaxir.core.errors import UserError
from jaxir.core.values import Count
from jaxir.retrieval.encoding.fde_settings import FdeSettings
from jaxir.storage.outputs import writes

if TYPE_CHECKING:
    from jaxir.retrieval.encoding.fixed_dimension_encoder import FixedDimensionEncoder
    from jaxir.retrieval.encoding.multi_vector_encoder import MultiVectorEncoder


@writes(output="embeddings directory")
@with_flags_of(FdeSettings)
def encode(
    model: str,
    input: str,
    output: str,
    tower: Literal["passage", "query"] = "passage",
    max_length: Count | None = None,
    prompt_name: str | None = None,
    batch_tokens: Count | None = None,
    shard_size: Count = 16_384,
    dtype: Literal["auto", "float32", "bfloat16"] = "float32",
    weights: Literal["int8", "nf4"] | None = None,
    head: Literal["dense", "tokens"] | None = None,
    expansions: str | None = None,
    expansion: Literal["typical", "corpus", "document"] | None = None,
    views: Count | None = None,
    on_bad_input: Literal["stop", "skip"] = "stop",
    ray: str | None = None,
    **given: Any,
) -> None:
    """Encodes a corpus, or queries, into a directory of vectors: one for each text, or one for each token.

    After an interruption, the same command continues where it stopped. Several machines that share a file
    system divide the work if each runs the command as for training (docs/sharding.md). See also --ray.

    Args:
      model: a jaxir model or run directory, or st: or hf: and a local directory or hub name. A multi-vector
        encoder gives a vector for each token.
      input: corpus.jsonl[.gz] (_id, title, text), or with --tower=query queries.jsonl[.gz] (_id, text); or
        with either tower a .txt[.gz] with a text on each line, whose number is its id.
      output: directory of the vectors: embeddings-00000.npy, ids-00000.json, ..., embeddings.json.
      tower: the tower that encodes the texts.
      max_length: maximum number of tokens per text; longer texts are truncated (default: the model's).
      prompt_name: the prompt of a sentence-transformers folder before each text (default: the tower's).
      batch_tokens: tokens per batch on one device; lower it if memory is short (default: by platform).
      shard_size: texts per output file; an interruption loses the work on at most one file.
      dtype: type of the matrix products; vectors are float32. auto: bfloat16 on a CPU that multiplies it
          natively.
      weights: keep the model's weights in int8, or in 4 bits (nf4), for less memory (docs/big_corpora.md).
      head: of a hybrid encoder: dense (a vector for each text, the default) or tokens (one for each token).
      expansions: queries generated for each document, which the passage tower encodes with it: a file or a
        folder, as docs/generation.md lists them.
      expansion: with --expansions, a document's vector: typical (the mean of its vectors with each query, the
        default), corpus (one vector for each query; search uses the best one) or document (one vector
        with all queries at once).
      views: with --expansions, the number of a document's first queries to use (default: 10).
      on_bad_input: stop at the first malformed line, or skip and count them.
      ray: encode on the machines of a Ray cluster (docs/big_corpora.md): HOST:PORT of its head, or auto for
        this machine's cluster. They need jaxir and the model, but no other file.
    """
    from jaxir.retrieval.encoding.any_encoder import kind_of
    from jaxir.retrieval.encoding.cluster import Cluster
    from jaxir.retrieval.encoding.embeddings import encode_corpus
    from jaxir.retrieval.encoding.text_encoder import DualEncoder
    from jaxir.retrieval.encoding.views import Expansion
    from jaxir.runtime import distributed

    how = {name: x for name, x in (("kind", expansion), ("views", views)) if x is not None}
    if how and expansions is None:
        raise UserError("--expansion and --views only apply with --expansions: leave them out")
    expanded = None if expansions is None else Expansion(path=expansions, **how)
    cluster = None if ray is None else Cluster.connect(ray, batch_tokens=batch_tokens)
    with distributed.joined(with_others=cluster is None):
        changes = {} if max_length is None else {f"{tower}_max_length": max_length}
        changes |= {"batch_tokens": batch_tokens, "dtype": dtype}
        of_vectors = {"weights": weights, "prompt_name": prompt_name}
        if (kind := kind_of(model)) != "hybrid_encoder":
            check_idle(encode, "a hybrid encoder", head=head)
        if kind == "multi_vector_encoder" or head == "tokens":
            check_idle(encode, "a dual encoder", **of_vectors, expansions=expansions, ray=ray)
            encoder = _multi_vector(model, changes, FdeSettings(**given))
        else:
            check_idle(encode, "a multi-vector encoder", **given)
            encoder = DualEncoder.load(model, **of_vectors, **changes)
        if dtype == "auto":
            distributed.say(f"products in {encoder.model.config.backbone.dtype} (--dtype=auto)")
        how = {"tower": tower, "shard_size": shard_size, "on_bad_input": on_bad_input, "cluster": cluster}
        report = encode_corpus(encoder, input, output, expansion=expanded, **how)
        distributed.say(f"{output}: {report}" if report.texts else f"{output} is complete, nothing to do")
        if note := _truncated(output, tower):
            distributed.say(note)


def _multi_vector(
    model: str, changes: dict[str, Any], settings: FdeSettings
) -> MultiVectorEncoder | FixedDimensionEncoder:
    from jaxir.retrieval.encoding.fixed_dimension import FixedDimension
    from jaxir.retrieval.encoding.fixed_dimension_encoder import FixedDimensionEncoder
    from jaxir.retrieval.encoding.multi_vector_encoder import MultiVectorEncoder

    more = settings.given()
    if more and settings.fde is None:
        raise UserError(f"--fde_{next(iter(more))} only applies with --fde: leave it out, or give --fde")
    encoder = MultiVectorEncoder.load(model, **changes)
    if settings.fde is None:
        return encoder
    return FixedDimensionEncoder(encoder, FixedDimension.of(settings.fde, encoder.dimension, **more))


def _truncated(output: str, tower: Literal["passage", "query"]) -> str:
    """Returns a line about the truncated texts of an output; empty if their number is unknown."""
    from jaxir.data.text.truncation import truncation_note
    from jaxir.retrieval.encoding.stored_embeddings import read_info
    from jaxir.storage.files import local_path

    truncation = read_info(local_path(output)).truncation
    if truncation is None:
        return ""
    texts = "queries" if tower == "query" else "passages"
    return truncation_note({texts: truncation}, "--max_length sets the length, with another --output")


if __name__ == "__main__":
    cli.start("jaxir.encode:encode", "--model=st:all-MiniLM-L6-v2 --input=corpus.jsonl --output=embeddings")
