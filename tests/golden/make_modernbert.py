"""Makes modernbert/: a tiny random ModernBERT in a folder of sentence-transformers, and its outputs.

pip install torch==2.13.0 transformers==5.23.0 sentence-transformers==6.2.0
python tests/golden/make_modernbert.py
"""

import json

import numpy as np
import tokenizers
import torch
import transformers
from make_golden import HERE, POSITIONS, SENTENCES, TEXTS, VOCAB, WIDTH, save_encoder, save_gradients
from sentence_transformers import SentenceTransformer
from sentence_transformers import models as st_modules
from tokenizers import decoders, normalizers, pre_tokenizers, processors, trainers

NAME = "modernbert"
# Modules of global and local layers whose gradients are saved.
WITH_GRADIENTS = ("embeddings.tok_embeddings", "layers.0.attn.Wqkv", "layers.4.mlp.Wi", "layers.5.attn.Wqkv")


def config(**more: object) -> transformers.ModernBertConfig:
    """Returns a model with two global layers after the first, and windows narrower than the texts."""
    return transformers.ModernBertConfig(
        **more,
        vocab_size=VOCAB,
        hidden_size=WIDTH,
        intermediate_size=48,
        num_hidden_layers=7,
        num_attention_heads=4,
        max_position_embeddings=POSITIONS,
        local_attention=16,
        pad_token_id=1,
        bos_token_id=2,
        cls_token_id=2,
        eos_token_id=3,
        sep_token_id=3,
    )


def save_tokenizer() -> None:
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["[UNK]", "[PAD]", "[CLS]", "[SEP]", "[MASK]"]
    tokenizer.train_from_iterator(
        TEXTS + SENTENCES, trainers.BpeTrainer(vocab_size=VOCAB, special_tokens=special)
    )
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    tokenizer.save(str(HERE / NAME / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "pad_token": "[PAD]"}
    (HERE / NAME / "tokenizer_config.json").write_text(json.dumps(settings | {"model_max_length": POSITIONS}))


def main() -> None:
    torch.manual_seed(0)
    save_encoder(NAME, config())
    save_gradients(HERE / NAME, transformers.AutoModel.from_pretrained(HERE / NAME), 1, WITH_GRADIENTS)
    save_tokenizer()
    transformer = st_modules.Transformer(str(HERE / NAME), max_seq_length=24)
    modules = [transformer, st_modules.Pooling(WIDTH, pooling_mode="lasttoken"), st_modules.Normalize()]
    model = SentenceTransformer(modules=modules, device="cpu")
    vectors = model.encode(TEXTS)
    model.save(str(HERE / NAME), create_model_card=False)
    np.savez_compressed(
        HERE / NAME / "golden_texts.npz", texts=np.array(TEXTS), query=vectors, passage=vectors
    )


if __name__ == "__main__":
    main()
