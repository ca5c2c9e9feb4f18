#!/usr/bin/env bash
# qwix 0.1.8 applies the dropout of a LoRA rule at evaluation, too: LoraProvider builds it with deterministic=False.
# An nnx model's eval() turns off the model's own dropout layers, but not that one, so two calls of one input differ.
# Document vectors then change from run to run, and a dev score is that of a noisy model. Without rngs (in linen:
# without a "dropout" stream), the model raises instead of turning the dropout off.
# What to do: before evaluation, apply a provider with dropout=0 to the trained model. It keeps the LoRA weights.
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
import numpy as np
import qwix
from flax import linen, nnx

print(*(f"{name} {version(name)}" for name in ("qwix", "jax", "flax")), sep=", ")
x = jnp.ones((2, 16))
settings = {"rank": 4, "alpha": 8.0, "lora_b_initializer": nnx.initializers.normal(1.0)}


class Model(nnx.Module):
    def __init__(self, rngs):
        self.linear = nnx.Linear(16, 16, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        return self.dropout(self.linear(x))


def show(title, call):
    try:
        print(f"{title}: two calls are {'equal' if np.array_equal(call(), call()) else 'different'}")
    except Exception as error:
        print(f"{title}: {type(error).__name__}")


plain = Model(nnx.Rngs(0))
plain.eval()
show("nnx, eval(), no LoRA", lambda: plain(x))
lora = qwix.apply_lora_to_model(plain, qwix.LoraProvider(dropout=0.5, **settings), x, rngs=nnx.Rngs(1))
lora.eval()
show("nnx, eval(), LoRA with dropout, no rngs", lambda: lora(x))
lora.set_attributes(qwix_rngs=nnx.Rngs(2))
show("nnx, eval(), LoRA with dropout, rngs set", lambda: lora(x))
again = qwix.apply_lora_to_model(lora, qwix.LoraProvider(**settings), x, rngs=nnx.Rngs(3))
kept = np.array_equal(again.linear.kernel_lora_b[...], lora.linear.kernel_lora_b[...])
show(f"nnx, eval(), provider without dropout applied again (weights kept: {kept})", lambda: again(x))
dense = qwix.apply_lora_to_model(linen.Dense(16), qwix.LoraProvider(dropout=0.5, **settings))
variables = dense.init({"params": jax.random.key(0), "dropout": jax.random.key(1)}, x)
show("linen, LoRA with dropout, no rngs", lambda: dense.apply(variables, x))
bare = qwix.apply_lora_to_model(linen.Dense(16), qwix.LoraProvider(**settings))
show("linen, the same variables, provider without dropout", lambda: bare.apply(variables, x))
PYTHON
"$folder/venv/bin/python" "$folder/show.py" 2>/dev/null | tee "$folder/seen"
cat >"$folder/expected" <<'TEXT'
qwix 0.1.8, jax 0.10.2, flax 0.12.8
nnx, eval(), no LoRA: two calls are equal
nnx, eval(), LoRA with dropout, no rngs: ValueError
nnx, eval(), LoRA with dropout, rngs set: two calls are different
nnx, eval(), provider without dropout applied again (weights kept: True): two calls are equal
linen, LoRA with dropout, no rngs: InvalidRngError
linen, the same variables, provider without dropout: two calls are equal
TEXT
diff "$folder/expected" "$folder/seen" && echo "as described"
