"""Loads models for the public encoders of token vectors, token weights, or both; says which may be saved."""

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx

from jaxir.core.errors import UserError
from jaxir.core.platforms import check_devices
from jaxir.interop import model_dir
from jaxir.interop.model import stored
from jaxir.interop.model_dir import LoadedModel
from jaxir.runtime.cpu import Dtype, settled_dtype


def load(
    spec: str, *, kind: str, dtype: Dtype, query_max_length: int | None, passage_max_length: int | None
) -> LoadedModel:
    """Loads a model of a kind, with other maximum lengths where they are given.

    Raises:
      UserError: there is no such model, or it has fewer positions than a maximum length.
    """
    check_devices()
    loaded = model_dir.load(spec, kind=kind, dtype=settled_dtype(dtype), halved=True)
    lengths = {"query_max_length": query_max_length, "passage_max_length": passage_max_length}
    given = {name: length for name, length in lengths.items() if length is not None}

    def changed(loaded: LoadedModel) -> LoadedModel:
        settings = dataclasses.replace(loaded.settings, **given)
        stored.check_lengths(settings, loaded.model.config, spec)
        queries = None if loaded.queries is None else changed(loaded.queries)
        return loaded._replace(settings=settings, queries=queries)

    return changed(loaded)


def check_not_rounded(model: nnx.Module) -> None:
    """Raises a UserError if a model's weights were rounded to bfloat16, so that they cannot be saved."""
    if any(x.dtype == jnp.bfloat16 for x in jax.tree.leaves(nnx.state(model, nnx.Param))):
        raise UserError("the weights were rounded to bfloat16: load the model in float32 to save it")
