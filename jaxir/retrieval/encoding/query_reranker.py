"""`QueryReranker`: predicts how well expanded queries will retrieve (EAR)."""

from collections.abc import Sequence
from typing import ClassVar

import numpy as np

from jaxir.core.features import Reads
from jaxir.data.text.pair_tokenizer import TokenPair
from jaxir.retrieval.encoding.pair_scorer import CrossEncoder


class QueryReranker(CrossEncoder):
    """Scores expanded queries (Chuang 2024, section 3.3), like `CrossEncoder` scores pairs.

    The retrieval-independent reranker reads [CLS] question ? expansion [SEP]. The retrieval-dependent one
    also reads the first passage that the query finds. Both take pairs (query, passage); the former ignores
    the passage.
    """

    kinds: ClassVar[tuple[Reads, ...]] = ("expanded_query", "expanded_query_and_passage")
    others_use: ClassVar[str] = "use it with python -m jaxir.rerank; it cannot rerank queries"

    @property
    def reads_passages(self) -> bool:
        """Whether the reranker is retrieval-dependent: it also reads the first passage found."""
        return self.settings.reads == "expanded_query_and_passage"

    def tokens(self, pairs: Sequence[tuple[str, str]]) -> list[TokenPair]:
        if self.reads_passages:
            return super().tokens(pairs)
        texts = [self.settings.query_prompt + query for query, _ in pairs]
        rows = self.texts.encode_batch(texts, max_length=self.max_length)
        return [TokenPair(row, np.zeros_like(row)) for row in rows]
