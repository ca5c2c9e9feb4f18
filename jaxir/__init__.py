"""jaxir: train, index, search and evaluate dual-encoder text retrievers with JAX.

The names below are imported when they are first used, so `import jaxir` costs nothing:

    from jaxir import DualEncoder
    encoder = DualEncoder.load("st:DIR")
    vectors = encoder.encode_passages(["a passage", "another"])
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxir.losses.in_batch import in_batch_softmax
    from jaxir.losses.pair import pair
    from jaxir.losses.samtone import samtone
    from jaxir.objectives.contrastive import Contrastive
    from jaxir.retrieval.dual_encoder import DualEncoder
    from jaxir.retrieval.embeddings import encode_corpus
    from jaxir.retrieval.exact import ExactIndex
    from jaxir.retrieval.index import Index, load_index
    from jaxir.retrieval.milvus_index import MilvusIndex
    from jaxir.retrieval.runs import read_run, write_run
    from jaxir.retrieval.scann_index import ScannIndex

_HOME = {
    "Contrastive": "jaxir.objectives.contrastive",
    "DualEncoder": "jaxir.retrieval.dual_encoder",
    "ExactIndex": "jaxir.retrieval.exact",
    "Index": "jaxir.retrieval.index",
    "MilvusIndex": "jaxir.retrieval.milvus_index",
    "ScannIndex": "jaxir.retrieval.scann_index",
    "encode_corpus": "jaxir.retrieval.embeddings",
    "in_batch_softmax": "jaxir.losses.in_batch",
    "load_index": "jaxir.retrieval.index",
    "pair": "jaxir.losses.pair",
    "read_run": "jaxir.retrieval.runs",
    "samtone": "jaxir.losses.samtone",
    "write_run": "jaxir.retrieval.runs",
}

__version__ = "0.1.0"
__all__ = [
    "Contrastive",
    "DualEncoder",
    "ExactIndex",
    "Index",
    "MilvusIndex",
    "ScannIndex",
    "__version__",
    "encode_corpus",
    "in_batch_softmax",
    "load_index",
    "pair",
    "read_run",
    "samtone",
    "write_run",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'jaxir' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(__all__))
