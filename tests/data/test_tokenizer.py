import json
import shutil
import threading
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

from jaxir.core.errors import UserError
from jaxir.core.features import PADDING_TOKEN
from jaxir.data.text.tokenizer import Tokenizer, pad_batch
from jaxir.data.text.truncation import Truncation

LINES = [
    "The retriever finds passages, and the reader reads them; it's 3.14 times better (or so they say).",
    "def tokenize(text: str) -> list[int]: return [ord(c) for c in text]",
    "Ein Überblick über naïve Verfahren; 日本語のテキスト and emoji 🙂👩‍👩‍👧 mixed in.",
    "supercalifragilistic antidisestablishmentarianism --- \t odd   spacing\n\nand a new paragraph",
]


def ids(rows):
    return [row.tolist() for row in rows]


def test_minilm_ids_equal_those_of_the_published_tokenizer(minilm):
    # [CLS] hello world [SEP]; accents stripped and case folded; an empty text is the special tokens alone.
    texts = ["Hello, World!", "", "naïve Café", "日本", "[MASK]", "\x00\u200b"]
    assert ids(minilm.encode_batch(texts, max_length=256)) == [
        [101, 7592, 1010, 2088, 999, 102],
        [101, 102],
        [101, 15743, 7668, 102],
        [101, 1864, 1876, 102],
        [101, 103, 102],
        [101, 102],
    ]
    assert (minilm.vocab_size, minilm.pad_swap) == (30522, None)
    assert minilm.decode([101, 7592, 2088, 102, 0, 0]) == "hello world"


def test_truncation_keeps_the_special_tokens_and_ignores_the_files_own_settings(minilm, minilm_folder):
    stored = json.loads((minilm_folder / "tokenizer.json").read_text())
    assert stored["truncation"]["max_length"] == 128 and stored["padding"]["strategy"] == {"Fixed": 128}
    words = "one two three four " * 100
    (long,), (short,) = (minilm.encode_batch([words], max_length=n) for n in (300, 6))
    assert len(long) == 300 and long[-1] == 102
    assert short.tolist() == [101, 2028, 2048, 2093, 2176, 102]
    # The tokenizer's own padding to 128 is ignored.
    assert len(minilm.encode_batch(["one"], max_length=300)[0]) == 3


def test_sentencepiece_appends_eos(sentencepiece_folder):
    tokenizer = Tokenizer.load(sentencepiece_folder)
    rows = tokenizer.encode_batch(["hello world", ""], max_length=32)
    assert ids(rows) == [[3, 20, 4, 9, 9, 7, 17, 7, 23, 9, 21, 1], [1]]
    assert ids(tokenizer.encode_batch(["hello world"], max_length=4)) == [[3, 20, 4, 1]]
    assert rows[0].dtype == np.int32 and tokenizer.pad_swap is None
    assert tokenizer.decode(rows[0]) == "hello world"


@pytest.fixture(scope="module")
def roberta_like(tmp_path_factory):
    """A byte-level BPE tokenizer with RoBERTa's special tokens: <s> 0, <pad> 1, </s> 2."""
    tokenizer = tokenizers.Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(LINES, trainer)
    tokenizer.post_processor = processors.RobertaProcessing(("</s>", 2), ("<s>", 0))
    folder = tmp_path_factory.mktemp("roberta")
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"pad_token": {"content": "<pad>"}}))
    return folder


def test_padding_id_that_is_not_zero_is_exchanged_with_zero(roberta_like):
    tokenizer = Tokenizer.load(roberta_like)
    raw = tokenizers.Tokenizer.from_file(str(roberta_like / "tokenizer.json")).encode("The retriever").ids
    assert tokenizer.pad_swap == 1 and raw[0] == 0
    (row,) = tokenizer.encode_batch(["The retriever"], max_length=64)
    assert row.tolist() == [1, *raw[1:]]
    assert tokenizer.decode(row) == "The retriever"


def test_the_vocabulary_reaches_to_the_largest_id(roberta_like, tmp_path):
    content = json.loads((roberta_like / "tokenizer.json").read_text())
    token = max(content["model"]["vocab"], key=content["model"]["vocab"].get)
    content["model"]["vocab"][token] = 5000
    folder = shutil.copytree(roberta_like, tmp_path / "gap")
    (folder / "tokenizer.json").write_text(json.dumps(content))
    assert Tokenizer.load(folder).vocab_size == 5001


def test_padding_tokens_of_a_text_are_not_padding(minilm, roberta_like):
    for tokenizer, token in ((minilm, "[PAD]"), (Tokenizer.load(roberta_like), "<pad>")):
        (row,) = tokenizer.encode_batch([f"{token} a{token}"], max_length=16)
        assert np.flatnonzero(row == PADDING_TOKEN).tolist() == [1, len(row) - 2] and (row != 0).all()
        assert tokenizer.decode(pad_batch([row], 16)[0]).strip() == "a"


@pytest.fixture(scope="module")
def unigram(tmp_path_factory):
    """T5's pipeline as a tokenizer.json: metaspace and unigram."""
    tokenizer = tokenizers.Tokenizer(models.Unigram())
    tokenizer.normalizer = normalizers.NFKC()
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=200, special_tokens=["<pad>", "</s>", "<unk>"], unk_token="<unk>", show_progress=False
    )
    tokenizer.train_from_iterator(LINES, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="$A </s>", pair=None, special_tokens=[("</s>", 1)]
    )
    folder = tmp_path_factory.mktemp("unigram")
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture(scope="module")
def deberta():
    return Path(__file__).resolve().parent.parent / "golden" / "cross_deberta"


@pytest.mark.parametrize(
    "which", ["deberta", "minilm_folder", "sentencepiece_folder", "roberta_like", "unigram"]
)
def test_cutting_long_texts_keeps_their_ids(which, request):
    tokenizer = Tokenizer.load(request.getfixturevalue(which))
    assert tokenizer._backend.words_are_independent
    rng = np.random.default_rng(0)
    texts = [" ".join(rng.choice(LINES, 60)) for _ in range(20)]
    texts += ["".join(rng.choice(list("ab cd.é🙂日\u0301 <s>[SEP]"), 3000)) for _ in range(20)]
    texts += [" " * 5000 + "the end", "x" * 9000 + " and so on" * 50, "日本語。" * 2000]
    truncation = Truncation(16)
    rows = tokenizer.encode_batch(texts, max_length=16, truncation=truncation)
    assert any(len(tokenizer._cut(text, 8 * 16 + 128)) < len(text) for text in texts)
    for text, row in zip(texts, rows, strict=True):
        ((whole, _),) = tokenizer._encode([text], 16)
        np.testing.assert_array_equal(row, whole)
    uncut = tokenizer.encode_batch(texts, max_length=1_000_000)
    assert truncation == Truncation(16, len(texts), sum(len(row) > 16 for row in uncut))


def test_a_text_that_just_fits_is_not_counted_as_cut(minilm, sentencepiece_folder):
    for tokenizer in (minilm, Tokenizer.load(sentencepiece_folder)):
        text = "this is a test of the tokens"
        size = len(tokenizer.encode_batch([text], max_length=100)[0])
        for length, cut in ((size, 0), (size - 1, 1)):
            truncation = Truncation(length)
            tokenizer.encode_batch([text, ""], max_length=length, truncation=truncation)
            assert truncation == Truncation(length, texts=2, cut=cut)
    assert truncation.in_words("passages") == f"1 of 2 passages (50.0 %) at {size - 1} tokens"
    assert Truncation(8, 100_000, 1).in_words("queries") == "1 of 100,000 queries (0.1 %) at 8 tokens"


@pytest.mark.parametrize("which", ["minilm_folder", "sentencepiece_folder", "roberta_like", "unigram"])
def test_cut_at_returns_where_the_kept_ids_end(which, request):
    tokenizer = Tokenizer.load(request.getfixturevalue(which))
    text = "The  retriever é reads one two three, and then some more words that it may not read"
    (whole,) = tokenizer.encode_batch([text], max_length=500)
    assert tokenizer.cut_at(text, max_length=len(whole)) is None
    assert 0 < tokenizer.cut_at(text, max_length=len(whole) - 1) < len(text)
    for length in (10, 20):
        (kept,) = tokenizer.encode_batch([text], max_length=length)
        read = text[: tokenizer.cut_at(text, max_length=length)]
        assert 0 < len(read) < len(text)
        np.testing.assert_array_equal(tokenizer.encode_batch([read], max_length=500)[0], kept)


def test_tokenizer_without_word_boundaries_is_never_cut(unigram, tmp_path):
    spec = json.loads((unigram / "tokenizer.json").read_text())
    spec["pre_tokenizer"] = None
    (tmp_path / "tokenizer.json").write_text(json.dumps(spec))
    tokenizer = Tokenizer.load(tmp_path)
    text = " ".join(LINES * 50)
    assert tokenizer._cut(text, 100) == text


def test_a_cut_that_was_too_short_is_made_longer(minilm):
    rare = ("x" * 110 + " ") * 300 + "the retriever reads " * 200  # a word of 110 letters is one [UNK]
    for tail in ("", "a b c d " * 1000):
        (row,) = minilm.encode_batch([rare + tail], max_length=512)
        ((whole, _),) = minilm._encode([rare + tail], 512)
        np.testing.assert_array_equal(row, whole)
        assert len(row) == 512 and row.tolist().count(100) == 300


def test_saved_tokenizer_is_the_same_byte_for_byte(minilm, minilm_folder, tmp_path):
    minilm.save(tmp_path / "copy")
    for name in ("tokenizer.json", "vocab.txt", "tokenizer_config.json", "special_tokens_map.json"):
        assert (tmp_path / "copy" / name).read_bytes() == (minilm_folder / name).read_bytes()
    assert Tokenizer.load(tmp_path / "copy").fingerprint == minilm.fingerprint


def test_folder_with_only_a_vocabulary_is_converted_and_stays_convertible(minilm, minilm_folder, tmp_path):
    for name in ("vocab.txt", "tokenizer_config.json"):
        shutil.copy(minilm_folder / name, tmp_path)
    converted = Tokenizer.load(tmp_path)
    texts = [*LINES, "", "unaffable"]
    assert ids(converted.encode_batch(texts, max_length=64)) == ids(minilm.encode_batch(texts, max_length=64))
    converted.save(tmp_path / "copy")
    assert Tokenizer.load(tmp_path / "copy").fingerprint == converted.fingerprint


def test_threads_with_different_lengths_do_not_disturb_each_other(minilm):
    text = "one two three four five six seven eight nine ten"
    found = {5: [], 9: []}

    def work(length):
        for _ in range(200):
            found[length] += map(len, minilm.encode_batch([text] * 4, max_length=length))

    threads = [threading.Thread(target=work, args=(n,)) for n in found]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {length: [length] * 800 for length in found}


@pytest.mark.parametrize(
    ("files", "message"),
    [
        (None, "is not a directory"),
        ({}, "holds no tokenizer"),
        ({"tokenizer.json": "{"}, "tokenizer.json is not valid JSON"),
        ({"tokenizer.json": "{}"}, "tokenizer.json is not a tokenizer"),
        ({"tokenizer.json": "[1]"}, "does not contain a JSON object"),
        ({"spiece.model": "nonsense"}, "is not a SentencePiece model"),
        ({"vocab.txt": "[PAD]\n[UNK]\n\0\0\0\0"}, "vocab.txt is damaged: it contains NUL bytes"),
        ({"vocab.txt": "a\nb\n"}, "transformers cannot read this tokenizer"),
    ],
)
def test_unusable_folders_are_refused(tmp_path, files, message):
    folder = tmp_path / "tokenizer"
    if files is not None:
        folder.mkdir()
        for name, content in files.items():
            (folder / name).write_text(content)
    with pytest.raises(UserError, match=message) as raised:
        Tokenizer.load(folder)
    assert "\n" not in str(raised.value)


def test_unusable_texts_and_lengths_are_refused(minilm):
    with pytest.raises(UserError, match="must be strings, got int"):
        minilm.encode_batch(["a", 3], max_length=8)
    with pytest.raises(UserError, match="not valid Unicode"):
        minilm.encode_batch(["\ud83d"], max_length=8)
    with pytest.raises(UserError, match="max_length is 2"):
        minilm.encode_batch(["a"], max_length=2)


def test_the_mask_token_is_found_under_the_ids_that_are_returned(minilm, sentencepiece_folder, roberta_like):
    assert minilm.mask_id == 103
    assert minilm.encode_batch(["a [MASK]"], max_length=8)[0].tolist() == [101, 1037, 103, 102]
    assert Tokenizer.load(sentencepiece_folder).mask_id is None
    tokenizer = Tokenizer.load(roberta_like)
    (ids,) = tokenizer.encode_batch(["<mask>"], max_length=8)
    assert tokenizer.mask_id in ids.tolist()
