"""Makes folders of tiny random models of today's families, and transformers' outputs for them.

pip install torch==2.13.0 transformers==5.24.0 sentence-transformers==6.2.0
python tests/golden/make_families.py [NAME ...]
"""

import sys

import torch
import transformers
from make_golden import HERE, POSITIONS, VOCAB, WIDTH, save_encoder, save_gradients

SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": WIDTH,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "max_position_embeddings": POSITIONS,
    "pad_token_id": 0,
}
GROUPED = SIZES | {"num_hidden_layers": 3, "num_key_value_heads": 2}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
BIDIRECTIONAL = {"is_causal": False}
ROPES = {
    kind: {"rope_type": "default", "rope_theta": base}
    for kind, base in (("sliding_attention", 100.0), ("full_attention", 5000.0))
}


def configs() -> dict[str, transformers.PretrainedConfig]:
    t = transformers
    bert = SIZES | {"num_hidden_layers": 2}
    robert = bert | {"pad_token_id": 1, "max_position_embeddings": POSITIONS + 2}
    return {
        "xlm_roberta": t.XLMRobertaConfig(**robert, type_vocab_size=1),
        "mpnet": t.MPNetConfig(**robert),
        "nomic_bert": t.NomicBertConfig(**bert, head_dim=12),
        "gte": t.GteConfig(**bert | {"pad_token_id": 1}),
        "gte_untyped": t.GteConfig(**bert, type_vocab_size=0, rope_parameters=ROPES["sliding_attention"]),
        "jina_embeddings_v3": t.JinaEmbeddingsV3Config(**bert | {"pad_token_id": 1}),
        "llama": t.LlamaConfig(**GROUPED, rope_parameters=LLAMA3, attention_bias=True, mlp_bias=True),
        "mistral": t.MistralConfig(**GROUPED, head_dim=12, sliding_window=10),
        "qwen2": t.Qwen2Config(**GROUPED, use_sliding_window=True, sliding_window=8, max_window_layers=1),
        "qwen2_bidirectional": t.Qwen2Config(**GROUPED, **BIDIRECTIONAL),
        "qwen3": t.Qwen3Config(**GROUPED, head_dim=12),
        "eurobert": t.EuroBertConfig(**GROUPED),
        "ultrabert": t.UltrabertConfig(**GROUPED, sliding_window=9, rope_parameters=ROPES),
        "gemma3": t.Gemma3TextConfig(
            **GROUPED | {"num_hidden_layers": 4},
            head_dim=12,
            query_pre_attn_scalar=20,
            sliding_window=14,
            layer_types=["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"],
            rope_parameters=ROPES,
            use_bidirectional_attention=True,
        ),
        "gemma3_causal": t.Gemma3TextConfig(
            **GROUPED, head_dim=12, query_pre_attn_scalar=20, sliding_window=14, sliding_window_pattern=2
        ),
        "embedding_gemma2": t.EmbeddingGemma2TextConfig(
            **GROUPED | {"num_hidden_layers": 7},
            head_dim=8,
            global_head_dim=12,
            num_global_key_value_heads=1,
            sliding_window=9,
            sliding_window_pattern=3,
            hidden_size_per_layer_input=10,
            embedding_dim=24,
            rope_parameters=ROPES,
        ),
    }


LLAMA = ("layers.1.input_layernorm", "layers.1.self_attn.k_proj", "norm")
GEMMA = ("layers.1.post_feedforward_layernorm", "layers.1.self_attn.q_norm", "layers.0.self_attn.v_proj")
ROPE_BERT = ("embeddings.LayerNorm", "layers.1.self_attn.q_proj", "layers.0.post_mlp_layernorm")
BERT = ("embeddings.LayerNorm", "encoder.layer.0.output.LayerNorm", "encoder.layer.1.intermediate.dense")
# Modules whose gradients are saved.
GRADIENTS = (
    dict.fromkeys(("llama", "mistral", "qwen2", "eurobert", "ultrabert"), LLAMA)
    | {"qwen3": (*LLAMA, "layers.0.self_attn.q_norm"), "gemma3": GEMMA, "xlm_roberta": BERT}
    | {"embedding_gemma2": (*GEMMA, "ple.per_layer_model_projection", "layers.2.self_attn.k_proj")}
    | {"mpnet": (*BERT, "encoder.relative_attention_bias")}
    | dict.fromkeys(("nomic_bert", "gte", "jina_embeddings_v3"), ROPE_BERT)
)


def main() -> None:
    torch.manual_seed(0)
    for name, config in configs().items():
        if sys.argv[1:] and name not in sys.argv[1:]:
            continue
        save_encoder(name, config)
        if name in GRADIENTS:
            model = transformers.AutoModel.from_pretrained(HERE / name)
            save_gradients(HERE / name, model, config.pad_token_id, GRADIENTS[name])


if __name__ == "__main__":
    main()
