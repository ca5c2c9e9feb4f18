"""Pure functions that map arrays (embeddings, keys) to a scalar loss and a dict of scalar metrics.

Several functions have the names of their modules. In Python, `jaxir.losses.samtone` is the function: the
names below replace the modules as attributes of this package, whichever module is imported first. gin's
`from jaxir.losses import samtone` still imports the module, whose function is `@samtone.samtone`.
"""

from jaxir.losses._types import HybridVectors as HybridVectors
from jaxir.losses._types import TokenVectors as TokenVectors
from jaxir.losses.bce import bce as bce
from jaxir.losses.distillation import kl_distillation as kl_distillation
from jaxir.losses.distillation import margin_mse as margin_mse
from jaxir.losses.gist import gist as gist
from jaxir.losses.guide import Guide as Guide
from jaxir.losses.hinges import margin as margin
from jaxir.losses.hinges import triplet as triplet
from jaxir.losses.in_batch import in_batch_softmax as in_batch_softmax
from jaxir.losses.matryoshka import matryoshka as matryoshka
from jaxir.losses.maxsim import maxsim as maxsim
from jaxir.losses.maxsim import maxsim_of_lists as maxsim_of_lists
from jaxir.losses.nt_xent import nt_xent as nt_xent
from jaxir.losses.pair import pair as pair
from jaxir.losses.ranking import binary_cross_entropy as binary_cross_entropy
from jaxir.losses.ranking import list_softmax as list_softmax
from jaxir.losses.ranking import margin_ranking as margin_ranking
from jaxir.losses.ranking import rank_margin as rank_margin
from jaxir.losses.samtone import samtone as samtone
from jaxir.losses.self_distillation import self_distillation as self_distillation
from jaxir.losses.tokens import token_cross_entropy as token_cross_entropy
from jaxir.losses.word_distributions import js_softmax as js_softmax
from jaxir.losses.xtr import xtr as xtr

__all__ = [
    "Guide",
    "HybridVectors",
    "TokenVectors",
    "bce",
    "binary_cross_entropy",
    "gist",
    "in_batch_softmax",
    "js_softmax",
    "kl_distillation",
    "list_softmax",
    "margin",
    "margin_mse",
    "margin_ranking",
    "matryoshka",
    "maxsim",
    "maxsim_of_lists",
    "nt_xent",
    "pair",
    "rank_margin",
    "samtone",
    "self_distillation",
    "token_cross_entropy",
    "triplet",
    "xtr",
]
