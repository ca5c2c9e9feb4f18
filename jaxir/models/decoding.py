"""Chooses tokens from logits: greedily, by sampling, or by beam search.

The model is a function (ids [N], state) -> (logits [N, V], state), which reads the next token of N outputs.
The state is arrays [N, ...], which beam search reorders, and scalars. Decoding is one loop in the compiled
program, which ends when all outputs have ended.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32, Int, Int32, Key

from jaxir.core.decoding_settings import Decoding
from jaxir.core.shapes import checked_shapes

State = Any
NextLogits = Callable[[jax.Array, State], tuple[jax.Array, State]]
# Maps logits [N, V] and the number of the step [] to chosen ids [N].
Choose = Callable[[jax.Array, jax.Array], jax.Array]

FAULT = -1  # the id that replaces a token if the logits are not finite
_NEVER = -1e9  # the score of impossible outputs, as in transformers


class _Loop(NamedTuple):
    step: jax.Array
    ids: jax.Array
    tokens: jax.Array
    ended: jax.Array
    state: State


def decode(
    next_logits: NextLogits,
    state: State,
    choose: Choose,
    *,
    ended: Bool[Array, " N"],
    max_new_tokens: int,
    start_id: int,
    eos_id: int,
) -> Int32[Array, "N T"]:
    """Generates N outputs token by token: returns [N, T], 0 after the end.

    An output whose logits are not finite ends with FAULT. `state` is the model's state at the start,
    `choose` is `greedy` or the result of `sampler`, and `ended` is true for rows that need no output.
    """

    def more(loop: _Loop) -> jax.Array:
        return (loop.step < max_new_tokens) & ~loop.ended.all()

    def step(loop: _Loop) -> _Loop:
        logits, state = next_logits(loop.ids, loop.state)
        ids = jnp.where(_finite(logits), choose(logits, loop.step).astype(jnp.int32), FAULT)
        ids = jnp.where(loop.ended, 0, ids)
        tokens = jax.lax.dynamic_update_slice_in_dim(loop.tokens, ids[:, None], loop.step, axis=1)
        return _Loop(loop.step + 1, ids, tokens, loop.ended | (ids == eos_id) | (ids == FAULT), state)

    rows = len(ended)
    tokens, first = jnp.zeros((rows, max_new_tokens), jnp.int32), jnp.full((rows,), start_id, jnp.int32)
    return jax.lax.while_loop(more, step, _Loop(jnp.int32(0), first, tokens, ended, state)).tokens


def _finite(logits: jax.Array) -> jax.Array:
    """Returns a mask [N] of the finite rows of logits [N, V]. The maximum suffices: max propagates NaN."""
    return jnp.isfinite(logits.max(-1))


def greedy(logits: Float[Array, "N V"], step: Int[Array, ""]) -> Int[Array, " N"]:
    return logits.argmax(-1)


def sampler(keys: Key[Array, " N"], how: Decoding) -> Choose:
    """Returns a function that draws tokens from the distribution of `how`, with one key for each output."""

    def choose(logits: jax.Array, step: jax.Array) -> jax.Array:
        logits, ids = likely(logits / (how.temperature or 1.0), top_k=how.top_k, top_p=how.top_p)
        drawn = jax.vmap(jax.random.categorical)(jax.vmap(jax.random.fold_in, (0, None))(keys, step), logits)
        return drawn if ids is None else jnp.take_along_axis(ids, drawn[:, None], axis=1)[:, 0]

    return choose


@checked_shapes
def likely(
    logits: Float32[Array, "N V"], *, top_k: int | None, top_p: float | None
) -> tuple[Float32[Array, "N K"], Int32[Array, "N K"] | None]:
    """Keeps the likely tokens (top-k; nucleus sampling, Holtzman et al. 2020).

    `top_k` keeps the K likeliest tokens; None: all. `top_p` keeps a token if all likelier ones together have
    less probability than `top_p`; tokens that tie with the last kept token are kept too. Returns the logits,
    -inf for dropped tokens, and the token id of each column, likeliest first. The ids are None if column
    numbers are ids.
    """
    ids = None
    if top_k is not None:
        logits, ids = jax.lax.top_k(logits, min(top_k, logits.shape[1]))
    if top_p is not None and top_p < 1:
        logits = jnp.where(_in_nucleus(logits, top_p), logits, -jnp.inf)
    return logits, ids


def _in_nucleus(logits: jax.Array, top_p: float) -> jax.Array:
    """Returns a mask [N, V] of the tokens to keep, without sorting the vocabulary.

    A token is kept if its weight, the numerator of softmax, is at least a threshold: the least number above
    which weights sum to less than `top_p` of the total. Bisection over the bits of float32 finds the
    threshold exactly, because positive floats are ordered as their bits. 30 sums over the vocabulary cost far
    less than sorting.
    """
    weights = jnp.exp(logits - logits.max(-1, keepdims=True))
    share = top_p * weights.sum(-1)
    bits = functools.partial(jax.lax.bitcast_convert_type, new_dtype=jnp.int32)

    def halve(_: jax.Array, bounds: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        low, high = bounds
        middle = (low + high) // 2
        above = jnp.where(bits(weights) > middle[:, None], weights, 0.0).sum(-1)
        return jnp.where(above < share, low, middle + 1), jnp.where(above < share, middle, high)

    least = jnp.zeros(share.shape, jnp.int32)
    most = jnp.full_like(least, bits(jnp.float32(1)))  # the likeliest token's weight is 1
    _, least = jax.lax.fori_loop(0, 30, halve, (least, most))
    return bits(weights) >= least[:, None]


class _Beams(NamedTuple):
    """The state of a beam search: K open beams of B inputs, and the K best ended outputs."""

    step: jax.Array
    tokens: jax.Array  # [B, K, T], tokens of open beams
    scores: jax.Array  # [B, K], sums of log probabilities
    ids: jax.Array  # [B K], last tokens of open beams
    ended_tokens: jax.Array  # [B, K, T], tokens of ended outputs
    ended_scores: jax.Array  # [B, K], scores of ended outputs, divided by length^penalty
    improvable: jax.Array  # [B], whether an open beam may still be better than an ended output
    faulty: jax.Array  # [B], whether any logits were not finite
    state: State


def beam_search(
    next_logits: NextLogits,
    state: State,
    *,
    num_beams: int,
    ended: Bool[Array, " B"],
    max_new_tokens: int,
    start_id: int,
    eos_id: int,
    length_penalty: float = 1.0,
) -> tuple[Int32[Array, "B K T"], Float32[Array, "B K"]]:
    """Finds outputs of high probability, as transformers does: returns the K best of each input, and scores.

    The score of an output is the sum of its tokens' log probabilities / (its length)^length_penalty. An input
    is done when it has K outputs and its best open beam, at its present length, scores no higher than any of
    them (early_stopping=False in transformers). Outputs are 0 after the end, and FAULT for an input whose
    logits are not finite. `state` is the model's state at the start, for K outputs of each input; `ended`
    is true for inputs that need no output.
    """
    rows, beams = len(ended), num_beams

    def more(now: _Beams) -> jax.Array:
        return (now.step < max_new_tokens) & now.improvable.any()

    def step(now: _Beams) -> _Beams:
        logits, state = next_logits(now.ids, now.state)
        size = logits.shape[-1]
        faulty = now.faulty | (now.improvable & ~_finite(logits).reshape(rows, beams).all(1))
        scores = jax.nn.log_softmax(logits.astype(jnp.float32), axis=-1).reshape(rows, beams, size)
        scores = (scores + now.scores[..., None]).reshape(rows, -1)
        # Keep 2 K candidates: K of them may end, and K must stay open.
        scores, places = jax.lax.top_k(scores, 2 * beams)
        parents, ids = places // size, places % size
        tokens = _gathered(now.tokens, parents)
        tokens = jax.lax.dynamic_update_slice_in_dim(tokens, ids[..., None], now.step, axis=2)
        length = now.step + 1
        ends = (ids == eos_id) | (length == max_new_tokens)

        good = ends & (jnp.arange(2 * beams) < beams)[None] & now.improvable[:, None]
        by_length = length.astype(jnp.float32) ** length_penalty
        found = jnp.concatenate([now.ended_scores, jnp.where(good, scores / by_length, _NEVER)], axis=1)
        ended_scores, best = jax.lax.top_k(found, beams)
        ended_tokens = _gathered(jnp.concatenate([now.ended_tokens, tokens], axis=1), best)

        open_scores, chosen = jax.lax.top_k(jnp.where(ends, _NEVER, scores), beams)
        parents, ids = (_gathered(x, chosen) for x in (parents, ids))
        improvable = now.improvable & ~faulty & (open_scores[:, 0] / by_length > ended_scores[:, -1])
        return _Beams(
            length,
            _gathered(tokens, chosen),
            open_scores,
            ids.reshape(-1),
            ended_tokens,
            ended_scores,
            improvable,
            faulty,
            jax.tree.map(lambda x: _reordered(x, parents), state),
        )

    tokens = jnp.zeros((rows, beams, max_new_tokens), jnp.int32)
    none = jnp.full((rows, beams), _NEVER, jnp.float32)
    first = jnp.full((rows * beams,), start_id, jnp.int32)
    # All beams are equal at first: give a score to the first, and make the others impossible.
    open_scores = none.at[:, 0].set(0.0)
    begun = tokens, open_scores, first, tokens, none, ~ended, jnp.zeros_like(ended), state
    end = jax.lax.while_loop(more, step, _Beams(jnp.int32(0), *begun))
    return jnp.where(end.faulty[:, None, None], FAULT, end.ended_tokens), end.ended_scores


def _gathered(x: jax.Array, places: jax.Array) -> jax.Array:
    """Returns x[b, places[b, j]] of x [B, K, ...] and places [B, J]."""
    return jax.vmap(lambda x, places: x[places])(x, places)


def _reordered(x: jax.Array, parents: jax.Array) -> jax.Array:
    """Returns state [B K, ...] in the order of parents [B, K]; scalars are unchanged."""
    if not x.ndim:
        return x
    return _gathered(x.reshape(*parents.shape, *x.shape[1:]), parents).reshape(x.shape)
