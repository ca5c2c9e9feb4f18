"""Backbones: what every encoder and its configuration offer, and the registry that finds them by name.

A backbone is one file: a configuration (a frozen dataclass), a module, and the tables by which its weights go
to Hugging Face's folders and back. `register` makes it known. One that lies outside jaxir is known once its
module is imported, by Python or by a gin file: docs/adding_a_backbone.md.
"""

import contextlib
import functools
import inspect
import operator
from collections.abc import Callable, Sequence
from typing import Annotated, Any, ClassVar, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from beartype import beartype
from flax import nnx
from jaxtyping import Array, Float, Int, Key, jaxtyped

from jaxir.core.errors import UserError
from jaxir.core.values import Size, Within, check_value
from jaxir.models import layers
from jaxir.models.codec import HuggingFace
from jaxir.runtime.partitioning import Partitioner

C = TypeVar("C", bound="type[BackboneConfig]")
# The sizes that every backbone has, also one outside jaxir that does not check its fields.
# One without a stack may have no layers.
SIZES = {"vocab_size": Size, "embed_dim": Size, "num_layers": Annotated[int, Within(0, 1000)]}
# What changes the token vectors [B, L, E] of a batch before the first block reads them.
Edit = Callable[[jax.Array], jax.Array]


class BackboneConfig:
    """The shape of an encoder and how it is computed: the base of a frozen dataclass of numbers and names.

    Fields that say how a model is computed, not what it is, are no part of its fingerprint: `dtype`, `remat`,
    `scan_layers`, and those whose names end in "dropout_rate", all of which loading with `dropout_rate` sets.

    Attributes:
      kind: the name of the backbone in `jaxir.json`.
      token_table: path, in the module, of the `layers.Embedding` from ids to vectors.
      hugging_face: the folders that hold it.
      vocab_size: rows of the token table.
      embed_dim: E, the width.
      num_layers: number of blocks.
      max_positions: the longest input, in tokens; None where there is no limit.
      num_token_types: rows of the token type table; 0 for none. With more than one the encoder's `__call__`
        takes `token_types` [B, L].
      dtype: the type of matrix products and activations; parameters are float32.
      remat: what the backward pass computes anew of a block instead of keeping it: nothing, all but
        matrix products ("products"), all but these and gathered weights ("weights"), or all; "auto" has
        training take the quickest that fits.
      scan_layers: stack the blocks' parameters and scan over them: compile time does not grow with depth.
      shows_layers: whether its encoder has `layer_and_last`.
    """

    kind: ClassVar[str]
    token_table: ClassVar[str]
    shows_layers: ClassVar[bool] = False
    hugging_face: ClassVar[tuple[HuggingFace, ...]] = ()
    vocab_size: int
    embed_dim: int
    num_layers: int
    max_positions: int | None = None
    num_token_types: int = 0
    dtype: str
    remat: layers.Remat
    scan_layers: bool

    @property
    def summary(self) -> str:
        """What it is, in a few words."""
        return f"{self.kind}, {self.num_layers} layers x {self.embed_dim}"

    @property
    def model_type(self) -> str | None:
        """The `model_type` of the Hugging Face folder that this one becomes; None where there is none."""
        return self.hugging_face[0].model_type if self.hugging_face else None

    def make(self, *, rngs: nnx.Rngs) -> "Encoder":
        """Makes the encoder, with random parameters."""
        raise NotImplementedError


class Encoder(layers.Summarised):
    """Token ids to vectors: the base of a backbone's module, which has `__call__` or `together`.

    Its attribute `config` says what it is; blocks that can be scanned are its `layers` (`layers.make_stack`).
    """

    config: BackboneConfig

    @property
    def token_table(self) -> layers.Embedding:
        """What maps ids to vectors."""
        return operator.attrgetter(self.config.token_table)(self)

    def is_pooled(self, ids: jax.Array) -> jax.Array:
        """Returns which tokens of texts [B, L] pooling reads, bool [B, L]: all but padding."""
        return ids != 0

    @jaxtyped(typechecker=beartype)
    def __call__(
        self,
        ids: Int[Array, "B L"],
        *,
        token_types: Int[Array, "B L"] | None = None,
        key: Key[Array, ""] | None = None,
        edit: Edit | None = None,
    ) -> Float[Array, "B L E"]:
        """Encodes token ids.

        Args:
          ids: [B, L], 0 is padding, on the right. A padding token that a text spells out is
            `features.PADDING_TOKEN`: `layers.Embedding` reads row 0 for it.
          token_types: [B, L], which part of the input each token belongs to, where there is a table of them;
            None: all to the first.
          key: key of dropout; None turns it off.
          edit: changes what the first block reads; None: nothing does.

        Returns:
          [B, L, E] in the config's dtype. What stands at padded positions has no meaning.
        """
        more = {} if token_types is None else {"token_types": [token_types]}
        return self.together([ids], [key], *([[edit]] if edit else []), **more)[0]

    def together(
        self,
        ids: Sequence[jax.Array],
        keys: Sequence[jax.Array | None],
        edits: Sequence[Edit | None] | None = None,
    ) -> list[jax.Array]:
        """Encodes batches of token ids [B, L], each of a length of its own, as calls for each would.

        What a device does not hold of a block's weights `layers.run_stack` gathers once for all of them.
        """
        more = [{"edit": edit} if edit else {} for edit in edits or [None] * len(ids)]
        return [self(batch, key=key, **m) for batch, key, m in zip(ids, keys, more, strict=True)]

    def layer_and_last(
        self,
        ids: Sequence[jax.Array],
        keys: Sequence[jax.Array | None],
        edits: Sequence[Edit | None] | None = None,
        *,
        layer: int,
    ) -> list[tuple[jax.Array, jax.Array]]:
        """Encodes as `together` does, and returns what an earlier block gave beside it, for each batch.

        Args:
          ids: token ids [B, L] of each batch.
          keys: key of dropout of each.
          edits: of what the first block reads.
          layer: 0 for what the first block reads, n for what the n-th gives.
        """
        raise NotImplementedError(f"{type(self).__name__} does not show its layers")


class StackEncoder(Encoder):
    """An encoder with one stack of blocks, `layers`: a family says what they read and what they are given.

    Methods take and return lists with an item for each batch. Keys are of dropout; None turns it off.
    """

    def embed(self, ids: Sequence[jax.Array], keys: Sequence[jax.Array | None]) -> list[jax.Array]:
        """Returns the token vectors [B, L, E] that the first block reads."""
        raise NotImplementedError

    def block_args(self, ids: Sequence[jax.Array]) -> list[tuple[Any, ...]]:
        """Returns what each block is called with behind its input; here the mask [B, L]."""
        return [(batch != 0,) for batch in ids]

    def finish(self, xs: list[jax.Array], keys: Sequence[jax.Array | None]) -> list[jax.Array]:
        """Returns what is made of the last block's output, [B, L, E] both."""
        return xs

    def together(
        self,
        ids: Sequence[jax.Array],
        keys: Sequence[jax.Array | None],
        edits: Sequence[Edit | None] | None = None,
        **inputs: Any,
    ) -> list[jax.Array]:
        """Encodes batches as `Encoder.together`; `inputs` are further ones of `embed`."""
        return [last for _, last in self.layer_and_last(ids, keys, edits, layer=0, **inputs)]

    def layer_and_last(
        self,
        ids: Sequence[jax.Array],
        keys: Sequence[jax.Array | None],
        edits: Sequence[Edit | None] | None = None,
        *,
        layer: int,
        **inputs: Any,
    ) -> list[tuple[jax.Array, jax.Array]]:
        """Encodes as `together` does, and returns an earlier layer's output too; see `Encoder`."""
        embedding, inside, last = zip(*(layers.split_key(key, 3) for key in keys), strict=True)
        early = edited(self.embed(ids, embedding, **inputs), edits)
        args, how = self.block_args(ids), {"remat": self.config.remat, "keys": inside}
        if layer:
            early = layers.run_stack(self.layers, early, args, **how, span=slice(layer))
        xs = layers.run_stack(self.layers, early, args, **how, span=slice(layer, None))
        return list(zip(early, self.finish(xs, last), strict=True))


def make_encoder(config: BackboneConfig, *, rngs: nnx.Rngs) -> Encoder:
    """Makes the encoder of a configuration, with random parameters.

    Raises:
      UserError: one in a user's file holds arrays that no training and no file would have.
    """
    encoder = config.make(rngs=rngs)
    if found := layers.not_of(encoder, nnx.Param):
        raise UserError(
            f"{type(encoder).__module__}.{type(encoder).__name__} holds {found}, which is neither trained nor"
            " saved: a parameter is made by jaxir.models.layers.param, a constant where it is used"
            " (docs/adding_a_backbone.md)"
        )
    return encoder


def check_editable(encoder: Encoder) -> None:
    """Raises a UserError unless an encoder takes edits: one in a user's file need not."""
    own = type(encoder).together is not Encoder.together
    method, name = (encoder.together, "edits") if own else (type(encoder).__call__, "edit")
    if name not in inspect.signature(method).parameters:
        raise UserError(
            f"the objective changes token vectors, but {type(encoder).__name__}.{method.__name__} takes no"
            f" {name!r} (docs/adding_a_backbone.md)"
        )


def check_padding(model: nnx.Module, partitioner: Partitioner | None = None) -> None:
    """Checks that each encoder outside jaxir, which anybody may have written, gives vectors to tokens alone.

    Three tokens are encoded before five of padding, whose vector is once that of another token: the bits of
    the three must be the same.

    Args:
      model: with parameters.
      partitioner: of their mesh, None where there is none.

    Raises:
      UserError: one looks at padding, or gives something else than [B, L, E].
    """
    encoders = [module for _, module in nnx.iter_modules(model) if isinstance(module, Encoder)]
    for encoder in encoders:
        if type(encoder).__module__.startswith("jaxir."):
            continue
        graphdef, state = nnx.split(encoder)
        name = f"{type(encoder).__module__}.{type(encoder).__name__}"
        length = min(8, encoder.config.max_positions or 8)
        ids = np.where(np.arange(length) < 3, np.arange(1, length + 1), 0) % encoder.config.vocab_size
        batch = np.tile(ids, (partitioner.batch_divisor() if partitioner else 1, 1)).astype(np.int32)

        def tokens(
            state: nnx.State, row: int, graphdef: Any = graphdef, ids: Any = batch, name: str = name
        ) -> Any:
            copy = nnx.merge(graphdef, state)
            table = copy.token_table.embedding
            table[...] = table[...].at[0].set(table[row])
            found, wanted = copy(jnp.asarray(ids)), (*ids.shape, copy.config.embed_dim)
            if jnp.shape(found) != wanted:
                raise UserError(
                    f"{name} must give a vector for each token, [B, L, E] {list(wanted)}, and gives"
                    f" {list(jnp.shape(found))}: pooling comes after it (docs/adding_a_backbone.md)"
                )
            return found[:, :3]

        # Twice the same program: two copies of it in one may be rounded in two ways.
        run, same = jax.jit(tokens), jax.jit(functools.partial(jnp.array_equal, equal_nan=True))
        with partitioner() if partitioner else contextlib.nullcontext():
            if not same(*(run(state, np.int32(row)) for row in (0, 1))):
                raise UserError(
                    f"{name} gives a text other vectors where other padding follows: zero or mask positions"
                    " whose id is 0 before others look at them (docs/adding_a_backbone.md)"
                )


def edited(xs: Sequence[jax.Array], edits: Sequence[Edit | None] | None) -> list[jax.Array]:
    """Returns token vectors [B, L, E] of several batches, each changed by its edit."""
    if edits is None:
        return list(xs)
    return [x if edit is None else edit(x) for x, edit in zip(xs, edits, strict=True)]


_KINDS: dict[str, type[BackboneConfig]] = {}
# Models on the hub by name, which need no network to be planned; the files of backbones add theirs.
PUBLISHED: dict[str, "BackboneConfig"] = {}


def check_registered(config: BackboneConfig) -> None:
    """Raises a UserError where a backbone was not registered, so that its models could not be opened.

    The same where one of its `SIZES` is impossible.
    """
    if config.kind not in _KINDS:
        raise UserError(
            f"{type(config).__name__} is not registered, so that no trained model of it could be opened: put"
            " @register of jaxir.models.backbones above it (docs/adding_a_backbone.md)"
        )
    for name, hint in SIZES.items():
        check_value(f"{type(config).__name__}.{name}", getattr(config, name), hint)


def register(config: C) -> C:
    """Makes a configuration's class known by its `kind` and its Hugging Face model types; a decorator.

    Raises:
      TypeError: it lacks what every configuration has, or is no frozen dataclass itself.
      ValueError: another class has such a name already.
    """
    types = {codec.model_type for codec in config.hugging_face}
    for other in _KINDS.values():
        names = {other.kind, *(codec.model_type for codec in other.hugging_face)} & {config.kind, *types}
        # A notebook's cell that is run again defines its class anew.
        again = other.__qualname__ == config.__qualname__ and not other.__module__.startswith("jaxir.")
        if names and not again:
            raise ValueError(f"{min(names)!r} is {other.__module__}.{other.__qualname__} already")

    needed = ("kind", "token_table", "vocab_size", "embed_dim", "num_layers", "dtype", "remat", "scan_layers")
    has = {*dir(config), *getattr(config, "__dataclass_fields__", ())}
    if missing := [name for name in needed if name not in has]:
        raise TypeError(
            f"the backbone {config.__module__}.{config.__qualname__} lacks {', '.join(missing)}"
            " (docs/adding_a_backbone.md)"
        )
    parameters = vars(config).get("__dataclass_params__")  # a base's would leave out this class's fields
    if parameters is None or not parameters.frozen:
        raise TypeError(
            f"the backbone {config.__module__}.{config.__qualname__} is no frozen dataclass: write"
            " @dataclasses.dataclass(frozen=True) below @register (docs/adding_a_backbone.md)"
        )
    _KINDS[config.kind] = config
    return config


def of_kind(kind: str, *, module: str | None, where: object) -> type[BackboneConfig]:
    """Returns the class of the configurations of a kind.

    Args:
      kind: its name.
      module: the one that registers it, where the file says so.
      where: the file that has the name.

    Raises:
      UserError: none is registered by this name.
    """
    if kind not in _KINDS:
        named = f"import {module}" if module else "import the module that registers it"
        raise UserError(
            f"{where}: no backbone {kind!r} is known, only {', '.join(_KINDS)}: {named} first, in Python or"
            " in a gin file (--gin_file)"
        )
    return _KINDS[kind]


def of_model_type(model_type: str, *, where: object) -> tuple[type[BackboneConfig], HuggingFace]:
    """Returns the class of the configurations that a Hugging Face `model_type` becomes, and how.

    Args:
      model_type: it.
      where: the file that has it.

    Raises:
      UserError: none is registered by this name.
    """
    known = {codec.model_type: (kind, codec) for kind in _KINDS.values() for codec in kind.hugging_face}
    if not isinstance(model_type, str) or model_type not in known:
        raise UserError(f"{where}: model_type {model_type!r} is not supported; there are {', '.join(known)}")
    return known[model_type]
