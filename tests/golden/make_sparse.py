"""Makes sparse/: folders of sentence-transformers' SparseEncoder over mlm_*/, and the folders' vectors.

pip install torch==2.13.0 transformers==5.24.0 sentence-transformers==6.2.0
python tests/golden/make_sparse.py

The weights of the language models, which are those of mlm_*/, are removed: tests put them back.
"""

import shutil

import numpy as np
import torch
from make_golden import HERE, TEXTS
from safetensors.numpy import load_file
from sentence_transformers import SparseEncoder
from sentence_transformers.base.modules import Router, Transformer
from sentence_transformers.sparse_encoder.modules import (
    MLMTransformer,
    SparseStaticEmbedding,
    SpladePooling,
)

PLACE = HERE / "sparse"
PROMPTS = {"query": "ask the cat: ", "document": "dog: "}


def language_model(name: str, *, legacy: bool = False) -> Transformer:
    if legacy:
        return MLMTransformer(str(HERE / f"mlm_{name}"), max_seq_length=24)
    return Transformer(str(HERE / f"mlm_{name}"), transformer_task="fill-mask", max_seq_length=24)


def static(name: str) -> SparseStaticEmbedding:
    tokenizer = language_model(name).tokenizer
    weight = torch.rand(len(tokenizer.get_vocab())) * 3
    weight[[7, 20]] = 0.0
    return SparseStaticEmbedding(tokenizer, weight=weight)


def inference_free(name: str, pooling: SpladePooling) -> Router:
    documents = [language_model(name), pooling]
    return Router.for_query_document(query_modules=[static(name)], document_modules=documents)


def save(name: str, weights: str, modules: list[torch.nn.Module], **more: object) -> None:
    SparseEncoder(modules=modules, device="cpu", **more).save(str(PLACE / name))
    model = SparseEncoder(str(PLACE / name), device="cpu")
    found = {}
    for side, encode in (("query", model.encode_query), ("passage", model.encode_document)):
        found[side] = encode(TEXTS, convert_to_sparse_tensor=False).numpy()
        alone = [encode([text], convert_to_sparse_tensor=False).numpy() for text in TEXTS]
        np.testing.assert_allclose(found[side], np.concatenate(alone), atol=1e-5)
    np.savez_compressed(PLACE / name / "vectors.npz", **found)
    (PLACE / name / "README.md").unlink()
    expected = load_file(HERE / f"mlm_{weights}" / "model.safetensors")
    for settings in (PLACE / name).rglob("sentence_bert_config.json"):
        written = load_file(settings.parent / "model.safetensors")
        assert all((written[key] == expected[key]).all() for key in expected)
        (settings.parent / "model.safetensors").unlink()


def main() -> None:
    torch.manual_seed(0)
    shutil.rmtree(PLACE, ignore_errors=True)
    save("max", "bert", [language_model("bert"), SpladePooling("max")])
    save("sum", "distilbert", [language_model("distilbert", legacy=True), SpladePooling("sum", "log1p_relu")])
    top = {"max_active_dims": 8, "prompts": PROMPTS}
    save("top", "roberta", [language_model("roberta"), SpladePooling("max", "log1p_relu")], **top)
    save("router", "bert", [inference_free("bert", SpladePooling("sum"))])
    save("router_top", "roberta", [inference_free("roberta", SpladePooling("max"))], **top)


if __name__ == "__main__":
    main()
