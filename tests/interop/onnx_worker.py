"""Follows the README.md of ONNX exports where there is neither JAX nor jaxir: `onnx_worker.py FOLDER`.

FOLDER holds texts.json and exports; the vectors of the texts go to answers.npz as EXPORT.TOWER, and the query
tower's of the rows in EXPORT/rows.npz, if there are any, as EXPORT.rows.
"""

import json
import os
import re
import sys
from pathlib import Path

for absent in ("jax", "jaxlib", "flax", "jaxir", "jax2onnx", "onnx", "tensorflow", "torch", "transformers"):
    sys.modules[absent] = None  # importing it raises ImportError

import numpy as np  # noqa: E402
import onnxruntime  # noqa: E402


def main(folder: Path) -> None:
    texts = json.loads((folder / "texts.json").read_text())
    answers = {}
    for readme in sorted(folder.glob("*/README.md")):
        os.chdir(readme.parent)
        code = re.search(r"```python\n(.*?)```", readme.read_text(), re.DOTALL)[1]
        names = {}
        exec(code, names)
        assert (
            names["query_vectors"].shape == names["passage_vectors"].shape == (1, names["query_vectors"].size)
        )
        names["texts"] = texts
        exec(re.sub(r'encode\(\[".*?"\]', "encode(texts", code), names)
        for tower in ("query", "passage"):
            answers[f"{readme.parent.name}.{tower}"] = names[f"{tower}_vectors"]
        if Path("rows.npz").exists():
            with np.load("rows.npz") as rows:
                session = onnxruntime.InferenceSession("query.onnx")
                (answers[f"{readme.parent.name}.rows"],) = session.run(None, dict(rows))
    np.savez(folder / "answers.npz", **answers)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
