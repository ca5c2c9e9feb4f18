"""A model's fingerprint: a SHA-256 of what decides its outputs."""

import hashlib
import json
import math
from typing import Any

import numpy as np

from jaxir.core.installation import state_of_code
from jaxir.data.text.tokenizer import Tokenizer
from jaxir.interop.model import kinds
from jaxir.interop.model.kinds import ModelConfig
from jaxir.interop.model.stored import StoredModel, describe_config
from jaxir.models.quantized import Scheme
from jaxir.storage import checksums

# Fields of a backbone that determine only how it is computed; they are excluded from fingerprints.
EXECUTION = ("dtype", "remat", "scan_layers")
DROPOUT = "dropout_rate"  # suffix of names of dropout rates, also excluded from fingerprints

_HASHED_AT_ONCE = 1 << 24  # numbers of a parameter that are read and hashed at a time


def fingerprint(stored: StoredModel) -> str:
    """Returns the SHA-256 (hex) of what decides the outputs: parameters, architecture and tokenizer.

    Settings and the way of computing (types, rematerialisation, scanning, dropout) are excluded.
    """
    digest = _identity(stored.config, stored.tokenizer)
    for name in sorted(stored.params):
        value = stored.params[name]
        digest.update(f"{name} {tuple(value.shape)}".encode())
        # Read in parts, because lazy arrays may be large.
        rows = max(1, _HASHED_AT_ONCE * value.shape[0] // max(1, math.prod(value.shape)))
        for start in range(0, value.shape[0], rows):
            digest.update(np.ascontiguousarray(value[start : start + rows], np.float32).data)
    if stored.queries is not None:
        digest.update(f"queries {fingerprint(stored.queries)}".encode())
    return digest.hexdigest()


def fingerprint_once(stored: StoredModel, *, same: bool) -> str:
    """Like `fingerprint`, but reads the parameters in a folder only if its files or jaxir have changed.

    `same` tells whether the parameters are the folder's own.
    """
    if stored.folder is None or not same:
        return fingerprint(stored)
    facts = f"{_identity(stored.config, stored.tokenizer).hexdigest()} {state_of_code('interop', 'models')}"
    return checksums.remembered(stored.folder, "fingerprint", facts, lambda: fingerprint(stored))


def quantized_fingerprint(fingerprint: str, weights: Scheme | None) -> str:
    """Returns the fingerprint of a model whose weights are quantised, from that of its float32 weights."""
    return fingerprint if weights is None else hashlib.sha256(f"{fingerprint} {weights}".encode()).hexdigest()


def initial_fingerprint(
    config: ModelConfig, tokenizer: Tokenizer, seed: int, *, source: str = "initialised"
) -> str:
    """Returns a fingerprint of the model that a run starts from, without reading its parameters."""
    digest = _identity(config, tokenizer)
    digest.update(f"{source} from seed {seed}".encode())
    return digest.hexdigest()


def _identity(config: ModelConfig, tokenizer: Tokenizer) -> Any:
    architecture, kind = describe_config(config), kinds.of(config)
    before = [name for name, value in kind.since.items() if architecture.get(name, value) == value]
    for name in (*kind.of_tokenizer, *before):
        architecture.pop(name, None)
    for field in list(architecture["backbone"]):
        unsaved = config.backbone.added
        before = field in unsaved and architecture["backbone"][field] == unsaved[field]
        if field in (*EXECUTION, "module") or field.endswith(DROPOUT) or before:
            del architecture["backbone"][field]
    digest = hashlib.sha256(json.dumps(architecture, sort_keys=True).encode())
    digest.update(tokenizer.fingerprint.encode())
    return digest
