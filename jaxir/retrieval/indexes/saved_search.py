"""Searches a ScaNN index with TensorFlow operations, for SavedModels (`interop.saved_model`)."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxir.core.errors import UserError
from jaxir.retrieval.indexes.base_index import check_k, load_index
from jaxir.retrieval.indexes.ids import descending_ranks
from jaxir.retrieval.indexes.scann_files import ASSETS
from jaxir.retrieval.indexes.scann_index import ScannIndex
from jaxir.storage.temporary_outputs import temporary_directory

if TYPE_CHECKING:
    import tensorflow as tf

K = 10
MOST = 0.999  # maximum recall that an index without SOAR is tuned for


class SavedSearch:
    """Like jaxir.search, but by TensorFlow operations; implements `interop.saved_model.GraphSearch`."""

    packages = ("scann",)

    def __init__(self, directory: str | Path, *, k: int, fingerprint: str, name: str):
        import tensorflow as tf

        check_k(k)
        index = load_index(directory)
        if not isinstance(index, ScannIndex):
            raise UserError(
                f"{directory} is an index of engine {index.info.engine}, but a SavedModel needs engine scann:"
                " build it with --backend=scann"
            )
        index.require_model(fingerprint, name)
        self.k = min(k, index.info.count)
        self.about = (
            f"`search` searches {index.info.count:,} documents. If ScaNN finds fewer than {self.k},"
            " the missing ids are empty and their scores -inf."
        )
        self._cosine = index.info.similarity == "cosine"
        self.state = tf.Module()
        if "soar" in index.info.settings:
            index = _in_one_leaf(index)
            with temporary_directory() as place:
                index.write_into(place)
                self.state.scann = _state(place / ASSETS)
        else:
            self.state.scann = _state(Path(directory) / ASSETS)
        # `_with_outliers` drops the rows of outliers, which are zeros in ScaNN, so ScaNN must find more rows.
        self._found = min(self.k + len(index.outliers), index.info.count)
        self._candidates = index.candidates(self._found)
        self._has_outliers = len(index.outliers) > 0
        if self._has_outliers:
            is_outlier = np.isin(np.arange(index.info.count), index.outliers.rows)
            self.state.is_outlier = tf.Variable(is_outlier, trainable=False)
            self.state.outlier_rows = tf.Variable(index.outliers.rows.astype(np.int32), trainable=False)
            self.state.outliers = tf.Variable(index.outliers.vectors, trainable=False)
        self.state.ids = tf.Variable(np.array(index.ids, object), dtype=tf.string, trainable=False)
        self.state.ranks = tf.Variable(descending_ranks(index.ids), trainable=False)

    def __call__(self, vectors: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """Returns the best documents for vectors [B, D]: ids (string [B, K]) and scores (float32 [B, K])."""
        import tensorflow as tf
        from scann.scann_ops.py import scann_ops

        if self._cosine:
            vectors = tf.math.divide_no_nan(vectors, tf.norm(vectors, axis=1, keepdims=True))
        searcher = scann_ops.searcher_from_module(self.state.scann)
        at, scores = searcher.search_batched_parallel(
            vectors, final_num_neighbors=self._found, **self._candidates
        )
        at, scores = tf.cast(at, tf.int32), tf.reshape(scores, [-1, self._found])
        at = tf.reshape(at, [-1, self._found])
        count = tf.size(self.state.ids)
        real = tf.math.is_finite(scores) & (at >= 0) & (at < count)
        at, scores = tf.where(real, at, 0), tf.where(real, scores, -np.inf)
        if self._has_outliers:
            at, scores = self._with_outliers(vectors, at, scores)
            real = tf.math.is_finite(scores)
        ids = tf.where(real, tf.gather(self.state.ids, at), "")
        # Documents of equal score are in descending order of id.
        by_id = tf.argsort(tf.gather(self.state.ranks, at), stable=True)
        ids, scores = (tf.gather(x, by_id, batch_dims=1) for x in (ids, scores))
        by_score = tf.argsort(scores, direction="DESCENDING", stable=True)
        return tuple(tf.gather(x, by_score, batch_dims=1)[:, : self.k] for x in (ids, scores))

    def _with_outliers(
        self, vectors: tf.Tensor, at: tf.Tensor, scores: tf.Tensor
    ) -> tuple[tf.Tensor, tf.Tensor]:
        import tensorflow as tf

        scores = tf.where(tf.gather(self.state.is_outlier, at), -np.inf, scores)
        own = tf.matmul(vectors, self.state.outliers, transpose_b=True)
        rows = tf.broadcast_to(self.state.outlier_rows, tf.shape(own))
        return tf.concat([at, rows], axis=1), tf.concat([scores, own], axis=1)


def _in_one_leaf(index: ScannIndex) -> ScannIndex:
    """Returns the index without what TensorFlow operations lack, tuned for the recall that is left."""
    plain = index.without_soar()
    if not index.tuned:
        return plain
    from jaxir.retrieval.indexes.tuning import Trial, tune  # imported here, because it imports JAX

    trial = Trial(index.vectors(), index.ids, similarity=index.info.similarity)
    recall = trial.recall(index.without_residuals(), trial.tuning())
    return tune(plain, trial, target=min(recall, MOST))[0]


def _state(directory: Path) -> Any:
    """Reads ScaNN's files into a module for its TensorFlow operations; bfloat16 becomes float32."""
    from scann.proto.scann_pb2 import ScannConfig
    from scann.scann_ops.py import scann_ops

    def message(name: str) -> Any:
        path = directory / name
        return [path.read_bytes()] if path.is_file() else b""

    def array(name: str, dtype: Any) -> np.ndarray:
        path = directory / name
        return np.load(path) if path.is_file() else np.zeros((), dtype)

    config = ScannConfig.FromString((directory / "scann_config.pb").read_bytes())
    vectors = array("dataset.npy", np.float32)
    halves = directory / "bfloat16_dataset.npy"
    if halves.is_file():
        vectors = (np.load(halves).view(np.uint16).astype(np.uint32) << 16).view(np.float32)
        for part in ("exact_reordering", "brute_force"):
            if config.HasField(part):
                getattr(config, part).ClearField("bfloat16")
    return scann_ops.ScannState(
        [
            [config.SerializeToString()],
            message("serialized_partitioner.pb"),
            array("datapoint_to_token.npy", np.int32),
            message("ah_codebook.pb"),
            array("hashed_dataset.npy", np.uint8),
            array("int8_dataset.npy", np.int8),
            array("int8_multipliers.npy", np.float32),
            array("dp_norms.npy", np.float32),
            vectors,
        ]
    )
