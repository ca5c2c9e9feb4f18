#!/usr/bin/env bash
USAGE="usage: launch.sh [--config=FILE] [--dry_run]

Starts the settings' TRAIN command on all workers, detached: the command continues when this script and the connection
end. Does nothing on workers that already run it. Training resumes from the last checkpoint in its output directory, if any.

  --config=FILE  settings (default: config.sh in this script's folder; see config.example.sh)
  --dry_run      print the commands instead of running them

example:
  tpu_scripts/launch.sh --config=my_slice.sh && tpu_scripts/logs.sh --config=my_slice.sh"
set -euo pipefail
# shellcheck source=tpu_scripts/lib.sh
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

parse_flags "$@"
load_config
explain_interrupts
start_on_workers
