"""Unsupervised SimCSE: each text is encoded twice, with different dropout masks (Gao et al. 2021)."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
from flax import nnx

from jaxir.core.errors import UserError
from jaxir.core.features import TextFormat
from jaxir.core.values import checked
from jaxir.losses.in_batch import in_batch_softmax
from jaxir.objectives.objective import Metrics
from jaxir.objectives.two_views import TwoViews, View

ONE_WAY = functools.partial(in_batch_softmax, temperature=0.05, bidirectional=False)


@dataclasses.dataclass(frozen=True, kw_only=True)
@checked
class SimCSE(TwoViews):
    """Unsupervised SimCSE (arXiv:2104.08821; Wang 2022, section 3.1.1).

    f(x, z) is the vector of text x with dropout mask z, and s is the similarity divided by the temperature.
    The equation of the loss is (eq. 3.1):

        loss = -1 / B sum_i log( exp s(f(x_i, z), f(x_i, z')) / sum_j exp s(f(x_i, z), f(x_j, z')) )

    Attributes:
      loss: any contrastive loss; the default is the equation above, the in-batch softmax in one direction.
    """

    loss: Callable[..., tuple[jax.Array, Metrics]] = ONE_WAY

    def auxiliary(self, model: Any, *, form: TextFormat, rngs: nnx.Rngs) -> None:
        """Returns None; raises a UserError for a model without dropout, because both views would be equal."""
        backbone = model.config.backbone
        rates = {f.name for f in dataclasses.fields(backbone) if f.name.endswith("dropout_rate")}
        if not any(getattr(backbone, rate) for rate in rates):
            raise UserError(
                "SimCSE's two views of a text differ by dropout, but the model has none: give --dropout=0.1"
            )

    def views(self, ids: jax.Array, key: jax.Array) -> tuple[View, View]:
        """Returns two views of the texts [B, L], with different dropout masks."""
        first, second = jax.random.split(key)
        return View(ids, first), View(ids, second)
