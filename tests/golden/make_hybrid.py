"""Makes hybrid/: a small random model of BGE-M3's form, and what FlagEmbedding computes with it.

pip install FlagEmbedding==1.4.2 transformers==4.57.6 datasets==4.5.0 torch==2.15.0
python tests/golden/make_hybrid.py

`vectors.npz` has the three outputs for texts, and the scores of pairs. `losses.npz` has the loss of a batch
with its gradients, without and with distillation. Each passage has as many tokens as the others, because
FlagEmbedding lets the padding of shorter ones take part in MaxSim.
"""

import json
import shutil
import sys
from pathlib import Path

import numpy as np
import torch

HERE = Path(__file__).resolve().parent
sys.path.remove(str(HERE))  # this directory has a folder peft, which would hide the package
PLACE, WIDTH, DIMENSION = HERE / "hybrid", 32, 8
QUERIES = ["a cat", "", "the dog, the mat", "which cat and which dog sat on the mat 木 left last night"]
PASSAGES = [
    "the cat sat on the mat.",
    "",
    "Dogs chase cats; cats chase mice, and mice eat the cheese that was left on the table last night.",
    "a dog and a cat",
    "cat cat cat cat",
]
TEMPERATURE = 0.05


def tokenizer() -> object:
    import transformers
    from tokenizers import Tokenizer, models, pre_tokenizers, processors, trainers

    made = Tokenizer(models.Unigram())
    made.pre_tokenizer = pre_tokenizers.Metaspace()
    specials = ["<s>", "<pad>", "</s>", "<unk>"]
    trainer = trainers.UnigramTrainer(
        vocab_size=70, special_tokens=specials, unk_token="<unk>", show_progress=False
    )
    made.train_from_iterator([text.replace("木", "") for text in (QUERIES + PASSAGES) * 20], trainer)
    made.add_special_tokens(["<mask>"])
    ends = [(token, made.token_to_id(token)) for token in ("</s>", "<s>")]
    made.post_processor = processors.RobertaProcessing(*ends, add_prefix_space=False, trim_offsets=False)
    names = {"bos": "<s>", "cls": "<s>", "sep": "</s>", "eos": "</s>", "unk": "<unk>", "pad": "<pad>"}
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=made,
        mask_token="<mask>",
        **{f"{name}_token": token for name, token in names.items()},
    )


def make_folder() -> None:
    import transformers

    torch.manual_seed(0)
    words = tokenizer()
    config = transformers.XLMRobertaConfig(
        vocab_size=len(words),
        hidden_size=WIDTH,
        intermediate_size=48,
        num_attention_heads=4,
        num_hidden_layers=2,
        max_position_embeddings=66,
        type_vocab_size=1,
        pad_token_id=1,
        bos_token_id=0,
        eos_token_id=2,
    )
    model = transformers.XLMRobertaModel(config, add_pooling_layer=False)
    for name, parameter in model.named_parameters():
        scale, middle = (0.2, 1.0) if "LayerNorm.weight" in name else (0.3, 0.0)
        parameter.data = middle + scale * torch.randn_like(parameter)
    shutil.rmtree(PLACE, ignore_errors=True)
    model.save_pretrained(PLACE)
    words.save_pretrained(PLACE)
    for name, size in (("sparse", 1), ("colbert", DIMENSION)):
        state = {"weight": 0.3 * torch.randn(size, WIDTH), "bias": 0.1 * torch.randn(size)}
        torch.save(state, PLACE / f"{name}_linear.pt")


def pack(rows: list[np.ndarray]) -> dict[str, np.ndarray]:
    return {"tokens": np.concatenate(rows), "lengths": np.array([len(row) for row in rows])}


def save_vectors() -> None:
    from FlagEmbedding import BGEM3FlagModel

    model = BGEM3FlagModel(str(PLACE), use_fp16=False, devices="cpu", colbert_dim=DIMENSION)
    wanted = {"return_dense": True, "return_sparse": True, "return_colbert_vecs": True, "max_length": 16}
    arrays = {}
    for side, texts in (("query", QUERIES), ("passage", PASSAGES)):
        found = model.encode(texts, **wanted)
        sparse = np.zeros([len(texts), len(model.tokenizer)], np.float32)
        for row, weights in zip(sparse, found["lexical_weights"], strict=True):
            for token, weight in weights.items():
                row[int(token)] = weight
        arrays |= {f"{side}_dense": found["dense_vecs"], f"{side}_sparse": sparse}
        arrays |= {f"{side}_{name}": x for name, x in pack(found["colbert_vecs"]).items()}
    pairs = [(query, passage) for query in QUERIES for passage in PASSAGES]
    how = {"max_query_length": 16, "max_passage_length": 16, "weights_for_different_modes": [1.0, 0.3, 1.0]}
    scores = model.compute_score(pairs, batch_size=1, **how)
    arrays |= {f"score_{name}": np.array(found, np.float32) for name, found in scores.items()}
    np.savez_compressed(PLACE / "vectors.npz", **arrays)


def save_losses() -> None:
    from FlagEmbedding.finetune.embedder.encoder_only.m3.modeling import EncoderOnlyEmbedderM3Model
    from FlagEmbedding.finetune.embedder.encoder_only.m3.runner import EncoderOnlyEmbedderM3Runner
    from transformers import AutoTokenizer

    words = AutoTokenizer.from_pretrained(PLACE)
    generator = np.random.default_rng(1)
    rows, negatives, length = 4, 2, 9

    def ids(count: int) -> torch.Tensor:
        middle = generator.integers(3, len(words) - 1, [count, length - 2])
        ends = [np.full([count, 1], end) for end in (0, 2)]
        return torch.tensor(np.concatenate([ends[0], middle, ends[1]], 1))

    queries, passages = ids(rows), ids(rows * (1 + negatives))
    arrays = {"query_ids": queries.numpy(), "passage_ids": passages.numpy()}
    for name, distils in (("plain", False), ("distilled", True)):
        model = EncoderOnlyEmbedderM3Model(
            EncoderOnlyEmbedderM3Runner.get_model(str(PLACE), colbert_dim=DIMENSION),
            tokenizer=words,
            temperature=TEMPERATURE,
            normalize_embeddings=True,
            use_self_distill=distils,
        )
        model.train()
        for part in model.modules():
            if isinstance(part, torch.nn.Dropout):
                part.p = 0.0
            if hasattr(part, "dropout_prob"):  # attention has its own rate
                part.dropout_prob = 0.0
        sides = [{"input_ids": x, "attention_mask": torch.ones_like(x)} for x in (queries, passages)]
        loss = model(*sides).loss
        loss.backward()
        arrays[f"{name}_loss"] = loss.detach().numpy()
        for part in ("sparse_linear", "colbert_linear"):
            arrays[f"{name}_{part}"] = getattr(model, part).weight.grad.numpy()
        words_table = model.model.embeddings.word_embeddings.weight.grad
        arrays[f"{name}_word_embeddings"] = words_table.numpy()
    np.savez_compressed(PLACE / "losses.npz", **arrays)


if __name__ == "__main__":
    make_folder()
    save_vectors()
    save_losses()
    texts = {"queries": QUERIES, "passages": PASSAGES}
    (PLACE / "texts.json").write_text(json.dumps(texts, ensure_ascii=False) + "\n")
