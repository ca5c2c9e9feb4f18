#!/usr/bin/env bash
USAGE="usage: status.sh [--config=FILE] [--dry_run]

Prints the state of the queued resource and of the job on each worker.

  --config=FILE  settings (default: config.sh in this script's folder; see config.example.sh)
  --dry_run      print the commands instead of running them

example:
  tpu_scripts/status.sh --config=my_slice.sh"
set -euo pipefail
# shellcheck source=tpu_scripts/lib.sh
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

parse_flags "$@"
load_config
if "$DRY_RUN"; then
  slice_state
  job_states
  exit
fi
state="$(slice_state)"
echo "$NAME ($SLICES x $ACCELERATOR_TYPE, $TIER, $ZONE): $state"
if [[ "$state" == ACTIVE ]]; then
  job_states | sort | uniq -c | sed 's/^ *\([0-9]*\) \(.*\)/  \1 workers: \2/'
fi
