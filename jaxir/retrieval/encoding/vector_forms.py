"""Truncates vectors [N, D], scales them to length 1, quantises them, and compares them."""

from typing import Literal

import numpy as np

from jaxir.core.errors import UserError

Precision = Literal["float32", "int8", "uint8", "binary", "ubinary"]
PRECISIONS = ("float32", "int8", "uint8", "binary", "ubinary")
_LEAST_LENGTH = 1e-12  # a shorter vector is divided by this, as in torch's F.normalize


def check_form(dimension: int, truncate_dim: int | None, precision: str) -> None:
    """Checks the arguments of `formed` before anything is encoded."""
    _check_precision(precision)
    if truncate_dim is not None and not 1 <= truncate_dim <= dimension:
        raise UserError(
            f"truncate_dim is {truncate_dim}, but the model has {dimension} dimensions: give at least 1 and"
            " at most that"
        )


def formed(
    vectors: np.ndarray, truncate_dim: int | None, normalize: bool, precision: Precision
) -> np.ndarray:
    """Returns vectors [N, D] first truncated, then scaled to length 1, then quantised."""
    vectors = vectors[:, :truncate_dim]
    return quantize_embeddings(normalized(vectors) if normalize else vectors, precision)


def _check_precision(precision: str) -> None:
    if precision not in PRECISIONS:
        raise ValueError(f"precision is {precision!r}; expected one of {', '.join(PRECISIONS)}")


def normalized(vectors: np.ndarray) -> np.ndarray:
    """Returns vectors [..., D] scaled to length 1; zeros stay zeros."""
    return vectors / np.maximum(np.linalg.norm(vectors, axis=-1, keepdims=True), _LEAST_LENGTH)


def quantize_embeddings(
    embeddings: np.ndarray,
    precision: Precision,
    *,
    ranges: np.ndarray | None = None,
    calibration_embeddings: np.ndarray | None = None,
) -> np.ndarray:
    """Quantises vectors as `sentence_transformers.quantize_embeddings` does.

    int8 and uint8 divide the range of each component into 256 equal steps. binary and ubinary keep whether a
    component is positive, 8 components a byte.

    Args:
      embeddings: float vectors [N, D], or one vector [D].
      precision: "float32"; "int8" or "uint8" of the same shape; "binary" (of type int8) or "ubinary" (of type
        uint8), [N, D/8].
      ranges: for int8 and uint8, the least and the greatest value of each component, [2, D].
      calibration_embeddings: vectors [M, D] that give the ranges. Without both, `embeddings` give them. Then
        vectors of two calls have different steps and must not be compared.

    Raises:
      ValueError: `precision` has another value, or one vector would have to give the ranges.
    """
    embeddings = np.asarray(embeddings)
    _check_precision(precision)
    if precision == "float32":
        return embeddings.astype(np.float32, copy=False)
    if precision in ("binary", "ubinary"):
        bits = np.packbits(embeddings > 0, axis=-1)
        return bits if precision == "ubinary" else (bits ^ 0x80).view(np.int8)
    known = np.int8 if precision == "int8" else np.uint8
    if embeddings.ndim == 2 and not len(embeddings):
        return embeddings.astype(known)
    if ranges is None:
        ranges = _ranges(embeddings if calibration_embeddings is None else calibration_embeddings, precision)
    low, high = np.asarray(ranges, np.float32)
    steps = (high - low) / 255
    levels = np.clip(np.floor((embeddings - low) / np.where(steps == 0, 1, steps)), 0, 255)
    return (levels - 128 if precision == "int8" else levels).astype(known)


def _ranges(vectors: np.ndarray, precision: Precision) -> np.ndarray:
    vectors = np.asarray(vectors)
    if vectors.ndim == 1 or len(vectors) == 1:
        raise ValueError(
            f"{precision} needs the range of each component, which one vector does not give: encode in"
            " float32 and call jaxir.quantize_embeddings with ranges= or calibration_embeddings="
        )
    return np.stack([vectors.min(axis=0), vectors.max(axis=0)])


def similarities(a: np.ndarray, b: np.ndarray, *, cosine: bool, pairwise: bool = False) -> np.ndarray:
    """Compares vectors by their cosine or their dot product.

    Args:
      a: vectors [A, D], or one vector [D].
      b: vectors [B, D], or one vector [D].
      cosine: whether vectors are scaled to length 1 first.
      pairwise: compare `a[i]` with `b[i]` only.

    Returns:
      float32 [A, B]; with `pairwise` [A].
    """
    a, b = (np.atleast_2d(np.asarray(vectors, np.float32)) for vectors in (a, b))
    if cosine:
        a, b = normalized(a), normalized(b)
    return np.einsum("nd,nd->n", a, b) if pairwise else a @ b.T
