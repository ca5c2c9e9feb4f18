"""Makes folders of sentence-transformers with random weights: MPNet, XLM-RoBERTa and Qwen3 0.6B cut to 6
layers.

    PEER/bin/python benchmarks/family_shapes.py DIRECTORY

`benchmarks/encode.py --model=st:DIRECTORY/NAME` compares jaxir with sentence-transformers on them. PEER is an
environment with sentence-transformers. The tokenizer is a WordPiece of the words in Python's own help topics.
"""

import pydoc_data.topics
import sys
from pathlib import Path

import torch
import transformers
from sentence_transformers import SentenceTransformer, models
from tokenizers import Tokenizer, normalizers, pre_tokenizers, processors, trainers
from tokenizers.models import WordPiece

# [PAD] has id 1, because MPNet counts positions from its padding id.
SPECIAL = ["[CLS]", "[PAD]", "[SEP]", "[UNK]", "[MASK]"]
LAYERS = {"num_hidden_layers": 6, "pad_token_id": 1}
CONFIGS = {
    "mpnet": transformers.MPNetConfig(**LAYERS),
    "xlm_roberta": transformers.XLMRobertaConfig(**LAYERS, max_position_embeddings=514, type_vocab_size=1),
    "qwen3": transformers.Qwen3Config(
        **LAYERS,
        vocab_size=30_000,
        hidden_size=1024,
        intermediate_size=3072,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
    ),
}


def make_tokenizer() -> transformers.PreTrainedTokenizerFast:
    tokenizer = Tokenizer(WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer, tokenizer.pre_tokenizer = (
        normalizers.BertNormalizer(),
        pre_tokenizers.BertPreTokenizer(),
    )
    trainer = trainers.WordPieceTrainer(vocab_size=20_000, special_tokens=SPECIAL)
    tokenizer.train_from_iterator(pydoc_data.topics.topics.values(), trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 0), ("[SEP]", 2)]
    )
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]", model_max_length=256
    )


def main(directory: str) -> None:
    torch.manual_seed(0)
    for name, config in CONFIGS.items():
        plain = Path(directory) / "encoders" / name
        transformers.AutoModel.from_config(config).save_pretrained(plain)
        make_tokenizer().save_pretrained(plain)
        pooling = models.Pooling(config.hidden_size, "lasttoken" if name == "qwen3" else "mean")
        parts = [models.Transformer(str(plain), max_seq_length=256), pooling, models.Normalize()]
        SentenceTransformer(modules=parts, device="cpu").save(str(Path(directory) / name))


if __name__ == "__main__":
    main(sys.argv[1])
