"""Makes the files of this directory: tiny random models and the outputs of the reference implementations.

Run it with torch, transformers and sentence-transformers, which only the scripts of this directory need:

    python tests/golden/make_golden.py --minilm=DIRECTORY_OF_ALL_MINILM_L6_V2

Every parameter is random, also norms and biases, so that a missing one changes the outputs.
"""

import argparse
import json
from pathlib import Path

import numpy as np
import tokenizers
import torch
import transformers
from sentence_transformers import SentenceTransformer
from sentence_transformers import models as st_modules
from tokenizers import decoders, normalizers, pre_tokenizers, processors, trainers

HERE = Path(__file__).resolve().parent
VOCAB, WIDTH, POSITIONS = 100, 32, 160
TEXTS = [
    "the cat sat on the mat",
    "a dog and a cat",
    "",
    "Dogs chase cats; cats chase mice, and mice eat the cheese that was left on the table last night.",
]
SENTENCES = [
    "How do I sort a list in Python?",
    "Return a new sorted list from the items in iterable.",
    "JAX is a library for array-oriented numerical computation, with automatic differentiation.",
    "the",
    "",
    "Where does the Rhine flow into the North Sea? " * 40,
]


def configs() -> dict[str, transformers.PretrainedConfig]:
    bert = {
        "vocab_size": VOCAB,
        "hidden_size": WIDTH,
        "intermediate_size": 48,
        "max_position_embeddings": POSITIONS,
    }
    distil = {"vocab_size": VOCAB, "dim": WIDTH, "hidden_dim": 48, "max_position_embeddings": POSITIONS}
    t5 = {"vocab_size": VOCAB, "d_model": WIDTH, "d_ff": 48, "num_heads": 4, "decoder_start_token_id": 0}
    return {
        "bert": transformers.BertConfig(**bert, num_hidden_layers=2, num_attention_heads=4),
        "minilm": transformers.BertConfig(
            **bert, num_hidden_layers=3, num_attention_heads=8, hidden_act="gelu_new"
        ),
        "distilbert": transformers.DistilBertConfig(**distil, n_layers=2, n_heads=4),
        "roberta": transformers.RobertaConfig(
            **bert | {"max_position_embeddings": POSITIONS + 2},
            num_hidden_layers=2,
            num_attention_heads=4,
            type_vocab_size=1,
            layer_norm_eps=1e-5,
        ),
        "t5_1_0": transformers.T5Config(**t5, d_kv=8, num_layers=2, feed_forward_proj="relu"),
        "t5_1_1": transformers.T5Config(
            **t5, d_kv=12, num_layers=3, feed_forward_proj="gated-gelu", tie_word_embeddings=False
        ),
    }


def randomize(model: torch.nn.Module) -> None:
    for name, parameter in model.named_parameters():
        centre = 1.0 if parameter.ndim == 1 and "bias" not in name else 0.0
        if model.config.model_type == "gemma3_text":  # Gemma 3's norms multiply by 1 + weight
            centre = 0.0
        elif model.config.model_type == "embedding_gemma2_text" and name.endswith(
            ("q_norm.weight", "k_norm.weight")
        ):
            centre = 0.4  # this model's logits are not divided by the root of the head's size
        is_table = "embedding" in name or "shared" in name or "relative" in name
        stddev = 0.3 if parameter.ndim == 1 else 1.0 if is_table else parameter.shape[-1] ** -0.5
        parameter.data = centre + stddev * torch.randn_like(parameter)
    for name, buffer in model.named_buffers():
        if name.endswith("layer_scalar"):  # each layer of EmbeddingGemma 2 has this scale
            buffer.copy_(torch.rand_like(buffer) + 0.5)


def make_ids(rng: np.random.Generator, pad: int, lengths: list[int]) -> np.ndarray:
    ids = rng.integers(3, VOCAB, (len(lengths), max(lengths)))
    for row, length in zip(ids, lengths, strict=True):
        row[length:] = pad
    return ids.astype(np.int32)


def save_gradients(directory: Path, model, pad: int, names: tuple[str, ...]) -> None:
    """Saves the gradients of a weighted sum of real tokens' outputs with respect to modules' weights."""
    draw = np.random.default_rng(0)
    ids = make_ids(draw, pad, [30, 11])
    mask = torch.tensor(ids != pad).long()
    output = model(input_ids=torch.tensor(ids), attention_mask=mask).last_hidden_state
    weights = draw.normal(size=output.shape).astype(np.float32) * (ids != pad)[..., None]
    (output * torch.tensor(weights)).sum().backward()
    found = {name: model.get_submodule(name).weight.grad.numpy() for name in names}
    np.savez_compressed(directory / "gradients.npz", ids=ids, weights=weights, **found)


def save_encoder(name: str, config: transformers.PretrainedConfig) -> None:
    kind = transformers.T5EncoderModel if config.model_type == "t5" else transformers.AutoModel
    model = (kind(config) if kind is transformers.T5EncoderModel else kind.from_config(config)).eval()
    randomize(model)
    model.save_pretrained(HERE / name)
    (HERE / name / "generation_config.json").unlink(missing_ok=True)
    rng = np.random.default_rng(0)
    arrays = {}
    for case, lengths in {"padded": [150, 40, 3], "unpadded": [20, 20]}.items():
        ids = make_ids(rng, config.pad_token_id, lengths)
        mask = ids != config.pad_token_id
        with torch.no_grad():
            output = model(input_ids=torch.tensor(ids), attention_mask=torch.tensor(mask).long())
        arrays[f"{case}_ids"] = ids
        arrays[f"{case}_output"] = np.where(mask[..., None], output.last_hidden_state.numpy(), 0.0)
    np.savez_compressed(HERE / name / "golden.npz", **arrays)


def save_tokenizer(name: str) -> None:
    directory = HERE / name
    if name == "bert":
        special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
        tokenizer = tokenizers.Tokenizer(tokenizers.models.WordPiece(unk_token="[UNK]"))
        tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
        tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        trainer = trainers.WordPieceTrainer(vocab_size=VOCAB, special_tokens=special)
        template, cls, sep = "[CLS] $A [SEP]", "[CLS]", "[SEP]"
        settings = {"tokenizer_class": "BertTokenizer", "pad_token": "[PAD]"}
    elif name == "roberta":
        special = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
        tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(unk_token="<unk>"))
        tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
        trainer = trainers.BpeTrainer(vocab_size=VOCAB, special_tokens=special)
        template, cls, sep = "<s> $A </s>", "<s>", "</s>"
        settings = {"tokenizer_class": "PreTrainedTokenizerFast", "pad_token": "<pad>"}
    else:
        special = ["<pad>", "</s>", "<unk>"]
        tokenizer = tokenizers.Tokenizer(tokenizers.models.Unigram())
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
        tokenizer.decoder = decoders.Metaspace()
        trainer = trainers.UnigramTrainer(vocab_size=VOCAB, special_tokens=special, unk_token="<unk>")
        template, cls, sep = "$A </s>", "</s>", "</s>"
        settings = {"tokenizer_class": "PreTrainedTokenizerFast", "pad_token": "<pad>"}
    tokenizer.train_from_iterator(TEXTS + SENTENCES, trainer)
    ids = {token: tokenizer.token_to_id(token) for token in {cls, sep}}
    tokenizer.post_processor = processors.TemplateProcessing(
        single=template, special_tokens=list(ids.items())
    )
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps(settings | {"model_max_length": POSITIONS}))


def save_sentence_transformer(name: str) -> None:
    """Adds the files of sentence-transformers to a tiny encoder, and saves the vectors of TEXTS."""
    directory = HERE / name
    save_tokenizer(name)
    transformer = st_modules.Transformer(str(directory), max_seq_length=24)
    dense = {
        "bert": lambda: st_modules.Dense(WIDTH, 16),
        "t5_1_1": lambda: st_modules.Dense(WIDTH, 16, bias=False, activation_function=torch.nn.Identity()),
    }
    pooling = st_modules.Pooling(WIDTH, pooling_mode="cls" if name == "bert" else "mean")
    modules = [transformer, pooling]
    if name in dense:
        modules.append(dense[name]())
        randomize(modules[-1])
    if name != "bert":
        modules.append(st_modules.Normalize())
    prompts = {"query": "a dog ", "document": "the cat "} if name == "bert" else None
    model = SentenceTransformer(
        modules=modules,
        device="cpu",
        prompts=prompts,
        similarity_fn_name="dot" if name == "bert" else "cosine",
    )
    query, passage = model.encode_query(TEXTS), model.encode_document(TEXTS)
    model.save(str(directory), create_model_card=False)
    np.savez_compressed(directory / "golden_texts.npz", texts=np.array(TEXTS), query=query, passage=passage)


def save_minilm(directory: str) -> None:
    vectors = SentenceTransformer(directory, device="cpu").encode(SENTENCES)
    np.savez_compressed(HERE / "minilm_vectors.npz", texts=np.array(SENTENCES), vectors=vectors)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minilm", required=True, help="folder of the published all-MiniLM-L6-v2")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    for name, config in configs().items():
        save_encoder(name, config)
    for name in ("bert", "roberta", "t5_1_1"):
        save_sentence_transformer(name)
    save_minilm(arguments.minilm)


if __name__ == "__main__":
    main()
