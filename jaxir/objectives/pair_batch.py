"""The features of a batch of pairs: names and shapes of the arrays of queries, passages and negatives."""

from __future__ import annotations

import dataclasses

from jaxir.core.features import Feature, Features, Key, PromptTokens, TextFormat, Tokens


def pair_features(form: TextFormat) -> dict[str, Feature]:
    """Returns the features of pairs.

    They are query_ids [Lq], passage_ids [Lp], query_key [2], passage_key [2], and with negatives negative_ids
    [N, Lp] and negative_key [N, 2]. A key is a hash of a text's id. If pooling leaves out prompts, there are
    query_prompt_tokens [] and passage_prompt_tokens [], too.
    """
    query = Tokens("query", form.query_length, form.query_prompt, among="queries")
    passage = Tokens("passage", form.passage_length, form.passage_prompt, among="passages")
    found: dict[str, Feature] = {"query_ids": query, "passage_ids": passage}
    found |= {"query_key": Key("query"), "passage_key": Key("passage")}
    if form.num_negatives:
        count = form.num_negatives
        negatives = dataclasses.replace(passage, field="negatives", count=count, unlike="passage")
        found |= {"negative_ids": negatives, "negative_key": Key("negatives", count)}
    if form.prompt_tokens is not None:
        for field, value in zip(("query", "passage"), form.prompt_tokens, strict=True):
            found[f"{field}_prompt_tokens"] = PromptTokens(field, value)
    return found


def pair_format(features: Features) -> TextFormat | None:
    """Returns the format for which `pair_features` returns `features`; None if no format does."""
    try:
        query, passage = features["query_ids"], features["passage_ids"]
        count = features["negative_ids"].count if "negative_ids" in features else 0
        left_out = [f.value for f in features.values() if isinstance(f, PromptTokens)]
        prompts = query.prompt, passage.prompt, tuple(left_out) or None
        form = TextFormat(query.length, passage.length, count, *prompts)
    except (KeyError, AttributeError):
        return None
    return form if pair_features(form) == dict(features) else None
