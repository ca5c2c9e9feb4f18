"""The settings that the configurations of all forms of sparse encoders share."""

from typing import Any, ClassVar, Literal

Score = Literal["dot", "cosine", "euclidean", "manhattan"]


class SparseConfig:
    """The base of the configurations of sparse encoders, each of which is one form.

    Each form has three fields. `max_active_dims` is the number of weights of a vector that are kept, the
    largest ones; None: all. `normalized` says whether vectors are scaled to length 1 before small weights are
    dropped; codes are scaled afterwards. `score` is how vectors are compared.

    Attributes:
      form: the name of the form in jaxir.json.
      of_tokens: whether each component of a vector is the weight of the token with its id.
      static_queries: whether queries get stored weights of their tokens, without running a model.
      active_dims: the number of weights of a vector that are kept unless a call gives another; None: all.
    """

    form: ClassVar[str] = "language_model"
    of_tokens: ClassVar[bool] = True
    static_queries: Any = False
    max_active_dims: Any = None
    score: Any = "dot"
    normalized: Any = False
    adapters: Any = None

    def stores_weights(self, tower: Literal["query", "passage"]) -> bool:
        """Whether texts of a tower get stored weights of their tokens, without running a model."""
        return tower == "query" and self.static_queries

    @property
    def active_dims(self) -> int | None:
        return self.max_active_dims
