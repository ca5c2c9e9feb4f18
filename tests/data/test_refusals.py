import pytest

from jaxir.core.errors import UserError
from jaxir.data.expanded.expanded_pairs import pairs_or_mined
from jaxir.data.expanded.joining import Joiner
from jaxir.data.expanded.selection import Bottom, Curriculum, Top, selection_of
from jaxir.data.formats.beir_folder import BeirFolder
from jaxir.data.formats.lines import OnBadInput
from jaxir.data.sets import beir_sets, msmarco, package_docs
from jaxir.data.sets.pair_sources import TevatronPairs
from tests.data import published


def msmarco_split(tmp_path, minilm):
    msmarco.MsMarcoFolder(published.write_msmarco(tmp_path)).pairs("dev")


REFUSALS = [
    (lambda *_: OnBadInput("ignore"), "must be stop or skip"),
    (lambda *_: next(package_docs.read_pairs("tets")), "no split 'tets' .*did you mean 'test'"),
    (msmarco_split, r"no split 'dev' \(has: dev.small, train\)"),
    (lambda path, _: BeirFolder(path / "nowhere"), "is not a directory"),
    (lambda path, _: BeirFolder(path), r"it has no corpus.jsonl or corpus.jsonl.gz"),
    (lambda *_: beir_sets.tfds_name("scifcat"), "BEIR has no data set 'scifcat'; did you mean 'scifact'"),
    (lambda *_: beir_sets.tfds_name("cqadupstack"), "name one, such as cqadupstack/android"),
    (lambda *_: beir_sets.tfds_name("cqadupstack/gamin"), "did you mean 'gaming'"),
    (lambda *_: beir_sets.tfds_name("scifact/android"), "has no parts"),
    (lambda *_: beir_sets.tfds_name("robust04"), "robust04, which its owner licenses"),
    (
        lambda *_: selection_of("random", groups=4),
        "groups=4 only applies to the selection 'curriculum', not to",
    ),
    (lambda *_: selection_of("gold", k=5), "the selections 'top' and 'bottom', not to 'gold'"),
    (lambda *_: Curriculum(0), "whole number of at least 1"),
    (lambda *_: Top(0), "whole number of at least 1"),
    (lambda *_: Bottom(0), "whole number of at least 1"),
    (lambda *_: pairs_or_mined(TevatronPairs(path="p"), "mined.jsonl", 0), "none would be used: set NEG"),
    (lambda _, tokenizer: Joiner(tokenizer, 8, 8), "documents of 8 tokens leave no room for a query of 8"),
]


@pytest.mark.parametrize(("use", "message"), REFUSALS, ids=[message[:30] for _, message in REFUSALS])
def test_unusable_settings_are_refused(use, message, tmp_path, minilm):
    with pytest.raises(UserError, match=message):
        use(tmp_path, minilm)
