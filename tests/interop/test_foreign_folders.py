"""Tokenizers and prompts of foreign folders are read as their libraries read them, or refused."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
import transformers

from jaxir import CrossEncoder, PretrainedCrossEncoder
from jaxir.core.errors import UserError
from jaxir.data.text.tokenizer import Tokenizer
from jaxir.interop import formats, model_dir
from jaxir.interop.huggingface import tokenizer_files
from tests.interop.folders import GOLDEN, change

pytestmark = pytest.mark.compiled
TEXTS = ["Dogs CHASE the Café", "the cat sat on the mat", "a 猫 and a 犬"]


@pytest.fixture
def folder(tmp_path):
    """A copy of a dual encoder of BERT, with a Dense and no Normalize."""
    return Path(shutil.copytree(GOLDEN / "bert", tmp_path / "folder"))


@pytest.fixture
def pairs_folder(tmp_path):
    shutil.copytree(GOLDEN / "cross_bert", tmp_path / "pairs")
    return Path(shutil.copytree(GOLDEN / "cross_saved", tmp_path / "pairs", dirs_exist_ok=True))


def test_saved_cross_encoder_keeps_its_head(pairs_folder, tmp_path):
    golden = np.load(GOLDEN / "cross_bert" / "golden.npz")
    formats.convert(f"st:{pairs_folder}", tmp_path / "ours", "jaxir")
    scores = CrossEncoder.load(str(tmp_path / "ours")).score([tuple(p) for p in golden["pairs"].tolist()])
    np.testing.assert_allclose(scores, golden["pair_scores"], atol=1e-5)
    head = PretrainedCrossEncoder(source=f"hf:{pairs_folder}").build(seed=0).model.classifier.kernel[...]
    tensors = safetensors.numpy.load_file(pairs_folder / "model.safetensors")
    np.testing.assert_array_equal(head, tensors["classifier.weight"].T)


def test_kind_of_a_saved_cross_encoder_is_checked(pairs_folder):
    with pytest.raises(UserError, match=r"config_sentence_transformers\.json: the folder holds a cross-enc"):
        model_dir.read(f"st:{pairs_folder}", kind="dual_encoder")
    change(pairs_folder / "config_sentence_transformers.json", model_type="SparseEncoder")
    with pytest.raises(UserError, match=r"holds a sparse encoder, .*; expected a dual encoder"):
        model_dir.read(f"st:{pairs_folder}", kind="dual_encoder")
    change(pairs_folder / "config_sentence_transformers.json", model_type="Unknown")
    with pytest.raises(UserError, match=r"holds a Unknown; expected a dual encoder"):
        model_dir.read(f"st:{pairs_folder}", kind=None)
    change(pairs_folder / "config_sentence_transformers.json", model_type="CrossEncoder")
    listed = json.loads((pairs_folder / "modules.json").read_text())
    kind = "sentence_transformers.base.modules.dense.Dense"
    more = {"idx": 1, "name": "1", "path": "1_Dense", "type": kind}
    (pairs_folder / "modules.json").write_text(json.dumps([*listed, more]))
    with pytest.raises(UserError, match=r"modules\.json: the modules Transformer, Dense are not supported"):
        model_dir.read(f"st:{pairs_folder}", kind=None)


def test_a_cross_encoders_default_prompt_goes_before_queries(pairs_folder, tmp_path):
    """CrossEncoder.predict of sentence-transformers 6.2 puts the prompt before the first text of a pair."""
    about = {"prompts": {"web": "Rank: ", "s2s": "Same: "}, "default_prompt_name": "web"}
    change(pairs_folder / "config_sentence_transformers.json", **about)
    settings = model_dir.read(f"st:{pairs_folder}", kind="cross_encoder")[0].settings
    assert (settings.query_prompt, settings.passage_prompt) == ("Rank: ", "")
    formats.convert(f"st:{pairs_folder}", tmp_path / "st", "st")
    written = json.loads((tmp_path / "st" / "config_sentence_transformers.json").read_text())
    assert {name: written[name] for name in about} == about
    assert model_dir.read(f"st:{tmp_path / 'st'}", kind="cross_encoder")[0].settings == settings
    (pairs_folder / "modules.json").unlink()  # without this file sentence-transformers reads no prompts
    assert model_dir.read(f"hf:{pairs_folder}", kind="cross_encoder")[0].settings.query_prompt == ""


def theirs(directory: Path) -> list[list[int]]:
    return transformers.AutoTokenizer.from_pretrained(directory)(TEXTS)["input_ids"]


def ours(tokenizer: Tokenizer) -> list[list[int]]:
    rows, pad = tokenizer.encode_batch(TEXTS, max_length=64), tokenizer.pad_swap
    return [[{0: pad, pad: 0}.get(i, i) if pad else i for i in row.tolist()] for row in rows]


def bare(directory: Path, **normalizer) -> None:
    """Keeps only the tokenizer.json of a folder's tokenizer, with another normaliser."""
    (directory / "tokenizer_config.json").unlink(missing_ok=True)
    spec = json.loads((directory / "tokenizer.json").read_text())
    spec["normalizer"] = normalizer or None
    (directory / "tokenizer.json").write_text(json.dumps(spec))


BERTS = {"type": "BertNormalizer", "clean_text": True, "handle_chinese_chars": True, "strip_accents": None}


@pytest.mark.parametrize(("name", "to"), [("bert", "st"), ("roberta", "hf"), ("t5_1_1", "st")])
def test_transformers_tokenises_with_what_is_written(name, to, tmp_path):
    """This includes models with only a tokenizer.json, whose normaliser BERT's class would ignore."""
    source = model_dir.read(f"st:{GOLDEN / name}")[0]
    source.tokenizer.save(tmp_path / "tokenizer")
    bare(tmp_path / "tokenizer", **(BERTS | {"lowercase": False} if name == "bert" else {}))
    tokenizer = Tokenizer.load(tmp_path / "tokenizer")
    loaded = model_dir.load(f"hf:{GOLDEN / name}")
    model_dir.save(tmp_path / "ours", loaded.model, tokenizer, source.settings)
    formats.convert(str(tmp_path / "ours"), tmp_path / "out", to)
    assert theirs(tmp_path / "out") == ours(tokenizer)
    again = model_dir.read(f"{to}:{tmp_path / 'out'}")[0].tokenizer
    assert ours(again) == ours(tokenizer) and again.fingerprint == tokenizer.fingerprint
    read = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert (read.model_max_length, read.pad_token_id) == (24, source.tokenizer.pad_swap or 0)


SETTINGS = {
    "as it is": {},
    "cased": {"do_lower_case": False},
    "accents": {"do_lower_case": True, "strip_accents": False},
    "Chinese": {"tokenize_chinese_chars": False},
    "the class alone": {"do_lower_case": ..., "strip_accents": ...},
    "another class": {"tokenizer_class": "PreTrainedTokenizerFast", "do_lower_case": False},
    "no class": {"tokenizer_class": ..., "do_lower_case": False},
}


@pytest.mark.parametrize("settings", SETTINGS)
def test_texts_are_normalised_as_transformers_does(settings, folder):
    change(folder / "tokenizer_config.json", **SETTINGS[settings])
    found, before = model_dir.read(f"st:{folder}")[0].tokenizer, Tokenizer.load(folder)
    assert ours(found) == theirs(folder)
    differs = settings not in ("as it is", "the class alone", "another class")
    assert (found.fingerprint != before.fingerprint) == differs


@pytest.mark.parametrize(
    ("name", "entry"), [("bert", "cls_token"), ("bert", "sep_token"), ("roberta", "cls_token")]
)
def test_special_tokens_that_differ_from_the_settings_are_refused(name, entry, tmp_path):
    folder = Path(shutil.copytree(GOLDEN / name, tmp_path / "folder"))
    config = {"cls_token": "<s>", "sep_token": "</s>", "mask_token": "<mask>"}
    config |= json.loads((folder / "tokenizer_config.json").read_text())
    config["tokenizer_class"] = {"bert": "BertTokenizerFast", "roberta": "RobertaTokenizer"}[name]
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(config | {entry: {"content": config[entry]}}))
    assert ours(model_dir.read(f"st:{folder}")[0].tokenizer) == ours(Tokenizer.load(GOLDEN / name))
    path.write_text(json.dumps(config | {entry: config["mask_token"]}))
    if name == "bert":
        assert theirs(folder) != ours(Tokenizer.load(folder))
    with pytest.raises(UserError, match=f"as its {entry}, but tokenizer.json puts '.*' and '.*' around"):
        model_dir.read(f"st:{folder}")
    change(path, tokenizer_class="PreTrainedTokenizerFast")
    assert ours(model_dir.read(f"st:{folder}")[0].tokenizer) == ours(Tokenizer.load(GOLDEN / name))


def test_class_that_lower_cases_by_default_is_followed(folder):
    spec = json.loads((folder / "tokenizer.json").read_text())
    spec["normalizer"]["lowercase"] = False
    (folder / "tokenizer.json").write_text(json.dumps(spec))
    path = folder / "tokenizer_config.json"
    change(path, tokenizer_class="BertTokenizerFast", do_lower_case=...)
    assert ours(model_dir.read(f"st:{folder}")[0].tokenizer) == theirs(folder) != ours(Tokenizer.load(folder))
    path.unlink()  # now only the model type determines the tokenizer's class
    with pytest.raises(UserError, match=r"ignores the normalizer of .* PreTrainedTokenizerFast"):
        model_dir.read(f"st:{folder}")


@pytest.mark.parametrize("in_json", [False, True])
@pytest.mark.parametrize("said", [None, False, True])
def test_space_before_roberta_texts_is_that_of_transformers(said, in_json, tmp_path):
    folder = Path(shutil.copytree(GOLDEN / "roberta", tmp_path / "folder"))
    spec = json.loads((GOLDEN / "modernbert" / "tokenizer.json").read_text())
    spec["pre_tokenizer"]["add_prefix_space"] = in_json
    (folder / "tokenizer.json").write_text(json.dumps(spec))
    names = {"pad": "[PAD]", "cls": "[CLS]", "bos": "[CLS]", "sep": "[SEP]", "eos": "[SEP]", "unk": "[UNK]"}
    about = {f"{name}_token": token for name, token in names.items()} | {"mask_token": "[MASK]"}
    about |= {"tokenizer_class": "RobertaTokenizerFast"}
    about |= {} if said is None else {"add_prefix_space": said}
    (folder / "tokenizer_config.json").write_text(json.dumps(about))
    found, before = model_dir.read(f"st:{folder}")[0].tokenizer, Tokenizer.load(folder)
    assert ours(found) == theirs(folder)
    assert (ours(found) != ours(before)) == (bool(said) != in_json)
    formats.convert(f"st:{folder}", tmp_path / "out", "st")
    assert theirs(tmp_path / "out") == ours(found)
    if said is None and in_json:  # without a named class it is unknown which tokenizer was meant
        change(folder / "tokenizer_config.json", tokenizer_class=...)
        with pytest.raises(UserError, match=r"ignores the pre_tokenizer of .*, or set add_prefix_space"):
            model_dir.read(f"st:{folder}")


def test_tokenizer_class_of_a_modernbert_is_ignored(tmp_path):
    folder = Path(shutil.copytree(GOLDEN / "modernbert", tmp_path / "folder"))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(GOLDEN / "bert" / name, folder)
    change(folder / "tokenizer_config.json", do_lower_case=False)
    change(folder / "config.json", pad_token_id=0)
    assert ours(model_dir.read(f"st:{folder}")[0].tokenizer) == theirs(folder) == ours(Tokenizer.load(folder))


DECODER = {"content": "mice", "lstrip": False, "rstrip": False, "normalized": False, "single_word": False}
NAMED = {
    "by id": ("tokenizer_config.json", {"added_tokens_decoder": {"NEXT": DECODER | {"special": False}}}),
    "more": ("tokenizer_config.json", {"additional_special_tokens": ["mice"]}),
    "extra": ("tokenizer_config.json", {"extra_special_tokens": ["mice"]}),
    "a map": ("special_tokens_map.json", {"additional_special_tokens": ["mice"]}),
    "a file": ("added_tokens.json", {"mice": "NEXT"}),
}


@pytest.mark.parametrize("name", ["bert", "t5"])
@pytest.mark.parametrize("how", NAMED)
def test_tokens_that_a_tokenizer_lacks_are_refused(how, name, folder, sentencepiece_folder, tmp_path):
    """transformers adds tokens that files beside a tokenizer name, so the tokenizer must have them."""
    if name == "t5":
        folder = Path(shutil.copytree(GOLDEN / "t5_1_1", tmp_path / "t5"))
        (folder / "tokenizer.json").unlink()
        (folder / "tokenizer_config.json").unlink()
        shutil.copy(sentencepiece_folder / "spiece.model", folder)
        change(folder / "tokenizer_config.json", tokenizer_class="T5Tokenizer", extra_ids=0)
        change(folder / "config.json", vocab_size=2000)
    before = tokenizer_files.load(folder)
    file, content = NAMED[how]
    content = json.loads(json.dumps(content).replace('"NEXT":', f'"{before.vocab_size}":'))
    change(folder / file, **{k: before.vocab_size if v == "NEXT" else v for k, v in content.items()})
    reads = transformers.AutoTokenizer.from_pretrained(folder)
    text = "cats chase mice, and mice eat"
    same = reads(text)["input_ids"] == before.encode_batch([text], max_length=64)[0].tolist()
    assert same == (name == "t5" and how == "a map")
    if same:  # transformers ignores the added token here, too
        assert tokenizer_files.load(folder).fingerprint == before.fingerprint
        return
    lacking = "spiece.model" if name == "t5" else "tokenizer.json"
    with pytest.raises(UserError, match=rf"{file} names the token 'mice', which {lacking} lacks") as caught:
        tokenizer_files.load(folder)
    assert "\n" not in str(caught.value)
    reads.save_pretrained(folder)  # do what the error advises
    found = tokenizer_files.load(folder).encode_batch([text], max_length=64)[0].tolist()
    assert found == reads(text)["input_ids"]


def test_exported_tokenizer_keeps_lower_casing(folder, tmp_path):
    """BERT's class must not replace the normaliser by tokenizer_config.json's defaults."""
    change(folder / "tokenizer_config.json", do_lower_case=False)
    change(folder / "sentence_bert_config.json", do_lower_case=True)
    lowered = model_dir.read(f"st:{folder}")[0].tokenizer
    formats.convert(f"st:{folder}", tmp_path / "out", "st")
    assert theirs(tmp_path / "out") == ours(lowered) != theirs(folder)
