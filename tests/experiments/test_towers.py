import jax.numpy as jnp
import numpy as np
import pytest

from jaxir.core.errors import UserError
from jaxir.experiments.towers import UnderIdentityProjection
from jaxir.interop import model_dir

IDS = np.array([[2, 7, 9, 3, 0], [2, 5, 6, 8, 3]], np.int32)


def vectors(model, tower):
    return np.asarray(model.encode(jnp.asarray(IDS), tower=tower))


@pytest.mark.slow
@pytest.mark.parametrize("sharing", ["ade", "ade_spl"])
def test_every_sharing_starts_from_the_encoder_unchanged(model, sharing, tmp_path):
    source = UnderIdentityProjection(source=model, sharing=sharing, query_max_length=8, passage_max_length=16)
    loaded, plain = source.build(seed=0), model_dir.load(model)
    assert (loaded.model.config.sharing, loaded.model.config.projection.dimension) == (sharing, 32)
    assert (loaded.settings.query_max_length, loaded.settings.passage_max_length) == (8, 16)
    for tower in ("query", "passage"):
        np.testing.assert_allclose(vectors(loaded.model, tower), vectors(plain.model, tower), atol=1e-6)
    # A second stage starts from the first one's result, whose projection is no identity any more.
    kernel = (loaded.model.query_projection if sharing == "ade" else loaded.model.projection).kernel
    kernel[...] = kernel[...] + 0.3
    model_dir.save(tmp_path / "stage1", loaded.model, loaded.tokenizer, loaded.settings)
    again = UnderIdentityProjection(source=str(tmp_path / "stage1"), sharing=sharing).build(seed=0)
    np.testing.assert_allclose(vectors(again.model, "query"), vectors(loaded.model, "query"), atol=1e-6)
    assert np.abs(vectors(again.model, "query") - vectors(plain.model, "query")).max() > 1e-3


def test_identity_projection_refuses_other_projections_and_ade_towers(model, tmp_path):
    with pytest.raises(UserError, match="projection cannot be set"):
        UnderIdentityProjection(source=model, projection=16).build(seed=0)
    loaded = model_dir.load(model, sharing="ade")
    model_dir.save(tmp_path / "ade", loaded.model, loaded.tokenizer, loaded.settings)
    with pytest.raises(UserError, match="'ade' towers need a projection"):
        UnderIdentityProjection(source=str(tmp_path / "ade")).build(seed=0)
