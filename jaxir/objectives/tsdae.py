"""TSDAE: a text is written again from the vector of what was left of it (Wang et al. 2021)."""

from __future__ import annotations

import dataclasses
from typing import Literal

from jaxir.core.values import Rate, checked
from jaxir.objectives.clm_autoencoder import CLMAutoencoder


@dataclasses.dataclass(frozen=True, kw_only=True)
@checked
class TSDAE(CLMAutoencoder):
    """A denoising autoencoder of texts (arXiv:2104.06979, section 3): the CLM autoencoder with deletion.

    Of each text tokens are deleted, each by itself; one stays in any case. In the paper encoder and decoder
    share all weights, here no others than the token vectors.
    """

    deletion: Rate = 0.6
    mean_over: Literal["texts", "tokens"] = "tokens"
