"""Token ids to vectors. Importing this room registers the backbones that come with jaxir."""

from jaxir.models import bert, deberta, modernbert, t5, word_vectors

__all__ = ["bert", "deberta", "modernbert", "t5", "word_vectors"]
