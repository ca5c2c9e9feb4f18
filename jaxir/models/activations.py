"""Activation functions by name."""

import contextlib
import contextvars
import math
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp

from jaxir.models.operators import operator

_without_erf = contextvars.ContextVar("_without_erf", default=False)


@contextlib.contextmanager
def without_erf() -> Iterator[None]:
    """Replaces the operation erf of GELU by a formula in programs that are traced inside the `with` block.

    An exported program holds erf (erfc from JAX 0.12) as a composite operation, which older readers such as
    TensorFlow 2.20's do not know. JAX's cache of traces ignores this setting: a function that was jitted and
    called before keeps its erf.
    """
    token = _without_erf.set(True)
    try:
        yield
    finally:
        _without_erf.reset(token)


def _times(gate: Callable[[jax.Array], tuple[jax.Array, jax.Array]]) -> Callable[[jax.Array], jax.Array]:
    """Returns a function that maps x to x * gate(x); `gate` returns its value and its slope, in float32.

    The product has the type of x. After a float32 product, XLA would also write the preceding matrix product
    in float32. The backward pass keeps only x.
    """

    @jax.custom_jvp
    def product(x: jax.Array) -> jax.Array:
        return x * gate(x.astype(jnp.float32))[0].astype(x.dtype)

    @product.defjvp
    def _(primals: tuple[jax.Array], tangents: tuple[jax.Array]) -> tuple[jax.Array, jax.Array]:
        (x,), (dx,) = primals, tangents
        x32 = x.astype(jnp.float32)
        value, slope = gate(x32)
        return x * value.astype(x.dtype), dx * (value + x32 * slope).astype(x.dtype)

    return product


def _normal(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns Phi(x), by erf, and its slope. `jax.nn.gelu` uses erfc, with three times the operations."""
    z = x * math.sqrt(0.5)
    erf = _erf_formula(z) if _without_erf.get() else jax.lax.erf(z)
    return 0.5 * (1.0 + erf), jnp.exp(-z * z) * (1.0 / math.sqrt(2.0 * math.pi))


def _erf_formula(z: jax.Array) -> jax.Array:
    """Returns erf(z) with an error of at most 1.5e-7 (Abramowitz and Stegun 1964, equation 7.1.26)."""
    t = 1.0 / (1.0 + 0.3275911 * jnp.abs(z))
    series = 1.421413741 + t * (-1.453152027 + t * 1.061405429)
    series = t * (0.254829592 + t * (-0.284496736 + t * series))
    return jnp.sign(z) * (1.0 - series * jnp.exp(-z * z))


def _nearly_normal(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    inner = math.sqrt(2.0 / math.pi)
    t = jnp.tanh(inner * (x + 0.044715 * x * x * x))
    return 0.5 * (1.0 + t), 0.5 * (1.0 - t * t) * inner * (1.0 + 3 * 0.044715 * x * x)


@operator
def gelu(x: jax.Array) -> jax.Array:
    """Returns x Phi(x) with the normal distribution function Phi (Hendrycks and Gimpel 2016)."""
    return _times(_normal)(x)


@operator
def gelu_tanh(x: jax.Array) -> jax.Array:
    """Returns GELU with the tanh approximation of Phi (Hendrycks and Gimpel 2016, eq. 2)."""
    return _times(_nearly_normal)(x)


ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "gelu": gelu,
    "gelu_tanh": gelu_tanh,
    "relu": jax.nn.relu,
    "silu": jax.nn.silu,
}
