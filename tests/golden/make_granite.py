"""Makes granite/: a tiny random Granite with grouped heads and its outputs, for docs/adding_a_backbone.md.

pip install torch==2.13.0 transformers==5.24.0 sentence-transformers==6.2.0
python tests/golden/make_granite.py
"""

import numpy as np
import torch
import transformers
from make_golden import HERE, VOCAB, WIDTH, make_ids, randomize

PLACE = HERE / "granite"


def main() -> None:
    torch.manual_seed(0)
    config = transformers.GraniteConfig(
        vocab_size=VOCAB,
        hidden_size=WIDTH,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        attention_multiplier=0.3,
        pad_token_id=0,
    )
    model = transformers.GraniteModel(config).eval()
    randomize(model)
    model.save_pretrained(PLACE)
    ids = make_ids(np.random.default_rng(0), 0, [20, 7, 2])
    with torch.no_grad():
        output = model(input_ids=torch.tensor(ids), attention_mask=torch.tensor(ids != 0).long())
    np.savez_compressed(PLACE / "golden.npz", ids=ids, output=output.last_hidden_state.numpy())


if __name__ == "__main__":
    main()
