"""`MultiVectorEncoder`: encodes queries and passages as a vector for each token (late interaction)."""

import itertools
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxir.core.platforms import local_devices
from jaxir.core.progress import progress
from jaxir.data.text.truncation import Truncation
from jaxir.interop import model_dir
from jaxir.interop.model_dir import LoadedModel
from jaxir.losses.maxsim import maxsim
from jaxir.models.dual_encoder import Tower
from jaxir.models.layers import size_of
from jaxir.models.multi_vector import EXPANSION_TOKEN, MultiVectorModel
from jaxir.retrieval.encoding import loading
from jaxir.retrieval.encoding.batch_runner import WINDOW, Runner
from jaxir.retrieval.encoding.batching import EncodingReport, padded_tokens, plan_batches
from jaxir.retrieval.encoding.lengths import UnusableVectorError
from jaxir.retrieval.encoding.made_by import MadeBy
from jaxir.retrieval.encoding.read_ahead import one_ahead
from jaxir.runtime.cpu import Dtype
from jaxir.runtime.partitioning import MeshConfig

# `similarity` compares batches of at most this many tokens, padded to few lengths, because each new length
# compiles a program.
_QUERY_TOKENS, _PASSAGE_TOKENS = 4096, 16_384

Vectors = Sequence[np.ndarray] | np.ndarray


def embed_tokens(model: MultiVectorModel, ids: jax.Array) -> jax.Array:
    return model.encode(ids)


class MultiVectorEncoder:
    """Encodes each token of queries and passages, and scores pairs by MaxSim.

    Texts are sorted by their number of tokens and batched to a token budget. Batches are split over all
    devices of this process.

    Attributes:
      model: the `MultiVectorModel`.
      tokenizer: the model's tokenizer.
      settings: maximum lengths and prompts of the two towers.
      fingerprint: identifies weights and tokenizer; vectors of two fingerprints must not be compared.
      spec: the name by which the model was loaded.
      dimension: D, the number of components of a token's vector.
      similarity_fn_name: "maxsim", or "meanmaxsim", which divides by the number of query tokens.
      training: how training ended (a `jaxir.training.loop.TrainResult`), for the result of `fit`; else None.
    """

    training: Any = None

    def __init__(self, loaded: LoadedModel, *, spec: str, batch_tokens: int | None = None):
        self.model, self.tokenizer, self.settings = loaded.model, loaded.tokenizer, loaded.settings
        self.fingerprint, self.spec, self.step = loaded.fingerprint, spec, loaded.step
        self.weights = None  # a multi-vector encoder's weights are never quantised
        self.dimension: int = loaded.model.config.dimension
        self.similarity_fn_name: str = loaded.model.config.similarity
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
    ) -> "MultiVectorEncoder":
        """Loads a model.

        Args:
          spec: a jaxir model directory, or `st:` and a local directory or hub name of a model of
            sentence-transformers' MultiVectorEncoder or of PyLate.
          dtype: type of the encoder's matrix products, as in `DualEncoder.load`; vectors are float32.
          batch_tokens: maximum number of tokens per batch on one device; None uses the platform's default.
          query_max_length: maximum number of tokens per query; None: the model's setting.
          passage_max_length: maximum number of tokens per passage; None: the model's setting.

        Raises:
          UserError: the model does not exist, is damaged, is not a supported multi-vector encoder, or has
            fewer positions than a maximum length.
        """
        lengths = {"query_max_length": query_max_length, "passage_max_length": passage_max_length}
        loaded = loading.load(spec, kind="multi_vector_encoder", dtype=dtype, **lengths)
        return cls(loaded, spec=model_dir.absolute(spec), batch_tokens=batch_tokens)

    def save(self, directory: str | Path) -> None:
        """Writes a model directory, which `load` takes; it appears only when complete.

        Raises:
          UserError: `directory` exists and is not empty, or the encoder was loaded in bfloat16.
        """
        loading.check_not_rounded(self.model)
        model_dir.save(directory, self.model, self.tokenizer, self.settings)

    def __repr__(self) -> str:
        settings = self.settings
        return (
            f"MultiVectorEncoder({self.spec!r}: {self.model.config.summary}, {size_of(self.model)}, queries"
            f" of {settings.query_max_length} tokens, passages of {settings.passage_max_length})"
        )

    def encode_queries(
        self, texts: str | Iterable[str], *, batch_size: int | None = None, show_progress: bool = True
    ) -> Any:
        """Returns a list of vectors [tokens, D] of queries; `encode` describes the arguments."""
        return self.encode(texts, tower="query", batch_size=batch_size, show_progress=show_progress)

    def encode_passages(
        self, texts: str | Iterable[str], *, batch_size: int | None = None, show_progress: bool = True
    ) -> Any:
        """Returns a list of vectors [tokens, D] of passages; `encode` describes the arguments."""
        return self.encode(texts, tower="passage", batch_size=batch_size, show_progress=show_progress)

    def encode(
        self,
        texts: str | Iterable[str],
        *,
        tower: Tower,
        batch_size: int | None = None,
        show_progress: bool = True,
    ) -> Any:
        """Encodes the tokens of texts.

        Args:
          texts: N texts, which may be empty, or one string; each gets the tower's prompt and is truncated at
            the tower's maximum length.
          tower: "query" or "passage".
          batch_size: maximum number of texts per batch on one device; None: only tokens are limited.
          show_progress: whether to show a progress bar (on a terminal only).

        Returns:
          a list of N float32 arrays [tokens, D], in the order of the texts, or one array for one string. A
          text has a vector for each token that is scored, which may be none.

        Raises:
          TypeError: `texts` holds something that is not a string.
          UserError: the model gives vectors that are not finite.
        """
        given = [texts] if isinstance(texts, str) else list(texts)
        if not all(isinstance(text, str) for text in given):
            raise TypeError("texts must be a string or a list of strings")
        starts = range(0, len(given), WINDOW)
        windows = (self.tokens(given[start : start + WINDOW], tower) for start in starts)
        what = f"encoding {'queries' if tower == 'query' else 'passages'}"
        with progress(total=len(given), what=what, unit="texts", hidden=not show_progress) as bar:
            how = {"num_windows": max(1, len(starts)), "max_rows": batch_size, "on_batch": bar.update}
            parts = self.encode_tokens(windows, tower=tower, **how)
            found = list(itertools.chain.from_iterable(parts))
        return found[0] if isinstance(texts, str) else found

    def encode_tokens(
        self,
        windows: Iterable[list[np.ndarray]],
        *,
        tower: Tower,
        report: EncodingReport | None = None,
        **how: Any,
    ) -> Iterator[list[np.ndarray]]:
        """Encodes lists of token ids, each sorted and batched separately, as `DualEncoder.encode_tokens`.

        Args:
          windows: lists of token ids, from `tokens`.
          tower: "query" or "passage".
          report: the counts of this call are added to it.
          **how: further arguments of `Runner.batches`.

        Yields:
          a list of float32 arrays [tokens, D] for each list of texts.
        """
        report = EncodingReport() if report is None else report
        for tokens in one_ahead(iter(windows)):
            started = time.perf_counter()
            found = [np.empty(0, np.float32)] * len(tokens)
            for rows, vectors in self.runner.batches(embed_tokens, tokens, report=report, **how):
                for i, row in zip(rows, vectors, strict=True):
                    found[i] = self.model.config.chosen(row, tokens[i], tower)
                    if not np.isfinite(found[i]).all():
                        raise UnusableVectorError(f"{self.made_by} gives a vector that", i, "is not finite")
            report.seconds += time.perf_counter() - started
            yield found

    def text_settings(self, tower: Tower) -> tuple[str, int]:
        """Returns (prompt, maximum length in tokens) of a tower."""
        return self.settings.of_tower(tower)

    @property
    def made_by(self) -> MadeBy:
        return MadeBy(self.spec, self.step)

    def tokens(
        self, texts: Sequence[str], tower: Tower, truncation: Truncation | None = None
    ) -> list[np.ndarray]:
        """Returns the token ids of texts after the tower's prompt; queries are expanded.

        If given, `truncation` counts the texts and the truncated texts.
        """
        expansion, (prompt, length) = self.model.config.expansion, self.text_settings(tower)
        texts = [prompt + text for text in texts]
        rows = self.tokenizer.encode_batch(texts, max_length=length, truncation=truncation)
        if tower == "passage" or expansion is None:
            return rows
        added = (max(0, expansion.length - len(row)) for row in rows)
        return [
            np.pad(row, (0, count), constant_values=EXPANSION_TOKEN)
            for row, count in zip(rows, added, strict=True)
        ]

    def similarity(self, queries: Vectors, passages: Vectors) -> np.ndarray:
        """Compares each query with each passage by `similarity_fn_name`.

        Args:
          queries: Q arrays [tokens, D], or the one array of one query.
          passages: P arrays [tokens, D], or one array.

        Returns:
          float32 [Q, P]; passages without tokens score -1e9, below all others.
        """
        return similarities_of_lists(queries, passages, mean=self.similarity_fn_name == "meanmaxsim")


def similarities_of_lists(queries: Vectors, passages: Vectors, *, mean: bool) -> np.ndarray:
    """Returns MaxSim, float32 [Q, P], of vectors [tokens, D]; `mean` divides it by the query's tokens."""
    a, b = (_listed(side) for side in (queries, passages))
    scores = np.zeros([len(a), len(b)], np.float32)
    plans = [
        plan_batches([len(x) for x in side], batch_tokens=size, shape_cost=size)
        for side, size in ((a, _QUERY_TOKENS), (b, _PASSAGE_TOKENS))
    ]
    for of_passages in plans[1]:
        passages = padded_tokens([b[i] for i in of_passages.texts], of_passages)
        for of_queries in plans[0]:
            queries = padded_tokens([a[i] for i in of_queries.texts], of_queries)
            found = _compared(*queries, *passages)
            found = np.asarray(found)[: len(of_queries.texts), : len(of_passages.texts)]
            scores[np.ix_(of_queries.texts, of_passages.texts)] = found
    if mean and a:
        scores /= np.array([max(1, len(x)) for x in a], np.float32)[:, None]
    return scores


_compared = jax.jit(maxsim)


def _listed(side: Vectors) -> list[np.ndarray]:
    single = isinstance(side, np.ndarray) and side.ndim == 2
    return [np.asarray(x, np.float32) for x in ([side] if single else side)]
