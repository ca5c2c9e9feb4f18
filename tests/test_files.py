"""Outputs appear only when whole."""

import pytest

from jaxir.errors import UserError
from jaxir.files import atomic_directory, atomic_file


def test_a_file_appears_only_when_whole(tmp_path):
    target = tmp_path / "deep" / "run.trec"
    with atomic_file(target) as file:
        file.write("whole")
        assert not target.exists()
    assert target.read_text() == "whole"
    with pytest.raises(RuntimeError), atomic_file(target) as file:
        file.write("half")
        raise RuntimeError
    assert target.read_text() == "whole"
    assert [p.name for p in target.parent.iterdir()] == ["run.trec"]


def test_a_directory_appears_only_when_whole(tmp_path):
    target = tmp_path / "index"
    with pytest.raises(RuntimeError), atomic_directory(target) as aside:
        (aside / "half").touch()
        raise RuntimeError
    assert list(tmp_path.iterdir()) == []
    with atomic_directory(target) as aside:
        (aside / "a").write_text("1")
        assert not target.exists()
    with pytest.raises(UserError, match="already exists"), atomic_directory(target):
        pass
    with atomic_directory(target, overwrite=True) as aside:
        (aside / "b").write_text("2")
    assert [p.name for p in target.iterdir()] == ["b"]
    assert [p.name for p in tmp_path.iterdir()] == ["index"]
