#!/usr/bin/env bash
# ir-measures 0.4.3 breaks ties in opposite ways: RR puts the greater document id first, RR@10 the smaller one.
# Exits 0 if that is still so, 1 if the behaviour has changed, 2 if the packages cannot be installed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
{
  "${PYTHON:-python3}" -m venv "$folder/venv" &&
    "$folder/venv/bin/python" -m pip install --quiet --disable-pip-version-check ir-measures==0.4.3 pytrec-eval-terrier==0.5.11
} || exit 2
"$folder/venv/bin/python" - <<'EOF'
import sys
from importlib.metadata import version

import ir_measures
from ir_measures import AP, RR, Compat, Judged, P, nDCG

for package in ("ir-measures", "pytrec-eval-terrier"):
    print(package, version(package))
print("One query. Documents a and b have the same score. One of them is relevant.")
run = [ir_measures.ScoredDoc("q", "a", 1.0), ir_measures.ScoredDoc("q", "b", 1.0)]
measures = (RR, RR @ 10, P @ 1, nDCG @ 10, AP, Judged @ 1, Compat)
found = {}
for relevant in "ab":
    values = ir_measures.calc_aggregate(measures, [ir_measures.Qrel("q", relevant, 1)], run)
    found[relevant] = {str(measure): round(value, 4) for measure, value in values.items()}
for measure in measures:
    a, b = found["a"][str(measure)], found["b"][str(measure)]
    first = "a, the smaller id" if a > b else "b, the greater id" if b > a else "neither"
    print(f"{measure!s:10} a relevant: {a:.4f}, b relevant: {b:.4f}. First is {first}.")
smaller_first = {str(m) for m in measures if found["a"][str(m)] > found["b"][str(m)]}
expected = {"RR@10", "Judged@1", "Compat"}
if smaller_first != expected:
    print(f"changed: the smaller id comes first for {sorted(smaller_first)}, and not for {sorted(expected)}")
    sys.exit(1)
print("as described: RR@10, Judged@1 and Compat put the smaller id first, the others the greater one")
EOF
