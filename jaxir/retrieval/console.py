"""Answers to questions typed by a person."""

from __future__ import annotations

import contextlib
import io
import sys
import textwrap

from jaxir.retrieval.dual_encoder import DualEncoder
from jaxir.retrieval.index import Index

SNIPPET = 160  # characters


def answer(index: Index, encoder: DualEncoder, question: str, k: int) -> str:
    """Returns the best `k` documents as lines of text: rank, score, name; id and snippet below."""
    scores, ids = index.search(encoder.encode_queries([question], show_progress=False), k)
    lines = []
    for rank, (score, doc_id) in enumerate(zip(scores[0], ids[0], strict=False), start=1):
        name, snippet = doc_id, ""
        if index.documents is not None:
            document = index.documents[doc_id]
            if document.title:
                name = f"{document.title}  [{doc_id}]" if document.title != doc_id else doc_id
            snippet = textwrap.shorten(document.text[: 2 * SNIPPET], SNIPPET, placeholder=" ...")
        lines.append(f"{rank:3d}  {score:.4f}  {name}")
        if snippet:
            lines.append(" " * 13 + snippet)
    return "\n".join(lines)


def converse(index: Index, encoder: DualEncoder, k: int) -> None:
    """Answers each line of standard input until it ends or the user interrupts; prompts on a terminal."""
    prompt = ""
    if sys.stdin.isatty():
        import readline  # noqa: F401  (its import gives `input` line editing and history)

        print(f"{index.info.count:,} documents; type a question, or Ctrl-D to leave")
        prompt = "question> "
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="replace")
    with contextlib.suppress(EOFError, KeyboardInterrupt):
        while True:
            question = input(prompt).strip()
            if question:
                if not prompt:
                    print(question)
                print(answer(index, encoder, question, k), flush=True)
                print()
    if prompt:
        print()
