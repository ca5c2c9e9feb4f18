"""Makes multi_vector/: folders of sentence-transformers' MultiVectorEncoder and of PyLate, and their vectors.

pip install torch==2.13.0 transformers==5.24.0 sentence-transformers==6.2.0
python tests/golden/make_multi_vector.py

In another environment, for the folders of PyLate (their name begins with pylate):

pip install pylate==1.6.0
python tests/golden/make_multi_vector.py pylate

The encoder is that of bert/ or of another folder here, so its files are removed; tests put them back.
`families/` has the vectors of one folder over several encoders. `losses.npz` and `pylate_losses.npz` have the
losses of given vectors of tokens, with their gradients.
"""

import json
import shutil
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch

HERE = Path(__file__).resolve().parent
sys.path.remove(str(HERE))  # this directory has a folder peft, which would hide the package
PLACE, WIDTH = HERE / "multi_vector", 32
QUERIES = [
    "a cat",
    "",
    "the dog, the mat",
    "which cat and which dog sat on the mat that the mouse left last night",
]
PASSAGES = [
    "the cat sat on the mat.",
    "",
    "Dogs chase cats; cats chase mice, and mice eat the cheese that was left on the table last night.",
    "a dog and a cat",
    ".",
]
OF_BERT = ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")
CLASSIC = {"strategy": "fixed", "length": 12, "attend": False}
# Windows must be longer than queries: the output of a token that is alone in its window is not defined.
CHANGED = {"pad_token_id": 0, "local_attention": 64, "sliding_window": 64}
# Encoders that are saved with queries whose last tokens others do not attend to; all use bert's tokenizer.
FAMILIES = (
    *("roberta", "distilbert", "modernbert", "gte", "nomic_bert", "eurobert", "llama", "qwen3"),
    *("gemma3", "t5_1_1"),
)


def randomized(module: torch.nn.Module) -> torch.nn.Module:
    for parameter in module.parameters():
        parameter.data = torch.randn_like(parameter) * 0.4
    return module


def pack(rows: list[np.ndarray]) -> dict[str, np.ndarray]:
    """Returns arrays of different lengths as one array and the lengths."""
    return {
        "vectors": np.concatenate(rows).astype(np.float32),
        "lengths": np.array([len(row) for row in rows]),
    }


def save_arrays(path: Path, queries: list, passages: list, scores: np.ndarray) -> None:
    sides = {"query": pack(queries), "passage": pack(passages)}
    arrays = {f"{side}_{name}": x for side, found in sides.items() for name, x in found.items()}
    np.savez_compressed(path, similarity=scores, **arrays)


def of_sentence_transformers() -> None:
    from sentence_transformers import MultiVectorEncoder
    from sentence_transformers.base.modules import Dense, Normalize, Transformer
    from sentence_transformers.multi_vector_encoder.modules import HierarchicalTokenPooling, MultiVectorMask

    def dense(*sizes: int, **more: object) -> Dense:
        how = {
            "bias": False,
            "activation_function": torch.nn.Identity(),
            "module_input_name": "token_embeddings",
        }
        return randomized(Dense(*sizes, **(how | more)))

    def modules(mask: dict | None = None, encoder: str = str(HERE / "bert"), **of_encoder: object) -> list:
        backbone = Transformer(encoder, max_seq_length=24, **of_encoder)
        masks = [] if mask is None else [MultiVectorMask(**mask)]
        width = backbone.get_embedding_dimension()
        return [backbone, dense(width, 8), *masks, Normalize(module_input_name="token_embeddings")]

    def save(place: Path, parts: list, **more: object) -> None:
        MultiVectorEncoder(modules=parts, device="cpu", **more).save(str(place))
        model = MultiVectorEncoder(str(place), device="cpu")
        queries = [row.numpy() for row in model.encode_query(QUERIES)]
        passages = [row.numpy() for row in model.encode_document(PASSAGES)]
        scores = model.similarity(queries, passages).numpy()
        save_arrays(place / "vectors.npz", queries, passages, scores)
        for file in ("README.md", *OF_BERT):
            (place / file).unlink(missing_ok=True)

    marks = [",", ".", ";", "no such token"]
    prompts = {"prompts": {"query": "cat: ", "document": "dog: "}}
    save(
        PLACE / "fixed",
        modules({"skiplist_words": marks}, query_expansion=CLASSIC, document_length=16),
        **prompts,
    )
    save(PLACE / "attended", modules({}, query_expansion=CLASSIC | {"attend": True}))
    least = {"strategy": "min", "length": 10, "token": "cat"}
    mask = {"skiplist_words": ["cat", "the"], "skiplist_tasks": ["query", "document"]}
    save(PLACE / "least", modules(mask, query_expansion=least, query_length=18))
    plain = modules({"keep_only_token_ids": [2, 10, 78]}, query_length=9)
    others = {"prompts": {"passage": "dog: ", "topic": "cat: "}, "default_prompt_name": "topic"}
    save(PLACE / "kept", plain, similarity_fn_name="meanmaxsim", **others)
    several = [
        Transformer(str(HERE / "bert"), max_seq_length=24),
        Normalize(module_input_name="token_embeddings"),
        dense(WIDTH, 20, bias=True, activation_function=torch.nn.GELU(), use_residual=True),
        dense(20, 20, bias=True, activation_function=torch.nn.Tanh(), use_residual=True),
        Normalize(),  # without effect: there is no vector of the whole text
    ]
    save(PLACE / "several", several)
    save(PLACE / "unmasked", modules(query_expansion=CLASSIC))
    save(PLACE / "pooled", [*modules({}), HierarchicalTokenPooling(2.0)])
    often = {"num_protected_tokens": 0, "normalize_embeddings": False, "tasks": ["query", "document"]}
    save(PLACE / "pooled_twice", [*modules({}), HierarchicalTokenPooling(3.0, **often)])
    shared = modules({}, query_expansion=CLASSIC)[1:]
    for family in FAMILIES:
        with tempfile.TemporaryDirectory() as folder:
            encoder = Path(shutil.copytree(HERE / family, f"{folder}/encoder"))
            for file in OF_BERT[2:]:
                shutil.copy(HERE / "bert" / file, encoder / file)
            settings = json.loads((encoder / "config.json").read_text())
            changed = {name: value for name, value in CHANGED.items() if settings.get(name) is not None}
            (encoder / "config.json").write_text(json.dumps(settings | changed))
            (encoder / "modules.json").unlink(missing_ok=True)
            backbone = Transformer(str(encoder), max_seq_length=24, query_expansion=CLASSIC)
            place = PLACE / "families"
            save(place, [backbone, *shared])
            (place / "vectors.npz").rename(place / f"{family}.npz")
    (PLACE / "texts.json").write_text(json.dumps({"queries": QUERIES, "passages": PASSAGES}))


class Given(torch.nn.Module):
    """Stands for a model whose vectors of tokens are given in the features."""

    skiplist, do_query_expansion = (), False

    def forward(self, features: dict, task: str | None = None) -> dict:
        return features


def columns_of_tokens() -> tuple[list[dict], torch.Tensor]:
    """Returns 5 queries, 5 passages and two negatives of each query, and a teacher's scores [5, 3]."""
    generator, columns = torch.Generator().manual_seed(7), []
    for length in (6, 9, 9, 9):
        # Components are positive, because PyLate takes 0 as the similarity of a token that is not scored.
        x = torch.nn.functional.normalize(torch.rand(5, length, 8, generator=generator) ** 3, dim=-1)
        mask = torch.rand(5, length, generator=generator) < 0.7
        mask[:, 0] = True
        ids = torch.ones(5, length, dtype=torch.int64)
        columns.append({"token_embeddings": x.requires_grad_(), "attention_mask": mask, "input_ids": ids})
    return columns, torch.randn(5, 3, generator=generator) * 2


def save_losses(path: Path, losses: dict, *, factors: dict) -> None:
    """Saves vectors, masks, teacher's scores, and each loss with the gradients of the vectors."""
    columns, scores = columns_of_tokens()
    arrays = {f"mask_{i}": column["attention_mask"].numpy() for i, column in enumerate(columns)}
    arrays |= {f"vectors_{i}": c["token_embeddings"].detach().numpy() for i, c in enumerate(columns)}
    arrays["scores"] = scores.numpy()
    for name, loss in losses.items():
        columns, _ = columns_of_tokens()
        value = loss(columns, scores) * factors.get(name, 1.0)
        value.backward()
        arrays[name] = np.float32(value.item())
        arrays |= {f"{name}_gradient_{i}": c["token_embeddings"].grad.numpy() for i, c in enumerate(columns)}
    np.savez_compressed(path, **arrays)


def losses_of_sentence_transformers() -> None:
    from sentence_transformers.multi_vector_encoder import losses, scoring

    save_losses(
        PLACE / "losses.npz",
        {
            "softmax": losses.MultiVectorMultipleNegativesRankingLoss(Given()),
            "sharper": losses.MultiVectorMultipleNegativesRankingLoss(Given(), scale=4.0),
            "kl": losses.MultiVectorDistillKLDivLoss(
                Given(), student_temperature=0.5, teacher_temperature=2.0
            ),
            "margin_mse": losses.MultiVectorMarginMSELoss(Given()),
            **{
                f"xtr_{k}": losses.MultiVectorMultipleNegativesRankingLoss(
                    Given(), scale=4.0, similarity_fct=scoring.XTRScores(k)
                )
                for k in (1, 16, 256)  # 256 exceeds the number of tokens
            },
            "xtr_kl": losses.MultiVectorDistillKLDivLoss(Given(), similarity_fct=scoring.XTRKDScores(16)),
        },
        factors={"kl": 4.0},  # sentence-transformers multiplies this loss by the temperature squared
    )


def losses_of_pylate() -> None:
    from pylate import losses, scores

    losses = {
        "softmax": losses.Contrastive(Given()),
        "sharper": losses.Contrastive(Given(), temperature=0.25),
        "xtr_16": losses.Contrastive(Given(), score_metric=scores.XTRScores(16), temperature=0.25),
    }
    save_losses(PLACE / "pylate_losses.npz", losses, factors={})


def of_pylate() -> None:
    from pylate import models, scores

    def save(name: str, **settings: object) -> None:
        place = PLACE / name
        shutil.rmtree(place, ignore_errors=True)
        with tempfile.TemporaryDirectory() as folder:
            for file in OF_BERT:
                shutil.copy(HERE / "bert" / file, folder)
            marks = [",", ".", ";"]
            model = models.ColBERT(folder, device="cpu", embedding_size=8, skiplist_words=marks, **settings)
            randomized(model[1])
            model.save(str(place))
        model = models.ColBERT(str(place), device="cpu")
        queries, passages = model.encode(QUERIES, is_query=True), model.encode(PASSAGES, is_query=False)
        found = [[float(scores.colbert_scores(q[None], p[None])) for p in passages] for q in queries]
        save_arrays(place / "vectors.npz", queries, passages, np.array(found, np.float32))
        (place / "README.md").unlink()

    save("pylate", query_length=12, document_length=16)
    more = {"attend_to_expansion_tokens": True, "query_prefix": "[CLS]", "document_prefix": "cat"}
    save("pylate_attended", query_length=14, document_length=20, **more)
    save("pylate_plain", query_length=10, document_length=20, do_query_expansion=False)


if __name__ == "__main__":
    torch.manual_seed(0)
    if sys.argv[1:] == ["pylate"]:
        of_pylate()
        losses_of_pylate()
    else:
        for folder in PLACE.glob("[!p]*"):
            shutil.rmtree(folder) if folder.is_dir() else folder.unlink()
        of_sentence_transformers()
        losses_of_sentence_transformers()
