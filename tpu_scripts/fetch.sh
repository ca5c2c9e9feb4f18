#!/usr/bin/env bash
USAGE="usage: fetch.sh [--config=FILE] [--to=DIRECTORY] [--dry_run]

Copies the logs of a run to this machine: from its bucket log.jsonl and tensorboard/ (with the traces of --profile_steps),
and, if the slice is active, the output of all workers (workers.log, each line with the machine's name). If not all
workers answer, an earlier workers.log is kept. The run is not interrupted.

  --to=DIRECTORY  output directory (default: the slice's NAME); existing files are overwritten
  --config=FILE   settings (default: config.sh in this script's folder; see config.example.sh)
  --dry_run       print the commands instead of running them

example:
  tpu_scripts/fetch.sh --config=my_slice.sh --to=samtone && xprof samtone/tensorboard"
set -euo pipefail
# shellcheck source=tpu_scripts/lib.sh
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

to=""
own_flag() {
  [[ "$1" == --to=?* ]] || return 1
  to="${1#*=}"
}

parse_flags "$@"
load_config
: "${to:="$NAME"}"
print_logs="sed \"s/^/\$(hostname): /\" jaxir-run/log"
if "$DRY_RUN"; then
  slice_state
  on_all_workers "$print_logs"
else
  mkdir -p "$to"
  state="$(slice_state)"
  if [[ "$state" == ACTIVE ]]; then
    if on_all_workers "$print_logs" >"$to/workers.part"; then
      mv "$to/workers.part" "$to/workers.log"
    elif [[ -s "$to/workers.log" ]]; then
      say "warning: not all workers answered: $to/workers.log is from an earlier fetch, $to/workers.part has the answers of this fetch"
    else
      mv "$to/workers.part" "$to/workers.log"
      say "warning: not all workers answered: $to/workers.log lacks the logs of some; run this again"
    fi
  else
    say "note: $NAME is $state, so no worker has a log"
  fi
fi
# The run writes its logs to the bucket from the first checkpoint on.
run gcloud storage cp --recursive "$RUN_DIR/log.jsonl" "$RUN_DIR/tensorboard" "$to" --project="$PROJECT"
"$DRY_RUN" || say "copied to $to: xprof ${to@Q}/tensorboard shows traces, tensorboard --logdir=${to@Q}/tensorboard shows curves"
