"""Small files in the formats of published data sets."""

import gzip
import json
from pathlib import Path


def write_lines(path: Path, lines: list[str]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    text = "".join(line + "\n" for line in lines)
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    return path


def write_msmarco(folder: Path) -> Path:
    write_lines(folder / "collection.tsv", [f"{i}\tPassage {i} on rivers – and banks." for i in range(6)])
    write_lines(
        folder / "queries.train.tsv", ["121352\tdefine river", "634306\twhat is a bank", "7\tunjudged"]
    )
    write_lines(folder / "qrels.train.tsv", ["121352\t0\t1\t1", "634306\t0\t4\t1", "634306\t0\t5\t1"])
    write_lines(folder / "queries.dev.small.tsv", ["1048585\twhere do rivers end"])
    write_lines(folder / "qrels.dev.small.tsv", ["1048585\t0\t3\t1"])
    write_lines(folder / "queries.eval.tsv", ["900\twithout judgements"])
    triples = ["121352\t1\t2", "121352\t1\t3", "121352\t1\t0", "634306\t4\t0", "634306\t5\t2"]
    write_lines(folder / "qidpidtriples.train.full.2.tsv.gz", triples)
    return folder


# The en dash is one character but three bytes; spans count characters.
LAKE = "The lake is 24–30 m deep. It froze in 1929 and again in 1963. Ferries cross it."
MILL = "A mill stands at its outlet."
NOTE = "[TLE] Weather [PAR] It froze in 1929."


def mrqa_lines() -> list[str]:
    def question(qid, text, *spans):
        answers = [{"text": "…", "char_spans": [list(s)], "token_spans": [[0, 0]]} for s in spans]
        rest = {"id": "x", "answers": ["…"], "question_tokens": [["When", 0]], "is_impossible": False}
        return {"qid": qid, "question": text, "detected_answers": answers, **rest}

    depth, first, second = LAKE.index("24–30"), LAKE.index("1929"), LAKE.index("1963")
    ferries, year = LAKE.index("Ferries"), NOTE.index("1929")
    lake = [question("a1", "How deep is the lake?", (depth, depth + 4))]
    lake.append(question("a2", "When did it freeze? ", (first, first + 3), (second, second + 3)))
    lake.append(question("a3", "What crosses it?", (ferries, ferries + 6)))
    lake.append(question("a4", "What is deep and froze?", (depth, first)))
    contexts = [
        {"id": "", "context": LAKE, "context_tokens": [["The", 0]], "qas": lake},
        # The question of a2 again, with an answer in another context.
        {"context": NOTE, "qas": [question("b1", "When did it freeze?", (year, year + 3))]},
        # MultiReQA dropped this context, because its text is the lake's again.
        {"context": LAKE, "qas": [question("c1", "In which year did it freeze first?", (first, first + 3))]},
        {"context": MILL, "qas": [question("d1", "What stands there?"), question("d2", "Where?", (2, 5))]},
    ]
    header = {"header": {"dataset": "SQuAD", "mrqa_split": "train"}}
    return [json.dumps(record) for record in (header, *contexts)]


def candidate_lines() -> list[str]:
    second, third = LAKE.index("It froze"), LAKE.index("Ferries")
    spans = [
        ("SQuAD_a1/a2/a3/a4/_0", 0, second - 1),
        ("SQuAD_a1/a2/a3/a4/_1", second, third - 1),
        ("SQuAD_a1/a2/a3/a4/_2", third, len(LAKE)),
        ("SQuAD_b1/_1", NOTE.index("It"), len(NOTE)),
    ]
    return [json.dumps({"candidate_id": i, "response_start": s, "response_end": e}) for i, s, e in spans]


def write_multireqa(folder: Path, split: str = "train", dataset: str = "SQuAD") -> tuple[Path, Path]:
    return (
        write_lines(folder / f"mrqa/{split}/{dataset}.jsonl.gz", mrqa_lines()),
        write_lines(folder / f"MultiReQA/data/{split}/{dataset}/candidates.json.gz", candidate_lines()),
    )


PAGE = (
    "Kettle - Wikipedia <H1> Kettle </H1> <P> A kettle boils water . </P> <Table> <Tr>"
    ' <Td_colspan="2"> Made since 1900 </Td> </Tr> </Table> <P> </P>'
)
PARAGRAPH, TABLE, EMPTY = (7, 14), (14, 22), (22, 24)


def nq_record(identifier: int, question: str, *answers: tuple[int, int]) -> dict:
    def span(start, end):
        return {"start_token": start, "end_token": end}

    places = ((PARAGRAPH, True), (TABLE, True), ((15, 21), False), (EMPTY, True))
    rest = {"yes_no_answer": "NONE", "short_answers": [], "annotation_id": 593165450220027640}
    return {
        "document_text": PAGE,
        "long_answer_candidates": [span(*place) | {"top_level": top} for place, top in places],
        "question_text": question,
        "annotations": [{"long_answer": span(*a) | {"candidate_index": 0}, **rest} for a in answers],
        "document_url": "https://en.wikipedia.org//w/index.php?title=Kettle&amp;oldid=1",
        "example_id": identifier,
    }


def nq_dev_record(identifier: int, question: str, *answers: tuple[int, int]) -> dict:
    record = nq_record(identifier, question, *answers)
    tokens = record.pop("document_text").split(" ")
    rest = {"start_byte": 0, "end_byte": 1}
    record["document_tokens"] = [{"token": t, "html_token": t.startswith("<"), **rest} for t in tokens]
    record |= {"document_title": "Kettle", "document_html": "<html>"}
    return record | {"question_tokens": question.split()}


def dpr_records() -> list[dict]:
    def passage(title, text, identifier):
        return {"title": title, "text": text, "score": 7.5, "title_score": 0, "passage_id": identifier}

    def record(question, answer, positive, negative, hard):
        found = {"dataset": "nq_train_psgs_w100", "question": question, "answers": [answer]}
        return found | {"positive_ctxs": positive, "negative_ctxs": negative, "hard_negative_ctxs": hard}

    kettle = passage("Kettle", 'A "kettle" boils\nwater [1].', "11")
    others = [passage("Pot", "A pot cooks soup.", "13"), passage("Pan", "A pan fries.", "14")]
    tea = [passage("Tea", "Tea came from Asia.", "15"), passage("Asia", "Tea grows there.", "16")]
    plant = [passage("Tea", "Tea is a plant.", "12")]
    return [
        record("what does a kettle do", "boils water", [kettle], plant, others),
        record("where is tea from", "Asia", tea, [], [kettle]),
    ]


def store_tfds(data_dir: Path, name: str, splits: dict[str, list[dict]]) -> None:
    """Writes examples in TFDS's format, so that its builder finds them."""
    import tensorflow_datasets as tfds

    builder = tfds.builder(name, data_dir=data_dir)
    Path(builder.data_dir).mkdir(parents=True)
    writer = tfds.core.SequentialWriter(builder.info, max_examples_per_shard=2)
    writer.initialize_splits(list(splits))
    writer.add_examples(splits)
    writer.close_all()
    assert tfds.builder(name, data_dir=data_dir).is_prepared()


def beir_row(query_id="", query="", passage_id="", passage="", score=-1.0, title=None) -> dict:
    metadata = {} if title is None else {"title": title}
    row = {"query_id": query_id, "query": query, "query_metadata": "{}", "score": score}
    return row | {"passage_id": passage_id, "passage": passage, "passage_metadata": json.dumps(metadata)}
