"""Towers that start from a pretrained encoder as it is, whatever they share."""

import dataclasses

import numpy as np

from jaxir.core.errors import UserError
from jaxir.interop import model_dir
from jaxir.interop.build import Reader
from jaxir.interop.model import stored
from jaxir.interop.model.encoder_settings import EncoderSettings
from jaxir.interop.model.overrides import Overrides
from jaxir.interop.model.stored import StoredModel
from jaxir.interop.model_dir import LoadedModel
from jaxir.models.dual_encoder import DualEncoderConfig, Projection
from jaxir.runtime.partitioning import Partitioner


@dataclasses.dataclass(frozen=True, kw_only=True)
class UnderIdentityProjection(Overrides):
    """A pretrained encoder under a projection that begins as the identity, with changes (see `Overrides`).

    The towers of the paper (Moiseev et al. 2023, section 2) end in a projection, shared in an ADE-SPL. A
    random one would throw away what a sentence encoder knows; under the identity an SDE, an ADE and an
    ADE-SPL give the same vectors as the encoder itself before the first step, so that whatever separates
    them after training is due to training. A model that has a projection keeps it.

    Attributes:
      source: a jaxir model or run directory, or `hf:` or `st:` and a directory or hub name.
    """

    source: str

    def build(self, *, seed: int, partitioner: Partitioner | None = None) -> LoadedModel:
        """Loads the model onto the mesh of `partitioner`.

        Raises:
          UserError: there is no such model, it is damaged, a change does not fit it, or its towers, which
            are separate already, have no projection.
        """

        def built(found: StoredModel, _: str | None) -> LoadedModel:
            model = self._on_identity(found, seed)
            fingerprint = stored.fingerprint(model)
            return LoadedModel(stored.build(model, partitioner), model.tokenizer, model.settings, fingerprint)

        return model_dir.read_with(built, self.source, tokenizer=self.tokenizer)

    def outline(self, read: Reader) -> tuple[DualEncoderConfig, EncoderSettings]:
        """Returns the configuration and the lengths with the changes made; see `interop.build.Source`."""
        model = self._on_identity(read(self.source, self.tokenizer), 0)
        return model.config, model.settings

    def _on_identity(self, found: StoredModel, seed: int) -> StoredModel:
        if self.projection is not None:
            raise UserError("projection cannot be set: an identity has the encoder's own width")
        return self.apply(_with_identity(found, self.source), seed=seed, where=self.source)


def _with_identity(model: StoredModel, where: str) -> StoredModel:
    if model.config.projection is not None:
        return model
    if model.config.sharing != "sde":
        raise UserError(f"{where}: its towers are {model.config.sharing!r} and have no projection")
    width = model.config.backbone.embed_dim
    return dataclasses.replace(
        model,
        config=dataclasses.replace(model.config, projection=Projection(dimension=width)),
        params={**model.params, "projection.kernel": np.eye(width, dtype=np.float32)},
    )
