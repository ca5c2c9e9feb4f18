"""Token ids to vectors. Importing this room registers the backbones that come with jaxir."""

from jaxir.models import bert, t5

__all__ = ["bert", "t5"]
