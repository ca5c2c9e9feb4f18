"""Every unsupported or damaged folder is refused by one sentence that names the folder."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from jaxir.core.errors import UserError
from jaxir.interop import model_dir
from tests.interop.folders import GOLDEN, add_normalize, change, change_tensors, remove_tensors

WORD = "embeddings.word_embeddings.weight"
TRANSFORMER, ABOUT = "sentence_bert_config.json", "config_sentence_transformers.json"
DENSE, POOLING, TOKENIZER = "2_Dense/config.json", "1_Pooling/config.json", "tokenizer_config.json"
Spoil = Callable[[Path], object]


def edit(name: str, **entries) -> Spoil:
    return lambda folder: change(folder / name, **entries)


def config(**entries) -> Spoil:
    return edit("config.json", **entries)


def write(name: str, text: str) -> Spoil:
    return lambda folder: (folder / name).write_text(text)


def remove(name: str) -> Spoil:
    return lambda folder: (folder / name).unlink()


def tensors(edited: Callable[[dict], object]) -> Spoil:
    return lambda folder: change_tensors(folder, edited)


def labels(count: int) -> Spoil:
    shapes = {"classifier.weight": (count, 32), "classifier.bias": (count,)}
    return tensors(lambda t: t.update({n: np.zeros(shape, np.float32) for n, shape in shapes.items()}))


def without(beginning: str) -> Spoil:
    return lambda folder: remove_tensors(folder, beginning)


def module(number: int, **entries) -> Spoil:
    def spoil(folder: Path) -> None:
        listed = json.loads((folder / "modules.json").read_text())
        listed[number] |= entries
        (folder / "modules.json").write_text(json.dumps(listed))

    return spoil


def normalized(folder: Path) -> None:
    """Adds a Normalize module that reads something other than the vectors of texts."""
    add_normalize(folder)
    change(folder / "3_Normalize" / "config.json", module_input_name="token_embeddings")


def truncated(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def euclidean(folder: Path) -> None:
    change(folder / ABOUT, similarity_fn_name="euclidean")
    listed = json.loads((folder / "modules.json").read_text())
    (folder / "modules.json").write_text(json.dumps(listed[:2]))


def pickled(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


ONE_MODULE = '[{"type": "sentence_transformers.models.Transformer", "path": ""}]'
# (spec of a folder, kind that is requested, what is wrong, expected sentence)
REFUSED = {
    ("st:roberta", "dual_encoder"): [
        (remove("config.json"), r"config\.json: no such file"),
        (remove("model.safetensors"), r"no weights in it \(expected model\.safetensors, pytorch"),
        (pickled, r"pytorch_model\.bin: truncated, or not a file of torch\.save"),
        (remove("tokenizer.json"), "holds no tokenizer"),
        (remove("modules.json"), r"modules\.json: no such file.*write hf:"),
        (truncated, r"model\.safetensors: truncated, or not a safetensors file"),
        (config(model_type="gpt2"), "model_type 'gpt2' is not supported"),
        (config(hidden_size=...), r"config\.json: 'hidden_size' is missing"),
        (config(num_attention_heads=5), r"config\.json: embed_dim 32 must be a multiple"),
        (config(hidden_act="mish"), "hidden_act 'mish' is not supported"),
        (config(position_embedding_type="relative_key"), "only 'absolute'"),
        (config(vocab_size=101), r"word_embeddings\.weight has shape \(100, 32\)"),
        (config(num_hidden_layers=3), r"lacks encoder\.layer\.2\..* and 13 more"),
        (config(num_hidden_layers=10**9), "num_hidden_layers must be .* from 1 to 1000"),
        (tensors(lambda t: t.pop(WORD)), f"it lacks {WORD}"),
        (tensors(lambda t: t.update(odd=t[WORD].copy())), "it has unknown odd"),
        (config(pad_token_id=2), r"pads with id 1, but this model counts positions from id 2|has shape"),
        (write("modules.json", ONE_MODULE), "modules Transformer are not"),
        (euclidean, "similarity 'euclidean' is not supported"),
    ],
    ("st:bert", "dual_encoder"): [
        (edit(TRANSFORMER, config_args={"hidden_act": "relu"}), "config_args sets hidden_act to 'relu'"),
        (edit(TRANSFORMER, model_kwargs={"num_hidden_layers": 1}), "model_kwargs sets num_hidden_layers"),
        (edit(TRANSFORMER, tokenizer_args={"do_lower_case": False}), "tokenizer_args sets do_lower"),
        (edit(TRANSFORMER, processing_kwargs={"text": {"truncation": False}}), r"\.text sets truncation to"),
        (edit(TRANSFORMER, model_args=[1]), "model_args must be a JSON object"),
        (edit(TRANSFORMER, max_seq_length="12"), "max_seq_length is '12', but must be a number"),
        (edit(TOKENIZER, model_max_length="24"), r"tokenizer_config\.json: model_max_length is '24'"),
        (edit(TRANSFORMER, transformer_task="fill-mask"), "transformer_task 'fill-mask' is not supported"),
        (edit(TRANSFORMER, query_expansion={"length": 32}), "query_expansion is not supported"),
        (edit(TRANSFORMER, module_output_name="all_layers"), "module_output_name 'all_layers' is not"),
        (edit(TOKENIZER, truncation_side="left"), "truncates texts on the left, but"),
        (edit(ABOUT, prompts={"query": 3}), "prompts must be an object of texts by name"),
        (edit(ABOUT, default_prompt_name="web"), "default_prompt_name 'web' is not in prompts"),
        (module(0, type="custom_st.Transformer"), r"modules\.json: the module 'custom_st\.Transformer' is"),
        (normalized, r"3_Normalize/config\.json: module_input_name 'token_embeddings' is not supported"),
        (edit(DENSE, module_output_name="scores"), "module_output_name 'scores' is not"),
        (edit(DENSE, activation_function="mine.Identity"), r"activation mine\.Identity is"),
        (edit(DENSE, activation_function=None), "activation None is not"),
        (edit(DENSE, bias=False), r"bias is false, but its weights have a linear\.bias"),
        (edit(DENSE, out_features="16"), r"2_Dense/config\.json: out_features is '16', not a number"),
        (write(DENSE, "[]"), r"2_Dense/config\.json is damaged"),
        (edit(POOLING, pooling_mode=3), r"config\.json: pooling_mode 3 is not the name of a pooling"),
        (config(pad_token_id=99999), "pad_token_id is 99999, but must be below vocab_size"),
        (config(pad_token_id="0"), "pad_token_id is '0', not an id"),
        (config(hidden_act={}), r"config\.json: hidden_act {} is not supported"),
        (module(1, path="../elsewhere"), r"modules\.json: '../elsewhere' lies outside of"),
    ],
    ("hf:modernbert", "dual_encoder"): [
        (config(layer_types=["sliding_attention"] * 7), "must be full_attention every 7 layers"),
        (config(rope_parameters={"full_attention": {"rope_type": "yarn"}}), "RoPE scaling is not supported"),
        (config(attention_bias=True), "attention_bias True is not supported, only False"),
        (config(num_hidden_layers=...), "'num_hidden_layers' is missing"),
        (config(num_hidden_layers=1, layer_types=...), "num_layers must be at least 2, not 1"),
        (config(num_attention_heads=5), "embed_dim 32 must be a multiple of 2 x num_heads 5"),
    ],
    ("hf:deberta", "dual_encoder"): [
        (config(conv_kernel_size=3), "the convolution next to the first block .* is not supported"),
        (config(position_biased_input=...), "absolute positions are not supported: relative_attention must"),
        (config(relative_attention=False), "absolute positions are not supported"),
        (config(type_vocab_size=2), "type_vocab_size 2 is not supported, only 0"),
        (config(pos_att_type="p2c|p2p"), "pos_att_type 'p2p' is not supported; supported are p2c, c2p"),
        (config(norm_rel_ebd="batch_norm"), "norm_rel_ebd 'batch_norm' is not supported"),
        (write("spm.model", "none"), "spm.model is not a SentencePiece model"),
        (config(embedding_size=16), "embedding_size 16 is not supported with hidden_size 32"),
        (config(num_attention_heads=0), "num_attention_heads must be"),
        (config(position_buckets=10**9), "relative_buckets must be a whole number from 0 to 65536"),
        (config(position_buckets=3), "relative_buckets 3 must be 0 or at least 4"),
        (config(pos_att_type=7), "."),
    ],
    ("hf:cross_bert", "cross_encoder"): [
        (labels(3), "the model has 3 labels; give one with one"),
        (edit(ABOUT, activation_fn="torch.nn.Softmax"), r"torch\.nn\.Softmax of scores is not supported"),
        (remove("model.safetensors"), "no weights in it"),
        (without("classifier."), r"no classifier\.weight among its weights, so it is not a cross-encoder"),
        (edit(TOKENIZER, model_input_names="input_ids"), "model_input_names must be a list of names"),
    ],
    ("hf:cross_bert", None): [
        (config(id2label=5), r"config\.json: .*id2label an object of labels"),
        (config(architectures={"0": "BertModel"}), r"config\.json: architectures must be a list of names"),
        (config(sentence_transformers="Identity"), "sentence_transformers must be a JSON object"),
    ],
    ("hf:cross_deberta", "cross_encoder"): [
        (config(pooler_hidden_act="mish"), "pooler_hidden_act 'mish' is not supported, only gelu"),
        (config(pooler_hidden_size=16), "pooler_hidden_size 16 is not supported, only 32"),
    ],
    ("hf:cross_modernbert", "cross_encoder"): [
        (config(classifier_pooling="max"), "classifier_pooling 'max' is not supported, only cls, mean"),
        (config(classifier_bias=True), "classifier_bias True is not supported, only False"),
    ],
    ("hf:t5_1_1", "cross_encoder"): [(lambda folder: None, "the head of 't5' reads its decoder, but")],
    ("hf:bert", "seq2seq"): [(lambda folder: None, "model_type 'bert' is not a generator")],
    ("hf:seq2seq_1_1", "seq2seq"): [
        (without("decoder."), "its weights have no decoder"),
        (without("decoder.block.1.layer.1.EncDec"), r"lacks decoder\.block\.1\.layer\.1\.EncDecAttention\.k"),
        (config(decoder_start_token_id=3), "decoder_start_token_id 3 are not"),
        (config(eos_token_id=[1, 2]), "eos_id"),
        (config(num_decoder_layers=-1), "num_decoder_layers"),
    ],
}
CASES = [(*folder, *case) for folder, cases in REFUSED.items() for case in cases]


@pytest.mark.parametrize(
    ("spec", "kind", "spoil", "sentence"), CASES, ids=[f"{c[0]}: {c[3]:.40}" for c in CASES]
)
def test_folder_is_refused_in_one_sentence(spec, kind, spoil, sentence, tmp_path):
    form, _, name = spec.partition(":")
    folder = Path(shutil.copytree(GOLDEN / name, tmp_path / "model"))
    spoil(folder)
    with pytest.raises(UserError, match=sentence) as caught:
        model_dir.read(f"{form}:{folder}", kind=kind)
    assert "\n" not in str(caught.value) and str(folder) in str(caught.value)


@pytest.mark.parametrize(
    ("spec", "sentence"),
    [
        ("nowhere", "nowhere: no such model directory"),
        ("st:./nowhere", r"\./nowhere: no such directory"),
        ("hf:some-owner/no-such-model", "is not in the cache .*, and HF_HUB_OFFLINE forbids"),
        (f"{GOLDEN / 'roberta'}", "write st:"),
        (f"{GOLDEN / 'distilbert'}", "write hf:"),
        (f"hf:{GOLDEN / 'distilbert'}", "holds no tokenizer"),
        (f"st:{GOLDEN / 'make_golden.py'}", "is a file; a model is a directory"),
        ("t5x:nowhere", "nowhere: no such directory"),
        ("t5x:s3://bucket/run", "only local paths and gs://"),
        (f"t5x:{GOLDEN}", "no T5X checkpoint in it"),
    ],
)
def test_missing_model_is_refused(spec, sentence):
    with pytest.raises(UserError, match=sentence) as caught:
        model_dir.read(spec, kind=None)
    assert "\n" not in str(caught.value)
