"""Models that the tests of exports use."""

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest
from flax import nnx

from jaxir import PretrainedCrossEncoder
from jaxir.data.text.tokenizer import Tokenizer
from jaxir.interop import model_dir
from jaxir.models.dual_encoder import DualEncoderConfig, DualEncoderModel


@pytest.fixture(scope="session")
def save_model() -> Callable[..., str]:
    """Writes a random model, with lengths and prompts of each tower, and returns its directory."""

    def save(directory: Path, backbone, tokenizer: Tokenizer, **config) -> str:
        config = DualEncoderConfig(backbone=backbone, **config)
        model = DualEncoderModel(config, rngs=nnx.Rngs(0))
        settings = model_dir.EncoderSettings(
            query_max_length=12, passage_max_length=40, query_prompt="ask: ", passage_prompt="tell: "
        )
        model_dir.save(directory, model, tokenizer, settings)
        return str(directory)

    return save


@pytest.fixture(scope="session")
def save_cross_encoder() -> Callable[..., str]:
    """Writes a cross-encoder, with the head that it has or a new one, and returns its directory."""

    def save(directory: Path, source: str, **settings) -> str:
        loaded = PretrainedCrossEncoder(source=source, query_max_length=12, passage_max_length=28).build(
            seed=0
        )
        settings = dataclasses.replace(loaded.settings, **settings)
        model_dir.save(directory, loaded.model, loaded.tokenizer, settings)
        return str(directory)

    return save
