"""Lengths, prompts and modules of folders are read as sentence-transformers reads them, or refused."""

import dataclasses
import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from jaxir import cli
from jaxir.core.errors import UserError
from jaxir.interop import formats, model_dir
from jaxir.interop.build import PretrainedCrossEncoder, outline_of
from jaxir.interop.hub import hub_files
from tests.interop.folders import GOLDEN, add_normalize, change, change_tensors

TRANSFORMER = "sentence_bert_config.json"
ABOUT = "config_sentence_transformers.json"


@pytest.fixture
def folder(tmp_path):
    """A dual encoder of BERT with a Dense, 160 positions, texts of at most 24 tokens."""
    return Path(shutil.copytree(GOLDEN / "bert", tmp_path / "folder"))


def lengths(folder: Path) -> tuple[int, int]:
    settings = model_dir.read(f"st:{folder}")[0].settings
    return settings.query_max_length, settings.passage_max_length


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ({}, (24, 24)),  # the length of tokenizer_config.json
        ({"max_seq_length": 12}, (12, 12)),
        ({"max_seq_length": 12, "query_length": 8}, (8, 12)),
        ({"query_length": 8, "document_length": 30}, (8, 30)),
        ({"max_seq_length": 12, "tokenizer_args": {"model_max_length": 9, "use_fast": True}}, (9, 9)),
        ({"query_length": 8, "processing_kwargs": {"text": {"max_length": 10}}}, (10, 10)),
        ({"model_args": {"torch_dtype": "bfloat16", "attn_implementation": "sdpa"}}, (24, 24)),
    ],
)
def test_lengths_are_sentence_transformers(said, expected, folder):
    """The numbers are those of version 6.2, for a text of 300 words as a query and as a document."""
    change(folder / TRANSFORMER, **said)
    assert lengths(folder) == expected


def test_default_length_is_the_number_of_positions(folder):
    change(folder / "tokenizer_config.json", model_max_length=10**30)
    assert lengths(folder) == (160, 160)
    change(folder / "tokenizer_config.json", model_max_length=...)
    assert lengths(folder) == (160, 160)


@pytest.mark.parametrize("name", ["roberta", "xlnet"])
def test_settings_file_may_be_named_after_an_architecture(name, folder):
    (folder / TRANSFORMER).rename(folder / f"sentence_{name}_config.json")
    change(folder / f"sentence_{name}_config.json", max_seq_length=11)
    assert lengths(folder) == (11, 11)
    (folder / TRANSFORMER).write_text("{}")  # ignored, because it is empty
    assert lengths(folder) == (11, 11)
    change(folder / TRANSFORMER, max_seq_length=13)
    assert lengths(folder) == (13, 13)
    names = [str(path.relative_to(folder)) for path in folder.rglob("*")]
    read = lambda name: json.loads((folder / name).read_text())  # noqa: E731
    assert f"sentence_{name}_config.json" in hub_files.wanted(names, read, "it", modules=True).small


def test_converted_lengths_fit_the_positions(folder, tmp_path, capsys):
    change(folder / TRANSFORMER, max_seq_length=200, query_length=40)
    assert cli.main("jaxir.convert:convert", [f"--source=st:{folder}", f"--output={tmp_path / 'ours'}"]) == 0
    note = f"note: {folder / TRANSFORMER} says 200 tokens, but the model has 160 positions"
    assert note in capsys.readouterr().err
    settings = model_dir.load(str(tmp_path / "ours")).settings
    assert (settings.query_max_length, settings.passage_max_length) == (40, 160)


@pytest.mark.parametrize(
    ("about", "expected"),
    [
        ({"prompts": {"query": "query: ", "passage": "passage: "}}, ("query: ", "passage: ")),
        ({"prompts": {"query": "q: ", "document": "", "passage": "p: "}}, ("q: ", "p: ")),
        ({"prompts": {"s2s": "Same: "}, "default_prompt_name": "s2s"}, ("Same: ", "Same: ")),
        ({"prompts": {"s2s": "Same: ", "query": "q: "}, "default_prompt_name": "s2s"}, ("q: ", "Same: ")),
        ({"prompts": {"query": "q: "}, "default_prompt_name": "query"}, ("q: ", "")),
        ({"prompts": {"query": "q: ", "document": None}}, ("q: ", "")),
        ({"prompts": None}, ("", "")),
    ],
)
def test_prompts_go_before_the_texts_that_they_are_named_for(about, expected, folder):
    """This holds even if sentence-transformers 5 or 6 saved the folder and added two empty prompts."""
    path = folder / ABOUT
    resaved = about | {"prompts": {"query": "", "document": ""} | (about["prompts"] or {})}
    for said in (about, resaved):
        path.write_text(json.dumps(json.loads(path.read_text()) | said))
        settings = model_dir.read(f"st:{folder}")[0].settings
        assert (settings.query_prompt, settings.passage_prompt) == expected


@pytest.mark.parametrize(
    ("prompts", "default", "pools_prompts"),
    [
        ({"query": "", "document": "", "s2s": "Same: "}, "s2s", True),
        ({"query": "q: ", "corpus": "c: ", "s2s": "Same: "}, "query", True),
        ({"s2s": "Same: "}, None, False),
    ],
)
def test_prompts_survive_a_round_trip(prompts, default, pools_prompts, folder, tmp_path, capsys):
    """sentence-transformers' `encode` gives the same vectors, with and without a prompt's name."""
    about = {"prompts": prompts, "default_prompt_name": default}
    (folder / ABOUT).write_text(json.dumps(about))
    change(folder / POOLING, include_prompt=pools_prompts)
    formats.convert(f"st:{folder}", tmp_path / "ours", "jaxir")
    formats.convert(str(tmp_path / "ours"), tmp_path / "st", "st")
    written = json.loads((tmp_path / "st" / ABOUT).read_text())
    assert {name: written[name] for name in about} == about
    assert json.loads((tmp_path / "st" / POOLING).read_text())["include_prompt"] == pools_prompts
    assert capsys.readouterr().err == ""


def test_prompts_that_were_changed_are_written_as_they_are(folder, tmp_path):
    about = {"prompts": {"s2s": "Same: ", "passage": "p: "}, "default_prompt_name": "s2s"}
    (folder / ABOUT).write_text(json.dumps(about))
    model = model_dir.read(f"st:{folder}")[0]
    settings = dataclasses.replace(model.settings, query_prompt="q: ", passage_prompt="")
    model_dir.write(tmp_path / "ours", dataclasses.replace(model, settings=settings))
    formats.convert(str(tmp_path / "ours"), tmp_path / "st", "st")
    written = json.loads((tmp_path / "st" / ABOUT).read_text())
    assert written["prompts"] == {"query": "q: ", "s2s": "Same: "}
    assert written["default_prompt_name"] is None


def test_a_reranker_keeps_the_prompts_of_its_encoder(folder):
    change(folder / ABOUT, prompts={"query": "query: ", "passage": "passage: "})
    settings = outline_of(PretrainedCrossEncoder(source=f"st:{folder}"))[1]
    assert (settings.query_prompt, settings.passage_prompt) == ("query: ", "passage: ")


DENSE, POOLING = "2_Dense/config.json", "1_Pooling/config.json"


@pytest.mark.parametrize("function", ["torch.nn.Tanh", "torch.nn.modules.activation.Tanh", ...])
def test_foreign_settings_that_change_nothing_are_accepted(function, folder):
    before = model_dir.read(f"st:{folder}")[0]
    change(folder / DENSE, activation_function=function, module_output_name=...)
    add_normalize(folder)
    change(folder / "tokenizer_config.json", truncation_side="right")
    found = model_dir.read(f"st:{folder}")[0].config
    assert (found.projection, found.similarity) == (before.config.projection, "cosine")


@pytest.mark.parametrize("kind", ["I8", "F8_E4M3"])
def test_quantised_weights_cost_one_sentence(kind, folder, tmp_path):
    """Integer tensors are refused, because the scale of quantised weights is not in the tensor."""
    path, name = folder / "model.safetensors", "encoder.layer.1.output.dense.weight"
    positions = np.arange(160)[None]  # old folders store this tensor of integers, which is ignored
    whole = {name: np.ones((32, 48), np.int8), "embeddings.position_ids": positions}
    change_tensors(folder, lambda tensors: tensors.update(whole))
    content = path.read_bytes()
    assert content.count(b'"I8"') == 1
    size = int.from_bytes(content[:8], "little")
    header = content[8 : 8 + size].replace(b'"I8"', f'"{kind}"'.encode())
    path.write_bytes(len(header).to_bytes(8, "little") + header + content[8 + size :])
    with pytest.raises(UserError, match=f"model.safetensors: {name} holds numbers of type {kind}"):
        formats.convert(f"st:{folder}", tmp_path / "ours", "jaxir")
    assert not (tmp_path / "ours").exists()
