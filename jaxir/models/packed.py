"""Several texts in each row of a batch, so that no token is padding and any texts fit the same few programs.

A position sees the positions of its own text only, and positions are counted from the start of each text.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxir.core.shapes import checked_shapes
from jaxir.models import stacks
from jaxir.models.bert import Bert
from jaxir.models.dual_encoder import EARLY_LAYERS, DualEncoderModel, Tower

SHORTEST = 8  # a batch has at most one text for each `SHORTEST` positions


def packs(model: DualEncoderModel, tower: Tower) -> bool:
    """Returns whether `encode` can compute this model's vectors: BERT's, pooled from the last layer."""
    encoder, config = model.encoder_of(tower), model.config
    plain = type(encoder) is Bert and not encoder.config.reserved_positions
    return plain and config.layers_from is None and not EARLY_LAYERS.keys() & set(config.poolings)


@checked_shapes
def encode(
    model: DualEncoderModel, ids: Int[Array, "B L"], texts: Int[Array, "B L"], *, tower: Tower
) -> Float[Array, "N D"]:
    """Embeds the texts of packed rows, like `DualEncoderModel.encode`.

    Args:
      model: a model for which `packs` is true.
      ids: token ids. A row holds whole texts, one after the other.
      texts: the number of each token's text in the batch, from 0 on, in the order of the tokens; -1 at
        padding.
      tower: the tower that reads the texts.

    Returns:
      float32 [B L / SHORTEST, D], the vector of each text by its number; further rows are undefined.
    """
    encoder, (rows, length) = model.encoder_of(tower), ids.shape
    columns = jnp.arange(length)[None]
    before = jnp.concatenate([jnp.full((rows, 1), -2, texts.dtype), texts[:, :-1]], 1)
    starts = jax.lax.cummax(jnp.where(texts != before, columns, 0), axis=1)
    # Padding has position 0, because a position outside the table gives NaN, and 0 * NaN is NaN.
    x = encoder.embed([ids], [None], positions=jnp.where(texts < 0, 0, columns - starts))
    same = texts[:, :, None] == texts[:, None, :]
    (hidden,) = stacks.run_stack(encoder.layers, x, [(same,)], remat=False, keys=[None], per_layer=())
    of_text = texts.reshape(1, -1) == jnp.arange(rows * length // SHORTEST)[:, None]  # [N, B L]
    places = jnp.argmax(of_text, axis=1)[:, None] + columns  # [N, L]
    mask = columns < of_text.sum(1)[:, None]
    hidden = hidden.reshape(rows * length, -1).at[places].get(mode="clip")
    return model._embedding(hidden, mask, tower, None)
