"""Whether an encoder takes texts of any number and length, as an exported graph must."""

import sys
import traceback
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxir.models.backbones import Encoder

_LIBRARIES = ("site-packages", "dist-packages", "importlib", "contextlib.py", "functools.py")
_ROOT = str(Path(__file__).resolve().parents[1])


def fault_of(model: nnx.Module) -> str | None:
    """Returns why no graph for texts of any number and length can be made of a model; None if one can.

    Encoders of jaxir are not looked at. The others are traced, not compiled, with symbols in place of both
    dimensions of the ids [B, L]. On an accelerator the answer is None, since graphs are made on the CPU.
    """
    if jax.default_backend() != "cpu":
        return None
    for _, encoder in nnx.iter_modules(model):
        if not isinstance(encoder, Encoder) or type(encoder).__module__.startswith("jaxir."):
            continue
        longest = encoder.config.max_positions
        shape = jax.export.symbolic_shape("B, L", constraints=[f"L <= {longest}"] if longest else [])
        graphdef, state = nnx.split(encoder)

        def encode(state: nnx.State, ids: jax.Array, graphdef: Any = graphdef) -> jax.Array:
            return nnx.merge(graphdef, state)(ids)

        try:
            jax.eval_shape(encode, state, jax.ShapeDtypeStruct(shape, jnp.int32))
        except Exception as error:  # of any kind: the code is the author's
            return (
                f"the backbone {encoder.config.kind!r} does not take texts of any number and length:"
                f" {_place_of(error)} fails where the length is a symbol, which cannot go into numpy, int()"
                f" or an `if` ({type(error).__name__}); use jax.numpy (docs/adding_a_backbone.md)"
            )
    return None


def warn(model: nnx.Module) -> None:
    """Prints a warning if a new model cannot be exported, before training is spent on it."""
    if jax.process_index() == 0 and (fault := fault_of(model)):
        print(f"warning: {fault}. Training works, but no ONNX or SavedModel export", file=sys.stderr)


def _place_of(error: Exception) -> str:
    """Returns the file and line of the author's code that failed."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [
        f
        for f in frames
        if not f.filename.startswith((_ROOT, sys.base_prefix)) and not f.filename.startswith("<")
    ]
    own = [f for f in own if not any(name in f.filename for name in _LIBRARIES)]
    frame = (own or list(frames))[-1]
    return f"{Path(frame.filename).name}:{frame.lineno}"
