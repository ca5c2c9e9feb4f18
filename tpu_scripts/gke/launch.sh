#!/usr/bin/env bash
USAGE="usage: gke/launch.sh [--config=FILE] [--dry_run]

Queues the settings' SETUP and TRAIN commands as a job on all machines of the cluster's slices. Stopped by a preemption,
the job is started again, at most MAX_RESTARTS times, and resumes from its last checkpoint; one that fails is not.

  --config=FILE  settings (default: config.sh in tpu_scripts; see config.example.sh there)
  --dry_run      print the commands instead of running them

example:
  tpu_scripts/gke/launch.sh --config=my_slice.sh && tpu_scripts/gke/logs.sh --config=my_slice.sh"
set -euo pipefail
# shellcheck source=tpu_scripts/gke/lib.sh
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

# Seconds from SIGTERM to SIGKILL, for a checkpoint; of a spot machine Google takes away less are left.
GRACE=300
# The status of a process whose companion is lost; that of one that got SIGTERM, 143, xpk knows.
LOST=75

parse_flags "$@"
load_gke_config xpk kubectl
# xpk runs the command in a subshell and sends SIGTERM to that: it must be training itself, which saves then. (Not
# every bash makes it so without "exec".)
command="exec$(printf ' %q' "${TRAIN[@]}")"
[[ -z "$SETUP" ]] || command="$(setup_command) && $command" # of one line: xpk writes it into YAML
xpk_on workload create --workload="$NAME" --tpu-type="$ACCELERATOR_TYPE" --num-slices="$SLICES" \
  --docker-image="$IMAGE" --max-restarts="$MAX_RESTARTS" --restart-on-exit-codes="$LOST" \
  --termination-grace-period-seconds="$GRACE" --command="$command"
