"""Writes the token weights of a corpus or of queries, for learned sparse indexes (see `windowed_file`)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from jaxir.core.errors import UserError
from jaxir.data.formats.lines import OnBadInput, Policy
from jaxir.data.formats.sources import Document, Query, read_corpus, read_queries
from jaxir.data.formats.sparse_vectors import MAX_WEIGHT
from jaxir.retrieval.encoding.batch_runner import WINDOW
from jaxir.retrieval.encoding.sparse_similarity import check_searched, normalized
from jaxir.retrieval.encoding.sparse_text_encoder import SparseEncoder
from jaxir.retrieval.encoding.tower_functions import Tower
from jaxir.retrieval.encoding.windowed_file import OutputsReport, write_windows
from jaxir.storage.files import local_path
from jaxir.storage.open_files import sha256_of

SCALE = 100.0  # weights are multiplied by this before they are rounded, as those of SPLADE in Anserini


def encode_weights(
    encoder: SparseEncoder,
    input: str | Path,
    output: str | Path,
    *,
    tower: Tower = "passage",
    scale: float = SCALE,
    on_bad_input: Policy = "stop",
) -> OutputsReport | None:
    """Writes a line {"_id", "vector": {token: whole number}} for each text of a file, in order.

    `python -m jaxir.index --backend=lucene_impact --vectors=FILE` indexes the lines of a corpus, and
    `jaxir.search --queries=FILE` searches with the lines of queries. After an interruption the same call
    resumes.

    Args:
      encoder: the model.
      input: corpus.jsonl[.gz], or with tower "query" queries.jsonl[.gz].
      output: the .jsonl to write; it appears only when complete.
      tower: "passage" or "query".
      scale: weights are multiplied by it and rounded.
      on_bad_input: "stop" at the first malformed line, or "skip" malformed lines.

    Returns:
      the counts, in the first process; None in the others.

    Raises:
      BadInputError: a line of `input` is malformed.
      UserError: a weight is negative or above 65,535, which an index cannot hold, or the encoder compares
        vectors by a distance.
    """
    check_searched(encoder.similarity_fn_name, str(encoder.spec))
    input, output = local_path(input), local_path(output, "written to")
    read = read_queries if tower == "query" else read_corpus
    count = sum(1 for _ in read(input, on_bad_input))
    prompt, length = encoder.text_settings(tower)
    made = {
        "input": sha256_of(input),
        "model": encoder.fingerprint,
        "tower": tower,
        "prompt": prompt,
        "max_length": length,
        "max_active_dims": encoder.max_active_dims,
        "dtype": encoder.model.config.backbone.dtype,
        "scale": scale,
    }

    def vectors(
        batch: Sequence[Document | Query], done: Callable[[int], None]
    ) -> Iterator[dict[str, dict[str, int]]]:
        texts = [record.contents if isinstance(record, Document) else record.text for record in batch]
        found = encoder.encode(texts, tower=tower, show_progress=False)
        found = normalized(found) if encoder.similarity_fn_name == "cosine" else found
        weights = encoder.token_weights(found)
        done(len(texts))
        for record, found in zip(batch, weights, strict=True):
            yield {"vector": _rounded(found, scale, record.id)}

    how: dict[str, Any] = {"count": count, "what": f"encoding {input.name}", "window": WINDOW}
    return write_windows(output, made, read(input, OnBadInput(on_bad_input)), vectors, field="vector", **how)


def _rounded(weights: dict[str, float], scale: float, text_id: str) -> dict[str, int]:
    rounded = {token: round(scale * weight) for token, weight in weights.items()}
    for token, weight in rounded.items():
        if not 0 <= weight <= MAX_WEIGHT:
            raise UserError(
                f"text {text_id!r:.40}: the weight of {token!r:.40} is {weight:,}, but an index holds whole"
                f" numbers from 0 to {MAX_WEIGHT:,}: give another scale or model"
            )
    return {token: weight for token, weight in rounded.items() if weight}
