import json
from pathlib import Path

import numpy as np
import pytest

from jaxir import cli
from jaxir.data.text.tokenizer import Tokenizer
from jaxir.evaluation import plots, word_heat
from jaxir.retrieval.encoding.text_encoder import DualEncoder

GOLDEN = Path(__file__).resolve().parent.parent / "golden"
TEXTS = ["da de, hi hi mo!", "la le li lo dada"]


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    place = tmp_path_factory.mktemp("words")
    rng, words = np.random.default_rng(0), [f"{a}{b}" for a in "dhlm" for b in "aeio"]
    (place / "texts.txt").write_text("".join(" ".join(rng.choice(words, 6)) + "\n" for _ in range(40)))
    files = [f"--gin_file=gin/{piece}.gin" for piece in ("unsupervised", "objectives/cpdae")]
    bindings = [f"--gin.TEXT={place}/texts.txt", f"--gin.MODEL=st:{GOLDEN / 'bert'}"]
    sizes = ["--gin.PASSAGE_LENGTH=16", "--gin.BATCH_SIZE=8", "--gin.LEARNING_RATE=0.01", "--steps=3"]
    command = [*files, *bindings, *sizes, f"--output_dir={place}/run"]
    assert cli.main("jaxir.train:train", command) == 0
    return place / "run"


def test_a_words_probability_is_the_sum_over_its_subwords():
    tokenizer = Tokenizer.load(GOLDEN / "bert")
    p = np.random.default_rng(0).random(tokenizer.vocab_size)
    text = "Da dedada, hi"
    found = word_heat.score_words(text, p, tokenizer)
    assert [word for word, _ in found] == ["Da", "dedada", ",", "hi"]
    whole = tokenizer.encode_batch([text], max_length=64)[0][1:-1]
    assert sum(share for _, share in found) == pytest.approx(p[whole].sum())
    for word, share in found:
        ids = tokenizer.encode_batch([word], max_length=64)[0][1:-1]
        assert share == pytest.approx(p[ids].sum())
    assert len(tokenizer.encode_batch(["dedada"], max_length=64)[0]) > 3  # a word of several subwords


@pytest.mark.slow
def test_the_command_draws_the_distributions_of_a_run(run, tmp_path, capsys):
    import orbax.checkpoint as ocp
    from matplotlib.image import imread

    (tmp_path / "texts.txt").write_text("\n".join(TEXTS) + "\n")
    command = [f"--models=CPDAE={run}", f"--dataset=texts:{tmp_path}/texts.txt", f"--output={tmp_path}/out"]
    assert cli.main("jaxir.analyze:analyze", command) == 0
    assert "most probable of its words" in capsys.readouterr().out
    found = json.loads((tmp_path / "out" / "analysis.json").read_text())["models"]["CPDAE"]["words"]
    shown = [" ".join(word for word, _ in words) for words in found]
    assert shown == ["da de , hi hi mo !", "la le li lo dada"]
    # The expected values are computed in numpy from arrays that Orbax reads.
    (checkpoint,) = (run / "checkpoints").glob("[0-9]*")
    tree = ocp.StandardCheckpointer().restore((checkpoint / "auxiliary").absolute())["decoder"]
    w = {f"{a}.{b}": np.asarray(x, np.float64) for a, part in tree.items() for b, x in part.items()}
    encoder = DualEncoder.load(str(run))
    x = encoder.encode_passages(TEXTS).astype(np.float64) @ w["dense.kernel"] + w["dense.bias"]
    from scipy.special import erf, expit

    x = x * (1 + erf(x / np.sqrt(2))) / 2
    x = (x - x.mean(1, keepdims=True)) / np.sqrt(x.var(1, keepdims=True) + 1e-12)
    p = expit((x * w["norm.scale"] + w["norm.bias"]) @ w["out.kernel"] + w["out.bias"])
    p /= p.sum(1, keepdims=True)
    for text, words in enumerate(found):
        for word, share in words:
            ids = encoder.tokenizer.encode_batch([word], max_length=64)[0][1:-1]
            assert share == pytest.approx(p[text][ids].sum(), rel=1e-4)
    assert len({round(share, 9) for words in found for _, share in words}) > 5
    picture = imread(tmp_path / "out" / "table4.png")
    assert picture.shape[0] > 100 and len(np.unique(picture.reshape(-1, picture.shape[2]), axis=0)) > 20


def test_the_most_probable_word_is_the_darkest(tmp_path):
    from matplotlib.image import imread

    def darkest(words):
        plots.word_heat({"model": [words]}, tmp_path / "one.png")
        picture = imread(tmp_path / "one.png")[..., :3]
        warmth = picture[..., 0] - picture[..., 2]  # red minus blue, which is 0 for the grey text
        return np.argmax(warmth.sum(0)) / picture.shape[1]

    assert darkest([("aaaaaaaaaa", 0.9), ("bbbbbbbbbb", 0.1), ("c" * 40, 0.0)]) < 0.2
    assert 0.15 < darkest([("aaaaaaaaaa", 0.1), ("bbbbbbbbbb", 0.9), ("c" * 40, 0.0)]) < 0.4
