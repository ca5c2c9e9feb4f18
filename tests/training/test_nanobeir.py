"""The evaluator NanoBEIR, on local folders of both of its layouts."""

import json

import pytest

from jaxir import Pairs, cli, fit
from jaxir.core.errors import UserError
from jaxir.evaluation.collection import evaluate_collection
from jaxir.evaluation.nanobeir_sets import SETS, read_nanobeir
from jaxir.training.evaluators.nanobeir import NanoBEIR
from tests.data import hub_folders


@pytest.mark.slow
def test_nanobeir_in_the_loop_is_the_mean_over_its_collections(one_layer, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    hub_folders.nanobeir_of_parts(tmp_path / "set", *(f"Nano{name}" for name in SETS))
    texts = ["cats drink milk", "dogs bark", "birds sing", "fish swim"]
    encoder = fit(
        f"st:{one_layer}",
        Pairs(texts, texts),
        evaluators=[NanoBEIR(place=f"hf:{tmp_path}/set")],
        dev_metric="NanoBEIR",
        steps=1,
        batch_size=4,
        output_dir=tmp_path / "run",
    )
    lines = [json.loads(line) for line in (tmp_path / "run/log.jsonl").read_text().splitlines()]
    found = next(line for line in reversed(lines) if "dev/NanoBEIR" in line)
    values = {name: found[f"dev/NanoBEIR/{name}"] for name in SETS}
    assert found["dev/NanoBEIR"] == pytest.approx(sum(values.values()) / 13)
    collection = read_nanobeir(str(tmp_path / "set"), ["SciFact"])["SciFact"]
    expected = evaluate_collection(encoder, collection, "nDCG@10", depth=10).values["nDCG@10"]
    assert values["SciFact"] == pytest.approx(expected, abs=1e-6)


def test_a_folder_for_each_collection_and_wrong_names(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    hub_folders.nanobeir(tmp_path / "set" / "NanoSciFact")
    found = read_nanobeir(str(tmp_path / "set"), ["SciFact"])
    assert found["SciFact"].qrels == {"q1": {"d1": 1}, "q2": {"d3": 1}}
    with pytest.raises(UserError, match=r"NanoBEIR has no collection 'Scifact' .*did you mean 'SciFact'"):
        read_nanobeir(sets=["Scifact"])
    with pytest.raises(UserError, match="NanoNQ: no such directory"):
        read_nanobeir(str(tmp_path / "set"), ["NQ"])


def test_evaluate_scores_a_model_on_nanobeir(one_layer, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    hub_folders.nanobeir_of_parts(tmp_path / "set", *(f"Nano{name}" for name in SETS))
    flags = [f"--model=st:{one_layer}", f"--dataset=nanobeir:hf:{tmp_path}/set", f"--output={tmp_path}/out"]
    assert cli.main("jaxir.evaluate:evaluate", [*flags, "--metrics=nDCG@10"]) == 0
    assert "| mean of 13 " in capsys.readouterr().out
    values = json.loads((tmp_path / "out").read_text())
    each = [found["metrics"]["nDCG@10"] for found in values["collections"].values()]
    assert list(values["collections"]) == list(SETS)
    assert values["metrics"]["nDCG@10"] == pytest.approx(sum(each) / 13)
    assert cli.main("jaxir.evaluate:evaluate", [*flags, "--split=dev"]) == 1
    assert "--split only applies to data that have splits" in capsys.readouterr().err
