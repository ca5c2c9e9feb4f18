"""Refusals of plans: one sentence each, nothing on standard output."""

import pytest

from jaxir import cli, expand

ONE, FOUR = "--topology=gpu:1xl4", "--topology=gpu:4xh100"
TWO, SEARCH = "--topology=v5e:2x2", "--search"


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        ((), "--topology must be given (see python -m jaxir.plan --help)"),
        ((ONE, "--gin.BATCH=3"), "BATCH is set but nothing uses it"),
        ((ONE, "--output=run"), "there is no flag --output"),
        ((ONE, "--gin.BATCH_SIZE=%gin.REQUIRED"), "train.batch_size must be set: --batch_size"),
        ((ONE, "--model=hf:./nowhere"), "./nowhere: no such directory"),
        ((FOUR, "--batch_size=510"), "batch_size must be a multiple of the 4 devices"),
        ((FOUR, "--passage_length=10000000000"), "more than chips hold: reduce batch_size (512) or the"),
        ((FOUR, "--fsdp=8"), "must be 4, all devices: for gpu:4xh100 set --fsdp=4"),
        ((FOUR, "--epochs=2"), "it cannot count the steps of 2.0 epochs: give --steps"),
        # machines
        (("--topology=v5q:4x4x4",), "'v5q'; did you mean 'v5p'?; write CHIP:SHAPE with v4, v5e, v5p, v6e"),
        (("--topology=v5e:3x3",), "no such slice of v5e; give one of 1x1, 2x2, 2x4, 4x4, 4x8, 8x8, 8x16,"),
        (("--topology=gpu:8xh1000",), "a100, h100, h200, b200, l4, l40s; did you mean 'h100'?"),
        (("--topology=gpu:9xh100",), "give a multiple of 8, a node's GPUs"),
        (("--topology=gpu:100000000000xh100",), "plans are for at most 2,048 GPUs"),
        (("--topology=v5e:4x4*1000000",), "plans are for at most 4,096 slices"),
        # searches and prices
        (("--topology=v5e:2x2,v5e:4x4",), "2x2,v5e:4x4: a plan is for one machine; add --search"),
        ((TWO, "--hours=2"), "--hours only applies to --search: leave it out"),
        (("--topology=gpu:8xh100", SEARCH), "possible for TPUs only: replace gpu:8xh100"),
        ((TWO, "--prices=1.2"), "--prices=1.2: write CHIP=PRICE, the price of a chip-hour, such as v5e=1.2"),
        (("--topology=gpu:8xh100", "--prices=h10=3"), "--prices=h10=3: no chip 'h10'; did you mean 'h100'?"),
        (("--topology=v5e:2x2,v5p:2x2x1", SEARCH, "--prices=v5e=1"), "lacks a price above 0 for v5p"),
        ((TWO, SEARCH, "--prices=v5e=1,V5E=9"), "--prices has two prices for v5e"),
        ((TWO, SEARCH, "--prices=v5e=nan"), "--prices lacks a price above 0 for v5e"),
    ],
)
def test_refused_plan_prints_one_sentence(flags, sentence, capsys):
    assert cli.main("jaxir.plan:plan", ["--gin_file=gin/samtone_base.gin", *flags]) in (1, 2)
    out, error = capsys.readouterr()
    assert error.startswith("error: ") and error.count("\n") == 1 and sentence in error and not out


def test_generation_is_planned_for_tpus_alone(capsys):
    assert expand.main(["plan", "--model=hf:t5-small", "--topology=gpu:8xh100"]) == 1
    assert "generation can be planned for TPUs only" in capsys.readouterr().err
