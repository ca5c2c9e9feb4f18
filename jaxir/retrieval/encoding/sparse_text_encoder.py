"""`SparseEncoder`: encodes queries and passages as weights of tokens."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from scipy import sparse

from jaxir.core.errors import UserError
from jaxir.core.features import PADDING_TOKEN
from jaxir.core.platforms import local_devices
from jaxir.core.progress import progress
from jaxir.data.text.tokenizer import Tokenizer
from jaxir.interop import model_dir
from jaxir.interop.huggingface import tokenizer_files
from jaxir.interop.model import identity, stored
from jaxir.interop.model.stored import LoadedModel, StoredModel
from jaxir.models.after_pooling import l2_normalize
from jaxir.models.layers import size_of
from jaxir.models.sparse_forms import SparseCodesConfig
from jaxir.retrieval.encoding import loading
from jaxir.retrieval.encoding.batch_runner import WINDOW, Runner
from jaxir.retrieval.encoding.batching import EncodingReport
from jaxir.retrieval.encoding.read_ahead import one_ahead
from jaxir.retrieval.encoding.sparse_similarity import normalized, similarities
from jaxir.retrieval.encoding.tower_functions import Tower
from jaxir.runtime.cpu import Dtype
from jaxir.runtime.partitioning import MeshConfig


@functools.cache  # one function object for each program (see `batch_runner.Function`)
def _weigh(limit: int | None, tower: Tower, left_out: int | None) -> Callable[[Any, jax.Array], jax.Array]:
    """Returns a function that computes weights [B, V] of texts, or their `limit` largest with the token ids.

    With `limit` the result is float32 [B, 2, limit]; float32 is exact for ids up to 2^24, more than any
    vocabulary has. `left_out` is the number of tokens of a prompt that pooling leaves out; None: the model's
    own.
    """

    def weigh(model: Any, ids: jax.Array) -> jax.Array:
        more = {} if left_out is None else {"left_out": jnp.full(len(ids), left_out)}
        weights = model.encode(ids, tower=tower, **more)
        if limit is None:
            return weights
        _, tokens = jax.lax.top_k(jnp.abs(weights), limit)
        values = jnp.take_along_axis(weights, tokens, axis=1)
        if model.config.form == SparseCodesConfig.form and model.config.normalized:
            values = l2_normalize(values)
        return jnp.stack([values, tokens.astype(jnp.float32)], axis=1)

    return weigh


class SparseEncoder:
    """Encodes queries and passages as weights of tokens, of which most are 0: learned sparse retrieval.

    Texts are batched as `DualEncoder` does. Each finished batch becomes sparse at once, so there is never a
    dense matrix of all texts. The score of a query and a passage is the product of their weights.

    Attributes:
      model: the module, of one of the forms in `models.sparse_forms`.
      tokenizer: the model's tokenizer.
      queries: the encoder of queries, if the folder has another model for them; else None.
      settings: maximum lengths and prompts of queries and passages.
      fingerprint: identifies the weights and the tokenizer.
      spec: the name by which the model was loaded; None for a model that was never saved.
      dimension: V, the number of tokens of the vocabulary, or of codes of a SparseAutoEncoder.
      max_active_dims: how many of a text's largest weights are kept; None: all.
      similarity_fn_name: how `similarity` compares vectors: "dot", "cosine", "euclidean" or "manhattan".
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        settings: Any,
        fingerprint: str | None = None,
        *,
        spec: str | None = None,
        batch_tokens: int | None = None,
        queries: SparseEncoder | None = None,
    ):
        self.queries = queries
        self.model, self.tokenizer, self.settings, self.spec = model, tokenizer, settings, spec
        self.fingerprint: str = fingerprint or identity.fingerprint(self._stored())
        self.dimension: int = model.config.dimension
        self.max_active_dims: int | None = model.config.active_dims
        self.similarity_fn_name: str = model.config.score
        self.runner = Runner(model, MeshConfig().build(local_devices()), batch_tokens=batch_tokens)
        self._tokenizers = {"query": tokenizer, "passage": tokenizer}
        if model.config.static_queries:
            where = spec or "the model"
            self._tokenizers["query"] = tokenizer_files.without_special_tokens(tokenizer, where)
        if model.config.stores_weights("query"):
            self._weights_of_tokens = np.asarray(model.stored_weights, np.float32)

    @classmethod
    def load(
        cls,
        spec: str,
        *,
        dtype: Dtype = "float32",
        batch_tokens: int | None = None,
        query_max_length: int | None = None,
        passage_max_length: int | None = None,
    ) -> SparseEncoder:
        """Loads a sparse encoder.

        Args:
          spec: `st:` and a local directory or hub name of sentence-transformers' SparseEncoder; `hf:` and a
            masked language model, from which a sparse encoder with max pooling begins; or a jaxir directory.
          dtype: type of the matrix products, as in `DualEncoder.load`; weights of tokens are float32.
          batch_tokens: maximum number of tokens per batch on one device; None uses the platform's default.
          query_max_length: maximum number of tokens per query; None: the model's setting.
          passage_max_length: maximum number of tokens per passage; None: the model's setting.

        Raises:
          UserError: the model does not exist, cannot be read, is of another kind, or has fewer positions than
            a maximum length.
        """
        lengths = {"query_max_length": query_max_length, "passage_max_length": passage_max_length}
        loaded = loading.load(spec, kind="sparse_encoder", dtype=dtype, **lengths)

        def made(loaded: LoadedModel, queries: SparseEncoder | None) -> SparseEncoder:
            how = {"spec": model_dir.absolute(spec), "batch_tokens": batch_tokens, "queries": queries}
            return cls(loaded.model, loaded.tokenizer, loaded.settings, loaded.fingerprint, **how)

        return made(loaded, None if loaded.queries is None else made(loaded.queries, None))

    def save(self, directory: str | Path) -> None:
        """Writes a model directory, which `load` takes; it appears only when complete.

        `python -m jaxir.convert --format=st` converts it to a folder of sentence-transformers.

        Raises:
          UserError: `directory` exists and is not empty, or the encoder was loaded in bfloat16.
        """
        for encoder in filter(None, (self, self.queries)):
            loading.check_not_rounded(encoder.model)
        queries = None if self.queries is None else self.queries._stored()
        model_dir.save(directory, self.model, self.tokenizer, self.settings, queries=queries)

    def _stored(self) -> StoredModel:
        params = stored.params_of(self.model)
        model = model_dir.stored_model(self.model, self.tokenizer, self.settings, params)
        queries = None if self.queries is None else self.queries._stored()
        return dataclasses.replace(model, queries=queries)

    def __repr__(self) -> str:
        name = f"{self.spec!r}: " if self.spec else ""
        queries = "" if self.queries is None else f"; queries: {self.queries.model.config.summary}"
        return f"SparseEncoder({name}{self.model.config.summary}, {size_of(self.model)}{queries})"

    def encode_queries(self, texts: str | Iterable[str], **how: Any) -> sparse.csr_matrix:
        """Returns the weights [N, V] of queries; `encode` describes the arguments."""
        return self.encode(texts, tower="query", **how)

    def encode_passages(self, texts: str | Iterable[str], **how: Any) -> sparse.csr_matrix:
        """Returns the weights [N, V] of passages; `encode` describes the arguments."""
        return self.encode(texts, tower="passage", **how)

    def encode(
        self,
        texts: str | Iterable[str],
        *,
        tower: Tower,
        batch_size: int | None = None,
        prompt: str | None = None,
        prompt_name: str | None = None,
        max_active_dims: int | None = None,
        show_progress: bool = True,
        report: EncodingReport | None = None,
    ) -> sparse.csr_matrix:
        """Encodes texts.

        Args:
          texts: N texts, which may be empty, or one string; each is truncated at the maximum length.
          tower: "query" or "passage".
          batch_size: maximum number of texts per batch on one device. None: only the number of tokens of a
            batch is limited (`batch_tokens`), which is faster.
          prompt: text put before each text, instead of the side's prompt. `prompt_name` is then ignored.
          prompt_name: name of a prompt of the model's sentence-transformers folder, "query" or "document".
          max_active_dims: how many of a text's largest weights to keep; None: the model's setting, which for
              a SparseAutoEncoder is its k.
          show_progress: whether to show a progress bar (on a terminal only).
          report: the counts of this call are added to it; stored query weights need no batches.

        Returns:
          float32 weights [N, V] in the order of the texts, or [1, V] of one string. Column i belongs to the
          token with id i in the tokenizer's file, as in sentence-transformers, or is the i-th code or token
          dimension of a model without weights of tokens; `token_weights` names them.

        Raises:
          TypeError: `texts` holds something that is not a string.
          ValueError: `batch_size` or `max_active_dims` is below 1.
          UserError: the model gives weights that are not finite, or has no prompt of this name.
        """
        given = [texts] if isinstance(texts, str) else list(texts)
        if not all(isinstance(text, str) for text in given):
            raise TypeError("texts must be a string or a list of strings")
        if tower == "query" and self.queries is not None:
            how = {"prompt": prompt, "prompt_name": prompt_name, "max_active_dims": max_active_dims}
            how |= {"batch_size": batch_size, "show_progress": show_progress, "report": report}
            return self.queries.encode(given, tower=tower, **how)
        limit = self.max_active_dims if max_active_dims is None else max_active_dims
        for name, value in (("batch_size", batch_size), ("max_active_dims", limit)):
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, not {value}")
        if prompt is None and prompt_name is not None:
            prompt = self.settings.prompt_named(prompt_name, self.spec or "the model")
        starts = range(0, len(given), WINDOW)
        windows = (self.tokens(given[start : start + WINDOW], tower, prompt=prompt) for start in starts)
        static = self.model.config.stores_weights(tower)
        left_out = None
        if prompt is not None and not self.settings.pools_prompts:
            left_out = self.tokenizer.prompt_length(prompt)
        by_tower = tower if self.model.config.form == SparseCodesConfig.form else "passage"
        found = [sparse.csr_matrix((0, self.dimension), dtype=np.float32)]
        what = f"encoding {'queries' if tower == 'query' else 'passages'}"
        with progress(total=len(given), what=what, unit="texts", hidden=not show_progress) as bar:
            how = {"max_rows": batch_size, "num_windows": max(1, len(starts)), "report": report}
            for tokens in one_ahead(windows):
                if static:
                    found.append(self._stored_weights(tokens, limit))
                    bar.update(len(tokens))
                else:
                    which = (limit, by_tower, left_out)
                    found.append(self._model_weights(tokens, *which, on_batch=bar.update, **how))
        return self._checked(self._in_own_order(sparse.vstack(found, format="csr")), given)

    def tokens(self, texts: Sequence[str], tower: Tower, *, prompt: str | None = None) -> list[np.ndarray]:
        """Returns the token ids of texts with a prompt, truncated at the side's maximum length."""
        own, length = self.text_settings(tower)
        prompted = [(own if prompt is None else prompt) + text for text in texts]
        return self.tokenizer_of(tower).encode_batch(prompted, max_length=length)

    def tokenizer_of(self, tower: Tower) -> Any:
        """Returns the tokenizer of queries or passages; stored weights need no special tokens."""
        encoder = self.queries if tower == "query" and self.queries is not None else self
        return encoder._tokenizers[tower]

    def text_settings(self, tower: Tower) -> tuple[str, int]:
        """Returns (prompt, maximum length in tokens) of queries or passages."""
        encoder = self.queries if tower == "query" and self.queries is not None else self
        return encoder.settings.of_tower(tower)

    def similarity(self, a: sparse.csr_matrix, b: sparse.csr_matrix) -> np.ndarray:
        """Returns float32 [A, B]: vectors [A, V] compared with vectors [B, V] by `similarity_fn_name`."""
        return similarities(a, b, score=self.similarity_fn_name)

    def similarity_pairwise(self, a: sparse.csr_matrix, b: sparse.csr_matrix) -> np.ndarray:
        """Returns float32 [A]: each of `a` [A, V] compared with its vector of `b` [A, V]."""
        return similarities(a, b, score=self.similarity_fn_name, pairwise=True)

    def token_weights(self, matrix: sparse.csr_matrix) -> list[dict[str, float]]:
        """Returns a dict {token: weight} for each row of weights [N, V]: the largest first, without zeros.

        An id i without a token in the tokenizer is named "[i]".
        """
        names = self.token_names + [f"[{i}]" for i in range(self.dimension, matrix.shape[1])]
        return named_weights(matrix, names)

    @functools.cached_property
    def token_names(self) -> list[str]:
        """The V tokens, in the order of the columns of `encode`; codes are named by their number, "[i]"."""
        return names_of_tokens(self.tokenizer if self.model.config.of_tokens else None, self.dimension)

    def _model_weights(
        self, tokens: list[np.ndarray], limit: int | None, tower: Tower, left_out: int | None, **how: Any
    ) -> sparse.csr_matrix:
        """Returns the weights [n, V] of texts by the model, in jaxir's order of tokens."""
        limit = None if limit is None else min(limit, self.dimension)
        function = _weigh(limit, tower, left_out)
        order, found = [], []
        for rows, part in self.runner.batches(function, tokens, **how):
            order.append(rows)
            if limit is None:
                found.append(sparse.csr_matrix(part))
                continue
            starts = np.arange(0, len(part) * limit + 1, limit)
            values, ids = part[:, 0].flatten(), part[:, 1].flatten().astype(np.int32)
            found.append(sparse.csr_matrix((values, ids, starts), shape=(len(part), self.dimension)))
            found[-1].eliminate_zeros()
        return sparse.vstack(found, format="csr")[np.argsort(np.concatenate(order))]

    def _stored_weights(self, tokens: list[np.ndarray], limit: int | None) -> sparse.csr_matrix:
        """Returns the stored weights [n, V] of texts' distinct tokens, in jaxir's order of tokens."""
        texts = np.repeat(np.arange(len(tokens)), [len(ids) for ids in tokens])
        ids = np.concatenate(tokens)
        ids = np.where(ids == PADDING_TOKEN, 0, ids)
        shape = (len(tokens), self.dimension)
        found = sparse.csr_matrix((np.ones(len(ids), np.float32), (texts, ids)), shape=shape)
        found.data = self._weights_of_tokens[found.indices]
        found = normalized(found) if self.model.config.normalized else found
        for start, end in zip(found.indptr, found.indptr[1:], strict=False) if limit is not None else ():
            data = found.data[start:end]
            data[np.argsort(-np.abs(data), kind="stable")[limit:]] = 0.0
        found.eliminate_zeros()
        return found

    def _in_own_order(self, matrix: sparse.csr_matrix) -> sparse.csr_matrix:
        """Returns weights in the order of the tokenizer's file; codes have only one order."""
        return in_own_order(matrix, self.tokenizer.pad_swap if self.model.config.of_tokens else None)

    def _checked(self, matrix: sparse.csr_matrix, texts: list[str]) -> sparse.csr_matrix:
        """Returns a matrix; raises a UserError if a weight is not finite."""
        bad = np.flatnonzero(~np.isfinite(matrix.data))
        if len(bad):
            row = int(np.searchsorted(matrix.indptr, bad[0], side="right")) - 1
            raise UserError(
                f"{self.spec or 'the model'} gives a weight that is not finite: text {row + 1},"
                f" {texts[row]!r:.40}"
            )
        return matrix


def names_of_tokens(tokenizer: Tokenizer | None, size: int) -> list[str]:
    """Returns the tokens with ids 0 to `size` - 1 in the tokenizer's file; "[i]" for one without a name."""
    names = [] if tokenizer is None else tokenizer.own_tokens()
    names += [None] * (size - len(names))
    return [f"[{i}]" if name is None else name for i, name in enumerate(names)]


def named_weights(matrix: sparse.csr_matrix, names: Sequence[str]) -> list[dict[str, float]]:
    """Returns a dict {token: weight} for each row of weights [N, V]: the largest first, without zeros."""
    found = []
    for row in sparse.csr_matrix(matrix):
        order = np.argsort(-row.data, kind="stable")
        found.append({names[row.indices[i]]: float(row.data[i]) for i in order if row.data[i]})
    return found


def in_own_order(matrix: sparse.csr_matrix, pad_swap: int | None) -> sparse.csr_matrix:
    """Exchanges the columns of id 0 and of the padding token `pad_swap`, which `Tokenizer` exchanges."""
    if pad_swap is not None:
        order = np.arange(matrix.shape[1], dtype=matrix.indices.dtype)
        order[[0, pad_swap]] = order[[pad_swap, 0]]
        matrix.indices = order[matrix.indices]
        matrix.has_sorted_indices = False
    matrix.sort_indices()
    return matrix
