#!/usr/bin/env bash
USAGE="usage: report.sh [--config=FILE] [--scale=base|small|tiny] [--to=FILE] [--dry_run]

Runs benchmarks on the slice for some minutes (benchmarks/report.py: the chips, training steps, the loss, encoding) and
copies the report, one file, to this machine. Ctrl-C ends the benchmarks and copies the results so far. Nothing else
may run on the slice.

  --scale=NAME   size of the benchmarks (default: depends on the chips)
  --to=FILE      path of the report on this machine (default: NAME-report.md, with the slice's NAME)
  --config=FILE  settings (default: config.sh in this script's folder; see config.example.sh)
  --dry_run      print the commands instead of running them

example:
  tpu_scripts/report.sh --config=my_slice.sh"
set -euo pipefail
# shellcheck source=tpu_scripts/lib.sh
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

scale="" to=""
own_flag() {
  case "$1" in
    --scale=base | --scale=small | --scale=tiny) scale=" $1" ;;
    --to=?*) to="${1#*=}" ;;
    *) return 1 ;;
  esac
}

JOB=report
worker="JAXIR_JOB=$JOB bash jaxir/tpu_scripts/worker.sh"

# The first worker's report covers all chips of the slice.
bring_back() { run_queued scp "$NAME:jaxir-report/report.md" "$to" --worker=0 --node=0; }

begun=false # whether the job has started; before, a report on the worker is from an earlier run
end_early() {
  trap - INT TERM
  say
  say "interrupted: ending the benchmarks and copying the results so far"
  on_all_workers "$worker stop" >/dev/null && "$begun" && bring_back && say "written: $to" || true
  describe_cost
  exit "$1"
}

parse_flags "$@"
load_config
: "${to:="$NAME-report.md"}"
# The command first removes the report of an earlier run.
measure="rm -f ../jaxir-report/report.md; exec python benchmarks/report.py --output=../jaxir-report/report.md$scale"
trap 'end_early 130' INT
trap 'end_early 143' TERM
on_all_workers "$worker start bash -c ${measure@Q}"
begun=true
if "$DRY_RUN"; then
  say "# repeat until no job is running:"
  job_states
  bring_back
  exit
fi
while true; do
  answered=true
  states="$(job_states)" || answered=false
  if "$answered" && [[ -n "$states" ]]; then
    [[ "$states" == *running* ]] || break
    silent=0
  elif ((++silent == PATIENCE)); then
    break
  fi
  pause
done
[[ -n "$states" && "$states" != *running* ]] ||
  fail "not all workers of $NAME answer: run this script again to continue waiting"
bring_back || fail "worker 0 has no report: see jaxir-report/log on that worker"
cat "$to"
say "written: $to"
describe_cost
"$answered" && [[ "$(sort -u <<<"$states")" == "exit 0" ]] || fail "some benchmarks failed: the report names them"
