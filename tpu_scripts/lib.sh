# Functions that the scripts of tpu_scripts/ share. Set USAGE before sourcing this file.
# shellcheck shell=bash

SCRIPTS="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
ROOT="$(dirname "$SCRIPTS")"
CONFIG="$SCRIPTS/config.sh"
DRY_RUN=false
POLL_SECONDS="${POLL_SECONDS:-30}"
# shellcheck disable=SC2034  # for resume.sh and report.sh
PATIENCE=10 # number of consecutive polls without an answer after which a script fails
silent=0    # current number of consecutive polls without an answer
JOB=""

say() { printf '%s\n' "$*" >&2; }

fail() {
  say "error: $*"
  exit 1
}

# parse_flags ARGS: handles the flags that all scripts have; calls own_flag for any other flag.
parse_flags() {
  local flag
  for flag in "$@"; do
    case "$flag" in
      --help | -h)
        printf '%s\n' "$USAGE"
        exit 0
        ;;
      --config=*) CONFIG="${flag#*=}" ;;
      --dry_run) DRY_RUN=true ;;
      *) own_flag "$flag" || fail "unknown flag $flag (see $(basename "$0") --help)" ;;
    esac
  done
}

own_flag() { return 1; } # scripts with flags of their own redefine this function

load_config() {
  [[ -f "$CONFIG" ]] || fail "there is no settings file $CONFIG: copy $SCRIPTS/config.example.sh there and fill it in"
  local name word file="$CONFIG"
  [[ "$file" == */* ]] || file="./$file" # for a name without a slash, source searches the PATH first
  # shellcheck source=tpu_scripts/config.example.sh
  source "$file"
  for name in PROJECT ZONE NAME ACCELERATOR_TYPE TIER; do
    [[ -n "${!name:-}" ]] || fail "$CONFIG does not set $name (see $SCRIPTS/config.example.sh)"
  done
  [[ "$NAME" =~ ^[a-z]([-a-z0-9]{0,40}[a-z0-9])?$ ]] ||
    fail "$CONFIG: NAME must be lower-case letters, digits and '-', a letter first, not '$NAME'"
  [[ "${SLICES:=1}" =~ ^[1-9][0-9]*$ ]] || fail "$CONFIG: SLICES must be 1 or more, not '$SLICES'"
  case "$TIER" in
    spot | on_demand | reserved) ;;
    *) fail "$CONFIG: TIER must be spot, on_demand or reserved, not '$TIER'" ;;
  esac
  [[ -n "${TRAIN[*]:-}" ]] || fail "$CONFIG does not set TRAIN, the command to run"
  [[ "$(declare -p TRAIN)" == "declare -a"* ]] ||
    fail "$CONFIG: TRAIN must be an array with its words in parentheses: TRAIN=(python -m jaxir.train ...)"
  RUN_DIR=""
  for word in "${TRAIN[@]}"; do
    [[ "$word" != --output_dir=* ]] || RUN_DIR="${word#*=}"
  done
  RUN_DIR="${RUN_DIR%"${RUN_DIR##*[!/]}"}" # remove final slashes: in a bucket, RUN//log.jsonl is not RUN/log.jsonl
  [[ "$RUN_DIR" == gs://* ]] || fail "$CONFIG: TRAIN must have a word --output_dir=gs://...: a slice's disks are" \
    "deleted with the slice, so a run on them could not resume"
  : "${VALID_UNTIL:=}" "${EXTRAS:=tpu}" "${SETUP:=}"
  if [[ -z "${RUNTIME_VERSION:-}" ]]; then
    case "$ACCELERATOR_TYPE" in
      v2-* | v3-* | v4-*) RUNTIME_VERSION=tpu-ubuntu2204-base ;;
      v5litepod-*) RUNTIME_VERSION=v2-alpha-tpuv5-lite ;;
      v5p-*) RUNTIME_VERSION=v2-alpha-tpuv5 ;;
      v6e-*) RUNTIME_VERSION=v2-alpha-tpuv6e ;;
      *) fail "$CONFIG: unknown accelerator type '$ACCELERATOR_TYPE': also set RUNTIME_VERSION, the TPU software version" ;;
    esac
  fi
  "$DRY_RUN" || command -v gcloud >/dev/null ||
    fail "gcloud is not installed, or not on the PATH: see https://cloud.google.com/sdk/docs/install"
}

# run COMMAND...: prints the command, quoted for a shell, and runs it unless this is a dry run.
run() {
  local shown
  shown="$(printf '%q ' "$@")"
  if "$DRY_RUN"; then
    printf '%s\n' "${shown% }"
  else
    say "+ ${shown% }"
    "$@"
  fi
}

# queued VERB ARGS...: runs "gcloud compute tpus queued-resources VERB" without printing it; a dry run only prints it.
queued() {
  local verb="$1"
  shift
  if "$DRY_RUN"; then
    run_queued "$verb" "$@"
  else
    gcloud compute tpus queued-resources "$verb" "$@" --project="$PROJECT" --zone="$ZONE" --quiet
  fi
}

run_queued() {
  local verb="$1"
  shift
  run gcloud compute tpus queued-resources "$verb" "$@" --project="$PROJECT" --zone="$ZONE" --quiet
}

# slice_state: prints the queued resource's state, or ABSENT; if gcloud fails, prints gcloud's message and fails. A dry
# run prints the command instead.
slice_state() {
  local out err status=0
  err="$(mktemp)"
  out="$(queued describe "$NAME" --format='value(state.state)' 2>"$err")" || status=$?
  if ((status)) && grep -q NOT_FOUND "$err"; then
    out=ABSENT status=0
  fi
  ((status == 0)) || cat "$err" >&2
  rm -f "$err"
  printf '%s\n' "$out"
  return "$status"
}

# poll_state: sets $state to the queued resource's state; if gcloud does not report a state, increments $silent and fails.
poll_state() {
  if state="$(slice_state)"; then
    silent=0
  else
    ((silent += 1))
    return 1
  fi
}

# on_all_workers COMMAND: runs a shell command on every worker of every slice. The command must print a line.
on_all_workers() {
  local out status=0
  if "$DRY_RUN"; then
    run_queued ssh "$NAME" --worker=all --node=all --command="$1"
    return
  fi
  out="$(run_queued ssh "$NAME" --worker=all --node=all --command="$1")" || status=$?
  printf '%s\n' "$out"
  # gcloud exits with 0 even if it could not connect to any worker.
  if [[ "$status" == 0 && -z "$out" ]]; then
    say "error: no worker of $NAME answered: run this again when its state is ACTIVE (see status.sh)"
    return 1
  fi
  return "$status"
}

# describe_cost: prints which resources exist and cost money; used when a script is interrupted.
describe_cost() {
  local state
  if "$DRY_RUN"; then
    return
  fi
  state="$(slice_state 2>/dev/null)" || state="in a state that gcloud does not report"
  if [[ "$state" == ABSENT ]]; then
    say "Nothing exists: there is no queued resource $NAME in $ZONE."
  else
    say "Queued resource $NAME ($SLICES x $ACCELERATOR_TYPE, $TIER, $ZONE) is $state: it costs money from ACTIVE on," \
      "until you run $SCRIPTS/delete.sh --config=${CONFIG@Q}"
  fi
}

explain_interrupts() {
  trap 'trap - INT TERM; say; say "interrupted."; describe_cost; exit 130' INT
  trap 'trap - INT TERM; say "terminated."; describe_cost; exit 143' TERM
}

pause() { # sleeps in the background, because signals interrupt "wait" at once, but not "sleep"
  sleep "$POLL_SECONDS" >/dev/null 2>&1 &
  wait $!
}

create_slice() {
  local flags=(--accelerator-type="$ACCELERATOR_TYPE" --runtime-version="$RUNTIME_VERSION")
  if ((SLICES == 1)); then
    flags+=(--node-id="$NAME")
  else
    flags+=(--node-count="$SLICES" --node-prefix="$NAME")
  fi
  case "$TIER" in
    spot) flags+=(--spot) ;;
    reserved) flags+=(--reserved) ;;
  esac
  [[ -z "$VALID_UNTIL" ]] || flags+=(--valid-until-duration="$VALID_UNTIL")
  run_queued create "$NAME" "${flags[@]}" --async
}

# wait_for STATE: waits until the queued resource has this state; fails if the state can no longer be reached.
wait_for() {
  local wanted="$1" state last=""
  if "$DRY_RUN"; then
    say "# repeat until the state is $wanted:"
    run_queued describe "$NAME" --format='value(state.state)'
    return
  fi
  while true; do
    poll_state || return 1
    [[ "$state" == "$last" ]] || say "$NAME is $state"
    last="$state"
    [[ "$state" != "$wanted" ]] || return 0
    case "$wanted:$state" in
      ABSENT:*) ;;
      *:ABSENT | *:FAILED | *:SUSPENDED | *:DELETING)
        queued describe "$NAME" --format='yaml(state)' >&2 || true
        say "error: $NAME is $state and will not become $wanted; delete it with" \
          "$SCRIPTS/delete.sh --config=${CONFIG@Q}"
        return 1
        ;;
    esac
    pause
  done
}

delete_slice() {
  run_queued delete "$NAME" --force --async || return 1
  wait_for ABSENT
}

archive_commit() { # writes the checkout's last commit to the file $ARCHIVE
  ARCHIVE="${TMPDIR:-/tmp}/jaxir-$NAME.tar.gz"
  [[ -z "$(git -C "$ROOT" status --porcelain --untracked-files=no)" ]] ||
    say "note: the checkout has uncommitted changes; the workers get the last commit, without these changes"
  run git -C "$ROOT" archive --format=tar.gz --output="$ARCHIVE" HEAD
}

# check_idle: fails if a job runs on a worker. A worker without an installation has no job.
check_idle() {
  local check="for job in run report; do"
  check+=" if JAXIR_JOB=\$job bash jaxir/tpu_scripts/worker.sh status 2>/dev/null | grep -q running; then"
  check+=" echo \"error: \$(hostname): a job runs: stop it first, on all workers:"
  check+=" JAXIR_JOB=\$job bash jaxir/tpu_scripts/worker.sh stop\" >&2; exit 1; fi; done; echo \"\$(hostname): idle\""
  on_all_workers "$check"
}

# install_on_workers: installs the last commit on all workers; fails if a job runs, because jobs read the checkout and its data.
install_on_workers() {
  local unpack
  check_idle && archive_commit || return 1
  run_queued scp "$ARCHIVE" "$NAME:jaxir.tar.gz" --worker=all --node=all || return 1
  unpack="mkdir -p jaxir && find jaxir -mindepth 1 -maxdepth 1 ! -name .venv -exec rm -rf {} +"
  unpack+=" && tar -xzf jaxir.tar.gz -C jaxir && bash jaxir/tpu_scripts/worker.sh install $EXTRAS"
  [[ -z "$SETUP" ]] || unpack+=" && cd jaxir && $(setup_command)"
  on_all_workers "$unpack"
}

# setup_command: prints SETUP as one command on one line, even if it has several lines or ends in ";" or a comment.
setup_command() { printf 'eval %q' "$SETUP"; }

start_on_workers() {
  local command
  command="$(printf ' %q' "${TRAIN[@]}")"
  on_all_workers "bash jaxir/tpu_scripts/worker.sh start$command"
}

stop_on_workers() {
  local worker=jaxir/tpu_scripts/worker.sh
  on_all_workers "if [ -e $worker ]; then bash $worker stop; else echo nothing to stop; fi"
}

# job_states: prints the state on each worker of job JOB (default: run), one per line: missing, none, running, died,
# or "exit N".
job_states() {
  local command="${JOB:+JAXIR_JOB=$JOB }bash jaxir/tpu_scripts/worker.sh status || echo jaxir-job missing"
  queued ssh "$NAME" --worker=all --node=all --command="$command" | sed -n 's/^jaxir-job //p; /^gcloud /p'
}
