#!/usr/bin/env bash
# ScaNN 1.4.2's wheel searches with SSE4 functions on CPUs that have AVX2 and AVX-512: the switch that its function for
# detecting the CPU sets stays off, although the faster functions are compiled in. Switched on, it finds the same neighbours.
# Exits 0 if that is still so, 1 if the behaviour has changed, 2 if the packages cannot be installed or the CPU has no AVX2.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
grep -qw avx2 /proc/cpuinfo && grep -qw fma /proc/cpuinfo || { echo "this CPU has no AVX2"; exit 2; }
{
  "${PYTHON:-python3}" -m venv "$folder/venv" &&
    "$folder/venv/bin/python" -m pip install --quiet --disable-pip-version-check scann==1.4.2 numpy==2.4.2
} || exit 2
cat >"$folder/search.py" <<'EOF'
import ctypes
import sys
import time

import numpy as np
from scann.scann_ops.py import scann_ops_pybind

import scann_pybind

switch = ctypes.c_bool.in_dll(
    ctypes.CDLL(scann_pybind.__file__), "_ZN14research_scann14flags_internal15should_use_avx2E"
)
if sys.argv[1] == "on":
    switch.value = True
rng = np.random.default_rng(0)
centres = rng.standard_normal([200, 64]).astype(np.float32)
vectors = centres[rng.integers(200, size=40_000)] + rng.standard_normal([40_000, 64]).astype(np.float32)
vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
queries = vectors[:2000] + 0.05 * rng.standard_normal([2000, 64]).astype(np.float32)
builder = scann_ops_pybind.builder(vectors, 10, "dot_product").tree(200, 50, training_sample_size=40_000)
searcher = builder.score_ah(2, anisotropic_quantization_threshold=0.2).reorder(200).build()
best = float("inf")
for _ in range(7):
    started = time.process_time()
    found, _ = searcher.search_batched(queries)
    best = min(best, time.process_time() - started)
exact = np.argsort(-(queries @ vectors.T), axis=1)[:, :10]
recall = np.mean([len(np.intersect1d(a, b)) for a, b in zip(found, exact, strict=True)]) / 10
print(int(switch.value), f"{recall:.4f}", f"{best:.3f}")
EOF
"$folder/venv/bin/python" -c 'from importlib.metadata import version; print("scann", version("scann"))'
read -r switch recall seconds < <("$folder/venv/bin/python" "$folder/search.py" as_it_is 2>/dev/null | tail -1)
read -r switched recall_on seconds_on < <("$folder/venv/bin/python" "$folder/search.py" on 2>/dev/null | tail -1)
echo "as installed:      should_use_avx2 is $switch after searches, recall@10 $recall, $seconds CPU s for 2,000 queries"
echo "set to true:       should_use_avx2 is $switched, recall@10 $recall_on, $seconds_on CPU s"
if [[ $switch == 0 && $switched == 1 ]] && python3 -c "import sys; sys.exit(abs($recall - $recall_on) > .005)"; then
  echo "as described: the wheel does not use AVX2 by itself"
else
  echo "changed"
  exit 1
fi
