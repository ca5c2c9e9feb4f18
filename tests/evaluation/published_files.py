"""Small files in the layouts of published collections."""

from pathlib import Path

import numpy as np

from jaxir.evaluation.senteval_files import TASKS

RUN = (
    "q1 Q0 d2 1 3.0 a\nq1 Q0 d1 2 2.0 a\nq2 Q0 d9 1 1.0 a\n"
    "q9 Q0 d1 1 1.0 a\nq3 Q0 q3 1 2.0 a\nq3 Q0 d3 2 1.0 a\n"
)
BEIR = "query-id\tcorpus-id\tscore\nq1\td1\t2\nq1\td2\t0\nq2\td1\t1\nq3\td3\t1\n"
TREC = "q1 0 d1 2\nq1 0 d2 0\nq2 0 d1 1\nq3 0 d3 1\n"
CORPUS = (
    '{"_id": "1", "title": "Cat", "text": "cat and dog"}\n{"_id": "2", "title": "", "text": "dog dog"}\n'
    '{"_id": "3", "title": "fish", "text": ""}\n{"_id": "4", "text": "bird"}\n'
)
QUERIES = '{"_id": "1", "text": "cat"}\n{"_id": "b", "text": "dog"}\n{"_id": "c", "text": "fish bird"}\n'
IR = {
    "corpus.tsv": "qid\tquestion\n1\tHow do I boil an egg?\n2\tHow to boil eggs?\n3\tWhy is the sky blue?\n",
    "test-queries.tsv": "qid\tquestion\tduplicate_qids\n4\tBest way to boil an egg?\t1,2,5\n"
    "6\tsky, why blue\t3\n5\tegg boiling\t4\n",
    "dev-queries.tsv": "qid\tquestion\tduplicate_qids\n9\tblue sky why\t3\n",
}
RELEASE = (
    "id\tqid1\tqid2\tquestion1\tquestion2\tis_duplicate\n"
    '0\t1\t2\tHow do I boil an egg?\t"How to boil ""large""\neggs?"\t1\n'
    "1\t3\t4\tWhy is the sky blue?\tWhy is the sea blue?\t0\n"
    "2\t2\t5\tHow to boil eggs?\tegg boiling\t1\n"
    "3\t7\t8\tWhat?\t\t0\n"
)
STS_HEADER = "score\tsentence1\tsentence2\n"
YEAR = {  # the layouts of STS 2015 and 2016; the second and the last pair of forums have no score
    "STS.input.forums.txt": "0\t10\n7\t7\n0\t20\thttp://a\n0\t30\n5\t5\n",
    "STS.gs.forums.txt": "5\n\n3\n4.5\n\n",
    "STS2016.input.question-question.txt": "1\t2\n3\t4\n",
    "STS2016.gs.question-question.txt": "1\n2.25\n",
    "readme.txt": "not a set",
}
GOOD, BAD = ["bright", "kind", "warm", "swift"], ["grim", "stale", "cold", "slow"]
FILLERS = ["lamp", "river", "table", "cloud", "stone"]


def write(folder: Path, files: dict[str, str | bytes | None]) -> Path:
    for name, content in files.items():
        if content is not None:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(content.encode() if isinstance(content, str) else content)
    return folder


def posts(duplicates: dict[int, object], count: int) -> dict[str, dict]:
    """Returns posts 1 to `count` of a forum, one for each day, some of them duplicates of older ones."""
    return {
        str(i): {
            "title": f"title {i}",
            "body": f"<p>body &amp; <b>soul</b>\n{i}</p>",
            "creationdate": f"2014-05-{i:02}T10:00:00.000",
            "dups": duplicates.get(i, []),
        }
        for i in range(1, count + 1)
    }


def senteval_files() -> dict[str, str]:
    """Returns the files of SentEval's tasks: five of six texts have a word of their label, among fillers."""
    rng = np.random.default_rng(3)

    def text(words: list[str], most: int = 6) -> str:
        word = rng.choice(words if rng.random() > 1 / 6 else [*GOOD, *BAD, *FILLERS])
        return " ".join(rng.permutation([word, *rng.choice(FILLERS, rng.integers(1, most))]))

    files: dict[str, list[str]] = {}
    for task in ("MR", "CR", "SUBJ", "MPQA"):
        for file, words in zip(TASKS[task].files, (GOOD, BAD), strict=True):
            files[file] = [text(words) for _ in range(14)]
    for file in TASKS["SST2"].files:
        rows = [(text(words), label) for label, words in ((1, GOOD), (0, BAD)) for _ in range(60)]
        files[file] = [f"{row}\t{label}" for row, label in rows]
    for file in TASKS["TREC"].files:
        pairs = [("NUM:dist", GOOD), ("HUM:ind", BAD), ("ABBR:exp", ["lamp"])]
        files[file] = [f"{label} {text(words, 4)} ?" for label, words in pairs * 13]
    found = {file: "".join(f"{line}\n" for line in lines) for file, lines in files.items()}
    for file in TASKS["MRPC"].files:
        lines = ["\ufeffQuality\t#1 ID\t#2 ID\t#1 String\t#2 String"]
        for number in range(30):
            label, words = number % 2, text([*GOOD, *BAD, *FILLERS])
            lines.append(f"{label}\t{number}\t{number}\t{words}\t{words if label else text(GOOD)}")
        found[file] = "".join(f"{line}\r\n" for line in lines)
    return found
