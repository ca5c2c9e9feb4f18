"""How texts become a model's inputs: lengths and prompts."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

from jaxir.core.errors import UserError
from jaxir.core.features import Reads, TextFormat
from jaxir.core.values import Count, checked
from jaxir.data.text.tokenizer import Tokenizer

_QUERY_OF_A_PAIR = 64  # default maximum number of tokens per query of a pair
_OF_A_TARGET = 64  # default maximum number of tokens per target text of a generator


@dataclasses.dataclass(frozen=True, kw_only=True)
@checked
class EncoderSettings:
    """How texts become a model's inputs.

    For a generator, the passage's fields apply to the source text that it reads, and the query's fields to
    the target text that it learns to write.

    Attributes:
      query_max_length: maximum number of tokens per query, special tokens included.
      passage_max_length: maximum number of tokens per passage, special tokens included.
      query_prompt: text put before each query.
      passage_prompt: text put before each passage.
      reads: which texts a cross-encoder reads (`features.Reads`).
      named_prompts: prompts by name, from the sentence-transformers folder that the model came from. They are
        only kept to write that folder again; `query_prompt` and `passage_prompt` are used.
      default_prompt_name: the sentence-transformers folder's default prompt, a key of `named_prompts`.
      pools_prompts: whether pooling in the sentence-transformers folder includes the tokens of prompts
        (`include_prompt`).
    """

    query_max_length: Count
    passage_max_length: Count
    query_prompt: str = ""
    passage_prompt: str = ""
    reads: Reads = "pair"
    named_prompts: Mapping[str, str] = dataclasses.field(default_factory=dict, hash=False)
    default_prompt_name: str | None = None
    pools_prompts: bool = True

    @classmethod
    def of_pairs(cls, max_length: int) -> EncoderSettings:
        """Returns a cross-encoder's settings, given only the maximum number of tokens per pair."""
        query = min(_QUERY_OF_A_PAIR, max_length // 2)
        return cls(query_max_length=query, passage_max_length=max_length - query)

    @classmethod
    def of_generator(cls, source_length: int) -> EncoderSettings:
        """Returns a generator's settings, given only the maximum number of tokens per source text."""
        return cls(query_max_length=_OF_A_TARGET, passage_max_length=source_length)

    def of_tower(self, tower: Literal["query", "passage"]) -> tuple[str, int]:
        """Returns (prompt, maximum length in tokens) of a tower."""
        if tower == "query":
            return self.query_prompt, self.query_max_length
        return self.passage_prompt, self.passage_max_length

    def describe(self) -> dict[str, Any]:
        """Returns the fields as JSON values; omits a folder's prompts if they have their defaults."""
        fields = dataclasses.asdict(self)
        of_folder = {"named_prompts": {}, "default_prompt_name": None, "pools_prompts": True}
        return {n: v for n, v in fields.items() if n not in of_folder or v != of_folder[n]}

    def prompt_named(self, name: str, spec: str) -> str:
        """Returns the folder's prompt `name`; if there is none, raises a UserError that begins with `spec`.

        As in sentence-transformers, each model has a prompt for queries and one for documents, even if empty.
        """
        prompts = {"query": self.query_prompt, "document": self.passage_prompt, **self.named_prompts}
        if name not in prompts:
            known = ", ".join(map(repr, prompts))
            raise UserError(
                f"{spec} has no prompt named {name!r}; it has {known}: choose one of them, or leave it out"
            )
        return prompts[name]

    @property
    def unused_prompts(self) -> dict[str, str]:
        """The named prompts that are put before neither queries nor passages."""
        used = ("", self.query_prompt, self.passage_prompt)
        return {name: text for name, text in self.named_prompts.items() if text not in used}

    @property
    def pair_max_length(self) -> int:
        """The maximum number of tokens that a cross-encoder reads as one sequence."""
        if self.reads == "expanded_query":
            return self.query_max_length
        return self.query_max_length + self.passage_max_length

    def text_format(
        self,
        num_negatives: int = 0,
        *,
        prompt_tokens: tuple[int, int] = (0, 0),
        mask_id: int | None = None,
        vocabulary: str | None = None,
    ) -> TextFormat:
        """Returns how texts become token arrays, given attributes of a tokenizer and its prompts' tokens."""
        return TextFormat(
            query_length=self.query_max_length,
            passage_length=self.passage_max_length,
            num_negatives=num_negatives,
            query_prompt=self.query_prompt,
            passage_prompt=self.passage_prompt,
            prompt_tokens=None if self.pools_prompts else prompt_tokens,
            mask_id=mask_id,
            vocabulary=vocabulary,
            reads=self.reads,
        )

    def text_format_of(self, tokenizer: Tokenizer | None, num_negatives: int = 0) -> TextFormat:
        """Returns `text_format` with the mask id and vocabulary of `tokenizer`, if it has them."""
        of_tokens = {name: getattr(tokenizer, name, None) for name in ("mask_id", "vocabulary")}
        if not (self.pools_prompts or tokenizer is None):
            prompts = self.query_prompt, self.passage_prompt
            of_tokens["prompt_tokens"] = tuple(map(tokenizer.prompt_length, prompts))
        return self.text_format(num_negatives, **of_tokens)
