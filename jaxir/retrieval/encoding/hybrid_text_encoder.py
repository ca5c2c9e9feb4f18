"""`HybridEncoder`: encodes texts by the three heads of a hybrid encoder (BGE-M3) in one pass."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from flax import nnx
from scipy import sparse

from jaxir.core.errors import UserError
from jaxir.core.platforms import local_devices
from jaxir.core.progress import progress
from jaxir.interop import model_dir
from jaxir.interop.model import stored
from jaxir.interop.model_dir import LoadedModel
from jaxir.models.hybrid_encoder import HybridEncoderModel, unpacked
from jaxir.models.layers import size_of
from jaxir.retrieval.encoding import loading
from jaxir.retrieval.encoding.batch_runner import WINDOW, Runner
from jaxir.retrieval.encoding.batching import EncodingReport
from jaxir.retrieval.encoding.multi_vector_encoder import similarities_of_lists
from jaxir.retrieval.encoding.read_ahead import one_ahead
from jaxir.retrieval.encoding.sparse_text_encoder import in_own_order, named_weights, names_of_tokens
from jaxir.retrieval.encoding.text_encoder import DualEncoder
from jaxir.retrieval.encoding.tower_functions import Tower
from jaxir.runtime.cpu import Dtype
from jaxir.runtime.partitioning import MeshConfig

# Weights of the heads' scores in their sum: those of the paper (Chen et al. 2024, arXiv:2402.03216, section
# 3.3).
SCORE_WEIGHTS = {"dense": 1.0, "sparse": 0.3, "tokens": 1.0}


class HybridTexts(NamedTuple):
    """N texts as a hybrid encoder reads them.

    Attributes:
      dense: float32 [N, D], one vector of length 1 for each text.
      sparse: float32 CSR [N, V], the weights of the tokens of a text. Column i belongs to the token with id i
        in the tokenizer's file.
      tokens: N float32 arrays [tokens, Dt], the vectors of the tokens of a text, each of length 1.
    """

    dense: np.ndarray
    sparse: sparse.csr_matrix
    tokens: list[np.ndarray]

    def chosen(self, numbers: Sequence[int]) -> HybridTexts:
        """Returns the features of the texts at these positions, in the order of `numbers`."""
        rows = list(numbers)
        return HybridTexts(self.dense[rows], self.sparse[rows], [self.tokens[i] for i in rows])


def encode_packed(model: HybridEncoderModel, ids: jax.Array) -> jax.Array:
    return model.encode_packed(ids)


class HybridEncoder:
    """Encodes queries and passages by three heads: a vector, token weights, and token vectors.

    `DualEncoder`, `SparseEncoder` and `MultiVectorEncoder` open the same models with one of the heads. Texts
    are sorted by their number of tokens and batched to a token budget, over all devices of this process.

    Attributes:
      model: the `HybridEncoderModel`.
      tokenizer: the model's tokenizer.
      settings: maximum lengths and prompts of queries and passages.
      fingerprint: identifies weights and tokenizer.
      spec: the name by which the model was loaded.
      dimension: D, the number of components of a text's vector.
      similarity_fn_name: "sum", the weighted sum of the heads' scores.
      training: how training ended (a `jaxir.training.loop.TrainResult`), for the result of `fit`; else None.
    """

    training: Any = None
    similarity_fn_name = "sum"

    def __init__(self, loaded: LoadedModel, *, spec: str, batch_tokens: int | None = None):
        self.model, self.tokenizer, self.settings = loaded.model, loaded.tokenizer, loaded.settings
        self.fingerprint, self.spec = loaded.fingerprint, spec
        self.dimension: int = loaded.model.config.dimension
        self.runner = Runner(loaded.model, MeshConfig().build(local_devices()), batch_tokens=batch_tokens)

    @classmethod
    def load(
        cls,
        spec: str,
        *,
        dtype: Dtype = "float32",
        batch_tokens: int | None = None,
        query_max_length: int | None = None,
        passage_max_length: int | None = None,
    ) -> HybridEncoder:
        """Loads a hybrid encoder.

        Args:
          spec: `st:` or `hf:` and a directory or hub name with `sparse_linear.pt` and `colbert_linear.pt`,
            such as BAAI/bge-m3; or a jaxir model directory or run.
          dtype: type of the matrix products in the encoder, as in `DualEncoder.load`; the heads are float32.
          batch_tokens: maximum number of tokens per batch on one device; None uses the platform's default.
          query_max_length: maximum number of tokens per query; None: the model's setting.
          passage_max_length: maximum number of tokens per passage; None: the model's setting.

        Raises:
          UserError: the model does not exist, is damaged, lacks a head, or has fewer positions than a maximum
            length.
        """
        lengths = {"query_max_length": query_max_length, "passage_max_length": passage_max_length}
        loaded = loading.load(spec, kind="hybrid_encoder", dtype=dtype, **lengths)
        return cls(loaded, spec=model_dir.absolute(spec), batch_tokens=batch_tokens)

    def save(self, directory: str | Path) -> None:
        """Writes a model directory, which `load` takes; it appears only when complete.

        Raises:
          UserError: `directory` exists and is not empty, or the encoder was loaded in bfloat16.
        """
        loading.check_not_rounded(self.model)
        model_dir.save(directory, self.model, self.tokenizer, self.settings)

    def __repr__(self) -> str:
        name = f"{self.spec!r}: " if self.spec else ""
        return f"HybridEncoder({name}{self.model.config.summary}, {size_of(self.model)})"

    def with_one_vector(self) -> DualEncoder:
        """Returns the dual encoder of the dense head, which shares the weights."""
        model = stored.abstract_model(self.model.config.dense)
        nnx.update(model, {"encoder": nnx.state(self.model.encoder)})
        return DualEncoder(model, self.tokenizer, self.settings, self.fingerprint, spec=self.spec)

    def encode_queries(self, texts: str | Iterable[str], **how: Any) -> HybridTexts:
        """Encodes queries; `encode` describes the arguments."""
        return self.encode(texts, tower="query", **how)

    def encode_passages(self, texts: str | Iterable[str], **how: Any) -> HybridTexts:
        """Encodes passages; `encode` describes the arguments."""
        return self.encode(texts, tower="passage", **how)

    def encode(
        self,
        texts: str | Iterable[str],
        *,
        tower: Tower,
        batch_size: int | None = None,
        show_progress: bool = True,
        report: EncodingReport | None = None,
    ) -> HybridTexts:
        """Encodes texts by all heads.

        Args:
          texts: N texts, which may be empty, or one string; each gets the tower's prompt and is truncated at
            the tower's maximum length.
          tower: "query" or "passage".
          batch_size: maximum number of texts per batch on one device; None: only tokens are limited.
          show_progress: whether to show a progress bar (on a terminal only).
          report: the counts of this call are added to it.

        Returns:
          the three kinds of features, in the order of the texts.

        Raises:
          TypeError: `texts` holds something that is not a string.
          UserError: the model gives numbers that are not finite.
        """
        given = [texts] if isinstance(texts, str) else list(texts)
        if not all(isinstance(text, str) for text in given):
            raise TypeError("texts must be a string or a list of strings")
        starts = range(0, len(given), WINDOW)
        windows = (self.tokens(given[start : start + WINDOW], tower) for start in starts)
        what = f"encoding {'queries' if tower == 'query' else 'passages'}"
        with progress(total=len(given), what=what, unit="texts", hidden=not show_progress) as bar:
            how = {"num_windows": max(1, len(starts)), "max_rows": batch_size, "report": report}
            parts = [self._window(ids, tower, on_batch=bar.update, **how) for ids in one_ahead(windows)]
        return self._joined(parts, given)

    def tokens(self, texts: Sequence[str], tower: Tower) -> list[np.ndarray]:
        """Returns the token ids of texts after the tower's prompt, truncated at its maximum length."""
        prompt, length = self.text_settings(tower)
        return self.tokenizer.encode_batch([prompt + text for text in texts], max_length=length)

    def text_settings(self, tower: Tower) -> tuple[str, int]:
        """Returns (prompt, maximum length in tokens) of a tower."""
        return self.settings.of_tower(tower)

    def token_weights(self, matrix: sparse.csr_matrix) -> list[dict[str, float]]:
        """Returns a dict {token: weight} for each row of weights [N, V]: the largest first, without zeros."""
        return named_weights(matrix, self.token_names)

    @functools.cached_property
    def token_names(self) -> list[str]:
        """The V tokens, in the order of the columns of `HybridTexts.sparse`."""
        return names_of_tokens(self.tokenizer, self.model.config.backbone.vocab_size)

    def similarity(
        self, queries: HybridTexts, passages: HybridTexts, *, weights: dict[str, float] | None = None
    ) -> dict[str, np.ndarray]:
        """Compares Q queries with P passages by each head, and by the weighted sum of the heads' scores.

        Args:
          queries: Q texts.
          passages: P texts.
          weights: the weights of the heads "dense", "sparse" and "tokens" in the sum; None: `SCORE_WEIGHTS`.

        Returns:
          float32 scores [Q, P] of each head, and their "sum". A passage without tokens scores -1e9 by
          "tokens".

        Raises:
          UserError: `weights` does not have these three heads.
        """
        weights = SCORE_WEIGHTS if weights is None else weights
        if weights.keys() != SCORE_WEIGHTS.keys():
            raise UserError(f"weights needs the heads {', '.join(SCORE_WEIGHTS)}; got {', '.join(weights)}")
        found = {
            "dense": queries.dense @ passages.dense.T,
            "sparse": (queries.sparse @ passages.sparse.T).toarray(),
            "tokens": similarities_of_lists(queries.tokens, passages.tokens, mean=True),
        }
        return found | {"sum": sum(weights[name] * scores for name, scores in found.items())}

    def _window(self, ids: list[np.ndarray], tower: Tower, **how: Any) -> HybridTexts:
        """Encodes texts that are sorted and batched together."""
        config = self.model.config
        scored = config.multi_vector
        dense = np.empty([len(ids), config.dimension], np.float32)
        rows: list[Any] = [None] * len(ids)
        tokens: list[Any] = [None] * len(ids)
        for numbers, packed in self.runner.batches(encode_packed, ids, **how):
            length = (packed.shape[1] - config.dimension) // (1 + config.token_dimension)
            for i, row in zip(numbers, packed, strict=True):
                dense[i], weights, vectors = unpacked(row, config, length)
                at = np.flatnonzero(weights[: len(ids[i])])
                rows[i] = (ids[i][at], weights[at])
                tokens[i] = scored.chosen(vectors, ids[i], tower)
        return HybridTexts(dense, _csr(rows, config.backbone.vocab_size), tokens)

    def _joined(self, parts: list[HybridTexts], texts: list[str]) -> HybridTexts:
        """Joins the texts of all windows; raises a UserError if a number is not finite."""
        config = self.model.config
        dense = np.concatenate([np.empty([0, config.dimension], np.float32), *(part.dense for part in parts)])
        empty = sparse.csr_matrix((0, config.backbone.vocab_size), dtype=np.float32)
        weights = sparse.vstack([empty, *(part.sparse for part in parts)], format="csr")
        tokens = [vectors for part in parts for vectors in part.tokens]
        finite = np.isfinite(dense).all(1) & np.isfinite(weights.sum(1).A1)
        for i, vectors in enumerate(tokens):
            if not (finite[i] and np.isfinite(vectors).all()):
                raise UserError(
                    f"{self.spec} gives a number that is not finite: text {i + 1}, {texts[i]!r:.40}"
                )
        return HybridTexts(dense, in_own_order(weights, self.tokenizer.pad_swap), tokens)


def _csr(rows: Iterable[tuple[np.ndarray, np.ndarray]], size: int) -> sparse.csr_matrix:
    """Returns a matrix [N, V] of token weights, made from (token ids, weights) of each text."""
    rows = list(rows)
    starts = np.cumsum([0, *(len(ids) for ids, _ in rows)])
    ids = np.concatenate([np.empty(0, np.int32), *(ids for ids, _ in rows)])
    weights = np.concatenate([np.empty(0, np.float32), *(weights for _, weights in rows)])
    return sparse.csr_matrix((weights, ids, starts), shape=(len(rows), size))
