"""What a training run starts from: a pretrained model or a random one. gin binds these two."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from jaxir.data.tokenizer import Tokenizer
from jaxir.errors import UserError
from jaxir.interop import model_dir, stored
from jaxir.interop.model_dir import LoadedModel
from jaxir.interop.overrides import Overrides
from jaxir.interop.stored import EncoderSettings, StoredModel
from jaxir.models.dual_encoder import DualEncoderConfig
from jaxir.partitioning import Partitioner
from jaxir.simple_types import Count, checked

# (the name of a model, a tokenizer's directory or None) -> the model at rest.
Reader = Callable[[str, str | None], StoredModel]


class Source(Protocol):
    """What a training run starts from: training builds it, a plan asks only what it would be."""

    def build(self, *, seed: int, partitioner: Partitioner | None = None) -> LoadedModel:
        """Makes the model on the mesh of `partitioner`, with random parameters from `seed`."""

    def outline(self, read: Reader) -> tuple[DualEncoderConfig, EncoderSettings]:
        """Returns what `build` would build and its lengths.

        Args:
          read: reads what it starts from, maybe as shapes alone: the parameters' values do not count.

        Raises:
          UserError: as `build`, where that can be known without a weight.
        """


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pretrained(Overrides):
    """A model to load, with changes (see `Overrides`).

    Attributes:
      source: as `model_dir.load` takes it.
    """

    source: str

    def build(self, *, seed: int, partitioner: Partitioner | None = None) -> LoadedModel:
        """Loads the model onto the mesh of `partitioner`; each process reads the parts that its devices hold.

        The fingerprint is of the source's name where the files do not say one: hashing the parameters would
        mean that every process reads all of them.

        Raises:
          UserError: there is no such model, it is damaged, or a change does not fit it.
        """

        def built(found: StoredModel, fingerprint: str | None) -> LoadedModel:
            model = self.apply(found, seed=seed, where=self.source)
            if fingerprint is None or self.change_vectors():
                how = {"source": self.source}
                fingerprint = stored.initial_fingerprint(model.config, model.tokenizer, seed, **how)
            return LoadedModel(stored.build(model, partitioner), model.tokenizer, model.settings, fingerprint)

        return model_dir.read_with(built, self.source, tokenizer=self.tokenizer)

    def outline(self, read: Reader) -> tuple[DualEncoderConfig, EncoderSettings]:
        """Returns the configuration and the lengths with the changes made; see `Source`."""
        model = self.apply(read(self.source, self.tokenizer), seed=0, where=self.source)
        return model.config, model.settings


@dataclasses.dataclass(frozen=True, kw_only=True)
@checked
class FromScratch:
    """A model with random parameters.

    Attributes:
      config: what it is made of.
      tokenizer: directory of its tokenizer.
      query_max_length: tokens kept of a query.
      passage_max_length: tokens kept of a passage.
      query_prompt: put before each query.
      passage_prompt: put before each passage.
    """

    config: DualEncoderConfig
    tokenizer: str
    query_max_length: Count
    passage_max_length: Count
    query_prompt: str = ""
    passage_prompt: str = ""

    def build(self, *, seed: int, partitioner: Partitioner | None = None) -> LoadedModel:
        """Makes the model; each parameter is computed on the devices of `partitioner` that hold it.

        Raises:
          UserError: there is no such tokenizer, it has more ids than the model, or a length is too large.
        """
        tokenizer = Tokenizer.load(Path(self.tokenizer))
        backbone = self.config.backbone
        if tokenizer.vocab_size > backbone.vocab_size:
            raise UserError(
                f"{self.tokenizer}: the tokenizer has {tokenizer.vocab_size} ids,"
                f" the model only {backbone.vocab_size}"
            )
        _, settings = self.outline()
        model = stored.initialize(self.config, seed=seed, partitioner=partitioner)
        fingerprint = stored.initial_fingerprint(self.config, tokenizer, seed)
        return LoadedModel(model, tokenizer, settings, fingerprint)

    def outline(self, read: Reader | None = None) -> tuple[DualEncoderConfig, EncoderSettings]:
        """Returns the configuration and the lengths; see `Source`. Nothing is read."""
        settings = EncoderSettings(
            query_max_length=self.query_max_length,
            passage_max_length=self.passage_max_length,
            query_prompt=self.query_prompt,
            passage_prompt=self.passage_prompt,
        )
        stored.check_lengths(settings, self.config, "the new model")
        return self.config, settings
