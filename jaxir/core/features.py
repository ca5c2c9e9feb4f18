"""What a batch holds: which field of an example becomes which array.

An objective says it, once, in its `features`; data sources, mixtures, prepared arrays, the stand-in batch of
a plan and the dev data follow. An example is a record with named fields: a text is a pair (id, text), and
there are numbers, and lists of either. All lists of a record run in parallel: item i of each belongs to item
i of the others (a hard negative and its score, say), and one draw serves them all.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np

from jaxir.core.errors import UserError

Record = Mapping[str, Any]
# Arrays of token ids hold 0 after the last token of a text. A text may also spell out the tokenizer's padding
# token ("[PAD]"), which is a token like any other: arrays hold this number for it, and models read row 0 of
# their table there. So `ids != 0` is true at every token of a text and nowhere else.
PADDING_TOKEN = -1
_LISTS = (list, tuple, Sequence)  # the usual ones first: to ask whether it is a Sequence takes longer
_NUMBERS = (float, int)
_LARGEST = float(np.finfo(np.float32).max)
# What a cross-encoder reads: a query and a passage; an expanded query by itself (EAR's retrieval-independent
# reranker); or an expanded query and the first passage that it finds (the retrieval-dependent one).
Reads = Literal["pair", "expanded_query", "expanded_query_and_passage"]


@dataclasses.dataclass(frozen=True)
class TextFormat:
    """How long texts may be and what stands before them, as a model wants it.

    Attributes:
      query_length: most tokens of a query.
      passage_length: most tokens of a passage, a negative, or a text that is neither.
      num_negatives: negatives of an example in a batch.
      query_prompt: put before each query, as the encoder will.
      passage_prompt: put before each passage and negative.
      mask_id: the id of the tokenizer's mask token; None where it has none.
      vocabulary: tells which token has which id (`Tokenizer.vocabulary`); None where that is not known.
      reads: what a cross-encoder reads.
    """

    query_length: int
    passage_length: int
    num_negatives: int = 0
    query_prompt: str = ""
    passage_prompt: str = ""
    mask_id: int | None = None
    vocabulary: str | None = None
    reads: Reads = "pair"

    def __post_init__(self):
        if self.num_negatives < 0:
            raise UserError(f"num_negatives must be 0 or more, got {self.num_negatives}")

    def need_mask(self) -> int:
        """Returns the id of the mask token; raises a UserError where there is none."""
        if self.mask_id is None:
            raise UserError("this objective masks tokens, but the model's tokenizer has no mask token")
        return self.mask_id


@dataclasses.dataclass(frozen=True)
class Tokens:
    """Token ids of a text: int32 [length], or [count, length] of a list of texts; 0 is padding.

    A padding token that the text itself spells out is `PADDING_TOKEN`.

    Attributes:
      field: the field of the record.
      length: most tokens of a text.
      prompt: put before each text.
      count: of a list, how many texts; None for a single text. In training each epoch has its own order. It
        draws some of a longer list, and repeats those of a shorter one. An evaluation keeps the record's
        order and refuses a list of another length, unless the evaluator lets items be drawn
        (`Bench.examples`).
      among: which texts are known together: of one id, only one is kept. By default those of the field.
      unlike: another field: texts of the list that have the very tokens of that one's are left out while
        there are others. One that must stay has that text's key.
    """

    field: str
    length: int
    prompt: str = ""
    count: int | None = None
    among: str = ""
    unlike: str | None = None

    @property
    def table(self) -> str:
        """The name of the texts that are known together."""
        return self.among or self.field

    @property
    def shape(self) -> tuple[int, ...]:
        """Of one example."""
        return (self.length,) if self.count is None else (self.count, self.length)

    dtype = np.dtype(np.int32)


@dataclasses.dataclass(frozen=True)
class Key:
    """What tells a text by its id: two int32, a hash; the losses compare them. [2], or [count, 2] of a list.

    Attributes:
      field: the field of the record, a text that is also read as `Tokens`.
      count: of a list, as of its tokens; None for a single text.
    """

    field: str
    count: int | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """Of one example."""
        return (2,) if self.count is None else (self.count, 2)

    dtype = np.dtype(np.int32)


@dataclasses.dataclass(frozen=True)
class Numbers:
    """A number, or as many of a list: float32 [], or [count].

    Attributes:
      field: the field of the record.
      count: of a list, how many; None for a single number.
    """

    field: str
    count: int | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """Of one example."""
        return () if self.count is None else (self.count,)

    dtype = np.dtype(np.float32)


class TokenCounts(NamedTuple):
    """How often each token comes in the texts of a field, but for the special ones at both ends.

    Attributes:
      texts: how many different texts there are.
      texts_with: int64 [V], how many of them have the token.
      occurrences: int64 [V], how often it comes in all of them.
    """

    texts: int
    texts_with: np.ndarray
    occurrences: np.ndarray


Feature = Tokens | Key | Numbers
Features = Mapping[str, Feature]


def fields_of(features: Features) -> dict[str, Tokens | Numbers]:
    """Returns what is read of each field, in order: its tokens or its numbers.

    Raises:
      ValueError: two features want different things of one field, or a key has no tokens beside it.
      UserError: one is something else.
    """
    found: dict[str, Tokens | Numbers] = {}
    for name, feature in features.items():
        if not isinstance(feature, Tokens | Numbers | Key):
            told = f"Tokens, Numbers or Key of jaxir.core.features, not {type(feature).__name__}"
            raise UserError(f"feature {name!r} must be a {told}")
    for feature in features.values():
        if not isinstance(feature, Key) and found.setdefault(feature.field, feature) != feature:
            raise ValueError(f"{feature} and {found[feature.field]} read one field")
    for name, feature in features.items():
        if isinstance(feature, Key):
            tokens = found.get(feature.field)
            if not isinstance(tokens, Tokens) or tokens.count != feature.count:
                raise ValueError(f"feature {name!r}: {feature} has no tokens of the same texts beside it")
    return found


def check_record(record: Record, fields: Mapping[str, Tokens | Numbers], number: int) -> None:
    """Checks that a record has what is read of it, as texts, finite numbers or lists of them.

    Args:
      record: the record.
      fields: what is read, as `fields_of` gives it.
      number: which example it is, from 0.

    Raises:
      UserError: it lacks a field, or has another kind of value in it.
    """
    # On the path of millions of records: what is right is passed by quickly.
    if not isinstance(record, Mapping):
        raise UserError(
            f"example {number} must be a dict of fields, such as {{{next(iter(fields))!r}: ...}},"
            f" but found {_described(record)}"
        )
    for name, field in fields.items():
        if name not in record:
            which = f"example {number} has" if number else "the data have"
            raise UserError(
                f"the objective reads the field {name!r}, but {which} only {', '.join(map(str, record))}"
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
    """Returns a value as an error shows it, and what it is if that is a string, a tuple or a list."""
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
    return isinstance(value, _NUMBERS) and -_LARGEST <= value <= _LARGEST  # and no nan
