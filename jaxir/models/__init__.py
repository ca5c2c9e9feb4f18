"""Models that map token ids to vectors. Importing this package registers jaxir's backbones."""

from jaxir.models import (
    bert,
    deberta,
    embedding_gemma,
    gemma,
    llama,
    modernbert,
    mpnet,
    rope_bert,
    t5,
    word_vectors,
)

__all__ = [
    "bert",
    "deberta",
    "embedding_gemma",
    "gemma",
    "llama",
    "modernbert",
    "mpnet",
    "rope_bert",
    "t5",
    "word_vectors",
]
