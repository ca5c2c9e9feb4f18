#!/usr/bin/env bash
# With jax 0.10.2 on a CPU, serialize_executable.serialize writes a program that was found in the persistent
# compilation cache without its functions: it loads without an error and fails when it is called.
# Exits 0 if that is still so, 1 if the behaviour has changed, 2 if the packages cannot be installed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
{
  "${PYTHON:-python3}" -m venv "$folder/venv" &&
    "$folder/venv/bin/python" -m pip install --quiet --disable-pip-version-check "jax==${JAX:-0.10.2}" "jaxlib==${JAX:-0.10.2}"
} || exit 2
cat >"$folder/program.py" <<'EOF'
import pickle
import sys

import jax
import jax.numpy as jnp
from jax.experimental import serialize_executable

what, path = sys.argv[1:]
table, ids = jnp.ones((100, 16)), jnp.array([1, 2, 3, 4])
if what == "save":
    function = jax.jit(lambda table, ids: jnp.tanh(table[ids]).sum(-1) + jnp.arange(4))
    compiled = function.lower(table, ids).compile()
    compiled(table, ids).block_until_ready()
    stored = serialize_executable.serialize(compiled)
    with open(path, "wb") as file:
        pickle.dump(stored, file)
    print(f"runs, {len(stored[0]):,} bytes stored")
else:
    with open(path, "rb") as file:
        loaded = serialize_executable.deserialize_and_load(*pickle.load(file))
    try:
        loaded(table, ids).block_until_ready()
        print("loaded and runs")
    except jax.errors.JaxRuntimeError as error:
        print(f"loaded, but fails: {str(error).splitlines()[0]}")
EOF
export JAX_PLATFORMS=cpu JAX_COMPILATION_CACHE_DIR=$folder/cache JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS=0
program() { "$folder/venv/bin/python" "$folder/program.py" "$@" 2>/dev/null | tail -1; }
"$folder/venv/bin/python" -c 'import jax; print("jax", jax.__version__)'
echo "compiled in this process:       $(program save "$folder/compiled")"
of_compiled=$(program load "$folder/compiled")
echo "  in another process:           $of_compiled"
echo "found in the compilation cache: $(program save "$folder/cached")"
of_cached=$(program load "$folder/cached")
echo "  in another process:           $of_cached"
if [[ $of_compiled == "loaded and runs" && $of_cached == "loaded, but fails: NOT_FOUND"* ]]; then
  echo "as described: do not serialise a program that the persistent cache may have returned"
else
  echo "changed"
  exit 1
fi
