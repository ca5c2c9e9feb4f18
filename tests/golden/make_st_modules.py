"""Makes st_modules/: the modules of sentence-transformers' folders over a BERT, and the folders' vectors.

pip install torch==2.13.0 transformers==5.24.0 sentence-transformers==6.2.0 model2vec==0.9.0
python tests/golden/make_st_modules.py

The files of the BERT itself, which is bert/, are removed: tests put them back.
"""

import json
import shutil

import model2vec
import numpy as np
import torch
from make_golden import HERE
from sentence_transformers import SentenceTransformer, models
from sentence_transformers.base.modules import Router
from sentence_transformers.sentence_transformer import modules
from tokenizers import Tokenizer, pre_tokenizers
from tokenizers import models as token_models

PLACE, WIDTH = HERE / "st_modules", 32
TEXTS = [
    "the cat sat on the mat",
    "a dog and a cat",
    "Dogs chase cats; cats chase mice, and mice eat the cheese that was left on the table last night.",
    "the",
]
OF_BERT = ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")


def randomized(module: torch.nn.Module) -> torch.nn.Module:
    for parameter in module.parameters():
        parameter.data = torch.randn_like(parameter) * 0.4 + (1 if parameter.ndim == 1 else 0)
    return module


def bert(**more: object) -> models.Transformer:
    return models.Transformer(str(HERE / "bert"), max_seq_length=40, **more)


def dense(*sizes: int, **more: object) -> models.Dense:
    return randomized(models.Dense(*sizes, **more))


def towers(*ends: list[torch.nn.Module]) -> Router:
    query, document = ([bert(), models.Pooling(WIDTH, "mean"), *end] for end in ends)
    return Router.for_query_document(query_modules=query, document_modules=document)


def save(name: str, modules: list[torch.nn.Module], **more: object) -> None:
    model = SentenceTransformer(modules=modules, device="cpu", **more)
    model.save(str(PLACE / name))
    model = SentenceTransformer(str(PLACE / name), device="cpu")
    query, passage = model.encode_query(TEXTS), model.encode_document(TEXTS)
    np.savez_compressed(PLACE / name / "vectors.npz", query=query, passage=passage)
    (PLACE / name / "README.md").unlink()
    for settings in (PLACE / name).rglob("sentence_bert_config.json"):
        for file in OF_BERT:
            (settings.parent / file).unlink()


def save_model2vec() -> None:
    words = {word: i for i, word in enumerate(["[PAD]", "[UNK]", "cat", "dog", "the", "mat"])}
    tokenizer = Tokenizer(token_models.WordPiece(words, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    vectors = np.random.default_rng(0).normal(size=(len(words), 8)).astype(np.float32)
    place = PLACE / "model2vec"
    model2vec.StaticModel(vectors, tokenizer, {"normalize": True}, normalize=True).save_pretrained(place)
    model = model2vec.StaticModel.from_pretrained(place)
    np.savez_compressed(place / "vectors.npz", query=model.encode(TEXTS), passage=model.encode(TEXTS))
    (place / "README.md").unlink()


def main() -> None:
    torch.manual_seed(0)
    shutil.rmtree(PLACE, ignore_errors=True)
    pooling = models.Pooling(WIDTH, "mean")
    dot = {"similarity_fn_name": "dot"}
    prompts = {"prompts": {"query": "ask the cat: ", "document": "dog: "}}
    without = models.Pooling(WIDTH, ("cls", "max", "mean"), include_prompt=False)
    weights = randomized(models.WeightedLayerPooling(WIDTH, num_hidden_layers=2, layer_start=1))
    shown = bert(config_kwargs={"output_hidden_states": True})
    gelu, identity = torch.nn.GELU(), torch.nn.Identity()
    two = [
        dense(WIDTH, 48, bias=False, activation_function=identity),
        dense(48, 20, activation_function=gelu),
    ]
    mixed = [
        models.Normalize(),
        randomized(models.LayerNorm(WIDTH)),
        models.Dropout(0.3),
        dense(WIDTH, WIDTH, use_residual=True, activation_function=torch.nn.Mish()),
        dense(WIDTH, 16, use_residual=True, activation_function=torch.nn.LeakyReLU()),
    ]
    poolings = models.Pooling(WIDTH, ("weightedmean", "mean_sqrt_len_tokens", "lasttoken", "cls"))
    static = randomized(
        models.StaticEmbedding(Tokenizer.from_file(str(HERE / "bert" / "tokenizer.json")), embedding_dim=24)
    )
    save("two_dense", [bert(), pooling, *two, models.Normalize()])
    save("mixed", [bert(), models.Pooling(WIDTH, "max"), *mixed], **dot)
    save("poolings", [bert(), poolings, models.Normalize()])
    save("layers", [shown, weights, pooling], **dot)
    save("layers_hidden", [bert(), weights, pooling], **dot)
    save("without_prompt", [bert(), without], **dot, **prompts)
    save("truncated", [bert(), pooling], truncate_dim=12, **dot)
    save("router", [towers([dense(WIDTH, 8)], [dense(WIDTH, 8)]), models.Normalize()])
    save("router_shared", [towers([], []), dense(WIDTH, 8, activation_function=None)], **dot)
    save("static", [static, models.Normalize()])
    save_model2vec()
    (PLACE / "texts.json").write_text(json.dumps(TEXTS))
    (PLACE / "modules.json").write_text(json.dumps(modules.__all__))


if __name__ == "__main__":
    main()
