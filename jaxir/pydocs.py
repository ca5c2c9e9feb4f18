"""Command: makes training and test data from the documentation of the installed packages."""

from __future__ import annotations

from jaxir import cli
from jaxir.storage.outputs import writes


@writes(output="directory")
def pydocs(*, output: str) -> None:
    """Writes the documentation of the installed Python packages as a BEIR folder.

    Each documented function, class and module of the standard library and the installed packages becomes a
    pair. The query is the summary line; the passage is the name, the signature and the rest of the docstring.
    Whole packages are held out for dev and test; OUTPUT/dev and OUTPUT/test are BEIR folders of only the
    held-out packages.

    Args:
      output: the folder to write.
    """
    from jaxir.data.sets import package_docs as source

    entries = source.collect()
    source.write_beir(output, entries)
    for split, packages in source.counts(entries).items():
        largest = ", ".join(f"{name} {count:,}" for name, count in packages.most_common(6))
        print(f"{split:5} {packages.total():7,} pairs from {len(packages)} packages: {largest}")


if __name__ == "__main__":
    cli.start("jaxir.pydocs:pydocs", "--output=pydocs")
