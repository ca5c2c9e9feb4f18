#!/usr/bin/env bash
USAGE="usage: resume.sh [--config=FILE] [--watch] [--dry_run]

Starts or resumes training, whatever the state of the slice: requests the slice (again, if it was preempted),
installs, and starts the TRAIN command, which continues from its last checkpoint. A job that runs on all workers, or is
complete, is not restarted. A job that failed is not restarted either: fix the cause, then run launch.sh.

  --watch        keep running, and resume after each preemption until the job is complete
  --config=FILE  settings (default: config.sh in this script's folder; see config.example.sh)
  --dry_run      print the commands for a slice that was preempted instead of running them

example:
  tpu_scripts/resume.sh --config=my_slice.sh --watch"
set -euo pipefail
# shellcheck source=tpu_scripts/lib.sh
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

watch=false
own_flag() {
  [[ "$1" == --watch ]] || return 1
  watch=true
}

# verdict: prints the state of the job as a whole, from the states on its workers (one per line on stdin).
verdict() {
  local distinct
  distinct="$(sort -u)"
  case "$distinct" in
    "") echo unreachable ;;
    "exit 0") echo complete ;;
    *missing*) echo missing ;;
    *none* | *died* | *"exit 143"* | *"exit 130"* | *"exit 75"*) echo interrupted ;; # 75: another worker was lost
    *running*) echo running ;; # on all workers, or on some, which will soon end like the others
    *) echo failed ;;
  esac
}

# bring_back: makes one attempt to get the job running. The job must run on all workers: if it ends on one worker, the
# others wait for that worker or fail.
bring_back() {
  local state states
  poll_state || return 1
  case "$state" in
    ACTIVE)
      states="$(job_states)" || states=""
      case "$(verdict <<<"$states")" in
        running) return 0 ;;
        complete) complete=true ;;
        unreachable)
          say "the workers of $NAME cannot be reached; its state is $state"
          "$watch"
          ;;
        missing) stop_on_workers && install_on_workers && start_on_workers ;;
        interrupted) stop_on_workers && start_on_workers ;;
        failed)
          sort <<<"$states" | uniq -c >&2
          say "error: the job failed: run $SCRIPTS/logs.sh --config=${CONFIG@Q} to see why. $NAME still exists and costs money."
          exit 1
          ;;
      esac
      return
      ;;
    SUSPENDED)
      say "$NAME was preempted: requesting it again"
      delete_slice && create_slice || return 1
      ;;
    SUSPENDING)
      say "$NAME is being preempted"
      pause
      bring_back
      return
      ;;
    DELETING) wait_for ABSENT && create_slice || return 1 ;;
    ABSENT) create_slice || return 1 ;;
  esac
  wait_for ACTIVE && install_on_workers && start_on_workers
}

# may_retry: succeeds if the next attempt may succeed, because gcloud did not answer or the slice is being preempted.
may_retry() {
  local state=""
  if ((silent == 0)); then
    pause # a preempted slice may lose its machines some time before its state changes
    poll_state || true
  fi
  ((silent < PATIENCE)) || fail "gcloud does not report the state of $NAME, see above; run this again later"
  ((silent)) || [[ "$state" == @(SUSPENDING|SUSPENDED|DELETING) ]]
}

parse_flags "$@"
load_config
explain_interrupts
complete=false

if "$DRY_RUN"; then
  delete_slice
  create_slice
  wait_for ACTIVE
  install_on_workers
  start_on_workers
  exit
fi
silent=$((PATIENCE - 1)) # if the very first poll fails, fail at once
while true; do
  bring_back || { "$watch" && may_retry; } || exit 1
  if "$complete"; then
    say "the job is complete on all workers. $NAME still exists and costs money; delete it with" \
      "$SCRIPTS/delete.sh --config=${CONFIG@Q}"
    exit
  fi
  "$watch" || exit 0
  pause
done
