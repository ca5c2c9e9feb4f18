"""Configurations that models refuse."""

import dataclasses

import pytest

from jaxir.core.errors import UserError
from jaxir.models import t5
from jaxir.models.decoding import Decoding
from jaxir.models.dual_encoder import DualEncoderConfig
from tests.models.test_attention import make as make_attention
from tests.models.test_encoders import BERT, T5


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: Decoding(num_beams=2, top_k=5), "beam search does not sample"),
        (lambda: Decoding(num_outputs=2), "num_outputs is 2, but num_beams is 1 and nothing is sampled"),
        (lambda: Decoding(num_outputs=5, num_beams=4), "num_outputs is 5"),
        (lambda: Decoding(top_p=1.5), "top_p"),
        (lambda: Decoding(temperature=0.0), "temperature"),
        (lambda: Decoding(temperature=1e-40), "temperature must be a number of at least 1e-06"),
        (lambda: Decoding(max_new_tokens=0), "max_new_tokens"),
        (lambda: dataclasses.replace(BERT, num_heads=5), "must be a multiple of num_heads"),
        (lambda: make_attention(num_kv_heads=3), "num_heads 4 must be a multiple of num_kv_heads 3"),
        (lambda: t5.preset("1.1-lareg"), r"no T5 preset '1\.1-lareg'; did you mean '1\.1-large'"),
        (lambda: DualEncoderConfig(backbone=BERT, sharing="ade_spl"), "ade_spl' shares the projection"),
        (
            lambda: DualEncoderConfig(backbone=T5, pooling="first_last"),
            "two layers, which t5 does not return",
        ),
    ],
)
def test_models_refuse_impossible_configurations(make, sentence):
    with pytest.raises((UserError, ValueError), match=sentence):
        make()
