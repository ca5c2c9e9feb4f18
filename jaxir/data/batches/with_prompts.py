"""Training data that have their own prompts, such as an instruction for each data set of a mixture."""

from __future__ import annotations

import dataclasses

from jaxir.core.errors import UserError
from jaxir.core.features import Feature, Features, PromptTokens, Tokens
from jaxir.core.values import checked
from jaxir.data.batches.dataset import Dataset
from jaxir.data.batches.text_data import TextData
from jaxir.data.formats.lines import OnBadInput
from jaxir.data.text.tokenizer import Tokenizer

_FIELDS = {"query": "query", "passage": "passage", "negatives": "passage"}  # field -> side of its prompt


@dataclasses.dataclass(frozen=True, kw_only=True)
@checked
class WithPrompts(TextData):
    """Pairs whose queries and passages get other prompts than the model's.

    The maximum lengths include the prompt's tokens. If pooling leaves out the model's prompts, it leaves out
    as many tokens as each set's prompt has (as in NV-Embed, Lee et al. 2024).

    Attributes:
      data: the pairs, such as BeirPairs(...), or a mixture.
      query_prompt: text put before each query; None: the model's prompt.
      passage_prompt: text put before each passage and negative; None: the model's prompt.
    """

    data: TextData
    query_prompt: str | None = None
    passage_prompt: str | None = None

    def dataset(self, tokenizer: Tokenizer, features: Features, on_bad_input: OnBadInput) -> Dataset:
        """Builds the dataset of `data` with these prompts.

        Raises:
          UserError: the objective reads other texts than queries, passages and negatives.
        """
        dataset = self.data.dataset(tokenizer, self.prompted(features, tokenizer), on_bad_input)
        dataset.own_prompts = True
        return dataset

    def prompted(self, features: Features, tokenizer: Tokenizer) -> Features:
        """Returns an objective's features with these prompts."""
        return {name: self._with_prompt(feature, tokenizer) for name, feature in features.items()}

    def _with_prompt(self, feature: Feature, tokenizer: Tokenizer) -> Feature:
        if not isinstance(feature, Tokens | PromptTokens):
            return feature
        if feature.field not in _FIELDS:
            raise UserError(
                f"WithPrompts is for queries and passages, but the objective reads the field"
                f" {feature.field!r}: give its prompt to the model, and the data without WithPrompts"
            )
        prompt = getattr(self, f"{_FIELDS[feature.field]}_prompt")
        if prompt is None:
            return feature
        if isinstance(feature, PromptTokens):
            return dataclasses.replace(feature, value=tokenizer.prompt_length(prompt))
        return dataclasses.replace(feature, prompt=prompt)
