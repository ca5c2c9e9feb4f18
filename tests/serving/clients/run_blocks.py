"""Runs blocks of Python in the environment of the clients.

Reads a JSON list of blocks from standard input, and writes a JSON list of what each printed.
"""

import contextlib
import io
import json
import sys
import traceback

outputs = []
for block in json.load(sys.stdin):
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        try:
            exec(compile(block, "block", "exec"), {"__name__": "__main__"})
        except Exception:
            printed.write(traceback.format_exc())
    outputs.append(printed.getvalue())
json.dump(outputs, sys.stdout)
