#!/usr/bin/env bash
# qwix 0.1.8 leaves LoRA out of a module that holds two weights of one shape, if the rule also quantizes them (QLoRA).
# It quantizes a weight first, and then looks up the old array's name by its shape. If two parameters have that shape,
# qwix takes the array for an activation, so the weight is quantized and gets no LoRA weights. Three such parameters
# raise "Multiple candidate params found". A gated feed-forward layer (gate, up) is often one module of raw
# parameters. Nothing is reported: get_unused_rules() is empty, and the module is frozen during the training.
# What to do: count the model's nnx.LoRAParam arrays, and give each weight its own module, such as nnx.Linear.
# Exits 0 if that is still so, 1 if the behaviour has changed, 2 if the packages cannot be installed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv" || exit 2
"$folder/venv/bin/python" -m pip install --quiet --disable-pip-version-check \
  qwix==0.1.8 jax==0.10.2 jaxlib==0.10.2 flax==0.12.8 || exit 2
cat >"$folder/show.py" <<'PYTHON'
from importlib.metadata import version

import jax
import jax.numpy as jnp
import qwix
from flax import nnx


class Gated(nnx.Module):
    def __init__(self, wide_up, rngs):
        self.gate = nnx.Param(jax.random.normal(rngs.params(), (16, 32)))
        self.up = nnx.Param(jax.random.normal(rngs.params(), (16, 64 if wide_up else 32)))

    def __call__(self, x):
        gate = jnp.einsum("bd,df->bf", x, self.gate[...])
        up = jnp.einsum("bd,df->bf", x, self.up[...])
        return jax.nn.silu(gate) * up[:, :32]


class GatedLinear(nnx.Module):
    def __init__(self, rngs):
        self.gate, self.up = (nnx.Linear(16, 32, rngs=rngs) for _ in range(2))

    def __call__(self, x):
        return jax.nn.silu(self.gate(x)) * self.up(x)


print(*(f"{name} {version(name)}" for name in ("qwix", "jax", "flax")), sep=", ")
makers = {
    "raw weights of one shape": lambda: Gated(False, nnx.Rngs(0)),
    "raw weights of two shapes": lambda: Gated(True, nnx.Rngs(0)),
    "two nnx.Linear": lambda: GatedLinear(nnx.Rngs(0)),
}
for title, make in makers.items():
    for name, quantized in (("LoRA", {}), ("QLoRA", {"weight_qtype": "nf4"})):
        provider = qwix.LoraProvider(rank=4, alpha=8.0, **quantized)
        model = qwix.apply_lora_to_model(make(), provider, jnp.ones((2, 16)), rngs=nnx.Rngs(1))
        arrays = len(jax.tree.leaves(nnx.state(model, nnx.LoRAParam)))
        print(f"{title}, {name}: {arrays} LoRA arrays, unused rules {len(provider.get_unused_rules())}")
PYTHON
"$folder/venv/bin/python" "$folder/show.py" 2>/dev/null | tee "$folder/seen"
cat >"$folder/expected" <<'TEXT'
qwix 0.1.8, jax 0.10.2, flax 0.12.8
raw weights of one shape, LoRA: 4 LoRA arrays, unused rules 0
raw weights of one shape, QLoRA: 0 LoRA arrays, unused rules 0
raw weights of two shapes, LoRA: 4 LoRA arrays, unused rules 0
raw weights of two shapes, QLoRA: 4 LoRA arrays, unused rules 0
two nnx.Linear, LoRA: 4 LoRA arrays, unused rules 0
two nnx.Linear, QLoRA: 4 LoRA arrays, unused rules 0
TEXT
diff "$folder/expected" "$folder/seen" && echo "as described"
