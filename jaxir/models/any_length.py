"""Checks whether an encoder accepts any number of texts of any length, as an exported graph must."""

import sys
import traceback
from pathlib import Path

import jax
import jax.numpy as jnp
from flax import nnx

from jaxir.models.backbones import Encoder

_LIBRARIES = ("site-packages", "dist-packages", "importlib", "contextlib.py", "functools.py")
_ROOT = str(Path(__file__).resolve().parents[1])


def export_error(model: nnx.Module) -> str | None:
    """Returns why a model cannot be exported for any number of texts of any length; None if it can.

    Only encoders outside jaxir are checked. They are traced, not compiled, with symbolic dimensions of the
    ids [B, L]. Graphs are exported on the CPU; on an accelerator the result is None without a check.
    """
    if jax.default_backend() != "cpu":
        return None
    for _, encoder in nnx.iter_modules(model):
        if not isinstance(encoder, Encoder) or type(encoder).__module__.startswith("jaxir."):
            continue
        longest = encoder.config.max_positions
        shape = jax.export.symbolic_shape("B, L", constraints=[f"L <= {longest}"] if longest else [])
        try:
            nnx.eval_shape(lambda encoder, ids: encoder(ids), encoder, jax.ShapeDtypeStruct(shape, jnp.int32))
        except Exception as error:  # the user's code may raise anything
            return (
                f"the backbone {encoder.config.kind!r} does not accept any number of texts of any length:"
                f" {_place_of(error)} fails with a symbolic length, which numpy, int() and `if` cannot use"
                f" ({type(error).__name__}); use jax.numpy (docs/adding_a_backbone.md)"
            )
    return None


def warn(model: nnx.Module) -> None:
    """Prints a warning if a new model cannot be exported, before it is trained."""
    if jax.process_index() == 0 and (fault := export_error(model)):
        print(f"warning: {fault}. Training works, but not export to ONNX or SavedModel", file=sys.stderr)


def _place_of(error: Exception) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    own = [f for f in frames if not f.filename.startswith((_ROOT, sys.base_prefix, "<"))]
    own = [f for f in own if not any(name in f.filename for name in _LIBRARIES)]
    frame = (own or list(frames))[-1]
    return f"{Path(frame.filename).name}:{frame.lineno}"
