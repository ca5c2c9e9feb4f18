"""DiffCSE: a contrastive loss, and the loss of a discriminator of changed tokens (Chuang 2024)."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx

from jaxir.core.errors import UserError
from jaxir.core.features import Features, TextFormat, Tokens
from jaxir.core.values import Count, NotNegative, Portion, checked
from jaxir.models import layers
from jaxir.models.backbones import check_editable
from jaxir.models.masked_lm import MaskedLanguageModel
from jaxir.models.projector import BatchNormProjector
from jaxir.objectives.contrastive import Contrastive, Embeddings
from jaxir.objectives.discriminator import Discriminator, Task
from jaxir.objectives.gradient_cache import embed_in_chunks
from jaxir.objectives.masking import mask_as_bert, places_of
from jaxir.objectives.objective import Batch, Metrics, Objective, RandomKey
from jaxir.objectives.pretrained_heads import (
    MaskedLMSource,
    PoolerSource,
    head_for,
    masked_lm_for,
    pooler_for,
)
from jaxir.objectives.simcse import SimCSE
from jaxir.objectives.token_edits import Change, Kind, longest, make_change
from jaxir.objectives.two_views import TwoViews


@dataclasses.dataclass(frozen=True, kw_only=True)
@checked
class DiffCSE(Objective):
    """DiffCSE (arXiv:2204.10298; Chuang 2024, chapter 2).

    m x is a text x with some tokens masked. A frozen masked language model G fills the masks: x'' = G(m x). A
    discriminator D, initially a copy of the encoder f, reads x'' with h = f(x) in place of its first token
    ([CLS]). D predicts for each token whether it is the token of x. Its gradient reaches f only through h
    (eq. 2.3):

        loss = L_contrast + weight * L_RTD
        L_RTD = 1 / N sum_i sum_t -1[x''_t = x_t] log D(x'', h, t) - 1[x''_t != x_t] log(1 - D(x'', h, t))

    The thesis sums both losses over the N texts of a batch; here both are means. The sum over t excludes
    padding and the first token, which h replaces. Texts without words are left out. h is the pooled vector
    after the projector, not normalised; the contrastive loss uses the same vector. D, G and the projector are
    not exported.

    With `follow="paper"` each masked token becomes the most likely token according to G, as in the thesis.
    With `follow="code"`, as in its authors' code, only 80 % of the chosen tokens are masked; 10 % become a
    random token and 10 % are unchanged (as in BERT). Every token except the first becomes the most likely
    one, masked or not. G has dropout. Each of the two views has its own changed text. L_RTD is the mean over
    all positions, including padding and the first token.

    On pairs (`contrastive=Contrastive(...)`) the query and the passage are both changed. D reads each with
    its own vector, and the two losses are added: DPR + DiffCSE (section 2.7).

    Attributes:
      contrastive: the objective that computes `L_contrast`: `SimCSE`, `ConSERT` or `Contrastive`.
      generator: G, as `PretrainedMaskedLM(...)` of jaxir.interop.build.
      weight: the weight of L_RTD, the thesis's lambda; 0: neither D nor G is made.
      contrastive_weight: the weight of L_contrast; 0 leaves L_contrast out.
      masking: the share of tokens that are masked, or of words that are inserted or deleted.
      change: whether tokens are replaced, inserted or deleted; "all": each of the three, with an output of D
        for each, and the sum of their losses. For "insert" D predicts which tokens are new, for "delete"
        before which tokens others are missing.
      use: "difference": the loss above. Otherwise there is no D and f encodes x'', as a "positive" of x in
        a second term of the contrastive loss, or as a "negative" of every text (section 2.8).
      texts: which text is changed: the "same" text that h encodes, the "next" text of the document, or
        "both", with the sum of both losses. "next" and "both" need the field `next_text` in the data.
      task: the task of D: "replaced": the loss above; "mlm": D predicts the masked tokens of m x, without G
        (conditional MLM, Yang et al. 2021); "corrective": D predicts each token of x from x'', by copying
        the token that it reads (with probability c) or by predicting a token:
        -log(1[x''_t = x_t] c + (1 - c) P(x_t)) (COCO-LM, Meng et al. 2021).
      head: `PretrainedMaskedLM(...)`, whose output head initialises D's for "mlm" and "corrective"; None:
        random.
      projector: applied to h: "batch_norm", two layers with BatchNorm over the global batch and all views;
        "tanh", BERT's pooler; "none".
      pooler: `PretrainedPooler(...)` of jaxir.interop.build, which initialises the projector "tanh"; None:
        random.
      follow: whether details that differ follow the "paper" or the authors' "code".
      chunks: the number of parts for gradient caching, see `Contrastive`. G and D use these parts, too.
    """

    contrastive: Contrastive = dataclasses.field(default_factory=SimCSE)
    generator: MaskedLMSource | None = None
    weight: NotNegative = 0.005
    contrastive_weight: NotNegative = 1.0
    masking: Portion = 0.3
    change: Literal["replace", "insert", "delete", "all"] = "replace"
    use: Literal["difference", "positive", "negative"] = "difference"
    texts: Literal["same", "next", "both"] = "same"
    task: Task = "replaced"
    head: MaskedLMSource | None = None
    projector: Literal["batch_norm", "tanh", "none"] = "batch_norm"
    pooler: PoolerSource | None = None
    follow: Literal["paper", "code"] = "paper"
    chunks: Count | Literal["auto"] = 1
    reads_with = "encode"

    def __post_init__(self):
        if not isinstance(self.contrastive, TwoViews) and (self.texts, self.use) != ("same", "difference"):
            raise UserError(
                "on labelled pairs DiffCSE changes the pairs themselves: set texts to 'same' and use to"
                f" 'difference', not {self.texts!r} and {self.use!r}"
            )
        if self.task != "replaced" and (self.change, self.use) != ("replace", "difference"):
            raise UserError(
                f"DiffCSE's task {self.task!r} predicts tokens that were replaced: set change to 'replace'"
                f" and use to 'difference', not {self.change!r} and {self.use!r}"
            )
        if self.follow == "code" and self.task != "replaced":
            raise UserError(
                f'the code of DiffCSE\'s authors has no task {self.task!r}: set follow to "paper"'
            )
        if self.pooler is not None and self.projector != "tanh":
            raise UserError(
                f'a pooler initialises projector "tanh", but projector is {self.projector!r}: set projector'
                ' to "tanh", or give no pooler'
            )
        if not self.contrastive_weight and not self._discriminates:
            raise UserError(
                "DiffCSE has no loss: contrastive_weight is 0, and there is no discriminator (weight is 0 or"
                ' use is not "difference"); set contrastive_weight above 0'
            )
        if self._generates and self.generator is None:
            raise UserError("DiffCSE needs a masked language model as generator: give --generator=hf:FOLDER")

    @property
    def frozen(self) -> tuple[str, ...]:
        return ("auxiliary.generator.*",) if self._generates else ()

    @property
    def evaluated_on_pairs(self) -> bool:
        return self.contrastive.evaluated_on_pairs

    @property
    def _kinds(self) -> tuple[Kind, ...]:
        return ("replace", "insert", "delete") if self.change == "all" else (self.change,)

    @property
    def _discriminates(self) -> bool:
        return self.use == "difference" and self.weight != 0

    @property
    def _generates(self) -> bool:
        return self.change != "delete" and (
            self.use != "difference" or (self._discriminates and self.task != "mlm")
        )

    def features(self, form: TextFormat) -> Features:
        """Returns the features of `contrastive`, and next_ids [L] if `texts` is "next" or "both"."""
        found = dict(self.contrastive.features(form))
        if self._discriminates and self.texts != "same":
            found["next_ids"] = dataclasses.replace(found["text_ids"], field="next_text", among="text")
        return found

    def auxiliary(self, model: Any, *, form: TextFormat, rngs: nnx.Rngs) -> DiffCSEModules | None:
        self.contrastive.auxiliary(model, form=form, rngs=rngs)
        projector = generator = discriminator = None
        if self.projector == "tanh":
            projector = pooler_for(model, self.pooler, rngs=rngs)
        elif self.projector == "batch_norm":
            projector = BatchNormProjector(model.config.dimension, rngs=rngs)
        lengths = [f.length for f in self.features(form).values() if isinstance(f, Tokens)]
        length = longest(max(lengths), self._kinds, self.masking)
        if self._generates:
            generator = masked_lm_for(model, self.generator, form=form, length=length, rngs=rngs)
        if self._discriminates or self._generates or self.use != "difference":
            limit = model.config.backbone.max_positions
            if limit is not None and length > limit:
                raise UserError(
                    f"texts have up to {length} tokens, inserted ones included, but the model reads at most"
                    f" {limit}: reduce PASSAGE_LENGTH"
                )
        if self._discriminates:
            encoder, width = model.encoder_of("passage"), model.config.backbone.embed_dim
            check_editable(encoder)
            kinds = 0 if self.task == "mlm" else len(self._kinds)
            head = None if self.task == "replaced" else head_for(model, self.head, form=form, rngs=rngs)
            widths = (width, model.config.dimension)
            discriminator = Discriminator(layers.copy_module(encoder), *widths, kinds, head, rngs=rngs)
        if projector is generator is discriminator is None and self.use == "difference":
            return None
        needs_mask = self._discriminates or self.use != "difference"
        return DiffCSEModules(projector, generator, discriminator, form.need_mask() if needs_mask else None)

    def __call__(
        self, model: Any, batch: Batch, key: RandomKey = None, *, auxiliary: Any = None, step: Any = None
    ) -> tuple[jax.Array, Metrics]:
        encoding, changing, reading = layers.split_key(key, 3)
        changing = jax.random.key(0) if changing is None else changing
        raw = model.unnormalized()
        found = dataclasses.replace(self.contrastive, chunks=self.chunks).embed(raw, batch, encoding)
        changed = []
        if self.use != "difference":
            changed = self._vectors_of_changed(raw, batch["text_ids"], auxiliary, changing, reading)
        vectors, changed = self._projected(found, changed, auxiliary, training=key is not None)
        contrast, metrics = self._contrast(vectors, changed, batch, model.compared)
        loss = self.contrastive_weight * contrast
        metrics = metrics | {"contrastive_loss": contrast}
        if self._discriminates:
            difference, more = self._difference(batch, vectors, auxiliary, changing, reading)
            # Remove this metric: the training loop stops if no row has negatives, but this objective has
            # another loss, too.
            metrics.pop("rows_without_negatives", None)
            loss, metrics = loss + self.weight * difference, metrics | more
        return loss, metrics

    def _projected(
        self, found: Embeddings, changed: Sequence[jax.Array], auxiliary: Any, *, training: bool
    ) -> tuple[Embeddings, list[jax.Array]]:
        """Projects all vectors of the batch in one call, so that BatchNorm sees all of them."""
        if self.projector == "none":
            return found, list(changed)
        negatives = [] if found.negatives is None else [found.negatives]
        # Concatenate a text's vectors along axis 1, so that rows stay on their devices.
        together = [x[:, None] for x in (found.query, found.passage, *changed)] + negatives
        projected = auxiliary.projector(jnp.concatenate(together, axis=1), training=training)
        query, passage, *others = (projected[:, i] for i in range(2 + len(changed)))
        rest = projected[:, 2 + len(changed) :] if negatives else None
        return Embeddings(query, passage, rest), others

    def _contrast(
        self, vectors: Embeddings, changed: Sequence[jax.Array], batch: Batch, unit: Any
    ) -> tuple[jax.Array, Metrics]:
        negatives = vectors.negatives
        if negatives is not None:
            negatives = unit(negatives.reshape(-1, negatives.shape[-1])).reshape(negatives.shape)
        pair, changed = Embeddings(unit(vectors.query), unit(vectors.passage), negatives), map(unit, changed)
        if self.use == "negative":
            pair = pair._replace(negatives=jnp.stack(list(changed), axis=1))
        loss, metrics = self.contrastive.loss_of(pair, batch)
        if self.use == "positive":
            loss += sum(self.contrastive.loss_of(pair._replace(passage=x), batch)[0] for x in changed)
        return loss, metrics

    def _vectors_of_changed(
        self, model: Any, ids: jax.Array, auxiliary: Any, changing: jax.Array, reading: RandomKey
    ) -> list[jax.Array]:
        """Changes the texts [B, L] in each of the configured ways; returns a list of their vectors [B, D]."""
        found = []
        count = len(self._kinds)
        keys = (jax.random.split(changing, count), layers.split_key(reading, count))
        for kind, own, key in zip(self._kinds, *keys, strict=True):
            filling, encoding = layers.split_key(key, 2)
            changed = self._filled(self._changed(ids, own, kind, auxiliary), auxiliary, filling)

            def embed(part: Batch, key: RandomKey) -> jax.Array:
                return model.encode(part["ids"], tower="passage", key=key)

            found.append(embed_in_chunks(embed, {"ids": changed}, encoding, chunks=self.chunks))
        return found

    def _difference(
        self, batch: Batch, vectors: Embeddings, auxiliary: Any, changing: jax.Array, reading: RandomKey
    ) -> tuple[jax.Array, Metrics]:
        """Returns the loss of DiffCSE's discriminator (L_RTD, or the loss of `task`), and its metrics."""
        views = 2 if self.follow == "code" and isinstance(self.contrastive, TwoViews) else 1
        sums = {name: jnp.float32(0) for name in ("loss", "places", "right", "changed")}
        each = [(side, kind) for side in self._sides(batch, vectors) for kind in self._kinds]
        keys = (jax.random.split(changing, len(each)), layers.split_key(reading, len(each)))
        for ((ids, vector), kind), own, key in zip(each, *keys, strict=True):
            filling, judging = layers.split_key(key, 2)
            change = self._changed(ids, own, kind, auxiliary)
            read = change.ids if self.task == "mlm" else self._filled(change, auxiliary, filling)
            losses, right = self._judged(read, change, vector, kind, auxiliary, judging)
            kept = self._counted(ids, read, change)
            over = kept.size * views if self.follow == "code" else len(ids)
            sums["loss"] += jnp.where(kept, losses, 0.0).sum() / over
            sums["places"] += kept.sum(dtype=jnp.float32)
            sums["right"] += (kept & right).sum(dtype=jnp.float32)
            sums["changed"] += (kept & (read != change.original)).sum(dtype=jnp.float32)
        places = jnp.maximum(sums["places"], 1.0)
        return sums["loss"], {
            "difference_loss": sums["loss"],
            "difference_accuracy": sums["right"] / places,
            "changed_tokens": sums["changed"] / places,
        }

    def _sides(self, batch: Batch, vectors: Embeddings) -> list[tuple[jax.Array, jax.Array]]:
        """Returns the texts to change, [B, L], each with the vector [B, D] that the discriminator reads."""
        if not isinstance(self.contrastive, TwoViews):
            return [(batch["query_ids"], vectors.query), (batch["passage_ids"], vectors.passage)]
        names = {"same": ["text_ids"], "next": ["next_ids"], "both": ["text_ids", "next_ids"]}[self.texts]
        views = [vectors.query] if self.follow == "paper" else [vectors.query, vectors.passage]
        return [(batch[name], view) for name in names for view in views]

    def _changed(self, ids: jax.Array, key: jax.Array, kind: Kind, auxiliary: Any) -> Change:
        placing, replacing = jax.random.split(key)
        found = make_change(ids, placing, kind=kind, share=self.masking, mask_id=auxiliary.mask_id)
        if self.follow == "code" and kind == "replace":
            how = {"mask_id": auxiliary.mask_id, "vocab_size": auxiliary.generator.config.backbone.vocab_size}
            found = found._replace(ids=mask_as_bert(ids, found.masked, replacing, **how))
        return found

    def _filled(self, change: Change, auxiliary: Any, key: RandomKey) -> jax.Array:
        """Returns changed texts [B, M] in which the generator's tokens replace the mask tokens."""
        if auxiliary.generator is None:
            return change.ids

        def fill(part: Batch, key: RandomKey) -> jax.Array:
            return auxiliary.generator.most_likely(part["ids"], places=part.get("places"), key=key)

        if self.follow == "paper":  # compute the generator's logits only at mask tokens
            places = places_of(change.masked, change.most)
            likely = embed_in_chunks(fill, {"ids": change.ids, "places": places}, None, chunks=self.chunks)
            found = jnp.put_along_axis(change.ids, places, likely, axis=1, inplace=False)
            return jnp.where(change.masked, found, change.ids)
        likely = embed_in_chunks(fill, {"ids": change.ids}, key, chunks=self.chunks)
        read = jnp.where(change.ids != 0, likely, 0)
        return jnp.concatenate([change.ids[:, :1], read[:, 1:]], axis=1)

    def _judged(
        self, read: jax.Array, change: Change, vector: jax.Array, kind: Kind, auxiliary: Any, key: Any
    ) -> tuple[jax.Array, jax.Array]:
        """Returns the discriminator's loss at each position, and whether its prediction is right: [B, M]."""

        def judge(part: Batch, key: RandomKey) -> tuple[jax.Array, jax.Array]:
            return auxiliary.discriminator.losses(
                **part, task=self.task, kind=self._kinds.index(kind), key=key
            )

        parts = {"ids": read, "original": change.original, "vector": vector}
        return embed_in_chunks(judge, parts, key, chunks=self.chunks)

    def _counted(self, ids: jax.Array, read: jax.Array, change: Change) -> jax.Array:
        """Returns bool [B, M]: the positions that are included in the discriminator's loss."""
        if self.follow == "code":
            return jnp.ones_like(read, bool)
        if self.task == "mlm":
            return change.masked
        after_first = jnp.arange(read.shape[1]) > 0
        has_words = (ids != 0).sum(1, keepdims=True) > 2
        return after_first[None] & has_words & (read != 0)


class DiffCSEModules(nnx.Module):
    """DiffCSE's projector, frozen generator, discriminator, and mask token id; each is None if not needed."""

    def __init__(
        self,
        projector: nnx.Module | None,
        generator: MaskedLanguageModel | None,
        discriminator: Discriminator | None,
        mask_id: int | None,
    ):
        self.projector, self.generator, self.discriminator = projector, generator, discriminator
        self.mask_id = mask_id
