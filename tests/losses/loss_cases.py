"""The papers' equations as float64 numpy loops, the variants of each loss, and small batches."""

import jax
import jax.numpy as jnp
import numpy as np

from jaxir.losses.gist import gist
from jaxir.losses.guide import Guide
from jaxir.losses.in_batch import in_batch_softmax
from jaxir.losses.pair import pair
from jaxir.losses.samtone import samtone


def both_directions(case, *, temperature, same_query=False, same_passage=False, one_sum=False):
    """Returns the mean -log softmax of both directions: Moiseev et al. 2023, eq. 1; same-tower terms, eq. 2.

    With `one_sum` the terms of both towers are in the denominator of the first direction.
    """
    q, p = case["query"], case["passage"]
    to_passage, to_query = [], []
    for i in range(len(q)):
        positive = np.exp(q[i] @ p[i] / temperature)
        below, above, together = positive, positive, 0.0
        for j in range(len(q)):
            if j == i or duplicates(case, i, j):
                continue
            below += kept(case, i, ("query", i), ("passage", j)) * np.exp(q[i] @ p[j] / temperature)
            above += kept(case, i, ("query", j), ("passage", i)) * np.exp(q[j] @ p[i] / temperature)
            if same_query:
                below += kept(case, i, ("query", i), ("query", j)) * np.exp(q[i] @ q[j] / temperature)
            if same_passage:
                term = kept(case, i, ("passage", i), ("passage", j)) * np.exp(p[i] @ p[j] / temperature)
                above, together = above + term, together + term
        for hard in hard_negatives_of(case, i):
            below += np.exp(q[i] @ hard / temperature)
        to_passage.append(-np.log(positive / (below + together * one_sum)))
        to_query.append(-np.log(positive / above))
    return np.mean(to_passage), np.mean(to_query)


def in_batch_loops(case, *, temperature, bidirectional):
    to_passage, to_query = both_directions(case, temperature=temperature)
    return to_passage + to_query if bidirectional else to_passage


def samtone_loops(case, *, temperature, bidirectional, same_tower):
    to_passage, to_query = both_directions(
        case,
        temperature=temperature,
        same_query=same_tower in ("query", "both"),
        same_passage=same_tower in ("passage", "both"),
    )
    return to_passage + to_query if bidirectional else to_passage


def gist_loops(case, *, temperature):
    return both_directions(case, temperature=temperature, same_query=True, same_passage=True, one_sum=True)[0]


def pair_loops(case, *, temperature, bidirectional, alpha):
    """Moiseev et al. 2023, eq. 3; a row whose denominator is empty adds 0."""
    q, p = case["query"], case["passage"]
    centric = 0.0
    for i in range(len(q)):
        below = 0.0
        for j in range(len(q)):
            if j != i and not duplicates(case, i, j):
                below += kept(case, i, ("passage", i), ("passage", j)) * np.exp(p[i] @ p[j] / temperature)
        if below > 0:
            centric -= np.log(np.exp(q[i] @ p[i] / temperature) / below) / len(q)
    in_batch = in_batch_loops(case, temperature=temperature, bidirectional=bidirectional)
    return (1 - alpha) * in_batch + alpha * centric


def kept(case, i, one, two):
    """Returns whether the guide keeps the negative pair of row i with the vectors `one` and `two`."""
    if "guide" not in case:
        return True
    first, second = (getattr(case["guide"], name)[index] for name, index in (one, two))
    return first @ second <= case["guide"].limit[i]


def duplicates(case, i, j):
    for name in ("query_key", "passage_key"):
        key = case.get(name)
        if key is not None and key[i][0] == key[j][0] and key[i][1] == key[j][1]:
            return True
    return False


def hard_negatives_of(case, i):
    """Yields the hard negatives of all rows, except copies of row i's own passage."""
    if case.get("negatives") is None:
        return
    keys = case.get("negative_key")
    own = case.get("passage_key")
    for j, row in enumerate(case["negatives"]):
        for n, embedding in enumerate(row):
            if keys is not None and own is not None and tuple(keys[j][n]) == tuple(own[i]):
                continue
            if kept(case, i, ("query", i), ("negatives", (j, n))):
                yield embedding


def slope_along(loss, case, name, direction, step=1e-6):
    """Returns the derivative of `loss` along `direction` in the array `name`, by central differences."""
    up = loss(case | {name: case[name] + step * direction})
    down = loss(case | {name: case[name] - step * direction})
    return (up - down) / (2 * step)


VARIANTS = {
    "in_batch": (in_batch_softmax, in_batch_loops, {"bidirectional": True}),
    "in_batch_one_way": (in_batch_softmax, in_batch_loops, {"bidirectional": False}),
    "samtone_query": (samtone, samtone_loops, {"bidirectional": True, "same_tower": "query"}),
    "samtone_one_way": (samtone, samtone_loops, {"bidirectional": False, "same_tower": "query"}),
    "samtone_passage": (samtone, samtone_loops, {"bidirectional": True, "same_tower": "passage"}),
    "samtone_both": (samtone, samtone_loops, {"bidirectional": True, "same_tower": "both"}),
    "pair": (pair, pair_loops, {"bidirectional": True, "alpha": 0.1}),
    "pair_one_way": (pair, pair_loops, {"bidirectional": False, "alpha": 0.3}),
    "gist": (gist, gist_loops, {}),
}
KEYS = ("query_key", "passage_key", "negative_key")
EMBEDDINGS = ("query", "passage", "negatives")


def make_case(*, batch=6, width=5, negatives=2, keys=True, seed=0):
    """Returns unit vectors. Rows 1 and 4 share a query, 2 and 3 a passage; row 3's negatives have row 0's."""
    rng = np.random.default_rng(seed)

    def unit(*shape):
        x = rng.normal(size=shape)
        return x / np.linalg.norm(x, axis=-1, keepdims=True)

    def ids(numbers):
        # Keys of 2k and 2k + 1 differ in one half only, keys of 2k and 2k + 2 in the other half, so that
        # losses must compare both halves.
        return np.stack(np.divmod(np.asarray(numbers), 2), axis=-1).astype(np.int32)

    case = {"query": unit(batch, width), "passage": unit(batch, width)}
    if negatives:
        case["negatives"] = unit(batch, negatives, width)
    if keys:
        query, passage = np.arange(batch), 100 + np.arange(batch)
        if batch > 4:
            query[4], passage[3] = query[1], passage[2]
        case |= {"query_key": ids(query), "passage_key": ids(passage)}
        if negatives:
            hard = 1000 + np.arange(batch * negatives).reshape(batch, negatives)
            hard[min(3, batch - 1), 0] = passage[0]
            case["negative_key"] = ids(hard)
    return case


def with_guide(case, *, width=3, margin=0.1, seed=3):
    """Adds a guide to a case; its positives are nearer than its average negative."""
    rng, unit = np.random.default_rng(seed), lambda x: x / np.linalg.norm(x, axis=-1, keepdims=True)
    query = unit(rng.normal(size=(len(case["query"]), width)))
    passage = unit(query + 0.6 * rng.normal(size=query.shape))
    negatives = unit(rng.normal(size=(*case["negatives"].shape[:2], width))) if "negatives" in case else None
    return case | {"guide": Guide(query, passage, negatives, (query * passage).sum(1) - margin)}


def to_jax(case):
    def of(name, value):
        return jax.tree.map(lambda x: jnp.asarray(x, jnp.int32 if name in KEYS else jnp.float32), value)

    return {name: of(name, value) for name, value in case.items()}
