"""Follows the README.md of ONNX exports where there is neither JAX nor jaxir: `onnx_worker.py FOLDER`.

FOLDER holds texts.json and exports. The vectors of the texts, or the scores of all pairs of texts, are
written to answers.npz as EXPORT.GRAPH. If EXPORT/rows.npz exists, the graph of queries or scores also reads
its rows, and the results are written as EXPORT.rows.
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
        for graph in (path.stem for path in Path().glob("*.onnx")):
            (called,) = (value for name, value in names.items() if name.startswith(f"{graph}_"))
            assert len(called) == 1 and np.isfinite(called).all()
            pairs = [(a, b) for a in texts for b in texts]
            given = zip(*pairs, strict=True) if graph == "score" else [texts]
            answers[f"{readme.parent.name}.{graph}"] = names[graph](*given)
        if Path("rows.npz").exists():
            with np.load("rows.npz") as rows:
                session = onnxruntime.InferenceSession(
                    min(Path().glob("*.onnx"), key=lambda p: p.stem != "query")
                )
                (answers[f"{readme.parent.name}.rows"],) = session.run(None, dict(rows))
    np.savez(folder / "answers.npz", **answers)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
