"""Reads folders of sentence-transformers' SparseEncoder; makes sparse encoders from language models.

`st_sparse_chain` reads one side of a folder, `st_sparse_folder` writes folders.
"""

import dataclasses
from pathlib import Path

import jax
import numpy as np

from jaxir.core.errors import UserError
from jaxir.interop.hub import hub
from jaxir.interop.huggingface import hf_config, hf_masked_lm, st_files, st_sparse_chain, tokenizer_files
from jaxir.interop.model.stored import StoredModel
from jaxir.models import layers
from jaxir.models.dual_encoder import DualEncoderConfig
from jaxir.models.sparse_encoder import SparseEncoderConfig
from jaxir.models.sparse_forms import SparseStaticConfig

_KIND = "sparse_encoder"
_START = -3.0  # bias of a new head, so low that few weights of a new model are above 0


def check(directory: Path) -> None:
    """Checks, before weights are downloaded, that a folder's modules are supported."""
    st_files.read_config(directory, _KIND)
    for modules in st_sparse_chain.chains(directory):
        st_sparse_chain.check(directory, modules)


def read(directory: Path) -> StoredModel:
    """Reads a sentence-transformers folder: the model of documents and, if it differs, that of queries."""
    about = st_files.read_config(directory, _KIND)
    sides = st_sparse_chain.chains(directory)
    *queries, documents = (st_sparse_chain.read(directory, modules, about) for modules in sides)
    if not queries:
        return documents
    if _fits_language_model(queries[0], documents):
        return _with_query_weights(documents, queries[0])
    return dataclasses.replace(documents, queries=queries[0])


def from_language_model(directory: Path) -> StoredModel:
    """Makes a sparse encoder with maximum pooling from the folder of a masked language model."""
    model = hf_masked_lm.read(directory)
    return dataclasses.replace(model, config=st_sparse_chain.language_model_config(model))


def kind_of_start(spec: str) -> str | None:
    """Returns the kind of model to read as the start of a sparse encoder; None: the kind its files name."""
    form, _, name = spec.partition(":")
    has_head = form == "hf" and hf_masked_lm.is_one(hub.configuration(name))
    return _KIND if has_head else None


def with_new_head(found: StoredModel, *, seed: int, where: str) -> StoredModel:
    """Returns a sparse encoder: a dual encoder's encoder with a new language-model head.

    Logits are products with the encoder's token vectors. The dense layer is drawn from N(0, 0.02^2) with
    `seed`, as in BERT. The bias starts at `_START`, so that few weights are above 0.

    Raises:
      UserError: the model has two encoders or is no dual encoder, or its backbone has no such head.
    """
    config = found.config
    if not isinstance(config, DualEncoderConfig) or config.sharing != "sde":
        raise UserError(
            f"{where}: a sparse encoder starts from a masked language model or one encoder, not from"
            f" {config.summary}; give hf: and a masked language model"
        )
    backbone = config.backbone
    codec = hf_config.codec_of(backbone)
    if codec.token_head is None or codec.token_head.dense is None:
        raise UserError(
            f"{where}: no masked language model has model_type {backbone.model_type!r}, so the encoder cannot"
            " become a sparse encoder; give a BERT, RoBERTa or ModernBERT"
        )
    made = SparseEncoderConfig(
        backbone=backbone,
        activation=codec.token_head.activation or backbone.activation,
        norm_epsilon=backbone.layer_norm_epsilon,
        norm_bias=codec.token_head.norm_bias,
        adapters=config.adapters,
    )
    width = backbone.embed_dim
    params = {name: value for name, value in found.params.items() if name.startswith("encoder.")}
    params |= {
        "head.dense.kernel": np.asarray(layers.normal(0.02)(jax.random.key(seed), (width, width))),
        "head.dense.bias": np.zeros(width, np.float32),
        "head.norm.scale": np.ones(width, np.float32),
        **({"head.norm.bias": np.zeros(width, np.float32)} if made.norm_bias else {}),
        "head.bias": np.full(made.dimension, _START, np.float32),
    }
    settings = dataclasses.replace(found.settings, pools_prompts=True)
    return dataclasses.replace(found, config=made, params=params, settings=settings)


def _fits_language_model(queries: StoredModel, documents: StoredModel) -> bool:
    """Whether queries have stored weights of the same tokens as the documents' language model."""
    config = documents.config
    if not isinstance(queries.config, SparseStaticConfig) or not isinstance(config, SparseEncoderConfig):
        return False
    alone = tokenizer_files.without_special_tokens(documents.tokenizer, "the model of documents")
    return (
        queries.config.dimension == config.dimension
        and queries.settings.query_max_length <= (config.backbone.max_positions or 0)
        and queries.tokenizer.effect == alone.effect
    )


def _with_query_weights(documents: StoredModel, queries: StoredModel) -> StoredModel:
    """Adds stored weights of queries to the documents' model."""
    weights = queries.params["encoder.table.embedding"][:, 0]
    config = dataclasses.replace(documents.config, static_queries=True, frozen=queries.config.frozen)
    length = queries.settings.query_max_length
    settings = dataclasses.replace(documents.settings, query_max_length=length)
    params = {**documents.params, "query_weights": weights}
    return dataclasses.replace(documents, config=config, params=params, settings=settings)
