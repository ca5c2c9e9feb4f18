"""What lies beside an output until it is whole is taken up only where it says what it is made of."""

import json
from types import SimpleNamespace

import pytest

from jaxir.errors import UserError
from jaxir.retrieval.encoding import windowed_file
from jaxir.retrieval.encoding.windowed_file import MADE, write_windows

TEXTS = [SimpleNamespace(id=f"t{i}") for i in range(5)]


def write(output, model: str) -> list[list[str]]:
    made = []

    def make(batch, done):
        made.extend(text.id for text in batch)
        return ({"outputs": [model]} for _ in batch)

    write_windows(output, {"model": model}, TEXTS, make, count=len(TEXTS), what="writing", window=2)
    assert not list(output.parent.glob(".*.unfinished"))
    lines = [json.loads(line) for line in output.read_text().splitlines()]
    assert [line["_id"] for line in lines] == [text.id for text in TEXTS]
    assert {tuple(line["outputs"]) for line in lines} == {(model,)}
    return made


@pytest.mark.parametrize("order", ["its description first", "a window first"])
def test_a_run_killed_while_it_tidies_up_leaves_nothing_to_another(tmp_path, monkeypatch, order):
    output = tmp_path / "out.jsonl"

    def killed(directory):
        (directory / (MADE if order == "its description first" else "outputs-00001.jsonl")).unlink()
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(windowed_file, "remove_tree", killed)
        with pytest.raises(KeyboardInterrupt):
            write(output, "first")
    assert output.exists() and len(list(tmp_path.glob(".out.jsonl.unfinished/outputs-*"))) >= 2
    if order == "a window first":
        with pytest.raises(UserError, match="was begun with another model"):
            write(output, "second")
        assert write(output, "first") == ["t2", "t3"]
    else:
        assert write(output, "second") == [text.id for text in TEXTS]
