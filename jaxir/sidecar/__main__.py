"""The command `python -m jaxir.sidecar install`, which installs Java and Lucene for BM25."""

from __future__ import annotations

import sys

from jaxir import cli

EXAMPLE = "python -m jaxir.sidecar install"


def main(arguments: list[str]) -> int:
    if arguments[:1] == ["install"]:
        return cli.main("jaxir.sidecar.install:install", arguments[1:], example=EXAMPLE)
    if arguments[:1] in (["--help"], ["-h"]):
        return cli.main("jaxir.sidecar.install:install", ["--help"], example=EXAMPLE)
    print(f"error: no subcommand given: run {EXAMPLE}", file=sys.stderr)
    return 1


if __name__ == "__main__":
    cli.end(main(sys.argv[1:]))
