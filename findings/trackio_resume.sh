#!/usr/bin/env bash
# trackio 0.43.0 keeps both versions of a step that a resumed run logs again, and drops the config of the first start.
# A training run that stops at step 4 and resumes from its checkpoint of step 2 logs steps 3 and 4 twice. The history
# then holds two values for each, in order of time, so a mean, a maximum or a plot over it counts the lost work, too.
# The config of the second init() replaces the first one: settings that it does not repeat are gone.
# The name alone decides which run goes on: resume="allow" takes the newest run of that name, and resume="must"
# raises for a run that has logged nothing. The doubled rows and the lost settings are not reported.
# What to do: keep the last row of each step when you read a history, pass the whole config, and use unique names.
# Exits 0 if that is still so, 1 if the behaviour has changed, 2 if the packages cannot be installed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv" || exit 2
"$folder/venv/bin/python" -m pip install --quiet --disable-pip-version-check trackio==0.43.0 || exit 2
cat >"$folder/show.py" <<'PYTHON'
import contextlib
import io

import trackio
from trackio.sqlite_storage import SQLiteStorage


def log(name, losses, **settings):
    with contextlib.redirect_stdout(io.StringIO()):
        run = trackio.init(project="training", name=name, embed=False, auto_log_gpu=False, **settings)
        for step, loss in losses.items():
            trackio.log({"loss": loss}, step=step)
        trackio.finish()
    return run.id


print("trackio", trackio.__version__)
first = log("a", {1: 0.9, 2: 0.8, 3: 0.7, 4: 0.6}, config={"lr": 1e-5, "seed": 1})
second = log("a", {3: 0.75, 4: 0.65, 5: 0.5}, config={"lr": 1e-5}, resume="allow")
rows = [(row["step"], row["loss"]) for row in SQLiteStorage.get_logs("training", run_id=first)]
config = {key: value for key, value in trackio.Api().runs("training")[0].config.items() if key[0] != "_"}
print(f"same run: {first == second}; rows: {rows}; config: {config}")
newer = log("a", {1: 0.9})
print(f'a new run of the same name: {newer != first}; resume="allow" takes it: {newer == log("a", {}, resume="allow")}')
log("no rows", {}, config={"lr": 1e-5})
try:
    log("no rows", {}, resume="must")
    print("a run without rows is found")
except ValueError:
    print("a run without rows is not found")
PYTHON
TRACKIO_DIR="$folder/trackio" "$folder/venv/bin/python" "$folder/show.py" 2>/dev/null | tee "$folder/seen"
cat >"$folder/expected" <<'TEXT'
trackio 0.43.0
same run: True; rows: [(1, 0.9), (2, 0.8), (3, 0.7), (4, 0.6), (3, 0.75), (4, 0.65), (5, 0.5)]; config: {'lr': 1e-05}
a new run of the same name: True; resume="allow" takes it: True
a run without rows is not found
TEXT
diff "$folder/expected" "$folder/seen" && echo "as described"
