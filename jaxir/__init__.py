"""jaxir: train, index, search and evaluate dual-encoder text retrievers with JAX.

The names below are imported when they are first used, so that `import jaxir` is fast:

    from jaxir import DualEncoder, Pairs, fit
    encoder = fit("st:sentence-transformers/all-MiniLM-L6-v2", Pairs.read("faq.csv"))
    encoder.save("model")
    vectors = DualEncoder.load("model").encode_passages(["a passage", "another"])
"""

import atexit
import gc
import importlib
from typing import TYPE_CHECKING, Any

from jaxir.version import __version__ as __version__

if TYPE_CHECKING:
    from jaxir.data.sets.own_pairs import Pairs as Pairs
    from jaxir.interop.build import FromScratch as FromScratch
    from jaxir.interop.build import Pretrained as Pretrained
    from jaxir.interop.build import PretrainedCrossEncoder as PretrainedCrossEncoder
    from jaxir.interop.build import PretrainedHybrid as PretrainedHybrid
    from jaxir.interop.build import PretrainedMultiVector as PretrainedMultiVector
    from jaxir.interop.build import PretrainedSeq2Seq as PretrainedSeq2Seq
    from jaxir.losses.in_batch import in_batch_softmax as in_batch_softmax
    from jaxir.losses.pair import pair as pair
    from jaxir.losses.samtone import samtone as samtone
    from jaxir.models.decoding import Decoding as Decoding
    from jaxir.objectives.contrastive import Contrastive as Contrastive
    from jaxir.objectives.seq2seq import Seq2Seq as Seq2Seq
    from jaxir.retrieval.encoding.embeddings import encode_corpus as encode_corpus
    from jaxir.retrieval.encoding.generator import Generator as Generator
    from jaxir.retrieval.encoding.hybrid_text_encoder import HybridEncoder as HybridEncoder
    from jaxir.retrieval.encoding.multi_vector_encoder import MultiVectorEncoder as MultiVectorEncoder
    from jaxir.retrieval.encoding.pair_scorer import CrossEncoder as CrossEncoder
    from jaxir.retrieval.encoding.sparse_text_encoder import SparseEncoder as SparseEncoder
    from jaxir.retrieval.encoding.text_encoder import DualEncoder as DualEncoder
    from jaxir.retrieval.encoding.vector_forms import quantize_embeddings as quantize_embeddings
    from jaxir.retrieval.encoding.weights_file import encode_weights as encode_weights
    from jaxir.retrieval.indexes.base_index import Index as Index
    from jaxir.retrieval.indexes.base_index import load_index as load_index
    from jaxir.retrieval.indexes.exact import ExactIndex as ExactIndex
    from jaxir.retrieval.indexes.milvus_index import MilvusIndex as MilvusIndex
    from jaxir.retrieval.indexes.pgvector_index import PgvectorIndex as PgvectorIndex
    from jaxir.retrieval.indexes.qdrant_index import QdrantIndex as QdrantIndex
    from jaxir.retrieval.indexes.scann_index import ScannIndex as ScannIndex
    from jaxir.retrieval.ranking.runs import read_run as read_run
    from jaxir.retrieval.ranking.runs import write_run as write_run
    from jaxir.training.fit import fit as fit
    from jaxir.training.step.optimizers import Adafactor as Adafactor
    from jaxir.training.step.optimizers import AdamW as AdamW

_NAMES = {
    "data.sets.own_pairs": "Pairs",
    "interop.build": "FromScratch Pretrained PretrainedCrossEncoder PretrainedHybrid"
    " PretrainedMultiVector PretrainedSeq2Seq",
    "losses.in_batch": "in_batch_softmax",
    "losses.pair": "pair",
    "losses.samtone": "samtone",
    "models.decoding": "Decoding",
    "objectives.contrastive": "Contrastive",
    "objectives.seq2seq": "Seq2Seq",
    "retrieval.encoding.embeddings": "encode_corpus",
    "retrieval.encoding.generator": "Generator",
    "retrieval.encoding.hybrid_text_encoder": "HybridEncoder",
    "retrieval.encoding.multi_vector_encoder": "MultiVectorEncoder",
    "retrieval.encoding.pair_scorer": "CrossEncoder",
    "retrieval.encoding.sparse_text_encoder": "SparseEncoder",
    "retrieval.encoding.text_encoder": "DualEncoder",
    "retrieval.encoding.vector_forms": "quantize_embeddings",
    "retrieval.encoding.weights_file": "encode_weights",
    "retrieval.indexes.base_index": "Index load_index",
    "retrieval.indexes.exact": "ExactIndex",
    "retrieval.indexes.milvus_index": "MilvusIndex",
    "retrieval.indexes.pgvector_index": "PgvectorIndex",
    "retrieval.indexes.qdrant_index": "QdrantIndex",
    "retrieval.indexes.scann_index": "ScannIndex",
    "retrieval.ranking.runs": "read_run write_run",
    "training.fit": "fit",
    "training.step.optimizers": "Adafactor AdamW",
}
_SUBMODULES = ("losses", "mteb")  # imported on first use, such as `jaxir.losses.samtone`
_HOME = {name: f"jaxir.{module}" for module, names in _NAMES.items() for name in names.split()}

__all__ = sorted((*_HOME, "__version__"))


def __getattr__(name: str) -> Any:
    if name in _SUBMODULES:
        return _imported(f"jaxir.{name}")
    if name not in _HOME:
        raise AttributeError(f"module 'jaxir' has no attribute {name!r}")
    return getattr(_imported(_HOME[name]), name)


def _imported(module: str) -> Any:
    """Imports a module without collecting garbage, which would take an eighth of the time."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        return importlib.import_module(module)
    finally:
        if collecting:
            gc.enable()


atexit.register(gc.freeze)  # Python's last collections would take 0.2 s


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(__all__))
