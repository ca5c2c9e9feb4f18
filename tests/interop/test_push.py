"""Model cards of exports; and uploads by huggingface_hub to a local server with the protocol of the hub."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from huggingface_hub import ModelCard

from jaxir import DualEncoder, Pairs, cli, fit
from jaxir.core.errors import UserError
from jaxir.interop import formats
from jaxir.interop.hub import push
from tests.interop import hub_server
from tests.interop.folders import GOLDEN

TEXTS = ["the cat", "a cat sat", "the mat", "on the mat", "a cat", "the cat sat"]
PAIRS = Pairs(TEXTS, [f"{text} on the mat" for text in TEXTS])
# A recipe in the form that `jaxir.train` writes.
RECIPE = """\
from __gin__ import dynamic_registration
from jaxir.data.sets import pair_sources
from jaxir.interop import build

MODEL = 'st:BAAI/bge-small-en-v1.5'

build.Pretrained.source = %MODEL
pair_sources.BeirPairs.directory = '/home/someone/private/nfcorpus'
other/pair_sources.BeirPairs.directory = 'hf:BeIR/nfcorpus'
"""
PUSH = """
import sys
from jaxir import DualEncoder
from jaxir.core.errors import UserError
try:
    print(DualEncoder.load(sys.argv[1]).push_to_hub(sys.argv[2]))
except UserError as error:
    print("error:", error)
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory, one_layer) -> Path:
    """A run that was evaluated at its end."""
    place = tmp_path_factory.mktemp("card") / "run"
    fit(f"st:{one_layer}", PAIRS, dev=PAIRS, steps=2, batch_size=4, output_dir=str(place))
    (place / "config.gin").write_text(RECIPE)
    return place


@pytest.mark.slow
def test_card_has_the_data_recipe_and_figures_of_a_run(run, tmp_path):
    formats.convert(str(run), tmp_path / "answers", "st")
    card = ModelCard.load(tmp_path / "answers" / "README.md")
    data = card.data
    assert (data.library_name, data.pipeline_tag) == ("sentence-transformers", "sentence-similarity")
    assert data.base_model == "BAAI/bge-small-en-v1.5" and "jaxir" in data.tags
    assert data.datasets == ["BeIR/nfcorpus"] and data.license is None
    figures = {result.metric_type: result.metric_value for result in data.eval_results}
    assert figures.keys() == {"ndcg_at_10", "rr_at_10"} and 0 < figures["ndcg_at_10"] <= 1
    assert f"| nDCG@10 | {figures['ndcg_at_10']:.4f} |" in card.content
    assert 'SentenceTransformer("answers")' in card.content
    assert 'DualEncoder.load("st:answers")' in card.content
    assert "| data | `6 pairs of " in card.content and "in_batch_softmax(temperature=0.05" in card.content
    assert "BeirPairs.directory = 'nfcorpus'" in card.content and "someone" not in card.content
    # The card may be edited, and the folder still opens.
    (tmp_path / "answers" / "README.md").write_text("mine")
    assert DualEncoder.load(f"st:{tmp_path / 'answers'}").dimension == 16


def test_card_of_a_model_that_is_no_run(tmp_path):
    formats.convert("st:all-MiniLM-L6-v2", tmp_path / "st", "st", repo="me/mine")
    card = ModelCard.load(tmp_path / "st" / "README.md")
    assert card.data.base_model == "sentence-transformers/all-MiniLM-L6-v2"
    assert card.data.eval_results is None and "## Training" not in card.content
    assert (card.data.license, card.data.language, card.data.datasets) == ("apache-2.0", "en", None)
    assert 'SentenceTransformer("me/mine")' in card.content and 'DualEncoder.load("me/mine")' in card.content
    formats.convert(f"hf:{GOLDEN / 'cross_bert'}", tmp_path / "hf", "hf", kind="cross_encoder")
    card = ModelCard.load(tmp_path / "hf" / "README.md")
    assert (card.data.library_name, card.data.pipeline_tag) == ("transformers", "text-ranking")
    assert card.data.base_model is None and 'CrossEncoder("hf")' in card.content
    assert card.data.license is None and card.data.language is None


@pytest.mark.parametrize(
    ("metadata", "known"),
    [
        (
            "license: other\nlicense_name: ours\nlanguage:\n- de\n- en\ndatasets:\n- a/b",
            ("other", "ours", ["de", "en"]),
        ),
        ("license: [", (None, None, None)),
    ],
)
def test_card_has_the_licence_and_languages_of_the_base_folder(metadata, known, one_layer, tmp_path):
    base = shutil.copytree(one_layer, tmp_path / "base")
    (base / "README.md").write_text(f"---\n{metadata}\n---\n")
    formats.convert(f"st:{base}", tmp_path / "st", "st")
    data = ModelCard.load(tmp_path / "st" / "README.md").data
    assert (data.license, data.get("license_name"), data.language) == known
    assert data.datasets is None and data.base_model is None


@pytest.mark.slow
def test_pushed_model_opens_by_its_name(run, tmp_path):
    """`export --push_to_hub`, then `DualEncoder.push_to_hub` of the model under another name."""
    with hub_server.serve() as hub:
        env = hub.environment(tmp_path / "cache", HF_TOKEN="hf_x", PYTHONPATH=str(Path.cwd()))
        command = [sys.executable, "-m", "jaxir.export", f"--model={run}", "--format=st"]
        command += [f"--output={tmp_path / 'out'}", "--push_to_hub=me/mine", "--private"]
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        assert f"pushed to {hub.url}/me/mine" in done.stdout and hub.created == {"me/mine": True}
        assert (
            b'SentenceTransformer("me/mine")'
            in hub.files("me/mine", hub.commit("me/mine", "main"))["README.md"]
        )
        again = [sys.executable, "-c", PUSH, "me/mine", "me/other"]
        done = subprocess.run(again, env=env, capture_output=True, text=True, timeout=120)
        assert done.stdout.strip() == f"{hub.url}/me/other", done.stderr
        names = [hub.files(name, hub.commit(name, "main")) for name in ("me/mine", "me/other")]
        assert names[0]["model.safetensors"] == names[1]["model.safetensors"]
        done = subprocess.run(again, env=env | {"HF_TOKEN": ""}, capture_output=True, text=True, timeout=120)
        assert "error: me/other: the hub refuses the upload (status 401): run `hf auth login`" in done.stdout


def test_names_that_no_repository_can_have_are_refused_first(tmp_path, capsys):
    with pytest.raises(UserError, match="'mine' is not a name on the hub: write OWNER/NAME"):
        push.check_name("mine")
    flags = ["--model=absent", "--format=st", f"--output={tmp_path / 'out'}"]
    assert cli.main("jaxir.export:export", [*flags, "--push_to_hub=mine"]) == 1
    assert "write OWNER/NAME" in capsys.readouterr().err
    assert cli.main("jaxir.export:export", [*flags, "--private"]) == 1
    assert "--private only applies to --push_to_hub=OWNER/NAME" in capsys.readouterr().err
