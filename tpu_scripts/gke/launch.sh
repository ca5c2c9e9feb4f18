#!/usr/bin/env bash
USAGE="usage: gke/launch.sh [--config=FILE] [--dry_run]

Queues the settings' SETUP and TRAIN commands as a job on all machines of the cluster's slices. After a preemption, the
job is started again, at most MAX_RESTARTS times, and resumes from its last checkpoint. A failed job is not restarted.

  --config=FILE  settings (default: config.sh in tpu_scripts; see config.example.sh there)
  --dry_run      print the commands instead of running them

example:
  tpu_scripts/gke/launch.sh --config=my_slice.sh && tpu_scripts/gke/logs.sh --config=my_slice.sh"
set -euo pipefail
# shellcheck source=tpu_scripts/gke/lib.sh
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

# Seconds from SIGTERM to SIGKILL, to save a checkpoint. A preempted spot machine has less.
GRACE=300
# Exit status of training when another worker is lost. xpk restarts status 143 (SIGTERM) by default.
LOST=75

parse_flags "$@"
load_gke_config xpk kubectl
# xpk sends SIGTERM to the subshell that runs the command. "exec" makes training that process, so that it saves a
# checkpoint.
command="exec$(printf ' %q' "${TRAIN[@]}")"
[[ -z "$SETUP" ]] || command="$(setup_command) && $command" # one line, because xpk writes it into YAML
xpk_on workload create --workload="$NAME" --tpu-type="$ACCELERATOR_TYPE" --num-slices="$SLICES" \
  --docker-image="$IMAGE" --max-restarts="$MAX_RESTARTS" --restart-on-exit-codes="$LOST" \
  --termination-grace-period-seconds="$GRACE" --command="$command"
