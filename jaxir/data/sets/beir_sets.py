"""The data sets of the BEIR benchmark (Thakur et al. 2021): which judgements each has, and where from."""

from __future__ import annotations

from typing import NamedTuple

from jaxir.core.errors import UserError, suggest

# CQADupStack is twelve collections; its figure is the mean of theirs.
CQADUPSTACK = (
    "android",
    "english",
    "gaming",
    "gis",
    "mathematica",
    "physics",
    "programmers",
    "stats",
    "tex",
    "unix",
    "webmasters",
    "wordpress",
)


class BeirSet(NamedTuple):
    """One set.

    Attributes:
      splits: splits that have judgements.
      public: whether BEIR and TFDS distribute it. The others are licensed by their owners: make the folder
        yourself, as BEIR's wiki says.
      parts: its collections, each a folder of its own; empty where it is one.
    """

    splits: tuple[str, ...]
    public: bool = True
    parts: tuple[str, ...] = ()


MSMARCO = BeirSet(("train", "dev", "test"))

# The 18 sets of zero-shot evaluation, by the names of BEIR's folders (Moiseev et al. 2023, table 2, has all).
BEIR_SETS = {
    "arguana": BeirSet(("test",)),
    "bioasq": BeirSet(("train", "test"), public=False),
    "climate-fever": BeirSet(("test",)),
    "cqadupstack": BeirSet(("test",), parts=CQADUPSTACK),
    "dbpedia-entity": BeirSet(("dev", "test")),
    "fever": BeirSet(("train", "dev", "test")),
    "fiqa": BeirSet(("train", "dev", "test")),
    "hotpotqa": BeirSet(("train", "dev", "test")),
    "nfcorpus": BeirSet(("train", "dev", "test")),
    "nq": BeirSet(("test",)),
    "quora": BeirSet(("dev", "test")),
    "robust04": BeirSet(("test",), public=False),
    "scidocs": BeirSet(("test",)),
    "scifact": BeirSet(("train", "test")),
    "signal1m": BeirSet(("test",), public=False),
    "trec-covid": BeirSet(("test",)),
    "trec-news": BeirSet(("test",), public=False),
    "webis-touche2020": BeirSet(("test",)),
}


def beir_set(name: str) -> BeirSet:
    """Returns the set `name`: "scifact", "cqadupstack/android", "msmarco".

    Raises:
      UserError: BEIR has no such set, or the set's parts have to be named.
    """
    known = {"msmarco": MSMARCO, **BEIR_SETS}
    whole, _, part = name.partition("/")
    if whole not in known:
        raise UserError(f"BEIR has no data set {name!r}{suggest(whole, known)}")
    parts = known[whole].parts
    if parts and part not in parts:
        raise UserError(
            f"{whole} is {len(parts)} collections: name one, such as {whole}/{parts[0]}{suggest(part, parts)}"
        )
    if part and not parts:
        raise UserError(f"BEIR's {whole} is one collection: there is no {name!r}")
    return known[whole]


def tfds_name(name: str) -> str:
    """Returns what TFDS calls a public set: "beir/cqadupstack.android" for "cqadupstack/android".

    Raises:
      UserError: there is no such set, or TFDS does not have it because its owner licenses it.
    """
    if not beir_set(name).public:
        raise UserError(f"TFDS does not have BEIR's {name}: its owner licenses it; give a BEIR folder")
    return "beir/" + name.replace("/", ".").replace("-", "_")


def tfds_split(split: str) -> str:
    """Returns what TFDS calls a split: "validation" for "dev"."""
    return {"dev": "validation"}.get(split, split)
