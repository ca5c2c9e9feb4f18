"""GELU and its slope, compared with the definition, in float32 and bfloat16."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import special

from jaxir.models.activations import gelu, gelu_tanh, without_erf

X = np.concatenate([np.linspace(-12, 12, 2001), [0.0, -1e-6, 1e-6, -30.0, 30.0]]).astype(np.float32)


def of_gelu(x):
    phi = special.ndtr(x)
    return x * phi, phi + x * np.exp(-x * x / 2) / np.sqrt(2 * np.pi)


def of_gelu_tanh(x):
    inner = np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)
    phi, slope = 0.5 * (1 + np.tanh(inner)), np.sqrt(2 / np.pi) * (1 + 3 * 0.044715 * x**2)
    return x * phi, phi + 0.5 * x * slope / np.cosh(np.clip(inner, -300, 300)) ** 2


both = pytest.mark.parametrize(
    ("gelu", "definition", "approximate"), [(gelu, of_gelu, False), (gelu_tanh, of_gelu_tanh, True)]
)


def errors(function, x, definition):
    """Returns the largest and the root mean square errors, each float64 [2]: of values and of slopes."""
    gradient = jax.jit(jax.grad(lambda x: function(x).astype(jnp.float32).sum()))
    found = [np.asarray(f(x), np.float64) for f in (jax.jit(function), gradient)]
    wrong = np.abs(np.stack(found) - np.stack(definition(np.asarray(x, np.float64))))
    return wrong.max(1), (wrong**2).mean(1) ** 0.5


@both
def test_values_and_slopes(gelu, definition, approximate):
    largest, _ = errors(gelu, jnp.asarray(X), definition)
    jaxs, _ = errors(lambda x: jax.nn.gelu(x, approximate=approximate), jnp.asarray(X), definition)
    assert (largest < np.maximum(2e-6, 1.1 * jaxs)).all(), (largest, jaxs)  # XLA's tanh errs by up to 9e-6
    assert (jaxs < 1e-5).all()


@both
def test_bfloat16_is_as_exact_as_jax_nn_gelu(gelu, definition, approximate):
    x = jnp.asarray(X, jnp.bfloat16)
    assert gelu(x).dtype == jax.grad(lambda x: gelu(x).sum())(x).dtype == jnp.bfloat16
    jaxs = errors(lambda x: jax.nn.gelu(x, approximate=approximate), x, definition)
    for ours, theirs, bound in zip(errors(gelu, x, definition), jaxs, (1.15, 1.0), strict=True):
        assert (ours <= bound * theirs).all(), (ours, theirs)


@both
def test_the_backward_pass_keeps_one_array_of_the_inputs_type(gelu, definition, approximate):
    x = jnp.ones((8, 16), jnp.bfloat16)
    _, backward = jax.vjp(gelu, x)
    kept = [leaf for leaf in jax.tree.leaves(backward) if leaf.shape == x.shape]
    assert [leaf.dtype for leaf in kept] == [jnp.bfloat16]


def test_without_erf_exports_no_composite():
    x = jnp.asarray(X)

    def exported() -> str:
        return jax.export.export(jax.jit(lambda x: gelu(x)))(x).mlir_module()

    assert "stablehlo.composite" in exported()  # if this fails, `without_erf` is no longer needed
    with without_erf():
        assert "stablehlo.composite" not in exported()
        np.testing.assert_allclose(jax.jit(lambda x: gelu(x))(x), of_gelu(X.astype(float))[0], atol=2e-6)
