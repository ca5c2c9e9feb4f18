"""An encoder of MTEB's protocol (`mteb.EncoderProtocol`) around a dual encoder."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxir.core.errors import UserError
from jaxir.interop import model_dir
from jaxir.interop.hub import hub

if TYPE_CHECKING:
    from jaxir.interop.model.encoder_settings import EncoderSettings
    from jaxir.retrieval.encoding.text_encoder import DualEncoder

OWNER = "jaxir"  # owner in the name of a model that is not on the hub: MTEB's names are OWNER/NAME
_TOWERS = {"query": "query", "document": "passage"}  # MTEB's prompt type -> tower


def make(
    encoder: DualEncoder,
    *,
    prompts: Mapping[str, str] | None = None,
    instruction_template: str | None = None,
    instruct_passages: bool = False,
    name: str | None = None,
) -> Any:
    """Returns an encoder that `mteb.evaluate` takes; `jaxir.mteb.load` describes the arguments."""
    if instruction_template is not None and "{instruction}" not in instruction_template:
        raise UserError(
            f"instruction_template is {instruction_template!r}; it must hold {{instruction}}, as in"
            " 'Instruct: {instruction}\\nQuery: '"
        )
    made = _encoder_class()(encoder)
    made.model_prompts = dict(prompts_of(encoder.settings) if prompts is None else prompts)
    made.prompts_dict = None if prompts is None else dict(prompts)
    made.instruction_template = instruction_template
    made.instruct_passages = instruct_passages
    how = (sorted(made.model_prompts.items()), instruction_template, instruct_passages)
    made.mteb_model_meta = _meta(encoder, name or name_of(encoder.spec), repr(how))
    return made


def prompts_of(settings: EncoderSettings) -> dict[str, str]:
    """Returns a model's prompts by MTEB's keys: prompt types, task types and names of tasks."""
    own = {"query": settings.query_prompt, "document": settings.passage_prompt}
    return {key: text for key, text in own.items() if text} | dict(settings.named_prompts)


def name_of(spec: str | None) -> str:
    """Returns OWNER/NAME of a model: its name on the hub, or `jaxir/` and the name of its directory."""
    form, colon, name = (spec or "model").partition(":")
    name = name if colon and form in model_dir.FORMS else spec or "model"
    path = Path(name)
    if colon and not path.exists() and name.count("/") <= 1:
        name = name.partition("@")[0]
        return name if "/" in name else f"{hub.ST_OWNER}/{name}"
    return f"{OWNER}/{path.name or 'model'}"


def _meta(encoder: DualEncoder, name: str, how: str) -> Any:
    from mteb.models.model_meta import ModelMeta, ScoringFunction

    settings, config = encoder.settings, encoder.model.config
    # MTEB keeps results by name and revision, so other weights, settings and prompts need another revision.
    identity = f"{encoder.fingerprint} {config} {settings.describe()} {how}"
    cosine = encoder.similarity_fn_name == "cosine"
    return ModelMeta.create_empty(
        {
            "name": name,
            "revision": hashlib.sha256(identity.encode()).hexdigest()[:40],
            "max_tokens": max(settings.query_max_length, settings.passage_max_length),
            "embed_dim": encoder.dimension,
            "framework": ["JAX"],
            "similarity_fn_name": ScoringFunction.COSINE if cosine else ScoringFunction.DOT_PRODUCT,
            "use_instructions": bool(prompts_of(settings)),
        }
    )


@functools.cache
def _encoder_class() -> type:
    """Returns the class of the encoders. It is made here because importing mteb imports torch."""
    from mteb.models.abs_encoder import AbsEncoder, get_prompt_name

    class Encoder(AbsEncoder):
        """Encodes queries by the query tower, and documents and all other texts by the passage tower."""

        instruct_passages: bool

        def __init__(self, encoder: DualEncoder):
            self.model = encoder

        def encode(
            self,
            inputs: Any,
            *,
            task_metadata: Any,
            hf_split: str,
            hf_subset: str,
            prompt_type: Any = None,
            batch_size: int | None = None,
            show_progress_bar: bool = True,
            precision: str = "float32",
            **kwargs: Any,
        ) -> np.ndarray:
            """Encodes the texts of a data loader's batches; returns vectors [N, D] in their order."""
            texts = [text for batch in inputs for text in batch["text"]]
            return self.model.encode(
                texts,
                tower=_TOWERS[prompt_type.value] if prompt_type else None,
                prompt=self._text_before(task_metadata, prompt_type),
                batch_size=batch_size,
                precision=precision,
                show_progress=show_progress_bar,
            )

        def _text_before(self, task_metadata: Any, prompt_type: Any) -> str | None:
            """Returns the prompt of a task; None for the model's default."""
            is_document = prompt_type is not None and prompt_type.value == "document"
            if self.instruction_template is not None and (self.instruct_passages or not is_document):
                return self.get_task_instruction(task_metadata, prompt_type)
            return self.model_prompts.get(get_prompt_name(self.model_prompts, task_metadata, prompt_type))

    return Encoder
