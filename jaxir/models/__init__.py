"""Token ids to vectors. Importing this room registers the backbones that come with jaxir."""

from jaxir.models import bert, modernbert, t5, word_vectors

__all__ = ["bert", "modernbert", "t5", "word_vectors"]
