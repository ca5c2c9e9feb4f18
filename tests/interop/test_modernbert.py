"""Tests for ModernBERT alone: forms of config.json, and other heads."""

from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxir.interop.huggingface import hf
from jaxir.interop.model import stored
from jaxir.models.modernbert import PUBLISHED, ModernBertConfig
from tests.interop.folders import edited

GOLDEN = Path(__file__).resolve().parent.parent / "golden" / "modernbert"


def test_config_json_as_transformers_4_wrote_it(tmp_path):
    older = {"global_attn_every_n_layers": 3, "global_rope_theta": 160000.0, "local_rope_theta": 10000.0}
    folder = edited(GOLDEN, tmp_path, layer_types=..., rope_parameters=..., **older)
    assert hf.read_encoder(folder).config == hf.read_encoder(GOLDEN).config
    bases = edited(GOLDEN, tmp_path / "b", layer_types=..., rope_parameters=..., local_rope_theta=500)
    assert hf.read_encoder(bases).config.local_rope_base == 500.0
    one = edited(GOLDEN, tmp_path / "one", layer_types=..., rope_parameters=..., local_rope_theta=None)
    assert hf.read_encoder(one).config.local_rope_base == 160_000.0


@pytest.mark.parametrize(("name", "millions"), [("base", 149.0), ("large", 394.8)])
def test_presets_have_the_published_sizes(name, millions):
    """Warner et al. 2024, table 3: 149 M and 395 M parameters."""
    shapes = stored.encoder_shapes(PUBLISHED[f"answerdotai/ModernBERT-{name}"])
    assert round(sum(map(np.prod, shapes.values())) / 1e6, 1) == millions


def test_too_long_input_is_refused():
    shape = {"vocab_size": 9, "embed_dim": 8, "num_layers": 2, "num_heads": 2, "mlp_dim": 8}
    model = ModernBertConfig(**shape, max_positions=4).make(rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="5 tokens exceed the model's 4 positions"):
        model(jnp.ones((1, 5), jnp.int32))
