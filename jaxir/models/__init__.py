"""Models that map token ids to vectors. Importing this package registers jaxir's backbones."""

from jaxir.models import bert, deberta, modernbert, t5, word_vectors

__all__ = ["bert", "deberta", "modernbert", "t5", "word_vectors"]
