"""Towers that start from an unchanged pretrained encoder, for every kind of sharing."""

import dataclasses

import numpy as np

from jaxir.core.errors import UserError
from jaxir.interop import model_dir
from jaxir.interop.build import Reader
from jaxir.interop.model import identity, stored
from jaxir.interop.model.encoder_settings import EncoderSettings
from jaxir.interop.model.overrides import Overrides
from jaxir.interop.model.stored import StoredModel
from jaxir.interop.model_dir import LoadedModel
from jaxir.models.dual_encoder import DualEncoderConfig, Projection
from jaxir.runtime.partitioning import Partitioner


@dataclasses.dataclass(frozen=True, kw_only=True)
class UnderIdentityProjection(Overrides):
    """A pretrained encoder with a projection initialised to the identity, with changes (see `Overrides`).

    The towers of Moiseev et al. 2023, section 2, end in a projection, which an ADE-SPL shares. A random
    projection would discard what the encoder knows. With the identity, SDE, ADE and ADE-SPL all start from
    the encoder's own vectors, so later differences are due to training. A model's own projection is kept.

    Attributes:
      source: a jaxir model or run directory, or `hf:` or `st:` and a directory or hub name.
    """

    source: str

    def build(self, *, seed: int, partitioner: Partitioner | None = None) -> LoadedModel:
        """Loads the model onto the mesh of `partitioner`."""

        def built(found: StoredModel, _: str | None) -> LoadedModel:
            model = self._on_identity(found, seed)
            fingerprint = identity.fingerprint(model)
            return LoadedModel(stored.build(model, partitioner), model.tokenizer, model.settings, fingerprint)

        return model_dir.read_with(built, self.source, tokenizer=self.tokenizer)

    def outline(self, read: Reader) -> tuple[DualEncoderConfig, EncoderSettings]:
        """Returns the changed config and settings; see `interop.build.Source`."""
        model = self._on_identity(read(self.source, self.tokenizer), 0)
        return model.config, model.settings

    def _on_identity(self, found: StoredModel, seed: int) -> StoredModel:
        if self.projection is not None:
            raise UserError("projection cannot be set: the identity has the encoder's width; remove it")
        config = found.config
        if config.projection is None:
            if config.sharing != "sde":
                raise UserError(f"{self.source}: {config.sharing!r} towers need a projection; use sde")
            width = config.backbone.embed_dim
            found = dataclasses.replace(
                found,
                config=dataclasses.replace(config, projection=Projection(dimension=width)),
                params={**found.params, "projection.kernel": np.eye(width, dtype=np.float32)},
            )
        return self.apply(found, seed=seed, where=self.source)
