import shutil

import pytest

from jaxir.core.errors import BadInputError
from jaxir.data.formats.beir_folder import BeirFolder
from jaxir.sample import sample


def test_sample_keeps_held_out_splits_and_some_training_pairs(folder, tmp_path, capsys):
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


def test_truncated_folder_is_refused(folder, tmp_path):
    copy, flags = shutil.copytree(folder, tmp_path / "copy"), {"output": str(tmp_path / "small"), "train": 40}
    for name in ("corpus", "queries"):
        whole = (copy / f"{name}.jsonl").read_text()
        lines = whole.splitlines(keepends=True)
        (copy / f"{name}.jsonl").write_text("".join(lines[:5]))
        with pytest.raises(BadInputError, match=rf"{name}\.jsonl: '.*' has judgements but .*truncated"):
            sample(dataset=str(copy), **flags)
        (copy / f"{name}.jsonl").write_text(whole + lines[0].replace('"text": "', '"text": "x'))
        with pytest.raises(BadInputError, match=rf"{name}\.jsonl:{len(lines) + 1}: duplicate id"):
            sample(dataset=str(copy), **flags)
        (copy / f"{name}.jsonl").write_text(whole)
    assert not (tmp_path / "small").exists()


def test_sample_reports_a_few_missing_judged_ids(folder, tmp_path, capsys):
    copy = shutil.copytree(folder, tmp_path / "copy")
    with (copy / "qrels/test.tsv").open("a") as file:
        file.write("lost\tgone\t1\n")
    sample(dataset=str(copy), output=str(tmp_path / "small"), train=10)
    captured = capsys.readouterr()
    assert "26 documents, 26 queries, 10 train judgements" in captured.out
    assert "corpus.jsonl: 'gone' has judgements but is missing (1 of 27 are missing)\n" in captured.err
    assert "lost\tgone\t1\n" in (tmp_path / "small/qrels/test.tsv").read_text()


def test_backups_and_hidden_files_are_not_splits(folder, tmp_path):
    copy = shutil.copytree(folder, tmp_path / "copy")
    for name in ("test.tsv~", "test.tsv.bak", "._test.tsv", ".x.tsv.swp"):
        (copy / "qrels" / name).write_text("not judgements")
    assert BeirFolder(copy).splits == ["dev", "test", "train"]
    sample(dataset=str(copy), output=str(tmp_path / "small"), train=10)
    (copy / "qrels/test.tsv").rename(copy / "qrels/test.small.tsv")
    assert BeirFolder(copy).splits == ["dev", "test.small", "train"]
