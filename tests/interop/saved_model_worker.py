"""Loads SavedModels where there is neither JAX nor jaxir: `saved_model_worker.py FOLDER`.

FOLDER holds requests.json, a list of {"model", "imports", "signature", "inputs"}. Answers are written to
answers.npz as INDEX.OUTPUT, and errors as INDEX.error. Libraries of operations are imported when a request
needs them, so the first requests show which models load without them.
"""

import importlib
import json
import os
import sys
from pathlib import Path

os.environ["TF_CPP_MIN_LOG_LEVEL"] = "2"
for absent in ("jax", "jaxlib", "flax", "orbax", "jaxir", "tokenizers", "sentencepiece", "transformers"):
    sys.modules[absent] = None  # importing it raises ImportError

import numpy as np  # noqa: E402
import tensorflow as tf  # noqa: E402

DTYPES = {"ids": tf.int32, "token_types": tf.int32}  # inputs of other names are texts


def main(folder: Path) -> None:
    answers, models = {}, {}
    for i, request in enumerate(json.loads((folder / "requests.json").read_text())):
        for name in request["imports"]:
            importlib.import_module(name)
        missing = {"tensorflow_text", "scann"} - set(request["imports"])
        assert not missing & sys.modules.keys(), "the request does not show what it needs"
        if request["model"] not in models:
            models[request["model"]] = tf.saved_model.load(request["model"])
        function = models[request["model"]].signatures[request["signature"]]
        inputs = {}
        for name, value in request["inputs"].items():
            if "bytes" in request:
                value = [bytes.fromhex(text) for text in value]
            inputs[name] = tf.constant(value, DTYPES.get(name, tf.string))
        try:
            outputs = function(**inputs)
        except tf.errors.InvalidArgumentError as error:
            answers[f"{i}.error"] = np.array(str(error))
            continue
        for name, value in outputs.items():
            array = value.numpy()
            answers[f"{i}.{name}"] = array.astype(str) if array.dtype == object else array
    assert not [name for name in ("jax", "jaxir") if sys.modules.get(name)]
    # Not ru_maxrss, which may have been inherited from the process that started this one.
    status = Path("/proc/self/status").read_text()
    peak = int(status.partition("VmHWM:")[2].split()[0]) * 1024
    np.savez(folder / "answers.npz", peak=peak, **answers)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
