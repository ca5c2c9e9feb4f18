"""Models for the tests of exports."""

import dataclasses
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from flax import nnx

from jaxir import PretrainedCrossEncoder
from jaxir.data.text.tokenizer import Tokenizer
from jaxir.interop import model_dir
from jaxir.models.dual_encoder import DualEncoderConfig, DualEncoderModel
from jaxir.models.t5 import T5Config

AWKWARD_TEXTS = [
    "Where is the TREATY kept?",
    "",
    "naïve café 日本 [MASK] \x00 🙂",
    "[PAD] the [PAD] cat <pad>[PAD]",
    "the cat sat on the mat " * 30,
]
SHAPE = {"vocab_size": 1000, "embed_dim": 32, "num_layers": 2, "num_heads": 2, "head_dim": 16, "mlp_dim": 64}
SMALL_T5 = T5Config(**SHAPE, scan_layers=True)


@pytest.fixture
def two_sentencepieces(sentencepiece_folder, tmp_path) -> Tokenizer:
    """A tokenizer whose folder also has a second SentencePiece file, which must not be read."""
    folder = Path(shutil.copytree(sentencepiece_folder, tmp_path / "folder"))
    (folder / "tokenizer.model").write_bytes(b"not a SentencePiece model")
    return Tokenizer.load(folder)


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
    """Writes a cross-encoder, with its own head or a new one, and returns its directory."""

    def save(directory: Path, source: str, **settings) -> str:
        lengths = {"query_max_length": 12, "passage_max_length": 28}
        loaded = PretrainedCrossEncoder(source=source, **lengths).build(seed=0)
        settings = dataclasses.replace(loaded.settings, **settings)
        model_dir.save(directory, loaded.model, loaded.tokenizer, settings)
        return str(directory)

    return save
