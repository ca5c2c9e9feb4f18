#!/usr/bin/env bash
# qwix 0.1.8 replaces jax.lax.dot_general while a quantized model runs, but jax caches what jnp.matmul, jnp.dot and
# the operator @ were traced to, by function and shapes. Whatever runs first therefore decides for the whole process:
# - after a plain forward pass, the "quantized" model of the same shapes is not quantized at all,
# - after a quantized forward pass, every plain product of the same shapes is rounded to int8.
# Nothing is reported. A comparison of a model with its quantized form shows an error of exactly zero.
# Layers that call jax.lax.dot_general themselves, such as nn.Dense and nnx.Linear, are not affected. Nor is jnp.dot
# with PtqProvider, which replaces it, too.
# What to do: build the provider with disable_jit=True, and check provider.get_unused_rules() after the first run.
# Exits 0 if that is still so, 1 if the behaviour has changed, 2 if the packages cannot be installed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv" || exit 2
"$folder/venv/bin/python" -m pip install --quiet --disable-pip-version-check \
  qwix==0.1.8 jax==0.10.2 jaxlib==0.10.2 flax==0.12.8 || exit 2
cat >"$folder/show.py" <<'PYTHON'
import sys
from importlib.metadata import version

import jax
import jax.numpy as jnp
import numpy as np
import qwix
from flax import linen as nn

order, disable_jit = sys.argv[1], sys.argv[2] == "disable_jit"


class Layer(nn.Module):
    @nn.compact
    def __call__(self, x):
        return x @ self.param("w", nn.initializers.normal(), (64, 64))


x, w = jax.random.normal(jax.random.key(0), (4, 64)), jax.random.normal(jax.random.key(1), (64, 64))
exact = np.asarray(x, np.float64) @ np.asarray(w, np.float64)
rule = qwix.QuantizationRule(weight_qtype=jnp.int8, act_qtype=jnp.int8)
provider = qwix.QtProvider([rule], disable_jit=disable_jit)
models = {"plain": Layer(), "quantized": qwix.quantize_model(Layer(), provider)}
seen = []
for name in ("plain", "quantized") if order == "plain" else ("quantized", "plain"):
    got = jax.jit(models[name].apply)({"params": {"w": w}}, x)
    error = np.linalg.norm(got - exact) / np.linalg.norm(exact)
    seen.append(f"{name} error {100 * error:.1f} %")
packages = ", ".join(f"{name} {version(name)}" for name in ("qwix", "jax", "flax"))
print(f"{packages}, {' '.join(sys.argv[2:])}: {'; '.join(seen)}; unused rules {len(provider.get_unused_rules())}")
PYTHON
for jit in default disable_jit; do
  for order in plain quantized; do
    "$folder/venv/bin/python" "$folder/show.py" $order $jit 2>/dev/null | tee -a "$folder/seen"
  done
done
cat >"$folder/expected" <<'TEXT'
qwix 0.1.8, jax 0.10.2, flax 0.12.8, default: plain error 0.0 %; quantized error 0.0 %; unused rules 1
qwix 0.1.8, jax 0.10.2, flax 0.12.8, default: quantized error 0.9 %; plain error 0.9 %; unused rules 0
qwix 0.1.8, jax 0.10.2, flax 0.12.8, disable_jit: plain error 0.0 %; quantized error 0.9 %; unused rules 0
qwix 0.1.8, jax 0.10.2, flax 0.12.8, disable_jit: quantized error 0.9 %; plain error 0.0 %; unused rules 0
TEXT
diff "$folder/expected" "$folder/seen" && echo "as described"
