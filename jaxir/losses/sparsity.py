"""Regularisers of learned sparse vectors: non-negative weights [N, V] of N texts and V tokens."""

import jax.numpy as jnp

from jaxir.core.shapes import checked_shapes
from jaxir.losses._types import Scalar, Vectors


@checked_shapes
def flops(weights: Vectors) -> Scalar:
    """FLOPS (Paria et al. 2020, arXiv:2004.05665, eq. 4): sum over tokens of (mean weight over texts)^2.

    A token that many texts have costs more than as many rare tokens, so posting lists get equal lengths.
    """
    return jnp.square(weights.mean(0)).sum()


@checked_shapes
def l1(weights: Vectors) -> Scalar:
    """L1: the mean over texts of the sum of a text's weights."""
    return weights.sum(1).mean()


@checked_shapes
def anti_zero(weights: Vectors) -> Scalar:
    """1 / (sum of all weights of all texts)^2, as in SPLADE's code (naver/splade): large if all are small."""
    return 1.0 / jnp.square(jnp.maximum(weights.sum(), 1e-6))
