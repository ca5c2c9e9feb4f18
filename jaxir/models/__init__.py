"""Token ids to vectors. Importing this package registers the backbones that jaxir has."""

from jaxir.models import bert, deberta, modernbert, t5, word_vectors

__all__ = ["bert", "deberta", "modernbert", "t5", "word_vectors"]
