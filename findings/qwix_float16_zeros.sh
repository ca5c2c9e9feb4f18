#!/usr/bin/env bash
# qwix 0.1.8 quantizes float16 weights to int8 as zeros, without a warning. If a scale is below
# sqrt(finfo(dtype).tiny), qwix takes the channel for an empty one and sets the scale to 1. That bound is 1e-19 for
# float32 and bfloat16, and 0.0078 for float16. The int8 scale is max|w| / 127.5, so a float16 channel whose largest
# weight is below 0.996 gets the scale 1, and rounding sets each of its weights below 0.5 to 0. Most weights of an
# encoder are far below 0.5, so a layer's output is zero for every text.
# What to do: cast float16 weights to float32 or bfloat16 before quantizing them, and check a reconstruction error.
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
from flax import linen as nn

print(*(f"{name} {version(name)}" for name in ("qwix", "jax", "flax")), sep=", ")
weights = np.random.default_rng(0).normal(scale=0.05, size=(64, 64)).astype(np.float32)
for dtype in ("float32", "bfloat16", "float16"):
    kernel = jnp.asarray(weights, dtype)
    for qtype in ("int8", "int4"):
        array = qwix.quantize(kernel, jnp.dtype(qtype), channelwise_axes=(1,))
        back = np.asarray(qwix.dequantize(array), np.float32)
        error = np.linalg.norm(back - weights) / np.linalg.norm(weights)
        print(f"qwix.quantize {dtype} to {qtype}: error {100 * error:.0f} %, zeros {100 * (back == 0).mean():.0f} %")
    layer = nn.Dense(64, use_bias=False, dtype=dtype, param_dtype=dtype)
    provider = qwix.PtqProvider([qwix.QuantizationRule(weight_qtype=jnp.int8)])
    model = qwix.quantize_model(layer, provider)
    x = jnp.ones((1, 64), dtype)
    abstract = jax.eval_shape(model.init, jax.random.key(0), x)
    params = qwix.quantize_params({"kernel": kernel}, abstract["params"])
    found = jnp.abs(model.apply({"params": params}, x)).max() > 0
    print(f"nn.Dense in {dtype}, weights in int8: {'has an output' if found else 'the output is all zeros'}")
PYTHON
"$folder/venv/bin/python" "$folder/show.py" 2>/dev/null | tee "$folder/seen"
cat >"$folder/expected" <<'TEXT'
qwix 0.1.8, jax 0.10.2, flax 0.12.8
qwix.quantize float32 to int8: error 1 %, zeros 1 %
qwix.quantize float32 to int4: error 10 %, zeros 13 %
nn.Dense in float32, weights in int8: has an output
qwix.quantize bfloat16 to int8: error 1 %, zeros 1 %
qwix.quantize bfloat16 to int4: error 10 %, zeros 13 %
nn.Dense in bfloat16, weights in int8: has an output
qwix.quantize float16 to int8: error 100 %, zeros 100 %
qwix.quantize float16 to int4: error 10 %, zeros 13 %
nn.Dense in float16, weights in int8: the output is all zeros
TEXT
diff "$folder/expected" "$folder/seen" && echo "as described"
