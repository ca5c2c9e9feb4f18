"""Writes parameters one at a time, so that lazy arrays need not fit into the host's memory."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from tqdm import tqdm

from jaxir.core.progress import progress
from jaxir.interop.weights import array_checksums, stores
from jaxir.interop.weights.lazy import LazyArray
from jaxir.interop.weights.quiet import quiet_orbax
from jaxir.storage.files import is_bucket

# A reader fetches and decompresses whole chunks. Chunks of this size cut both dimensions of a large kernel,
# so a host of a pod reads little more than its own part.
_CHUNK_BYTES = 1 << 23
_LARGE_BYTES = 1_000_000_000  # show a progress bar if at least this much is written


def write_params(directory: Path, tree: Mapping[str, Any]) -> dict[str, int]:
    """Writes nested dicts of float32 arrays, lazy or NumPy's, in Orbax's format of NumPy arrays.

    Returns the checksum of each array (see `array_checksums`) by its name.
    """
    size = 4 * sum(x.size for x in jax.tree.leaves(tree))
    bar = progress(total=size, what="writing", unit="B", hidden=size < _LARGE_BYTES)
    handler = _OneByOne(bar)
    types = ocp.type_handlers.create_type_handler_registry(
        (LazyArray, handler),
        (np.ndarray, handler),
        (jax.Array, ocp.type_handlers.ArrayHandler()),  # unused; Orbax warns without it
    )
    place = directory if is_bucket(directory) else directory.resolve()
    chunks = jax.tree.map(lambda _: ocp.SaveArgs(chunk_byte_size=_CHUNK_BYTES), tree)
    with (
        quiet_orbax(),
        bar,
        ocp.Checkpointer(ocp.PyTreeCheckpointHandler(type_handler_registry=types)) as writer,
    ):
        saved = ocp.args.PyTreeSave(tree, save_args=chunks)
        stores.attempt("the parameters could not be written", lambda: writer.save(place, args=saved))
    return handler.sums


class _OneByOne(ocp.type_handlers.NumpyHandler):
    """Reads an array only after the previous one is written, and advances a progress bar."""

    def __init__(self, bar: tqdm):
        super().__init__(deepcopy_host_arrays=False)
        self._bar = bar
        self.sums: dict[str, int] = {}

    async def serialize(
        self,
        values: Sequence[np.ndarray | LazyArray],
        infos: Sequence[ocp.type_handlers.ParamInfo],
        args: Sequence[ocp.SaveArgs] | None = None,
    ) -> list[Any]:
        for value, info, arg in zip(values, infos, args or [ocp.SaveArgs()] * len(values), strict=True):
            whole = np.asarray(value, np.float32)
            self.sums[info.name] = array_checksums.of_part(whole, [0] * whole.ndim, whole.shape)
            for writing in await super().serialize([whole], [info], [arg]):
                writing.result()
            self._bar.update(whole.nbytes)
        return []
