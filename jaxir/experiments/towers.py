"""Towers that start from a pretrained encoder as it is, whatever they share."""

import dataclasses

import numpy as np

from jaxir.errors import UserError
from jaxir.interop import model_dir, stored
from jaxir.interop.model_dir import LoadedModel
from jaxir.interop.overrides import Overrides
from jaxir.interop.stored import StoredModel
from jaxir.models.dual_encoder import Projection
from jaxir.partitioning import Partitioner


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
        if self.projection is not None:
            raise UserError("projection cannot be set: an identity has the encoder's own width")
        found, _ = model_dir.read(self.source, tokenizer=self.tokenizer)
        changes = {f.name: getattr(self, f.name) for f in dataclasses.fields(Overrides)}
        model = Overrides(**changes).apply(_with_identity(found, self.source), seed=seed, where=self.source)
        fingerprint = stored.fingerprint(model)
        return LoadedModel(stored.build(model, partitioner), model.tokenizer, model.settings, fingerprint)


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
