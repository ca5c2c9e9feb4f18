"""Backbones: the interface of encoders and their configurations, and the registry that finds them by name.

A backbone is one file: a configuration (a frozen dataclass), a module, and the tables that map its weights to
Hugging Face's folders. `register` makes it known. A backbone outside jaxir is known once Python or a gin file
imports its module: docs/adding_a_backbone.md.
"""

import contextlib
import functools
import inspect
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, ClassVar, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int, Key

from jaxir.core.errors import UserError
from jaxir.core.shapes import checked_shapes
from jaxir.core.values import Size, Within, check_value
from jaxir.models import layers, stacks
from jaxir.models.codec import HuggingFace
from jaxir.runtime.partitioning import Partitioner

C = TypeVar("C", bound="type[BackboneConfig]")
# Allowed sizes of all backbones, also of those outside jaxir. num_layers is 0 if there is no stack of blocks.
SIZES = {"vocab_size": Size, "embed_dim": Size, "num_layers": Annotated[int, Within(0, 1000)]}
# Changes the token vectors [B, L, E] of a batch before the first block reads them.
Edit = Callable[[jax.Array], jax.Array]


class BackboneConfig:
    """Base class of configurations: frozen dataclasses of numbers and names that describe an encoder.

    Fields that do not change what a model computes are left out of its fingerprint: `dtype`, `remat`,
    `scan_layers`, and fields whose names end in "dropout_rate". The argument `dropout_rate` of a function
    that loads a model sets all of the last.

    Attributes:
      kind: the name of the backbone in `jaxir.json`.
      title: the name of the backbone in summaries; empty: `kind`.
      token_table: attribute of the module that holds the `layers.Embedding` from ids to vectors.
      hugging_face: the kinds of Hugging Face folders that can hold such a model.
      vocab_size: rows of the token table.
      embed_dim: E, the width.
      num_layers: number of blocks.
      max_positions: maximum number of tokens per text; None: no limit.
      num_token_types: rows of the token type table; 0: no table. If there are several rows, the encoder's
        `__call__` takes `token_types` [B, L].
      dtype: the type of matrix products and activations; parameters are float32.
      remat: what the backward pass recomputes of a block: nothing (False), all except matrix products
        ("products"), all except these and gathered weights ("weights"), all except what the kernels of TPUs
        read again ("kernels"), or all (True); with "auto" training chooses the fastest setting that fits into
        memory.
      scan_layers: stack the parameters of the blocks and scan over them, so that compile time does not grow
        with depth.
      shows_layers: whether the encoder implements `layer_and_last`.
      embeds_unattended: whether the encoder has `embed` (see `StackEncoder`) and gives vectors of tokens that
        other tokens do not attend to, as multi-vector encoders add to queries.
      added: field that was added later -> its value in models that were saved without the field.
    """

    kind: ClassVar[str]
    title: ClassVar[str] = ""
    token_table: ClassVar[str]
    shows_layers: ClassVar[bool] = False
    embeds_unattended: ClassVar[bool] = False
    added: ClassVar[Mapping[str, Any]] = {}
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
        """A short description of the model."""
        return f"{self.title or self.kind}, {self.num_layers} layers x {self.embed_dim}"

    @property
    def output_dim(self) -> int:
        """The width of the encoder's output: the width of its blocks unless a subclass overrides it."""
        return self.embed_dim

    @property
    def reach(self) -> int | None:
        """The largest distance at which a token sees another in every layer; None: any distance."""
        return min(getattr(self, "windows", ()), default=None)

    @property
    def model_type(self) -> str | None:
        """The `model_type` of a Hugging Face folder of this model; None if there is no such folder format."""
        return self.hugging_face[0].model_type if self.hugging_face else None

    def make(self, *, rngs: nnx.Rngs) -> "Encoder":
        """Makes the encoder, with random parameters."""
        raise NotImplementedError


class Encoder(layers.Summarised):
    """Base class of modules that map ids to vectors. Subclasses define `__call__` or `together`.

    The attribute `layers` holds the blocks that can be scanned (`stacks.make_stack`).
    """

    config: BackboneConfig

    @property
    def token_table(self) -> layers.Embedding:
        return operator.attrgetter(self.config.token_table)(self)

    def is_pooled(self, ids: jax.Array) -> jax.Array:
        """Returns a mask, bool [B, L], of the tokens that pooling reads: all except padding."""
        return ids != 0

    @checked_shapes
    def __call__(
        self,
        ids: Int[Array, "B L"],
        *,
        token_types: Int[Array, "B L"] | None = None,
        key: Key[Array, ""] | None = None,
        edit: Edit | None = None,
    ) -> Float[Array, "B L E"]:
        """Encodes token ids [B, L]; returns [B, L, E] in the config's dtype, undefined at padded positions.

        Args:
          ids: 0 is padding, on the right; `features.PADDING_TOKEN` is a padding token in the text itself.
          token_types: which part of the input each token belongs to, for encoders with a table of types;
            None: all 0.
          key: dropout key; None turns dropout off.
          edit: changes the token vectors that the first block reads.
        """
        more = {} if token_types is None else {"token_types": [token_types]}
        return self.together([ids], [key], *([[edit]] if edit else []), **more)[0]

    def together(
        self,
        ids: Sequence[jax.Array],
        keys: Sequence[jax.Array | None],
        edits: Sequence[Edit | None] | None = None,
    ) -> list[jax.Array]:
        """Encodes several batches of token ids [B, L]; equals one `__call__` for each batch.

        Weights that are split over devices are gathered once for all batches (see `stacks.run_stack`).
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
        """Like `together`, but also returns the output of block `layer`, or the first block's input for 0."""
        raise NotImplementedError(
            f"{type(self).__name__} does not return outputs of earlier layers: use another pooling"
        )


class StackEncoder(Encoder):
    """An encoder with one stack of blocks, `layers`; subclasses define what the blocks read.

    Methods take and return lists with an item for each batch. A dropout key of None turns dropout off.
    """

    def embed(self, ids: Sequence[jax.Array], keys: Sequence[jax.Array | None]) -> list[jax.Array]:
        """Returns the token vectors [B, L, E] that the first block reads."""
        raise NotImplementedError

    def block_args(self, ids: Sequence[jax.Array], xs: Sequence[jax.Array]) -> list[tuple[Any, ...]]:
        """Returns the further arguments of each block; by default the mask [B, L].

        `xs` are the token vectors [B, L, E] that the first block reads.
        """
        return [(batch != 0,) for batch in ids]

    def per_layer(self) -> Sequence[Any]:
        """Returns arrays [num_layers, ...] of values that differ between blocks; see `stacks.run_stack`."""
        return ()

    def finish(self, xs: list[jax.Array], keys: Sequence[jax.Array | None]) -> list[jax.Array]:
        """Maps the last block's output [B, L, E] to the encoder's output."""
        return xs

    def together(
        self,
        ids: Sequence[jax.Array],
        keys: Sequence[jax.Array | None],
        edits: Sequence[Edit | None] | None = None,
        **inputs: Any,
    ) -> list[jax.Array]:
        """Encodes batches like `Encoder.together`; `inputs` are further arguments of `embed`."""
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
        embedding, inside, last = zip(*(layers.split_key(key, 3) for key in keys), strict=True)
        early = edited(self.embed(ids, embedding, **inputs), edits)
        args = self.block_args(ids, early)
        how = {"remat": self.config.remat, "keys": inside, "per_layer": self.per_layer()}
        if layer:
            early = stacks.run_stack(self.layers, early, args, **how, span=slice(layer))
        xs = stacks.run_stack(self.layers, early, args, **how, span=slice(layer, None))
        return list(zip(early, self.finish(xs, last), strict=True))

    def mean_and_last(
        self,
        ids: Sequence[jax.Array],
        keys: Sequence[jax.Array | None],
        edits: Sequence[Edit | None] | None = None,
        *,
        weights: jax.Array,
    ) -> list[tuple[jax.Array, jax.Array]]:
        """Like `together`, but also returns a weighted sum of the last outputs, one for each of `weights`.

        The outputs are the first block's input, then each block's output. The encoder's output takes the
        place of the last block's, as in `hidden_states` of transformers.
        """
        embedding, inside, last = zip(*(layers.split_key(key, 3) for key in keys), strict=True)
        xs = edited(self.embed(ids, embedding), edits)
        args, num = self.block_args(ids, xs), self.config.num_layers
        how = {"remat": self.config.remat, "keys": inside, "per_layer": self.per_layer()}
        outputs = [xs]
        for i in range(num):
            outputs.append(stacks.run_stack(self.layers, outputs[-1], args, **how, span=slice(i, i + 1)))
        outputs[-1] = self.finish(outputs[-1], last)
        summed = outputs[len(outputs) - len(weights) :]
        means = [
            sum(w * x.astype(jnp.float32) for w, x in zip(weights, of_batch, strict=True))
            for of_batch in zip(*summed, strict=True)
        ]
        return list(zip(means, outputs[-1], strict=True))


def make_encoder(config: BackboneConfig, *, rngs: nnx.Rngs) -> Encoder:
    """Makes an encoder with random parameters; raises a UserError if an array is not a parameter."""
    encoder = config.make(rngs=rngs)
    if found := layers.unexpected_array(encoder, nnx.Param):
        raise UserError(
            f"{type(encoder).__module__}.{type(encoder).__name__} holds {found}, which is neither trained nor"
            " saved: make parameters with jaxir.models.layers.param, and constants in the method that uses"
            " them (docs/adding_a_backbone.md)"
        )
    return encoder


def check_editable(encoder: Encoder) -> None:
    """Raises a UserError if an encoder, such as a user's, has no argument for edits of token vectors."""
    own = type(encoder).together is not Encoder.together
    method, name = (encoder.together, "edits") if own else (type(encoder).__call__, "edit")
    if name not in inspect.signature(method).parameters:
        raise UserError(
            f"the objective changes token vectors, but {type(encoder).__name__}.{method.__name__} takes no"
            f" {name!r}; add this argument (docs/adding_a_backbone.md)"
        )


def check_padding(model: nnx.Module, partitioner: Partitioner | None = None) -> None:
    """Checks that encoders outside jaxir return [B, L, E] and ignore padding.

    Encodes three tokens followed by five of padding, twice. The second time, padding has another token's
    vector. The vectors of the three tokens must be equal bit for bit, else a UserError is raised.
    """
    for _, encoder in nnx.iter_modules(model):
        if isinstance(encoder, Encoder) and not type(encoder).__module__.startswith("jaxir."):
            with partitioner() if partitioner else contextlib.nullcontext():
                _check_padding(encoder, rows=partitioner.batch_divisor() if partitioner else 1)


def _check_padding(encoder: Encoder, *, rows: int) -> None:
    graphdef, state = nnx.split(encoder)
    name = f"{type(encoder).__module__}.{type(encoder).__name__}"
    length = min(8, encoder.config.max_positions or 8)
    ids = np.where(np.arange(length) < 3, np.arange(1, length + 1), 0) % encoder.config.vocab_size
    ids = np.tile(ids, (rows, 1)).astype(np.int32)

    @jax.jit
    def first_tokens(state: nnx.State, row: int) -> jax.Array:
        copy = nnx.merge(graphdef, state)
        table = copy.token_table.embedding
        table[...] = table[...].at[0].set(table[row])
        found, wanted = copy(jnp.asarray(ids)), (*ids.shape, copy.config.output_dim)
        if jnp.shape(found) != wanted:
            raise UserError(
                f"{name} must return a vector for each token, [B, L, E] {list(wanted)}, not"
                f" {list(jnp.shape(found))}: the dual encoder pools them (docs/adding_a_backbone.md)"
            )
        return found[:, :3]

    # One program runs twice: two copies in one program might be rounded differently.
    one, other = (first_tokens(state, np.int32(row)) for row in (0, 1))
    if not jax.jit(functools.partial(jnp.array_equal, equal_nan=True))(one, other):
        raise UserError(
            f"{name} returns different vectors for a text when its padding changes: zero or mask"
            " positions whose id is 0 before other positions read them (docs/adding_a_backbone.md)"
        )


def edited(xs: Sequence[jax.Array], edits: Sequence[Edit | None] | None) -> list[jax.Array]:
    """Returns token vectors [B, L, E] of several batches, each changed by its edit."""
    if edits is None:
        return list(xs)
    return [x if edit is None else edit(x) for x, edit in zip(xs, edits, strict=True)]


_KINDS: dict[str, type[BackboneConfig]] = {}
# Configurations of models on the hub, so that plans need no network; each backbone's file adds its own.
PUBLISHED: dict[str, "BackboneConfig"] = {}


def check_registered(config: BackboneConfig) -> None:
    """Raises a UserError if a backbone is not registered, or has impossible sizes."""
    if config.kind not in _KINDS:
        raise UserError(
            f"{type(config).__name__} is not registered, so a trained model could not be opened: put"
            " @register of jaxir.models.backbones above the class (docs/adding_a_backbone.md)"
        )
    for name, hint in SIZES.items():
        check_value(f"{type(config).__name__}.{name}", getattr(config, name), hint)


def register(config: C) -> C:
    """A class decorator: registers a configuration class by its `kind` and its Hugging Face model types.

    Raises:
      TypeError: the class lacks an attribute of configurations, or is not a frozen dataclass.
      ValueError: another class has the same name.
    """
    types = {codec.model_type for codec in config.hugging_face}
    for other in _KINDS.values():
        names = {other.kind, *(codec.model_type for codec in other.hugging_face)} & {config.kind, *types}
        # Running a notebook cell again redefines its class.
        again = other.__qualname__ == config.__qualname__ and not other.__module__.startswith("jaxir.")
        if names and not again:
            raise ValueError(
                f"{min(names)!r} is already registered by {other.__module__}.{other.__qualname__}: rename it"
            )

    needed = ("kind", "token_table", "vocab_size", "embed_dim", "num_layers", "dtype", "remat", "scan_layers")
    has = {*dir(config), *getattr(config, "__dataclass_fields__", ())}
    if missing := [name for name in needed if name not in has]:
        raise TypeError(
            f"the backbone {config.__module__}.{config.__qualname__} lacks {', '.join(missing)}"
            " (docs/adding_a_backbone.md)"
        )
    parameters = vars(config).get("__dataclass_params__")  # the parameters of this class, not of a base class
    if parameters is None or not parameters.frozen:
        raise TypeError(
            f"the backbone {config.__module__}.{config.__qualname__} is not a frozen dataclass: write"
            " @dataclasses.dataclass(frozen=True) below @register (docs/adding_a_backbone.md)"
        )
    _KINDS[config.kind] = config
    return config


def of_kind(kind: str, *, module: str | None, where: object) -> type[BackboneConfig]:
    """Returns the configuration class of a kind.

    `module` is the module that registers the kind, if the file `where` names that module.
    """
    if kind not in _KINDS:
        named = f"import {module}" if module else "import the module that registers it"
        raise UserError(
            f"{where}: unknown backbone {kind!r}, known are {', '.join(_KINDS)}: {named} first, in Python or"
            " in a gin file (--gin_file)"
        )
    return _KINDS[kind]


def of_model_type(model_type: str, *, where: object) -> tuple[type[BackboneConfig], HuggingFace]:
    """Returns the configuration class and the codec of a `model_type` that the file `where` names."""
    known = {codec.model_type: (kind, codec) for kind in _KINDS.values() for codec in kind.hugging_face}
    if not isinstance(model_type, str) or model_type not in known:
        raise UserError(
            f"{where}: model_type {model_type!r} is not supported; supported are {', '.join(known)}"
        )
    return known[model_type]
