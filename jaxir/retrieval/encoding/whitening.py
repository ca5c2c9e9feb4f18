"""Whitening (Su et al. 2021, arXiv:2103.15316): a linear map, fitted to texts, that decorrelates vectors.

It takes the place of the model's projection, with a bias: a whitened model is a model like any other.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
from jaxtyping import Float

from jaxir.core.errors import UserError
from jaxir.interop.model import stored
from jaxir.interop.model.stored import StoredModel
from jaxir.models.dual_encoder import Projection
from jaxir.retrieval.encoding.batch_runner import WINDOW
from jaxir.retrieval.encoding.text_encoder import DualEncoder

# Below this share of the vectors' mean square a variance is lost in the rounding of float32 vectors: the
# square of 3e-5, where these are good to 1e-6 or so.
_RESOLVED = 1e-9


class Whitened(NamedTuple):
    """A whitened model.

    Attributes:
      model: at rest.
      texts: how many it was fitted to.
      kept: the share of the variance that the dimensions kept have.
    """

    model: StoredModel
    texts: int
    kept: float


def whiten(found: StoredModel, texts: Iterable[str], *, dimensions: int | None, where: str) -> Whitened:
    """Fits a whitening to texts, encoded as passages, and puts it behind a model.

    Args:
      found: a model of one tower. A projection that it has becomes part of the map.
      texts: N texts, read once.
      dimensions: K, of the whitened vectors, those with the most variance; None: as many as they span. That
        is one less than the model has where it ends in a LayerNorm.
      where: what the model is called in messages.

    Raises:
      UserError: the model has two towers or a projection that is not linear, or the texts are too few or span
        fewer than K dimensions.
    """
    config = found.config
    if config.sharing != "sde":
        raise UserError(f"{where}: a whitening is of one tower, and this model has two ({config.sharing})")
    if config.projection is not None and config.projection.activation != "identity":
        raise UserError(f"{where}: a {config.projection.activation} follows its projection: no linear map")
    # As they are before they are made of length 1, which is done behind the map; and in float32, as the model
    # will be used: a run's remembers in which type its products were when it was trained.
    config = stored.replace_backbone(dataclasses.replace(config, similarity="dot"), dtype="float32")
    raw = dataclasses.replace(found, config=config)
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
    """Returns the first K columns of W = U L^(-1/2), and their share of the variance (their algorithm 1).

    U L U^T is the covariance, L diagonal and descending: (x - mean) W has mean 0 and covariance 1.

    Args:
      dimensions: K; None for as many as the vectors span.

    Raises:
      UserError: K is more than the dimensions that the vectors span, or there are no more texts than
        dimensions and K is not given.
    """
    if dimensions is None and count <= len(mean):
        raise UserError(f"{count:,} texts are too few to whiten {len(mean)} dimensions: give more of them")
    values, columns = (a[..., ::-1] for a in np.linalg.eigh(covariance))
    spanned = int((values > _RESOLVED * (mean @ mean + np.trace(covariance))).sum())
    wanted = dimensions or spanned
    if wanted > spanned:
        raise UserError(
            f"the vectors of {count:,} texts span {spanned} of {len(mean)} dimensions, and {wanted} were"
            " asked for"
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
    """Returns the model with x -> (x - mean) `matrix` behind its projection: one projection with a bias."""
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
