"""Answers to questions: reference answers and generated ones."""

from __future__ import annotations

from pathlib import Path

from jaxir.data.formats.lines import (
    MalformedRecord,
    OddRecord,
    has_text,
    json_object,
    parsed_lines,
    string_field,
)


def read_answers(path: str | Path) -> dict[str, list[str]]:
    """Reads the reference answers of each query: lines of {"_id": query id, "answers": [text, ...]}.

    A line's `metadata` may hold the answers instead, as in the queries.jsonl of some BEIR folders. A query
    without an answer, or with two different lists of answers, is malformed.
    """
    found: dict[str, list[str]] = {}

    def parse(line: str, _: int) -> tuple[str, list[str]]:
        record = json_object(line)
        query_id, metadata = string_field(record, "_id"), record.get("metadata")
        default = metadata.get("answers") if isinstance(metadata, dict) else None
        answers = record.get("answers", default)
        if not isinstance(answers, list) or not all(isinstance(a, str) and has_text(a) for a in answers):
            raise MalformedRecord("'answers' is not a list of texts")
        if not answers:
            raise MalformedRecord(
                "'answers' is empty,", f"but a query is judged by its answers: {query_id!r}"
            )
        if query_id not in found:
            return query_id, answers
        if found[query_id] == answers:
            noted = "lines that repeat the answers of a query, left out"
            raise OddRecord("a query occurs twice:", repr(query_id), noted=noted)
        raise MalformedRecord("a query occurs twice:", f"{query_id!r}, with different answers")

    found.update(parsed_lines(path, parse, "stop"))
    return found


def read_written(path: str | Path) -> dict[str, str]:
    """Reads the first output of each query; "" for a query without outputs.

    Lines are as `jaxir.read` and `jaxir.expand generate` write them: {"_id": ..., "outputs": [text, ...]}.
    """
    found: dict[str, str] = {}

    def parse(line: str, _: int) -> tuple[str, str]:
        record = json_object(line)
        query_id, outputs = string_field(record, "_id"), record.get("outputs")
        if not isinstance(outputs, list) or not all(isinstance(text, str) for text in outputs):
            raise MalformedRecord("'outputs' is not a list of texts")
        if query_id in found:
            raise MalformedRecord("a query occurs twice:", repr(query_id))
        return query_id, outputs[0] if outputs else ""

    found.update(parsed_lines(path, parse, "stop"))
    return found
