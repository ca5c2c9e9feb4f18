#!/usr/bin/env bash
# Runs on each worker, from the home directory: `bash jaxir/tpu_scripts/worker.sh VERB`. The verbs:
#   install EXTRAS     creates .venv in the checkout, with jaxir and EXTRAS (such as "tpu")
#   start COMMAND...   runs COMMAND in the checkout, detached, unless the job runs already; output goes to jaxir-run/log
#   status             prints "jaxir-job none|running|died|exit N"
#   stop               ends the command: SIGTERM (training saves a checkpoint), after two minutes SIGKILL
# JAXIR_JOB=NAME in the environment selects another job, with the directory jaxir-NAME instead of jaxir-run. Only one job
# may run at a time, because it uses all chips.
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
run="$HOME/jaxir-${JAXIR_JOB:-run}"

# alive [DIRECTORY]: succeeds if the job runs. Its processes are a group, whose id is in jaxir-run/pid. The command line
# is compared, too, because after a reboot another process may have the same id.
alive() {
  local of="${1:-$run}"
  [[ -f "$of/pid" && ! -f "$of/exit_status" ]] && grep -qsF "$of/exit_status" "/proc/$(<"$of/pid")/cmdline"
}

install() {
  local uv
  uv="$(command -v uv || true)"
  if [[ -z "$uv" ]]; then # uv installs Python 3.11, because the image's Python is too old
    python3 -m pip install --quiet --user uv
    uv="$(python3 -m site --user-base)/bin/uv"
  fi
  "$uv" venv --quiet --allow-existing --python 3.11 .venv
  "$uv" pip install --quiet --python .venv/bin/python --constraint constraints.txt --editable ".[$1]"
  printf '%s: installed\n' "$(hostname)"
}

# in_turn start|stop: runs one of them under a lock, so that stop finds the process id that start writes.
in_turn() {
  mkdir -p "$run"
  (
    flock --wait 30 9 || true
    "$@"
  ) 9>"$run/lock"
}

start() {
  local other
  if alive; then
    printf '%s: already running\n' "$(hostname)"
    return
  fi
  for other in "$HOME"/jaxir-*/pid; do
    if alive "${other%/pid}"; then
      printf 'error: %s: the job %s runs and uses the chips: stop it first\n' "$(hostname)" "$(basename "${other%/pid}")" >&2
      exit 1
    fi
  done
  [[ -x .venv/bin/python ]] || {
    printf 'error: %s: nothing is installed: run install.sh first\n' "$(hostname)" >&2
    exit 1
  }
  rm -f "$run/exit_status" "$run/pid"
  printf -- '--- %s: %s\n' "$(date -u +%FT%TZ)" "$*" >>"$run/log"
  # A signal to the process group ends the command. This shell ignores the signal and writes the command's exit status.
  # shellcheck disable=SC2016
  PATH="$PWD/.venv/bin:$PATH" setsid nohup bash -c '
    "$@" 9>&- &
    trap : TERM INT # set after the fork, because the child would inherit the traps
    echo $$ >"${0%/*}/pid"
    exec 9>&-
    status=0
    while true; do
      wait $! && status=0 || status=$?
      kill -0 $! 2>/dev/null || break
    done
    echo "$status" >"$0.part" && mv "$0.part" "$0"
  ' "$run/exit_status" "$@" >>"$run/log" 2>&1 </dev/null &
  until alive || [[ -f "$run/exit_status" ]] || ! kill -0 $! 2>/dev/null; do sleep 0.05; done
  printf '%s: started\n' "$(hostname)"
}

status() {
  if alive; then
    echo "jaxir-job running"
  elif [[ -f "$run/exit_status" ]]; then
    echo "jaxir-job exit $(<"$run/exit_status")"
  elif [[ -f "$run/pid" ]]; then
    echo "jaxir-job died"
  else
    echo "jaxir-job none"
  fi
}

stop() {
  local group waited
  if alive; then
    group="$(<"$run/pid")"
    kill -TERM -- "-$group"
    for ((waited = 0; waited < 240; waited++)); do
      alive || break
      sleep 0.5
    done
    if alive; then kill -KILL -- "-$group"; fi
  fi
  printf '%s: stopped\n' "$(hostname)"
}

verb="${1:-}"
case "$verb" in
  install | status)
    shift
    "$verb" "$@"
    ;;
  start | stop)
    shift
    in_turn "$verb" "$@"
    ;;
  *)
    echo "error: expected worker.sh install|start|status|stop, not '$verb'" >&2
    exit 2
    ;;
esac
