"""Answers to questions typed by a person."""

from __future__ import annotations

import contextlib
import io
import sys
import textwrap

from jaxir.retrieval.searcher import Searcher

SNIPPET = 160  # characters


def answer(searcher: Searcher, question: str, k: int) -> str:
    """Returns the best `k` documents as lines of text: rank, score, name; id and snippet below."""
    scores, ids = searcher.search([question], k)
    documents = searcher.index.documents
    lines = []
    for rank, (score, doc_id) in enumerate(zip(scores[0], ids[0], strict=False), start=1):
        name, snippet = doc_id, ""
        if documents is not None:
            document = documents[doc_id]
            if document.title:
                name = f"{document.title}  [{doc_id}]" if document.title != doc_id else doc_id
            snippet = textwrap.shorten(document.text[: 2 * SNIPPET], SNIPPET, placeholder=" ...")
        lines.append(f"{rank:3d}  {score:.4f}  {name}")
        if snippet:
            lines.append(" " * 13 + snippet)
    return "\n".join(lines) or "nothing found"


def converse(searcher: Searcher, k: int) -> None:
    """Answers each line of standard input until it ends or the user interrupts; prompts on a terminal."""
    prompt = ""
    if sys.stdin.isatty():
        import readline  # noqa: F401  (its import gives `input` line editing and history)

        print(f"{searcher.index.info.count:,} documents; type a question, or Ctrl-D to leave")
        prompt = "question> "
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="replace")
    with contextlib.suppress(EOFError, KeyboardInterrupt):
        while True:
            question = input(prompt).strip()
            if question:
                if not prompt:
                    print(question)
                print(answer(searcher, question, k), flush=True)
                print()
    if prompt:
        print()
