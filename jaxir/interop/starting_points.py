"""The interface of starting points of a training run, and what those that load a model have in common."""

import dataclasses
from collections.abc import Callable
from typing import ClassVar, Protocol

from jaxir.core.errors import UserError
from jaxir.interop import model_dir
from jaxir.interop.model import identity, kinds, lora, stored
from jaxir.interop.model.encoder_settings import EncoderSettings
from jaxir.interop.model.stored import Base, ModelConfig, StoredModel
from jaxir.interop.model_dir import LoadedModel
from jaxir.runtime.partitioning import Partitioner

# Maps (model name, directory of a tokenizer or None, kind="dual_encoder" or None for any) to a stored model.
Reader = Callable[..., StoredModel]


class Source(Protocol):
    """The model that a training run starts from. Training calls `build`, planning only `outline`."""

    def build(self, *, seed: int, partitioner: Partitioner | None = None) -> LoadedModel:
        """Makes the model on the mesh of `partitioner`, with random parameters from `seed`."""

    def outline(self, read: Reader) -> tuple[ModelConfig, EncoderSettings]:
        """Returns the configuration and settings that `build` would give; `read` need not load parameters."""


class Opened:
    """Methods of sources that load a model and apply the changes of `CommonOverrides` to it."""

    _kind: ClassVar[str | None]
    source: str
    tokenizer = from_scratch = None  # only `Pretrained` has these fields

    def build(self, *, seed: int, partitioner: Partitioner | None = None) -> LoadedModel:
        """Loads the model onto the mesh of `partitioner`; each process reads the parts of its devices.

        `seed` is for new random weights. If the files have no fingerprint, one is made of the source's name,
        because hashing the parameters would make every process read all of them.
        """
        drawn = bool(self.from_scratch)
        if drawn and self.lora_rank is not None:
            raise UserError("lora_rank needs trained weights: leave out from_scratch or lora_rank")

        def built(found: StoredModel, fingerprint: str | None) -> LoadedModel:
            model = self.apply(found, seed=seed, where=self.source)
            if model.weights is None and self.lora_rank is None and model.base is not None:
                model = dataclasses.replace(model, weights=model.base.weights)
            if model.weights is not None and model.config.adapters is None:
                raise UserError(
                    f"{self.source}: weights={self.weights!r} cannot be trained: give lora_rank, too, to"
                    " train adapters, or leave it out"
                )
            if drawn:
                made = stored.initialize(model.config, seed=seed, partitioner=partitioner)
                fingerprint = identity.initial_fingerprint(model.config, model.tokenizer, seed)
                return LoadedModel(made, model.tokenizer, model.settings, fingerprint)
            another = self.change_outputs() or kinds.of(model.config) is not kinds.of(found.config)
            if fingerprint is None or another:
                fingerprint = identity.initial_fingerprint(
                    model.config, model.tokenizer, seed, source=self.source
                )
            base = self._base(found)
            made = stored.build(model, partitioner, halved=base is not None)
            return LoadedModel(made, model.tokenizer, model.settings, fingerprint, base=base)

        return model_dir.read_with(
            built, self.source, tokenizer=self.tokenizer, kind=self._kind, weights=not drawn
        )

    def _base(self, found: StoredModel) -> Base | None:
        """Returns the model that adapters change, which a run only names; None if it stores all weights."""
        if self.lora_rank is None:
            return found.base and found.base._replace(weights=self.weights or found.base.weights)
        params = lora.merged(found).params
        return Base(model_dir.absolute(self.source), self.tokenizer, lora.digest_of(params), self.weights)

    def outline(self, read: Reader) -> tuple[ModelConfig, EncoderSettings]:
        found = read(self.source, self.tokenizer, self._kind)
        model = self.apply(found, seed=0, where=self.source)
        return model.config, model.settings
