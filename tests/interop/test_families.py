"""Models of today's families, also in folders of older forms, equal transformers' (make_families.py)."""

import json
import math
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from flax import nnx

from jaxir import DualEncoder
from jaxir.core.errors import UserError
from jaxir.interop.huggingface import hf
from jaxir.interop.model import stored
from jaxir.models.backbones import PUBLISHED
from jaxir.models.dual_encoder import l2_normalize, pool
from tests.interop.folders import built, change, edited, exchange

pytestmark = pytest.mark.compiled

GOLDEN = Path(__file__).resolve().parent.parent / "golden"
LLAMAS = ("llama", "mistral", "qwen2", "qwen2_bidirectional", "qwen3", "eurobert", "ultrabert")
GEMMAS = ("gemma3", "gemma3_causal", "embedding_gemma2")
BERTS = ("xlm_roberta", "mpnet", "nomic_bert", "gte", "gte_untyped", "jina_embeddings_v3")
FAMILIES = (*LLAMAS, *GEMMAS, *BERTS)
WITH_GRADIENTS = [name for name in FAMILIES if (GOLDEN / name / "gradients.npz").exists()]
# transformers writes the tensors of these families under the names that the hub's older folders have.
OLDER = ("nomic_bert", "gte", "jina_embeddings_v3")


def unit(hidden: np.ndarray, mask: np.ndarray) -> np.ndarray:
    return np.asarray(l2_normalize(pool(jnp.asarray(hidden), jnp.asarray(mask), how="mean")))


@pytest.mark.parametrize(
    ("case", "scan"),
    [
        ("padded", True),
        *(pytest.param(*x, marks=pytest.mark.slow) for x in (("padded", False), ("unpadded", True))),
    ],
    ids=str,
)
@pytest.mark.parametrize("name", FAMILIES)
def test_encoder_equals_transformers(name, case, scan):
    encoder, golden = hf.read_encoder(GOLDEN / name), np.load(GOLDEN / name / "golden.npz")
    ids, expected = exchange(golden[f"{case}_ids"], encoder.pad_id), golden[f"{case}_output"]
    output = np.asarray(nnx.jit(lambda m, x: m(x))(built(encoder, scan_layers=scan), jnp.asarray(ids)))
    real = ids != 0
    error = np.abs(np.where(real[..., None], output - expected, 0.0)).max()
    assert error < 5e-6 * max(1.0, np.abs(expected).max()), error
    assert np.abs(unit(output, real) - unit(expected, real)).max() < 5e-6


@pytest.mark.parametrize("scan", [pytest.param(False, marks=pytest.mark.slow), True], ids=["list", "scan"])
@pytest.mark.parametrize("name", WITH_GRADIENTS)
def test_gradients_equal_torchs(name, scan):
    encoder, golden = hf.read_encoder(GOLDEN / name), np.load(GOLDEN / name / "gradients.npz")
    graph, state = nnx.split(built(encoder, scan_layers=scan))
    ids = jnp.asarray(exchange(golden["ids"], encoder.pad_id))

    def total(state):
        return (jnp.where((ids != 0)[..., None], nnx.merge(graph, state)(ids), 0.0) * golden["weights"]).sum()

    gradients = stored.flatten(nnx.to_pure_dict(jax.jit(jax.grad(total))(state)))
    theirs = hf.tensors_of(encoder.config, gradients, pad_id=encoder.pad_id)
    names = set(golden) - {"ids", "weights"}
    assert len(names) >= 3
    for parameter in names:
        expected = golden[parameter]
        assert np.abs(expected).max() > 0.1
        error = np.abs(theirs[f"{parameter}.weight"] - expected).max() / np.abs(expected).max()
        assert error < 1e-4, (parameter, error)


@pytest.mark.parametrize("name", FAMILIES)
def test_written_folder_is_the_read_one(name, tmp_path):
    encoder = hf.read_encoder(GOLDEN / name)
    hf.write_encoder(tmp_path, encoder.config, encoder.params, pad_id=encoder.pad_id)
    again = hf.read_encoder(tmp_path)
    assert again.config == encoder.config
    assert again.params.keys() == encoder.params.keys()
    assert all(np.array_equal(again.params[n], x) for n, x in encoder.params.items())
    theirs, ours = (safetensors.numpy.load_file(d / "model.safetensors") for d in (GOLDEN / name, tmp_path))
    if not name.startswith(OLDER):
        assert all(np.array_equal(theirs[tensor], ours[tensor]) for tensor in ours)
        assert all(tensor.startswith("pooler.") for tensor in theirs.keys() - ours.keys())
    else:
        assert "layers.0.self_attn.q_proj.weight" in ours
    read, wrote = (json.loads((d / "config.json").read_text()) for d in (GOLDEN / name, tmp_path))
    assert wrote["model_type"] == read["model_type"] and wrote["architectures"] == read["architectures"]


def test_gtes_older_model_type_is_read(tmp_path):
    folder = edited(GOLDEN / "gte", tmp_path, model_type="new")
    assert hf.read_encoder(folder).config == hf.read_encoder(GOLDEN / "gte").config


def test_older_config_json_of_nomic_is_read(tmp_path):
    older = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_inner": 48, "rotary_emb_base": 1000}
    removed = (
        "hidden_size",
        "num_hidden_layers",
        "num_attention_heads",
        "intermediate_size",
        "rope_parameters",
    )
    folder = edited(GOLDEN / "nomic_bert", tmp_path, **older, **dict.fromkeys(removed, ...))
    assert hf.read_encoder(folder).config == hf.read_encoder(GOLDEN / "nomic_bert").config


def test_fixed_ntk_scaling_of_gtes_authors(tmp_path):
    scaling = {"type": "ntk", "factor": 8.0}
    folder = edited(
        GOLDEN / "gte",
        tmp_path,
        model_type="new",
        rope_parameters=...,
        rope_theta=20_000,
        rope_scaling=scaling,
    )
    config = hf.read_encoder(folder).config
    assert config.rope_base == 160_000.0 and config.rope_divisor == pytest.approx(8 ** (2 / config.head_dim))


def test_text_model_of_a_multimodal_folder_is_read(tmp_path):
    folder = Path(shutil.copytree(GOLDEN / "embedding_gemma2", tmp_path / "whole"))
    tensors = safetensors.numpy.load_file(folder / "model.safetensors")
    tensors = {f"language_model.{name}": value for name, value in tensors.items()}
    tensors["vision_tower.norm.weight"] = np.ones(3, np.float32)
    safetensors.numpy.save_file(tensors, folder / "model.safetensors")
    text = json.loads((folder / "config.json").read_text())
    whole = {"model_type": "embedding_gemma2", "text_config": text, "vision_config": None}
    (folder / "config.json").write_text(json.dumps(whole))
    read, expected = hf.read_encoder(folder), hf.read_encoder(GOLDEN / "embedding_gemma2")
    assert read.config == expected.config
    assert all(np.array_equal(read.params[n], x) for n, x in expected.params.items())


def test_head_that_predicts_tokens_is_left_out(tmp_path):
    folder = Path(shutil.copytree(GOLDEN / "qwen3", tmp_path / "causal"))
    tensors = safetensors.numpy.load_file(folder / "model.safetensors")
    tensors = {f"model.{name}": value for name, value in tensors.items()}
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    safetensors.numpy.save_file(tensors, folder / "model.safetensors")
    read, expected = hf.read_encoder(folder), hf.read_encoder(GOLDEN / "qwen3")
    assert all(np.array_equal(read.params[n], x) for n, x in expected.params.items())


def with_tokenizer(name: str, tokenizer: str, place: Path, **entries) -> Path:
    folder = edited(GOLDEN / name, place, **entries)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(GOLDEN / tokenizer / file, folder / file)
    return folder


def test_tokenizers_padding_id_counts(tmp_path):
    """Folders on the hub have a BERT with RoBERTa's tokenizer, or a Qwen3 without a padding id."""
    for name, entries in (("bert", {}), ("qwen3", {"pad_token_id": None})):
        wrong = DualEncoder.load(f"hf:{with_tokenizer(name, 'roberta', tmp_path / name, **entries)}")
        right = with_tokenizer(name, "roberta", tmp_path / f"{name}_right", pad_token_id=1)
        texts = ["the cat sat", "a dog and a cat and a dog and a mouse"]
        expected = DualEncoder.load(f"hf:{right}").encode_passages(texts)
        np.testing.assert_array_equal(wrong.encode_passages(texts), expected)


@pytest.mark.parametrize(
    ("name", "entries", "advice"),
    [
        ("xlm_roberta", {}, "correct pad_token_id in config.json or the"),
        ("mpnet", {"pad_token_id": 0}, "correct the"),  # transformers still counts MPNet's from 1
    ],
)
def test_positions_counted_from_another_padding_id_are_refused(tmp_path, name, entries, advice):
    folder = with_tokenizer(name, "bert", tmp_path, **entries)
    with pytest.raises(
        UserError, match=f"pads with id 0, but this model counts positions from id 1: {advice}"
    ):
        DualEncoder.load(f"hf:{folder}")


@pytest.mark.parametrize(
    ("name", "entries", "message"),
    [
        ("llama", {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, "RoPE of type 'yarn'"),
        ("qwen3", {"num_key_value_heads": 3}, "num_heads 4 is not a multiple of num_kv_heads 3"),
        ("qwen2", {"layer_types": ["full_attention"]}, "layer_types must have 3 items"),
        ("gemma3", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping 50.0 is not supported"),
        ("mpnet", {"relative_attention_num_buckets": 64}, "relative_attention_num_buckets 64"),
        ("embedding_gemma2", {"per_layer_config": {}}, None),
    ],
)
def test_settings_that_are_not_supported_are_refused(name, entries, message, tmp_path):
    folder = edited(GOLDEN / name, tmp_path, **entries)
    if message is None:  # transformers would take its default sizes, which the weights do not fit
        message = "has shape"
    with pytest.raises(UserError, match=message):
        hf.read_encoder(folder)


@pytest.mark.parametrize(
    ("name", "millions"),
    [
        ("Qwen/Qwen3-Embedding-0.6B", 595.8),
        ("Qwen/Qwen3-Embedding-4B", 4021.8),
        ("Qwen/Qwen3-Embedding-8B", 7567.3),
        ("intfloat/e5-mistral-7b-instruct", 7110.7),
        ("google/embeddinggemma-300m", 302.9),
        ("sentence-transformers/all-mpnet-base-v2", 108.9),
        ("nomic-ai/nomic-embed-text-v1.5", 136.7),
        ("Alibaba-NLP/gte-multilingual-base", 305.4),
    ],
)
def test_presets_have_the_published_sizes(name, millions):
    """Sizes in millions, without poolers and the layers after pooling (EmbeddingGemma: 308 M with these)."""
    shapes = stored.encoder_shapes(PUBLISHED[name])
    assert sum(math.prod(shape) for shape in shapes.values()) / 1e6 == pytest.approx(millions, abs=0.1)


def test_eos_that_transformers_5_no_longer_appends_is_noted(tmp_path, capsys):
    folder = with_tokenizer("qwen3", "bert", tmp_path)
    change(folder / "tokenizer_config.json", add_eos_token=True, eos_token="[SEP]")
    DualEncoder.load(f"hf:{folder}")
    assert "add_eos_token" not in capsys.readouterr().err  # this folder's tokenizer.json appends [SEP]
    change(folder / "tokenizer_config.json", eos_token="[MASK]")
    DualEncoder.load(f"hf:{folder}")
    assert "sets add_eos_token, but tokenizer.json appends no '[MASK]'" in capsys.readouterr().err
