#!/usr/bin/env bash
USAGE="usage: fetch.sh [--config=FILE] [--to=DIRECTORY] [--dry_run]

Fetches the logs of a run: log.jsonl and tensorboard/ with the traces of --profile_steps from its bucket, and the output
of the workers, if the slice is active (workers.log, each line with its machine). If not all workers answer, an earlier
workers.log is kept. The run continues.

  --to=DIRECTORY  output directory (default: the slice's NAME); earlier files are overwritten
  --config=FILE   settings (default: config.sh beside this script; see config.example.sh)
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
      say "warning: not all workers answered: $to/workers.log is from an earlier time, $to/workers.part has the others"
    else
      mv "$to/workers.part" "$to/workers.log"
      say "warning: not all workers answered: $to/workers.log lacks some"
    fi
  else
    say "note: $NAME is $state, so no worker has a log"
  fi
fi
# The bucket has logs from the first checkpoint on.
run gcloud storage cp --recursive "$RUN_DIR/log.jsonl" "$RUN_DIR/tensorboard" "$to" --project="$PROJECT"
"$DRY_RUN" || say "in $to: xprof ${to@Q}/tensorboard shows traces, tensorboard --logdir=${to@Q}/tensorboard the curves"
