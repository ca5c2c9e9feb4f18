"""The data sets of the BEIR benchmark (Thakur et al. 2021), their splits and their names in TFDS."""

from __future__ import annotations

from typing import NamedTuple

from jaxir.core.errors import UserError, suggest

# The twelve collections of CQADupStack, whose score is the mean of the collections' scores.
CQADUPSTACK = (
    *("android", "english", "gaming", "gis", "mathematica", "physics", "programmers", "stats", "tex", "unix"),
    *("webmasters", "wordpress"),
)


class BeirSet(NamedTuple):
    """One data set of BEIR.

    Attributes:
      splits: splits that have judgements.
      public: whether BEIR and TFDS distribute the set. Other sets are licensed by their owners; BEIR's wiki
        explains how to make their folders.
      parts: names of the set's collections, each with its own folder; empty if it is a single collection.
    """

    splits: tuple[str, ...]
    public: bool = True
    parts: tuple[str, ...] = ()


MSMARCO = BeirSet(("train", "dev", "test"))

# The 18 sets of zero-shot evaluation (Moiseev et al. 2023, table 2), by the names of BEIR's folders.
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
    """Returns the data set called `name`, such as "scifact", "cqadupstack/android" or "msmarco"."""
    known = {"msmarco": MSMARCO, **BEIR_SETS}
    whole, _, part = name.partition("/")
    if whole not in known:
        raise UserError(f"BEIR has no data set {name!r}{suggest(whole, known)}")
    parts = known[whole].parts
    if parts and part not in parts:
        raise UserError(
            f"{whole} has {len(parts)} parts: name one, such as {whole}/{parts[0]}{suggest(part, parts)}"
        )
    if part and not parts:
        raise UserError(f"BEIR's {whole} has no parts: name it {whole!r} rather than {name!r}")
    return known[whole]


def tfds_name(name: str) -> str:
    """Returns the TFDS name of a public set: "beir/cqadupstack.android" for "cqadupstack/android"."""
    if not beir_set(name).public:
        raise UserError(f"TFDS does not have BEIR's {name}, which its owner licenses: give a BEIR folder")
    return "beir/" + name.replace("/", ".").replace("-", "_")


def tfds_split(split: str) -> str:
    return {"dev": "validation"}.get(split, split)
