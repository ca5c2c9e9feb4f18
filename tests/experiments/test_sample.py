"""A smaller BEIR folder keeps what is judged, and nothing else."""

import pytest

from jaxir.data.sources import BeirFolder
from jaxir.errors import UserError
from jaxir.sample import sample


def test_a_sample_has_all_held_out_queries_and_some_training_pairs(folder, tmp_path, capsys):
    sample(dataset=f"beir:{folder}", output=str(tmp_path / "small"), train=10)
    small, whole = BeirFolder(tmp_path / "small"), BeirFolder(folder)
    assert "26 documents, 26 queries, 10 train judgements" in capsys.readouterr().out
    assert len(list(small.pairs("train"))) == 10
    assert set(small.pairs("train")) < set(whole.pairs("train"))
    for split in ("dev", "test"):
        assert list(small.pairs(split)) == list(whole.pairs(split))
    assert '"metadata"' in small.corpus_path.read_text().splitlines()[0]
    assert len(list(small.corpus())) == 26
    sample(dataset=f"beir:{folder}", output=str(tmp_path / "again"), train=10)
    assert (tmp_path / "again" / "corpus.jsonl").read_text() == small.corpus_path.read_text()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"train": 41}, "between 1 and 40"),
        ({"train": 0}, "between 1 and 40"),
        ({"split": "trian"}, "did you mean 'train'"),
        ({"dataset": "pairs"}, "--dataset must be beir:DIR"),
    ],
)
def test_bad_settings_cost_one_sentence_and_write_nothing(folder, tmp_path, changes, message):
    flags = {"dataset": f"beir:{folder}", "output": str(tmp_path / "small"), "train": 10} | changes
    with pytest.raises(UserError, match=message):
        sample(**flags)
    assert not (tmp_path / "small").exists()
