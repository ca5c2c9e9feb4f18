"""Whitening (Su et al. 2021, arXiv:2103.15316): a linear map, fitted to texts, that decorrelates vectors.

The map becomes the model's projection, with a bias, so a whitened model is used like any other.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
from jaxtyping import Float

from jaxir.core.errors import UserError
from jaxir.interop.model import lora, stored
from jaxir.interop.model.stored import StoredModel
from jaxir.models.dual_encoder import Projection
from jaxir.retrieval.encoding.batch_runner import WINDOW
from jaxir.retrieval.encoding.text_encoder import DualEncoder

# Variances below this share of the vectors' mean square are rounding errors. It is (3e-5)^2, because float32
# vectors are accurate to about 1e-6.
_RESOLVED = 1e-9


class Whitened(NamedTuple):
    """A whitened model, the number of texts it was fitted to, and the share of variance it keeps."""

    model: StoredModel
    texts: int
    kept: float


def whiten(found: StoredModel, texts: Iterable[str], *, dimensions: int | None, where: str) -> Whitened:
    """Fits a whitening map to a model's passage vectors of texts, and merges it into its projection."""
    config = found.config
    if config.sharing != "sde":
        raise UserError(
            f"{where}: whitening needs a model with one tower, but this one has two ({config.sharing}): give"
            " another model"
        )
    if config.projection is not None and config.projection.activation != "identity":
        activation = config.projection.activation
        raise UserError(
            f"{where}: whitening needs a linear projection, but this model's has a {activation}: give another"
            " model"
        )
    # "dot" omits the scaling to length 1, which comes after the map. A model is used in float32, whatever
    # type it was trained in.
    config = stored.replace_backbone(dataclasses.replace(config, similarity="dot"), dtype="float32")
    raw = lora.merged(dataclasses.replace(found, config=config))
    encoder = DualEncoder(stored.build(raw), found.tokenizer, found.settings, "unnamed", spec=where)
    count, mean, covariance = _moments(encoder, texts)
    matrix, kept = whitening(mean, covariance, dimensions, count=count)
    return Whitened(_behind(found, mean, matrix), count, kept)


def whitening(
    mean: Float[np.ndarray, " D"],
    covariance: Float[np.ndarray, "D D"],
    dimensions: int | None = None,
    *,
    count: int,
) -> tuple[Float[np.ndarray, "D K"], float]:
    """Returns the first K columns of W = U L^(-1/2), and their share of the variance (algorithm 1).

    U L U^T is the covariance, with L diagonal and descending. So (x - mean) W has mean 0 and covariance 1.

    Args:
      dimensions: K; None: the number of dimensions that the vectors span.
    """
    if dimensions is None and count <= len(mean):
        raise UserError(f"{count:,} texts are too few to whiten {len(mean)} dimensions: give more texts")
    values, columns = (a[..., ::-1] for a in np.linalg.eigh(covariance))
    spanned = int((values > _RESOLVED * (mean @ mean + np.trace(covariance))).sum())
    wanted = dimensions or spanned
    if wanted > spanned:
        raise UserError(
            f"the vectors of {count:,} texts only span {spanned} of {len(mean)} dimensions, fewer than"
            f" --dimensions={wanted}: give more texts, or fewer dimensions"
        )
    kept = values[:wanted].sum() / np.trace(covariance)
    return columns[:, :wanted] / np.sqrt(values[:wanted]), float(kept)


def _moments(encoder: DualEncoder, texts: Iterable[str]) -> tuple[int, np.ndarray, np.ndarray]:
    """Returns the number of texts, and the mean [D] and covariance [D, D] of their vectors, in float64."""
    count, total = 0, np.zeros(encoder.dimension)
    squares = np.zeros([encoder.dimension] * 2)
    source = iter(texts)
    windows = iter(lambda: list(itertools.islice(source, WINDOW)), [])
    tokens = (encoder.tokens(some, "passage") for some in windows)
    for vectors in encoder.encode_tokens(tokens, tower="passage"):
        rows = vectors.astype(np.float64)
        count, total, squares = count + len(rows), total + rows.sum(0), squares + rows.T @ rows
    mean = total / max(count, 1)
    return count, mean, squares / max(count, 1) - np.outer(mean, mean)


def _behind(found: StoredModel, mean: np.ndarray, matrix: np.ndarray) -> StoredModel:
    """Returns the model with the map from x to (x - mean) `matrix` merged into its projection."""
    kernel, bias = (found.params.get(f"projection.{name}") for name in ("kernel", "bias"))
    before = 0.0 if bias is None else np.asarray(bias, np.float64)
    made = {
        "kernel": matrix if kernel is None else np.asarray(kernel, np.float64) @ matrix,
        "bias": (before - mean) @ matrix,
    }
    params = {**found.params, **{f"projection.{n}": v.astype(np.float32) for n, v in made.items()}}
    projection = Projection(dimension=matrix.shape[1], use_bias=True)
    config = dataclasses.replace(found.config, projection=projection)
    return dataclasses.replace(found, config=config, params=params)
