"""Masking, inserting and deleting tokens: shares, places, and the original tokens."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxir.objectives import token_edits
from tests.objectives.unlabelled import CLS, MASK, SEP

ONE = jnp.asarray(
    [[CLS, 10, 11, 12, 13, SEP, 0, 0], [CLS, 20, SEP, 0, 0, 0, 0, 0], [CLS, SEP, 0, 0, 0, 0, 0, 0]], jnp.int32
)


def test_masks_are_inserted_among_the_words():
    texts = jnp.asarray([[CLS, *range(4, 24), SEP, 0, 0]] * 500, jnp.int32)
    insert = jax.jit(functools.partial(token_edits.insert_masks, share=0.15, mask_id=MASK))
    found = insert(texts, jax.random.key(0))
    assert (
        found.ids.shape[1]
        == 24 + token_edits.most_inserted(24, 0.15)
        == token_edits.longest(24, ("insert",), 0.15)
    )
    masked = np.asarray(found.masked)
    assert (masked.sum(1) == 3).all()  # 15 % of 20 words
    where = set()
    for ids, new, original in zip(*map(np.asarray, (found.ids, found.masked, found.original)), strict=True):
        assert (ids[new] == MASK).all() and (original[new] == token_edits.NEW).all()
        left = ids[~new]
        assert list(left[:22]) == list(texts[0, :22]) and not left[22:].any()
        assert (original[~new] == left).all()
        where |= set(np.flatnonzero(new))
    assert where == set(range(1, 24))  # not before the first token, nor after the last
    few = insert(ONE, jax.random.key(1))
    assert few.masked.sum(1).tolist() == [1, 1, 0] and few.ids[2].tolist() == [CLS, SEP] + [0] * 7


def test_the_token_after_a_deleted_one_is_marked(monkeypatch):
    chosen = jnp.asarray([[0, 1, 0, 1, 1, 0, 0, 0], [0, 1, 0, 0, 0, 0, 0, 0], [0] * 8], bool)
    monkeypatch.setattr(token_edits, "choose_tokens", lambda ids, key, *, share: chosen)
    found = token_edits.delete_tokens(ONE, jax.random.key(0), share=0.15)
    assert found.ids[0].tolist() == [CLS, 11, SEP, 0, 0, 0, 0, 0]
    assert found.original[0].tolist() == [CLS, token_edits.NEW, token_edits.NEW, 0, 0, 0, 0, 0]
    assert found.ids[1].tolist()[:3] == [CLS, SEP, 0] and found.original[1, 1] == token_edits.NEW
    assert (found.original[2] == found.ids[2]).all() and not found.masked.any()


@pytest.mark.parametrize(("share", "kind"), [(0.15, "replace"), (0.3, "replace"), (0.3, "delete")])
def test_the_share_of_the_words_that_changes(share, kind):
    texts = jnp.asarray([[CLS, *range(4, 34), SEP]] * 300, jnp.int32)
    found = token_edits.make_change(texts, jax.random.key(0), kind=kind, share=share, mask_id=MASK)
    left = (np.asarray(found.ids) > SEP).sum() / (300 * 30)
    assert left == pytest.approx(1 - share, abs=0.01)
