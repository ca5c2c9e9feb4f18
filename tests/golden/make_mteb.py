"""Makes mteb/: results and predictions that MTEB writes for two models on the local tasks of the tests.

make mteb && .mteb/bin/python -m tests.golden.make_mteb
"""

import shutil
import tempfile
from pathlib import Path

from tests.beir_folder import write_folder
from tests.evaluation import local_mteb

PLACE = Path(__file__).resolve().parent / "mteb"
MODELS = {"minilm": "all-MiniLM-L6-v2", "bert": "st:tests/golden/bert"}


def main() -> None:
    shutil.rmtree(PLACE, ignore_errors=True)
    with tempfile.TemporaryDirectory() as place:
        folder, output = write_folder(Path(place) / "beir", held_out=12), Path(place) / "output"
        local_mteb.evaluate(str(folder), str(output), *MODELS.values())
        for number, name in enumerate(MODELS):
            shutil.copytree(output / str(number), PLACE / name)
        (PLACE / "qrels").mkdir()
        shutil.copy(folder / "qrels" / "test.tsv", PLACE / "qrels" / "LocalRetrieval.tsv")


if __name__ == "__main__":
    main()
