"""Makes sparse_forms/: folders of sentence-transformers' SparseEncoder of every form, and their vectors.

pip install torch==2.15.0 transformers==5.24.0 sentence-transformers==6.2.0
python tests/golden/make_sparse_forms.py

All weights are random. Texts are encoded one by one, because in a batch with padding a SparseStaticEmbedding
would also leave out padding tokens of the text itself.
"""

import functools
import json
import shutil
import tempfile
from pathlib import Path

import numpy as np
import torch
import transformers
from make_golden import HERE, VOCAB
from sentence_transformers import SparseEncoder
from sentence_transformers import models as dense_models
from sentence_transformers.base.modules import Dense, Router, Transformer
from sentence_transformers.sparse_encoder.modules import (
    SparseAutoEncoder,
    SparseStaticEmbedding,
    SpladePooling,
)
from tokenizers import Tokenizer

PLACE, SCRATCH = HERE / "sparse_forms", Path(tempfile.mkdtemp())
WIDTH, POSITIONS = 16, 64
TEXTS = [
    "the cat sat on the mat",
    "a dog and a cat",
    "",
    "   ",
    "[PAD] the <pad> cat [CLS] </s>",
    "Dogs chase cats; cats chase mice, and mice eat the cheese that was left on the table last night. " * 4,
]
PROMPTS = {"query": "ask the cat: ", "document": "dog: ", "other": "mice "}


def configs() -> dict[str, transformers.PretrainedConfig]:
    t = transformers
    sizes = {"vocab_size": VOCAB, "hidden_size": WIDTH, "intermediate_size": 24, "num_hidden_layers": 1}
    sizes |= {"num_attention_heads": 2, "max_position_embeddings": POSITIONS, "pad_token_id": 0}
    shifted = sizes | {"pad_token_id": 1, "max_position_embeddings": POSITIONS + 2}
    untied = {"tie_word_embeddings": False}
    special = {"bos_token_id": 2, "cls_token_id": 2, "eos_token_id": 3, "sep_token_id": 3}
    modern = sizes | {"pad_token_id": 1, "num_hidden_layers": 2, **special}
    deberta = {"relative_attention": True, "max_relative_positions": -1, "position_buckets": 16}
    deberta |= {"norm_rel_ebd": "layer_norm", "share_att_key": True, "pos_att_type": ["p2c", "c2p"]}
    deberta |= {"position_biased_input": False, "type_vocab_size": 0}
    distil = {"vocab_size": VOCAB, "dim": WIDTH, "hidden_dim": 24, "n_heads": 2, "n_layers": 1}
    distil |= {"max_position_embeddings": POSITIONS}
    grouped = sizes | {"num_key_value_heads": 1}
    return {
        "bert": t.BertConfig(**sizes),
        "bert_untied": t.BertConfig(**sizes, **untied, hidden_act="relu"),
        "distilbert_untied": t.DistilBertConfig(**distil, **untied),
        "roberta": t.RobertaConfig(**shifted, type_vocab_size=1),
        "roberta_untied": t.RobertaConfig(**shifted, **untied, type_vocab_size=1),
        "xlm_roberta": t.XLMRobertaConfig(**shifted, type_vocab_size=1),
        "mpnet": t.MPNetConfig(**shifted),
        "modernbert": t.ModernBertConfig(**modern),
        "modernbert_untied": t.ModernBertConfig(
            **modern, **untied, classifier_bias=True, decoder_bias=False, classifier_activation="relu"
        ),
        "deberta": t.DebertaV2Config(**sizes, **deberta),
        "deberta_new": t.DebertaV2Config(**sizes, **deberta, legacy=False),
        "nomic_bert": t.NomicBertConfig(**sizes, head_dim=8),
        "gte": t.GteConfig(**sizes | {"pad_token_id": 1}),
        "jina_embeddings_v3": t.JinaEmbeddingsV3Config(**sizes | {"pad_token_id": 1}),
        "eurobert": t.EuroBertConfig(**grouped),
        "eurobert_biased": t.EuroBertConfig(**grouped, mlp_bias=True, tie_word_embeddings=True),
    }


def randomize(module: torch.nn.Module) -> torch.nn.Module:
    for name, parameter in module.named_parameters():
        centre = 1.0 if parameter.ndim == 1 and "bias" not in name else 0.0
        is_table = "embedding" in name or "tok" in name
        stddev = 0.3 if parameter.ndim == 1 else 1.0 if is_table else parameter.shape[-1] ** -0.5
        parameter.data = centre + stddev * torch.randn_like(parameter)
    return module


@functools.cache
def folder(name: str, *, head: bool = True) -> str:
    """Makes the folder of a random model, with or without the head of a masked language model."""
    config, place = configs()[name], SCRATCH / f"{name}_{head}"
    kind = transformers.AutoModelForMaskedLM if head else transformers.AutoModel
    model = randomize(kind.from_config(config).eval())
    model.tie_weights()
    model.save_pretrained(place)
    source = HERE / ("bert" if config.pad_token_id == 0 else "roberta")
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(source / file, place)
    settings = json.loads((place / "tokenizer_config.json").read_text())
    settings |= {"model_max_length": POSITIONS, "tokenizer_class": "PreTrainedTokenizerFast"}
    (place / "tokenizer_config.json").write_text(json.dumps(settings))
    return str(place)


def language_model(name: str, length: int = 24) -> Transformer:
    return Transformer(folder(name), transformer_task="fill-mask", max_seq_length=length)


def encoder(name: str = "bert") -> Transformer:
    return Transformer(folder(name, head=False), max_seq_length=24)


def pooling(mode: str = "mean", **more: object) -> dense_models.Pooling:
    return dense_models.Pooling(WIDTH, mode, **more)


def dense(size: int, **more: object) -> Dense:
    return randomize(Dense(WIDTH, size, **more))


def codes(width: int, size: int, **more: object) -> SparseAutoEncoder:
    made = SparseAutoEncoder(width, size, **more)
    made.encoder.weight.data = torch.randn(size, width)
    made.pre_bias.data, made.latent_bias.data = torch.randn(width) * 0.5, torch.randn(size)
    made.stats_last_nonzero = torch.randint(0, 50, (size,))
    return made


def static(name: str, **more: object) -> SparseStaticEmbedding:
    tokenizer = language_model(name).tokenizer
    return SparseStaticEmbedding(tokenizer, weight=torch.rand(VOCAB) * 3 - 0.3, **more)


def of_json(name: str) -> SparseStaticEmbedding:
    tokenizer = language_model(name).tokenizer
    tokens = list(tokenizer.get_vocab())[:60]
    weights = {token: round(5 * float(w), 4) for token, w in zip(tokens, torch.rand(60), strict=True)}
    (SCRATCH / "idf.json").write_text(json.dumps(weights))
    return SparseStaticEmbedding.from_json(str(SCRATCH / "idf.json"), tokenizer, frozen=True)


def sides(query: list[torch.nn.Module], document: list[torch.nn.Module]) -> Router:
    return Router.for_query_document(query_modules=query, document_modules=document)


def save(name: str, modules: list[torch.nn.Module], **more: object) -> None:
    SparseEncoder(modules=modules, device="cpu", **more).save(str(PLACE / name))
    model, found = SparseEncoder(str(PLACE / name), device="cpu"), {}
    for side, encode in (("query", model.encode_query), ("passage", model.encode_document)):
        for end, more in (("", {}), ("_top", {"max_active_dims": 7})):
            alone = [encode([text], convert_to_sparse_tensor=False, **more).numpy() for text in TEXTS]
            found[f"{side}{end}"] = np.concatenate(alone)
    if found["query"].shape == found["passage"].shape:
        pairs = torch.tensor(found["query"]), torch.tensor(found["passage"])
        found["similarity"] = model.similarity(*pairs).numpy()
        found["pairwise"] = model.similarity_pairwise(*pairs).numpy()
    np.savez_compressed(PLACE / name / "vectors.npz", **found)
    (PLACE / name / "README.md").unlink()
    print(name, found["query"].shape, [int((row != 0).sum()) for row in found["passage"]])


def save_codes() -> None:
    save("codes", [encoder(), pooling(), codes(WIDTH, 40, k=5)])
    normalized = [encoder("roberta"), pooling("cls"), dense_models.Normalize()]
    save("codes_cosine", [*normalized, codes(WIDTH, 48, k=6, normalize=True)], similarity_fn_name="cosine")
    without = pooling("mean", include_prompt=False)
    modules = [encoder(), without, dense(12), codes(12, 40, k=9, k_aux=20, dead_threshold=7)]
    save("codes_prompts", modules, max_active_dims=4, prompts=PROMPTS, similarity_fn_name="euclidean")
    words = dense_models.StaticEmbedding(
        Tokenizer.from_file(str(HERE / "bert" / "tokenizer.json")), embedding_dim=12
    )
    save("codes_static", [randomize(words), codes(12, 30, k=8)])
    shared = codes(WIDTH, 36, k=5)
    two = sides([encoder(), pooling()], [encoder("roberta"), pooling("max")])
    save("codes_router", [two, shared], prompts=PROMPTS)


def save_routers() -> None:
    top = {"max_active_dims": 20, "prompts": PROMPTS}
    query = [language_model("roberta"), SpladePooling("sum")]
    save(
        "two_models", [sides(query, [language_model("bert", 40), SpladePooling("max", "log1p_relu")])], **top
    )
    one = language_model("bert")
    save("two_poolings", [sides([one, SpladePooling("sum")], [one, SpladePooling("max")])])
    documents = [language_model("bert"), SpladePooling("max")]
    save("other_tokenizer", [sides([static("roberta")], documents)], similarity_fn_name="manhattan")
    save("from_json", [sides([of_json("bert")], documents)], default_prompt_name="other", prompts=PROMPTS)
    shutil.copy(SCRATCH / "idf.json", PLACE / "from_json")
    mapped = {("query", "text"): "short", ("document", None): "long"}
    router = Router({"short": [static("bert")], "long": documents}, "long", False, mapped)
    save("mapped", [router])
    save("codes_and_words", [sides([encoder(), pooling(), codes(WIDTH, VOCAB, k=9)], documents)])


def save_others() -> None:
    unlimited = static("bert", frozen=True)
    unlimited.tokenizer.model_max_length = int(1e30)
    save("static", [unlimited], similarity_fn_name="cosine", max_active_dims=3)
    save("factors", [language_model("roberta"), SpladePooling("max"), static("roberta")], max_active_dims=4)
    named = {"prompts": {"passage": "the mice ", "other": "a dog "}, "default_prompt_name": "other"}
    save("normalized", [language_model("bert"), SpladePooling("max"), dense_models.Normalize()], **named)
    save("codes_normalized", [encoder(), pooling(), codes(WIDTH, 40, k=6), dense_models.Normalize()])
    save("tokens", [encoder(), SpladePooling("sum")])
    tokens = dense(30, module_input_name="token_embeddings", activation_function=torch.nn.GELU())
    save("tokens_dense", [encoder("roberta"), tokens, SpladePooling("max", "log1p_relu")], prompts=PROMPTS)


def main() -> None:
    torch.manual_seed(0)
    shutil.rmtree(PLACE, ignore_errors=True)
    save_codes()
    save_routers()
    save_others()
    for name in configs():
        if name not in ("bert", "roberta"):
            save(f"head_{name}", [language_model(name), SpladePooling("max")])


if __name__ == "__main__":
    main()
