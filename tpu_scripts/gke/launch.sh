#!/usr/bin/env bash
USAGE="usage: gke/launch.sh [--config=FILE] [--dry_run]

Queues a job that runs the settings' SETUP and TRAIN commands on all machines of the cluster's slices. After a preemption,
the job is restarted (at most MAX_RESTARTS times) and resumes from its last checkpoint. A failed job is not restarted.

  --config=FILE  settings (default: config.sh in tpu_scripts; see config.example.sh there)
  --dry_run      print the commands instead of running them

example:
  tpu_scripts/gke/launch.sh --config=my_slice.sh && tpu_scripts/gke/logs.sh --config=my_slice.sh"
set -euo pipefail
# shellcheck source=tpu_scripts/gke/lib.sh
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

# Seconds between SIGTERM and SIGKILL, in which training saves a checkpoint. A preempted spot machine has less time.
GRACE=300
# Exit status of training when another worker is lost. xpk restarts such jobs, and by default those that SIGTERM ended (143).
LOST=75

parse_flags "$@"
load_gke_config xpk kubectl
# xpk sends SIGTERM to the subshell that runs the command. "exec" replaces the subshell by the training process, which
# then receives the signal and saves a checkpoint.
command="exec$(printf ' %q' "${TRAIN[@]}")"
[[ -z "$SETUP" ]] || command="$(setup_command) && $command" # one line, because xpk writes it into YAML
xpk_on workload create --workload="$NAME" --tpu-type="$ACCELERATOR_TYPE" --num-slices="$SLICES" \
  --docker-image="$IMAGE" --max-restarts="$MAX_RESTARTS" --restart-on-exit-codes="$LOST" \
  --termination-grace-period-seconds="$GRACE" --command="$command"
