"""Tokenizers in TensorFlow graphs give the ids of the tokenizers library and of SentencePiece."""

import json

import numpy as np
import pytest
from tokenizers import Tokenizer as Library
from tokenizers import normalizers, processors

from jaxir.core.errors import UserError
from jaxir.data.text.pair_tokenizer import PairTokenizer
from jaxir.data.text.tokenizer import Tokenizer
from jaxir.interop.exports.graph_tokenizer import GraphTokenizer
from jaxir.interop.exports.graph_wordpiece import check
from tests.interop.folders import GOLDEN

tf = pytest.importorskip("tensorflow")
pytest.importorskip("tensorflow_text")

# Marks that Unicode's normal forms sort, marks that stop the sorting, and characters that combine with marks.
MARKS = "\u0300\u0301\u0334\u0345\u08db\u08ca\u0903\u093e\u093c\u094d\u302e\u1bf2"
MARKS += "\U0001d165\U0001d16d\U0001e94a"
SPECIAL = "[MASK] [SEP] [PAD] [ ] [mask] </s> <unk> ## ##ing \u2581 a \u65e5"
EMOJI = "\U0001f642\U0001f469\u200d\U0001f467\U0001f3fd\U0001f1e9\U0001f1ea\u2603\ufe0f \u200d"
UNASSIGNED = "\u0378\u2fe0\U0001fbff\U000e0080\uffff\U0010ffff"
LONG = ["x" * 100, "x" * 101, "\u00e9" * 101, "\u65e5" * 3000, "word " * 20_000, "y" * 100_000]
LONG.append("e" + "\u0301" * 500)
BLANK = ["", " ", "\n\t\r", "\x00", "\x7f\x80\x9f"]


def varied_texts(vocabulary: list[str], count: int) -> list[str]:
    """Returns `count` random texts, and some texts on which tokenizers have failed."""
    rng = np.random.default_rng(0)
    everything = np.array([chr(c) for c in range(0x110000) if not 0xD800 <= c < 0xE000])
    alphabets = [
        everything,
        everything[:0x3000],
        everything[0x4E00:0xAC00],
        np.array([*MARKS, *"\u200d\x00 a\u00e0\u00e9\uac00\u0130"]),
        np.array([*SPECIAL.split(), " ", "\n", "\x00"]),
        np.array([*EMOJI, "ok"]),
        np.array(vocabulary),
        np.array(list("\u039f\u0394\u03a3\u0391\u03c2\u0130i\u0131I\u01c5\ufb01\u00df \t'-.,")),
    ]
    drawn = (alphabets[i % len(alphabets)] for i in range(count))
    texts = ["".join(alphabet[rng.integers(0, len(alphabet), rng.integers(1, 60))]) for alphabet in drawn]
    return [*texts, *BLANK, *LONG, *UNASSIGNED, UNASSIGNED, "\u039f\u0394\u039f\u03a3 \u03a3\u0391\u03a3"]


def assert_same_ids(tokenizer: Tokenizer, texts: list[str], max_length: int) -> None:
    graph = GraphTokenizer(tokenizer)
    signature = [tf.TensorSpec([None], tf.string)]
    function = tf.function(lambda x: graph([x], max_length)[0], input_signature=signature, autograph=False)
    found = function(tf.constant(texts)).to_list()
    expected = tokenizer.encode_batch(texts, max_length=max_length)
    lengths = {len(row) for row in expected}
    assert max_length in lengths and len(lengths) > max_length / 2
    wrong = [row for row in zip(texts, found, expected, strict=True) if row[1] != row[2].tolist()]
    assert not wrong, f"{len(wrong)} of {len(texts)}, such as {wrong[0]!r:.300}"
    assert function(tf.constant([], tf.string)).nrows() == 0
    for bad in (b"\xff", b"ab\xed\xa0\x80", b"abc\xe2\x82"):
        with pytest.raises(tf.errors.InvalidArgumentError, match="Invalid formatting"):
            function(tf.constant([b"good", bad]))


@pytest.mark.slow
def test_ten_thousand_texts_have_the_ids_of_wordpiece(minilm_folder):
    library = Library.from_file(str(minilm_folder / "tokenizer.json"))
    texts = varied_texts(sorted(library.get_vocab()), 10_000)
    assert len(texts) > 10_000
    assert_same_ids(Tokenizer.load(minilm_folder), texts, 48)


def test_ten_thousand_texts_have_the_ids_of_sentencepiece(sentencepiece_folder):
    tokenizer = Tokenizer.load(sentencepiece_folder)
    pieces = [tokenizer.decode([i]) or " " for i in range(tokenizer.vocab_size)]
    assert_same_ids(tokenizer, varied_texts(pieces, 10_000), 48)


@pytest.mark.slow
@pytest.mark.parametrize(
    "normalizer",
    [
        None,
        normalizers.BertNormalizer(strip_accents=False),
        normalizers.BertNormalizer(clean_text=False, strip_accents=True, lowercase=False),
        normalizers.Sequence([normalizers.NFKD(), normalizers.StripAccents(), normalizers.Lowercase()]),
    ],
)
def test_ten_thousand_texts_with_other_normalisers(normalizer, minilm_folder, tmp_path):
    library = Library.from_file(str(minilm_folder / "tokenizer.json"))
    library.normalizer = normalizer
    # The padding id is not 0, texts follow two tokens, and an added token is the prefix of another one.
    library.add_special_tokens(["[MASK]!", "<q>"])
    library.post_processor = processors.TemplateProcessing(
        single="[CLS] <q> $A [SEP]", special_tokens=[("[CLS]", 101), ("<q>", 30523), ("[SEP]", 102)]
    )
    library.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text('{"pad_token": "[UNK]"}')
    tokenizer = Tokenizer.load(tmp_path)
    assert tokenizer.pad_swap == 100
    assert_same_ids(tokenizer, [*varied_texts(sorted(library.get_vocab()), 10_000), "[MASK]!a[MASK]"], 48)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"model": {"type": "BPE"}}, "its model is BPE"),
        ({"pre_tokenizer": None}, "its pre-tokenizer is None"),
        ({"normalizer": {"type": "Sequence", "normalizers": [{"type": "NFC"}]}}, "its normaliser NFC"),
        ({"added_tokens": [{"content": "x", "normalized": True, "single_word": False}]}, "after normalis"),
    ],
)
def test_unsupported_tokenizers_are_refused(change, reason):
    spec = json.loads((GOLDEN / "bert" / "tokenizer.json").read_text())
    check(spec)
    with pytest.raises(UserError, match=f"{reason}.*export with --signatures=ids") as raised:
        check(spec | change)
    assert "\n" not in str(raised.value)


def pairs_of(count: int, vocabulary: list[str]) -> list[tuple[str, str]]:
    """Returns pairs of varied texts, and of short, long and empty texts."""
    texts = varied_texts(vocabulary, count)
    counts = [(m, n) for m in (0, 1, 7, 8, 9, 10, 30) for n in (0, 1, 7, 8, 9, 10, 30)]
    return [*zip(texts, reversed(texts), strict=True), *(("the " * m, "cat " * n) for m, n in counts)]


@pytest.mark.slow
@pytest.mark.parametrize(("max_length", "longest"), [(5, 300), (21, 100_000)])
def test_thousands_of_pairs_have_the_ids_of_wordpiece(max_length, longest, minilm_folder):
    """Leaves out pairs far longer than `max_length`: the library keeps every combination of cut pieces."""
    library = Library.from_file(str(minilm_folder / "tokenizer.json"))
    pairs = pairs_of(10_000, sorted(library.get_vocab()))
    pairs = [pair for pair in pairs if len("".join(pair)) <= longest]
    assert len(pairs) > 5_000
    tokenizer = Tokenizer.load(minilm_folder)
    graph = GraphTokenizer(tokenizer, num_texts=2)
    columns = [tf.constant(texts) for texts in zip(*pairs, strict=True)]
    found = [*zip(*(rows.to_list() for rows in graph(columns, max_length)), strict=True)]
    expected = PairTokenizer(tokenizer).encode(pairs, max_length=max_length)
    rows = zip(pairs, found, expected, strict=True)
    wrong = [row for row in rows if row[1] != (row[2].ids.tolist(), row[2].types.tolist())]
    assert not wrong, f"{len(wrong)} of {len(pairs)}, such as {wrong[0]!r:.300}"
    assert {len(ids) for ids, _ in found} == set(range(min(3, max_length), max_length + 1))
    assert any(sum(types) for _, types in found)
    with pytest.raises(tf.errors.InvalidArgumentError, match="Invalid formatting"):
        graph([tf.constant([b"good"]), tf.constant([b"\xff"])], max_length)


@pytest.mark.slow
def test_pairs_have_the_ids_of_a_lone_sentencepiece_model(sentencepiece_folder):
    tokenizer = Tokenizer.load(sentencepiece_folder)
    pairs = pairs_of(300, ["the", "cat", "sat"])
    graph = GraphTokenizer(tokenizer, num_texts=2)
    ids, types = (rows.to_list() for rows in graph([tf.constant(t) for t in zip(*pairs, strict=True)], 20))
    expected = PairTokenizer(tokenizer).encode(pairs, max_length=20)
    assert (ids, types) == ([e.ids.tolist() for e in expected], [e.types.tolist() for e in expected])
    assert max(map(len, ids)) == 20
