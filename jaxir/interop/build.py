"""What a training run starts from: a pretrained model or a random one. gin binds these two."""

import dataclasses
from pathlib import Path

from jaxir.data.tokenizer import Tokenizer
from jaxir.errors import UserError
from jaxir.interop import model_dir, stored
from jaxir.interop.model_dir import LoadedModel
from jaxir.interop.overrides import Overrides
from jaxir.interop.stored import EncoderSettings
from jaxir.models.dual_encoder import DualEncoderConfig
from jaxir.partitioning import Partitioner


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pretrained(Overrides):
    """A model to load, with changes (see `Overrides`).

    Attributes:
      source: a jaxir model or run directory, or `hf:` or `st:` and a directory or hub name.
    """

    source: str

    def build(self, *, seed: int, partitioner: Partitioner | None = None) -> LoadedModel:
        """Loads the model onto the mesh of `partitioner`; each process reads the parts that its devices hold.

        The fingerprint is of the source's name where the files do not say one: hashing the parameters would
        mean that every process reads all of them.

        Raises:
          UserError: there is no such model, it is damaged, or a change does not fit it.
        """
        changes = {f.name: getattr(self, f.name) for f in dataclasses.fields(Overrides)}
        overrides = Overrides(**changes)
        found, fingerprint = model_dir.read(self.source, tokenizer=overrides.tokenizer)
        model = overrides.apply(found, seed=seed, where=self.source)
        if fingerprint is None or overrides.change_vectors():
            fingerprint = stored.initial_fingerprint(model.config, model.tokenizer, seed, source=self.source)
        return LoadedModel(stored.build(model, partitioner), model.tokenizer, model.settings, fingerprint)


@dataclasses.dataclass(frozen=True, kw_only=True)
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
    query_max_length: int
    passage_max_length: int
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
        settings = EncoderSettings(
            query_max_length=self.query_max_length,
            passage_max_length=self.passage_max_length,
            query_prompt=self.query_prompt,
            passage_prompt=self.passage_prompt,
        )
        stored.check_lengths(settings, self.config, "the new model")
        model = stored.initialize(self.config, seed=seed, partitioner=partitioner)
        fingerprint = stored.initial_fingerprint(self.config, tokenizer, seed)
        return LoadedModel(model, tokenizer, settings, fingerprint)
