"""TSDAE: predicts a text from the vector of the text with tokens deleted (Wang et al. 2021)."""

from __future__ import annotations

import dataclasses
from typing import Literal

from jaxir.core.values import Rate, checked
from jaxir.objectives.clm_autoencoder import CLMAutoencoder


@dataclasses.dataclass(frozen=True, kw_only=True)
@checked
class TSDAE(CLMAutoencoder):
    """A denoising autoencoder of texts (arXiv:2104.06979, section 3): the CLM autoencoder with deletion.

    Random tokens are deleted from the encoder's input; at least one stays. In the paper, encoder and decoder
    share all weights; here they share only the token embeddings.
    """

    deletion: Rate = 0.6
    mean_over: Literal["texts", "tokens"] = "tokens"
