"""An objective that has trained and frozen parameters and averages, for tests and their gin files."""

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx

from jaxir.models import layers
from jaxir.objectives.contrastive import Contrastive
from jaxir.objectives.objective import Objective
from tests.training import tiny_run


class ScaleAndBias(nnx.Module):
    def __init__(self, scale: float, width: int, rngs: nnx.Rngs):
        self.scale, self.bias = layers.param(jnp.float32(scale)), layers.param(jnp.float32(-1))
        # The head has no logical axes, and no bias, which the norm would remove again.
        self.head = nnx.Linear(width, width, use_bias=False, rngs=rngs)
        self.norm = nnx.BatchNorm(width, rngs=rngs, momentum=0.5)
        self.teacher = layers.Linear(
            width,
            width,
            axes=("embed", "mlp"),
            use_bias=False,
            dtype="float32",
            init=layers.normal(0.5),
            rngs=rngs,
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sigmoid(Objective):
    """SigLIP's loss with a learnt scale and bias on a normalised head, plus the distance to a teacher."""

    scale: float = 2.0
    width: int = tiny_run.WIDTH
    frozen = ("auxiliary.teacher.*",)

    def features(self, form):
        return Contrastive().features(form)

    def auxiliary(self, model, *, form, rngs):
        return ScaleAndBias(self.scale, self.width, rngs)

    def __call__(self, model, batch, key=None, *, auxiliary, step=None):
        query, passage, _ = Contrastive().embed(model, batch, key)
        x = auxiliary.norm(auxiliary.head(query), use_running_average=key is None)
        taught = jnp.square(x - auxiliary.teacher(query)).mean()
        logits = x @ passage.T * jnp.exp(auxiliary.scale[...]) + auxiliary.bias[...]
        sign = 2 * jnp.eye(len(query), dtype=jnp.float32) - 1
        return -jax.nn.log_sigmoid(sign * logits).mean() + taught, {"scale": auxiliary.scale[...]}
