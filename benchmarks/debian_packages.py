"""Prints the pairs of docs/tutorial.md: the synopsis and description of one package of every seventh source.

Needs a machine with apt and its lists: python benchmarks/debian_packages.py > packages.jsonl
"""

import json
import re
import subprocess
import sys
from pathlib import Path


def read(name: str) -> list[dict[str, str]]:
    files = list(Path("/var/lib/apt/lists").glob(f"*{name}*"))
    if not files:
        sys.exit(f"there is no *{name}* in /var/lib/apt/lists: run apt-get update -o Acquire::Languages=en")
    text = subprocess.check_output(["/usr/lib/apt/apt-helper", "cat-file", *files], text=True)
    parts = filter(None, text.split("\n\n"))
    return [dict(re.findall(r"^(\S+): (.*(?:\n .*)*)", part, re.MULTILINE)) for part in parts]


def main() -> None:
    source = {p["Package"]: p.get("Source", p["Package"]).split()[0] for p in read("_Packages")}
    pairs: dict[str, dict[str, str]] = {}
    for package in read("Translation-en"):
        name, (synopsis, _, description) = package["Package"], package["Description-en"].partition("\n ")
        if name in source and description:
            answer = description.replace("\n .\n", "\n").replace("\n ", " ")
            pairs.setdefault(source[name], {"package": name, "question": synopsis, "answer": answer})
    for name in sorted(pairs)[::7]:
        print(json.dumps(pairs[name]))


if __name__ == "__main__":
    main()
