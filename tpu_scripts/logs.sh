#!/usr/bin/env bash
USAGE="usage: logs.sh [--config=FILE] [--worker=N] [--dry_run]

Prints the end of a worker's log and follows the log until Ctrl-C. The job is not interrupted.

  --worker=N     number of the worker, or --worker=all for the interleaved logs of all workers (default: 0)
  --config=FILE  settings (default: config.sh in this script's folder; see config.example.sh)
  --dry_run      print the commands instead of running them

example:
  tpu_scripts/logs.sh --config=my_slice.sh --worker=3"
set -euo pipefail
# shellcheck source=tpu_scripts/lib.sh
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

worker=0
own_flag() {
  [[ "$1" =~ ^--worker=([0-9]+|all)$ ]] || return 1
  worker="${BASH_REMATCH[1]}"
}

parse_flags "$@"
load_config
explain_interrupts
run_queued ssh "$NAME" --worker="$worker" --node=0 --command="tail -n 100 -F jaxir-run/log"
