"""NanoBEIR: 13 small collections, each of 50 queries and some thousand documents of a set of BEIR."""

from __future__ import annotations

from collections.abc import Sequence

from jaxir.core.errors import UserError, suggest
from jaxir.data.formats.beir_folder import BeirFolder
from jaxir.evaluation.collection import Collection, read_collection

PLACE = "hf:sentence-transformers/NanoBEIR-en"
SETS = (
    *("ArguAna", "ClimateFEVER", "DBPedia", "FEVER", "FiQA2018", "HotpotQA", "MSMARCO", "NFCorpus", "NQ"),
    *("QuoraRetrieval", "SCIDOCS", "SciFact", "Touche2020"),
)


def read_nanobeir(
    place: str = PLACE, sets: Sequence[str] = SETS, *, strict: bool = False
) -> dict[str, Collection]:
    """Reads collections of NanoBEIR by their names without "Nano".

    Args:
      place: a data set of the hub with a part for each collection, such as a translation; the owner of a data
        set for each (hf:zeta-alpha-ai); or a local folder (hf:DIR) of either layout.
      sets: the names of the collections.
      strict: see `read_collection`.

    Raises:
      UserError: a name is not in `SETS`, or a collection cannot be read.
    """
    if unknown := [name for name in sets if name not in SETS]:
        raise UserError(
            f"NanoBEIR has no collection {unknown[0]!r} (has: {', '.join(SETS)}){suggest(unknown[0], SETS)}"
        )
    if not sets:
        raise UserError("sets is empty: give names of NanoBEIR's collections, or leave it out")
    place = place if place.startswith("hf:") else f"hf:{place}"
    found = {}
    for name in sets:
        folder = BeirFolder(f"{place}/Nano{name}")
        split = folder.splits[0] if len(folder.splits) == 1 else "test"  # a copy on the hub has only "train"
        found[name] = read_collection(folder.directory, split, strict=strict)
    return found
