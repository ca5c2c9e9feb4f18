"""A smaller BEIR folder keeps what is judged, and nothing else."""

import shutil

import pytest

from jaxir.core.errors import BadInputError, UserError
from jaxir.data.formats.sources import BeirFolder
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


def test_a_folder_that_is_cut_off_costs_one_sentence(folder, tmp_path):
    """What could not be searched in, or evaluated on, is not written."""
    copy, flags = shutil.copytree(folder, tmp_path / "copy"), {"output": str(tmp_path / "small"), "train": 40}
    for name in ("corpus", "queries"):
        whole = (copy / f"{name}.jsonl").read_text()
        lines = whole.splitlines(keepends=True)
        (copy / f"{name}.jsonl").write_text("".join(lines[:5]))
        with pytest.raises(
            BadInputError, match=rf"{name}\.jsonl: it lacks '.*', which is judged \(.*cut off"
        ):
            sample(dataset=str(copy), **flags)
        (copy / f"{name}.jsonl").write_text(whole + lines[0].replace('"text": "', '"text": "x'))
        with pytest.raises(BadInputError, match=rf"{name}\.jsonl:{len(lines) + 1}: duplicate id"):
            sample(dataset=str(copy), **flags)
        (copy / f"{name}.jsonl").write_text(whole)
    assert not (tmp_path / "small").exists()


def test_a_sample_does_without_the_few_judged_ids_that_are_missing(folder, tmp_path, capsys):
    copy = shutil.copytree(folder, tmp_path / "copy")
    with (copy / "qrels/test.tsv").open("a") as file:
        file.write("lost\tgone\t1\n")
    sample(dataset=str(copy), output=str(tmp_path / "small"), train=10)
    told = capsys.readouterr()
    assert "26 documents, 26 queries, 10 train judgements" in told.out
    assert "corpus.jsonl: it lacks 'gone', which is judged (1 of 27)\n" in told.err
    assert "lost\tgone\t1\n" in (tmp_path / "small/qrels/test.tsv").read_text()


def test_backups_and_hidden_files_are_no_splits(folder, tmp_path):
    copy = shutil.copytree(folder, tmp_path / "copy")
    for name in ("test.tsv~", "test.tsv.bak", "._test.tsv", ".x.tsv.swp"):
        (copy / "qrels" / name).write_text("not judgements")
    assert BeirFolder(copy).splits == ["dev", "test", "train"]
    sample(dataset=str(copy), output=str(tmp_path / "small"), train=10)
    (copy / "qrels/test.tsv").rename(copy / "qrels/test.small.tsv")
    assert BeirFolder(copy).splits == ["dev", "test.small", "train"]
