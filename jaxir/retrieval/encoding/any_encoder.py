"""Loads a text encoder, whichever kind of encoder its files hold."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

from jaxir.core.errors import UserError
from jaxir.interop import model_dir
from jaxir.models.quantized import Scheme
from jaxir.retrieval.encoding.text_encoder import DualEncoder

if TYPE_CHECKING:  # encoders of sparse weights import SciPy, which takes a tenth of the start of `encode`
    from jaxir.retrieval.encoding.hybrid_text_encoder import HybridEncoder
    from jaxir.retrieval.encoding.multi_vector_encoder import MultiVectorEncoder
    from jaxir.retrieval.encoding.sparse_text_encoder import SparseEncoder

    AnyEncoder: TypeAlias = DualEncoder | MultiVectorEncoder | SparseEncoder


def load_encoder(spec: str, *, weights: Scheme | None = None, **how: Any) -> AnyEncoder:
    """Returns the encoder `spec`: a `DualEncoder`, `MultiVectorEncoder` or `SparseEncoder`.

    Args:
      spec: the model's name.
      weights: how a dual encoder is quantised (see `DualEncoder.load`).
      **how: further arguments of the encoder's `load`.

    Raises:
      UserError: the model is of another kind or cannot be read, or `weights` is given and the model is not a
          dual encoder.
    """
    from jaxir.retrieval.encoding.multi_vector_encoder import MultiVectorEncoder
    from jaxir.retrieval.encoding.sparse_text_encoder import SparseEncoder

    others = {"multi_vector_encoder": MultiVectorEncoder, "sparse_encoder": SparseEncoder}
    if (kind := kind_of(spec)) not in others:
        return DualEncoder.load(spec, weights=weights, **how)
    if weights is not None:
        raise UserError(f"a {kind.replace('_', ' ')} is not quantised: leave out --weights")
    return others[kind].load(spec, **how)


def load_served(spec: str, *, weights: Scheme | None = None, **how: Any) -> AnyEncoder | HybridEncoder:
    """Like `load_encoder`, but opens a hybrid encoder with all its heads."""
    if weights is None and kind_of(spec) == "hybrid_encoder":
        from jaxir.retrieval.encoding.hybrid_text_encoder import HybridEncoder

        return HybridEncoder.load(spec, **how)
    return load_encoder(spec, weights=weights, **how)


def kind_of(spec: str) -> str | None:
    """Returns the kind of a model; None if it cannot be opened, so that `load` reports the error."""
    try:
        return model_dir.kind_of(spec)
    except UserError:
        return None
