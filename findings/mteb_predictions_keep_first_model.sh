#!/usr/bin/env bash
# mteb 2.26.24: a file of predictions keeps the name of the first model, although another model replaced the predictions.
# Exits 0 if that is still so, 1 if the behaviour has changed, 2 if the packages cannot be installed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
{
  "${PYTHON:-python3}" -m venv "$folder/venv" &&
    "$folder/venv/bin/python" -m pip install --quiet --disable-pip-version-check mteb==2.26.24 sentence-transformers==6.2.0 \
      transformers==5.24.0 datasets==5.2.0 torch==2.13.0
} || exit 2
HF_HUB_OFFLINE=1 "$folder/venv/bin/python" - <<'EOF'
import json
import tempfile
import warnings
from importlib.metadata import version
from pathlib import Path

warnings.filterwarnings("ignore")
import mteb
import numpy as np
from datasets import Dataset, DatasetDict
from mteb.abstasks import AbsTaskSTS
from mteb.abstasks.task_metadata import TaskMetadata

UNKNOWN = ("date", "domains", "task_subtypes", "license", "annotations_creators", "dialect")
WORDS = ("cat", "dog", "bird", "fish")


class Pairs(AbsTaskSTS):
    metadata = TaskMetadata(
        name="Pairs",
        type="STS",
        main_score="cosine_spearman",
        description="a task in memory",
        dataset={"path": "none/none", "revision": "1"},
        category="t2t",
        reference=None,
        eval_splits=["test"],
        eval_langs=["eng-Latn"],
        sample_creation=None,
        bibtex_citation=None,
        **dict.fromkeys(UNKNOWN),
    )
    min_score, max_score = 0, 5

    def load_data(self, *args, **kwargs):
        pairs = [
            {"sentence1": a, "sentence2": b, "score": 5.0 if a == b else float(i)} for i, a in enumerate(WORDS) for b in WORDS
        ]
        self.dataset = DatasetDict({"test": Dataset.from_list(pairs)})
        self.data_loaded = True


class Random:
    """An encoder whose vectors depend on its seed."""

    def __init__(self, name, seed):
        self.seed = seed
        self.mteb_model_meta = mteb.models.ModelMeta.create_empty({"name": name, "revision": "1"})

    def encode(self, inputs, **kwargs):
        texts = [text for batch in inputs for text in batch["text"]]
        return np.array([np.random.default_rng([self.seed, *text.encode()]).normal(size=8) for text in texts])

    def similarity(self, a, b):
        return mteb.similarity_functions.cos_sim(a, b)

    def similarity_pairwise(self, a, b):
        return mteb.similarity_functions.pairwise_cos_sim(a, b)


print("mteb", version("mteb"))
with tempfile.TemporaryDirectory() as folder:
    found = []
    for seed, name in enumerate(("org/first", "org/second")):
        mteb.evaluate(Random(name, seed), Pairs(), cache=None, prediction_folder=folder, show_progress_bar=False)
        content = json.loads(next(Path(folder).rglob("Pairs_predictions.json")).read_text())
        found.append((content.pop("mteb_model_meta")["model_name"], content))
for name, (stored, _) in zip(("org/first", "org/second"), found):
    print(f"after the evaluation of {name}: the predictions are those of model_name {stored!r}")
changed = found[0][1] != found[1][1]
print(f"the second evaluation replaced the predictions: {changed}")
if changed and found[1][0] == "org/first":
    print("as described: the second model's predictions stand under the first model's name")
else:
    print("changed")
    raise SystemExit(1)
EOF
