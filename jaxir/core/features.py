"""The features of a batch: which field of an example becomes which array.

An objective declares them in its `features`, and every dataset builds its batches from them. An example is a
record with named fields: texts, each a pair (id, text), numbers, and lists of either. All lists of a record
are parallel: item i of one belongs to item i of the others, such as a hard negative and its score.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal, NamedTuple

import numpy as np

from jaxir.core.errors import UserError

Record = Mapping[str, Any]
# Arrays of token ids hold 0 after the last token of a text, so `ids != 0` is true only at its tokens.
# Where the text itself contains the padding token "[PAD]", the arrays hold this number instead of 0, and
# models read row 0 of their embedding table.
PADDING_TOKEN = -1
_LISTS = (list, tuple, Sequence)  # Sequence last, because it is slow to check
_NUMBERS = (float, int)
_LARGEST = float(np.finfo(np.float32).max)  # larger numbers do not fit into a batch's float32
# The texts that a cross-encoder reads. EAR's retrieval-independent reranker reads "expanded_query". EAR's
# retrieval-dependent reranker also reads the first passage that the expanded query finds.
Reads = Literal["pair", "expanded_query", "expanded_query_and_passage"]


@dataclasses.dataclass(frozen=True)
class TextFormat:
    """The lengths and prompts of a model's texts.

    Attributes:
      query_length: maximum number of tokens per query.
      passage_length: maximum number of tokens per passage, negative, or any other text.
      num_negatives: number of hard negatives per example in a batch.
      query_prompt: text put before each query.
      passage_prompt: text put before each passage and negative.
      prompt_tokens: number of tokens of the query prompt and of the passage prompt that pooling leaves out;
        None: pooling reads prompts like other tokens.
      mask_id: the id of the tokenizer's mask token; None if it has none.
      vocabulary: a hash of the tokens and their ids (`Tokenizer.vocabulary`); None if unknown.
      reads: which texts a cross-encoder reads.
    """

    query_length: int
    passage_length: int
    num_negatives: int = 0
    query_prompt: str = ""
    passage_prompt: str = ""
    prompt_tokens: tuple[int, int] | None = None
    mask_id: int | None = None
    vocabulary: str | None = None
    reads: Reads = "pair"

    def need_mask(self) -> int:
        """Returns the id of the mask token; raises a UserError if the tokenizer has none."""
        if self.mask_id is None:
            raise UserError(
                "this objective masks tokens, but the model's tokenizer has no mask token: use a model with"
                " one, such as BERT, or another objective"
            )
        return self.mask_id


@dataclasses.dataclass(frozen=True)
class Tokens:
    """Token ids of a text, int32 [length], or of a list of texts, [count, length]; 0 is padding.

    A padding token that the text itself contains is `PADDING_TOKEN`.

    Attributes:
      field: the field of the record.
      length: maximum number of tokens per text.
      prompt: text put before each text.
      count: number of texts taken from a list; None for a single text. Each training epoch shuffles the list:
        it draws from a longer list and repeats a shorter one. An evaluation keeps the record's order and
        refuses a list of another length, unless the evaluator allows drawing (`Bench.examples`).
      among: the table that stores texts with the same id once; by default a table of only this field.
      unlike: another field. Texts of the list whose tokens equal that field's text are left out while other
        texts remain. If one has to stay, it gets the key of that field's text.
    """

    field: str
    length: int
    prompt: str = ""
    count: int | None = None
    among: str = ""
    unlike: str | None = None

    @property
    def table(self) -> str:
        """The name of the table that stores texts with the same id once."""
        return self.among or self.field

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape for one example."""
        return (self.length,) if self.count is None else (self.count, self.length)

    dtype = np.dtype(np.int32)


@dataclasses.dataclass(frozen=True)
class Key:
    """A hash of a text's id, which losses compare: int32 [2], or [count, 2] for a list.

    Attributes:
      field: the field of the record, which must also be read as `Tokens`.
      count: the `count` of that field's `Tokens`.
    """

    field: str
    count: int | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape for one example."""
        return (2,) if self.count is None else (self.count, 2)

    dtype = np.dtype(np.int32)


@dataclasses.dataclass(frozen=True)
class Numbers:
    """A number, float32 [], or numbers of a list, [count].

    Attributes:
      field: the field of the record.
      count: number of values taken from a list; None for a single number.
    """

    field: str
    count: int | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape for one example."""
        return () if self.count is None else (self.count,)

    dtype = np.dtype(np.float32)


@dataclasses.dataclass(frozen=True)
class PromptTokens:
    """Number of tokens at the start of a text that pooling leaves out: int32 [], the same for all examples.

    Attributes:
      field: the field of the record, which must also be read as `Tokens`.
      value: the number of tokens of its prompt (`Tokenizer.prompt_length`).
    """

    field: str
    value: int

    count: ClassVar[None] = None
    shape: ClassVar[tuple[int, ...]] = ()
    dtype = np.dtype(np.int32)


class TokenCounts(NamedTuple):
    """Counts of each token in the texts of a field, without the special tokens at both ends.

    Attributes:
      texts: the number of different texts.
      texts_with: int64 [V], the number of texts that contain the token.
      occurrences: int64 [V], the token's occurrences in all texts.
    """

    texts: int
    texts_with: np.ndarray
    occurrences: np.ndarray


Feature = Tokens | Key | Numbers | PromptTokens
Features = Mapping[str, Feature]


def fields_of(features: Features) -> dict[str, Tokens | Numbers]:
    """Returns how each field is read, in order: as tokens or as numbers.

    Raises:
      ValueError: two features read one field differently, or the field of a key or of a prompt's length is
        not read as tokens.
    """
    found: dict[str, Tokens | Numbers] = {}
    for name, feature in features.items():
        if not isinstance(feature, Feature):
            kinds = "Tokens, Numbers, Key or PromptTokens of jaxir.core.features"
            raise UserError(f"feature {name!r} must be a {kinds}, not {type(feature).__name__}")
    for feature in features.values():
        if isinstance(feature, Tokens | Numbers) and found.setdefault(feature.field, feature) != feature:
            raise ValueError(
                f"{feature} and {found[feature.field]} read the same field differently: give both the same"
                " settings"
            )
    for name, feature in features.items():
        if isinstance(feature, Key | PromptTokens):
            tokens = found.get(feature.field)
            if not isinstance(tokens, Tokens) or tokens.count != feature.count:
                raise ValueError(
                    f"feature {name!r}: {feature} needs a `Tokens` feature with the same field and count"
                )
    return found


def check_record(record: Record, fields: Mapping[str, Tokens | Numbers], number: int) -> None:
    """Checks that example `number`, from 0, has all `fields` that are read, with valid values.

    This function runs for millions of records, so it is fast for valid values.
    """
    if not isinstance(record, Mapping):
        raise UserError(
            f"example {number} must be a dict of fields, such as {{{next(iter(fields))!r}: ...}},"
            f" but found {_described(record)}"
        )
    for name, field in fields.items():
        if name not in record:
            which = f"example {number} has" if number else "the data have"
            raise UserError(
                f"the objective reads the field {name!r}, but {which} only {', '.join(map(str, record))}:"
                " give other data"
            )
        value = record[name]
        is_right = _is_text if isinstance(field, Tokens) else _is_number
        if field.count is None:
            if not is_right(value):
                raise _of_another_kind(name, field, _described(value), number)
        elif isinstance(value, str) or not isinstance(value, _LISTS) or _is_text(value):
            raise _of_another_kind(name, field, _described(value), number)
        elif not all(map(is_right, value)):
            wrong = next(item for item in value if not is_right(item))
            raise _of_another_kind(name, field, f"{_described(wrong)} in the list", number)


def _of_another_kind(name: str, field: Tokens | Numbers, found: str, number: int) -> UserError:
    kind = "text" if isinstance(field, Tokens) else "finite number"
    wanted = f"a {kind}" if field.count is None else f"a list of {kind}s"
    meant = "; a text is a tuple of two strings, (id, text)" if isinstance(field, Tokens) else ""
    return UserError(
        f"example {number}: the objective reads {wanted} in the field {name!r}, but found {found}{meant}"
    )


def _described(value: Any) -> str:
    """Returns a value for an error message, with its kind if it is a string, a tuple or a list."""
    names = {str: "a string", bytes: "bytes", type(None): "None", int: "an integer", float: "a number"}
    if isinstance(value, str):
        return f"{value!r:.60}, a string"
    if not isinstance(value, tuple | list):
        return f"{value!r:.60}"
    items = [names.get(type(item), type(item).__name__) for item in value[:3]]
    items += ["..."] if len(value) > 3 else []
    return f"{value!r:.60}, a {type(value).__name__} of {' and '.join(items) or 'nothing'}"


def _is_text(value: Any) -> bool:
    return (
        isinstance(value, tuple)
        and len(value) == 2
        and isinstance(value[0], str)
        and isinstance(value[1], str)
    )


def _is_number(value: Any) -> bool:
    return isinstance(value, _NUMBERS) and -_LARGEST <= value <= _LARGEST  # the comparison is False for NaN
