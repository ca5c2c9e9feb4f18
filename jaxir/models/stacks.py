"""Stacks of blocks: lists, or scanned blocks with stacked parameters, whose program has one block of each
kind."""

import itertools
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from jaxir.models.layers import POLICIES, Remat, gather_once, is_variable
from jaxir.models.outlines import outline, outlining

# Runs one block: (graph, state, batches, dropout keys, per-layer values) -> batches.
_Apply = Callable[[nnx.GraphDef, Any, tuple, tuple, tuple], tuple]


def make_stack(
    make_block: Callable[..., nnx.Module],
    num: int,
    *,
    scan: bool,
    rngs: nnx.Rngs,
    kinds: Sequence[Hashable] | None = None,
) -> Any:
    """Makes a stack of `num` blocks, `make_block(rngs)` each, or `make_block(kinds[i], rngs)` with `kinds`.

    Without `scan` the stack is a list. With `scan` it is one block whose parameters have a leading axis
    "layers". If blocks differ in kind, it is a dict with such a block for each kind; its key lists the layers
    of the kind, such as "of_0_1_3". All forms have the same initial values for the same `rngs`.
    """
    keys = None if outlining() else jax.random.split(rngs.params(), num)

    def own_rngs(layer: int) -> nnx.Rngs:
        return rngs if keys is None else nnx.Rngs(keys[layer])

    def of_kind(kind: Hashable) -> Callable[[nnx.Rngs], nnx.Module]:
        return make_block if kinds is None else lambda rngs: make_block(kind, rngs)

    kinds_of = [None] * num if kinds is None else list(kinds)
    if not scan:
        return nnx.List([of_kind(kind)(own_rngs(layer)) for layer, kind in enumerate(kinds_of)])
    groups = {}
    for kind in dict.fromkeys(kinds_of):
        own = [i for i, other in enumerate(kinds_of) if other == kind]
        groups["_".join(["of", *map(str, own)])] = _stacked(of_kind(kind), own, keys)
    return nnx.Dict(groups) if kinds_of[1:] != kinds_of[:-1] else next(iter(groups.values()))


def _stacked(
    make_block: Callable[[nnx.Rngs], nnx.Module], numbers: Sequence[int], keys: jax.Array | None
) -> nnx.Module:
    """Makes the layers `numbers` as one block with stacked parameters; without `keys`, its outline."""
    graphdef, one = nnx.split(outline(make_block))
    if keys is None:
        stacked = jax.tree.map(lambda x: jax.ShapeDtypeStruct((len(numbers), *x.shape), x.dtype), one)
    else:
        own = keys[jnp.array(numbers)]
        stacked = jax.vmap(lambda key: nnx.state(make_block(nnx.Rngs(key)), nnx.Param))(own)
    for p in jax.tree.leaves(stacked, is_leaf=is_variable):
        p.set_metadata(logical_axes=("layers", *p.get_metadata()["logical_axes"]))
    return nnx.merge(graphdef, stacked)


def layers_of(name: str) -> list[int] | None:
    """Returns the numbers of the layers of a kind, by its name in a stack; None for other names."""
    prefix, *numbers = name.split("_")
    return [int(i) for i in numbers] if prefix == "of" and numbers else None


def unstacked(blocks: Any) -> list[nnx.Module]:
    """Returns the blocks of `make_stack` as a list, also those of a scanned stack."""
    if isinstance(blocks, nnx.List):
        return list(blocks)
    graphdef, stacked = nnx.split(blocks)
    num = len(jax.tree.leaves(stacked)[0])
    return [nnx.merge(graphdef, jax.tree.map(lambda x, i=i: x[i], stacked)) for i in range(num)]


def run_stack(
    blocks: Any,
    xs: Sequence[Float[Array, "B L E"]],
    args: Sequence[Sequence[Any]],
    *,
    remat: Remat,
    keys: Sequence[jax.Array | None],
    per_layer: Sequence[Any] = (),
    span: slice = slice(None),
) -> list[Float[Array, "B L E"]]:
    """Runs batches x [B, L, E] through the blocks that `make_stack` made.

    Each block is called as x = block(x, *args, *(a[layer] for a in per_layer), key=own key). All batches pass
    a block before any enters the next, so that the block's weights are gathered once.

    Args:
      blocks: a list, one block of stacked parameters for `jax.lax.scan`, or a dict of one for each kind.
      xs: inputs of the first block.
      args: for each batch, further arguments of every block.
      remat: what the backward pass recomputes (jax.checkpoint).
      keys: for each batch a dropout key, which is split into one key for each block; None turns dropout off.
      per_layer: arrays [layers, ...] of values that differ between blocks and are not trained, such as a
        window.
      span: the slice of blocks to run; each has the same dropout key as in a run of all blocks.
    """
    groups = blocks if isinstance(blocks, nnx.Dict) else None
    scan = not isinstance(blocks, nnx.List)
    num = _depth(blocks)
    split = tuple(None if key is None else jax.random.split(key, num) for key in keys)

    def apply(graphdef, state, xs, keys, own):
        block = nnx.merge(graphdef, state)
        with gather_once():
            return tuple(block(x, *a, *own, key=key) for x, a, key in zip(xs, args, keys, strict=True))

    if remat in POLICIES:
        apply = jax.checkpoint(apply, static_argnums=0, prevent_cse=not scan, policy=POLICIES[remat])
    xs, per_layer = tuple(xs), tuple(map(jnp.asarray, per_layer))
    if groups is not None:
        return list(_scan_groups(apply, groups, xs, split, per_layer, range(num)[span]))
    if scan:
        graphdef, stacked = nnx.split(blocks)
        layers = jax.tree.map(lambda a: a[span], (stacked, split, per_layer))
        return list(_scan(apply, graphdef, xs, layers))
    for i, block in list(enumerate(blocks))[span]:
        graphdef, state = nnx.split(block)
        own_keys = tuple(None if k is None else k[i] for k in split)
        xs = apply(graphdef, state, xs, own_keys, tuple(a[i] for a in per_layer))
    return list(xs)


def _depth(blocks: Any) -> int:
    if isinstance(blocks, nnx.List):
        return len(blocks)
    if isinstance(blocks, nnx.Dict):
        return sum(len(layers_of(name)) for name in blocks)
    return len(jax.tree.leaves(nnx.state(blocks))[0])


def _scan(apply: _Apply, graphdef: nnx.GraphDef, xs: tuple, layers: tuple) -> tuple:
    """Scans blocks of one kind; `layers` are (state, dropout keys, per-layer values), each stacked."""

    def step(xs: tuple, layer: tuple) -> tuple[tuple, None]:
        state, keys, own = layer
        return apply(graphdef, state, xs, keys, own), None

    return jax.lax.scan(step, xs, layers)[0]


def _scan_groups(
    apply: _Apply, groups: nnx.Dict, xs: tuple, keys: tuple, per_layer: tuple, numbers: Sequence[int]
) -> tuple:
    """Runs the layers `numbers` of blocks of several kinds.

    A sequence of kinds that repeats (five local layers, then a global one) is one step of an outer scan, so
    that the program's size does not grow with depth.
    """
    if not numbers:
        return xs
    kind = {i: name for name in groups for i in layers_of(name)}
    split = {name: nnx.split(groups[name]) for name in groups}
    period = next(p for p in range(1, len(numbers) + 1) if all(kind[i] == kind[i + p] for i in numbers[:-p]))
    times = len(numbers) // period

    def states_of(part: Sequence[int]) -> dict[str, Any]:
        found = {}
        for name, (_, state) in split.items():
            rows = [row for row, i in enumerate(layers_of(name)) if i in part]
            if rows:
                found[name] = jax.tree.map(lambda a, r=rows: a[r[0] : r[-1] + 1], state)
        return found

    def run(xs: tuple, part: Sequence[int], states: dict, keys: tuple, own: tuple) -> tuple:
        """Runs the layers `part`.

        `keys` and `own` have a row for each layer of `part`, and a state for each layer of its kind.
        """
        done, begin = dict.fromkeys(states, 0), 0
        for name, several in itertools.groupby(part, key=kind.get):
            count = len(list(several))
            rows, first = slice(begin, begin + count), done[name]
            state = jax.tree.map(lambda a, f=first, n=count: a[f : f + n], states[name])
            layers = (state, *jax.tree.map(lambda a, r=rows: a[r], (keys, own)))
            if count == 1:
                layers = jax.tree.map(lambda a: a[0], layers)
                xs = apply(split[name][0], layers[0], xs, *layers[1:])
            else:
                xs = _scan(apply, split[name][0], xs, layers)
            done[name], begin = first + count, begin + count
        return xs

    whole, rest = numbers[: times * period], numbers[times * period :]
    chosen = jax.tree.map(lambda a: a[numbers[0] : numbers[-1] + 1], (keys, per_layer))
    if times > 1:
        own = jax.tree.map(lambda a: a[: len(whole)], chosen)
        folded = jax.tree.map(
            lambda a: a.reshape(times, a.shape[0] // times, *a.shape[1:]), (states_of(whole), *own)
        )

        def step(xs: tuple, layer: tuple) -> tuple[tuple, None]:
            return run(xs, whole[:period], *layer), None

        xs = jax.lax.scan(step, xs, folded)[0]
    else:
        rest = numbers
    if rest:
        own = jax.tree.map(lambda a: a[len(numbers) - len(rest) :], chosen)
        xs = run(xs, rest, states_of(rest), *own)
    return xs
