"""Makes weights/: tiny random models in the file formats of torch, transformers and Flax.

    pip install torch==2.13.0 transformers==4.49.0 flax==0.10.2 jax==0.4.38 jaxlib==0.4.38 'numpy<2.3'
    python tests/golden/make_weights.py

transformers 5 writes neither pytorch_model.bin nor flax_model.msgpack; 4.49 writes them as on the hub. Each
model is also saved in safetensors, with the output of its encoder.
"""

import copy
import shutil
from pathlib import Path

import numpy as np
import torch
import transformers

HERE = Path(__file__).resolve().parent
ROOT = HERE / "weights"
VOCAB, WIDTH, POSITIONS = 30, 8, 24
BIN = "pytorch_model.bin"


def models() -> dict[str, str]:
    """Returns the class (in Flax prefixed by "Flax") and the configuration of each folder."""
    bert = {"vocab_size": VOCAB, "hidden_size": WIDTH, "intermediate_size": 12, "num_hidden_layers": 2}
    bert |= {"num_attention_heads": 2, "max_position_embeddings": POSITIONS}
    distil = {"vocab_size": VOCAB, "dim": WIDTH, "hidden_dim": 12, "n_layers": 2, "n_heads": 2}
    t5 = {"vocab_size": VOCAB, "d_model": WIDTH, "d_kv": 4, "d_ff": 12, "num_heads": 2, "num_layers": 2}
    gated = {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False, "decoder_start_token_id": 0}
    return {
        "t5": ("T5ForConditionalGeneration", transformers.T5Config(**t5, **gated, num_decoder_layers=1)),
        "bert": ("BertForPreTraining", transformers.BertConfig(**bert)),
        "roberta": (
            "RobertaForSequenceClassification",
            transformers.RobertaConfig(**bert, type_vocab_size=1, num_labels=1),
        ),
        "distilbert": (
            "DistilBertForSequenceClassification",
            transformers.DistilBertConfig(**distil, max_position_embeddings=POSITIONS, num_labels=1),
        ),
    }


def randomize(model: torch.nn.Module) -> None:
    for parameter in model.parameters():
        parameter.data = torch.randn_like(parameter) * parameter.shape[-1] ** -0.5 + (parameter.ndim == 1)


def save_model(name: str, kind: str, config: transformers.PretrainedConfig) -> None:
    directory = ROOT / name
    model = getattr(transformers, kind)(config).eval()
    randomize(model)
    model.save_pretrained(directory)
    model.save_pretrained(directory / "torch", safe_serialization=False)
    in_flax = getattr(transformers, f"Flax{kind}").from_pretrained(directory, from_pt=True)
    in_flax.save_pretrained(directory / "flax")
    encoder = model.get_encoder() if name == "t5" else model.base_model
    ids = torch.tensor([[5, 9, 4, 20, 2, 7], [8, 3, 2, *[config.pad_token_id] * 3]])
    mask = ids != config.pad_token_id
    with torch.no_grad():
        output = encoder(input_ids=ids, attention_mask=mask.long()).last_hidden_state
    np.savez_compressed(directory / "golden.npz", ids=ids.numpy().astype(np.int32), output=output.numpy())
    if name == "t5":
        model.save_pretrained(directory / "torch_sharded", safe_serialization=False, max_shard_size="3KB")
        in_flax.save_pretrained(directory / "flax_sharded", max_shard_size="3KB")
        save(directory / "protocol_4", model.state_dict(), pickle_protocol=4)
        save(directory / "legacy", model.state_dict(), _use_new_zipfile_serialization=False)
        save(directory / "parameters", dict(model.named_parameters()))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        state = {"epoch": 3, "state_dict": model.state_dict(), "optimizer": optimizer.state_dict()}
        save(directory / "training", state)
        for dtype in ("float16", "bfloat16"):
            half = copy.deepcopy(model).to(getattr(torch, dtype))
            half.save_pretrained(directory / dtype, safe_serialization=False)
    # Tests read only the weights of the other folders.
    for extra in (*directory.glob("*/*config.json"), directory / "generation_config.json"):
        extra.unlink(missing_ok=True)


def save(directory: Path, content: object, **options: object) -> None:
    directory.mkdir(parents=True)
    torch.save(content, directory / BIN, **options)


def save_odd() -> None:
    """Saves tensors that are views of one storage, and tensors of types that no encoder's parameter has."""
    table = torch.arange(60, dtype=torch.float32).reshape(6, 10)
    strided = torch.randn(4, 5, 6)
    tensors = {
        "whole": table,
        "transposed": table.T,
        "rows": table[2:4],
        "columns": table[:, 3:9:2],
        "element": table[3, 4],
        "expanded": table[1:2].expand(7, 10),
        "scalar": torch.tensor(0.5),
        "none": torch.empty(0, 4),
        "permuted": strided.permute(2, 0, 1)[1:4, :, 1:],
        "parameter": torch.nn.Parameter(table[:2] / 7),
        "double": torch.tensor([1 / 3], dtype=torch.float64),
        "half": torch.tensor([[1.5, -2.25]], dtype=torch.float16).T,
        "bfloat": torch.arange(-3, 3, dtype=torch.bfloat16)[1::2],
        "position_ids": torch.arange(9).expand((1, -1)),
        "mask": torch.tensor([True, False]),
        "bytes": torch.tensor([3, 200], dtype=torch.uint8),
    }
    tensors["tagged"] = torch.nn.Parameter(table[0])
    tensors["tagged"].tag = "a parameter with an attribute of its own"
    save(ROOT / "odd", tensors)
    arrays = {name: tensor.detach().float().numpy() for name, tensor in tensors.items()}
    np.savez_compressed(ROOT / "odd" / "tensors.npz", **arrays)
    save(ROOT / "float8", {"weight": torch.ones(3).to(torch.float8_e4m3fn)})
    torch.serialization.set_crc32_options(False)
    save(ROOT / "no_sums", {"weight": torch.ones(3)})
    torch.serialization.set_crc32_options(True)
    (ROOT / "script").mkdir()
    torch.jit.script(torch.nn.Linear(2, 3)).save(ROOT / "script" / BIN)


def save_dense() -> None:
    """Saves the Dense of ../bert in the old format of sentence-transformers."""
    from safetensors.torch import load_file

    save(ROOT / "dense", load_file(HERE / "bert" / "2_Dense" / "model.safetensors"))


def main() -> None:
    torch.manual_seed(0)
    shutil.rmtree(ROOT, ignore_errors=True)
    for name, (kind, config) in models().items():
        save_model(name, kind, config)
    save_odd()
    save_dense()


if __name__ == "__main__":
    main()
