#!/usr/bin/env bash
USAGE="usage: gke/status.sh [--config=FILE] [--dry_run]

Prints the state of the job: how many machines it needs, how many run it, and why it waits, if it does.

  --config=FILE  settings (default: config.sh in tpu_scripts; see config.example.sh there)
  --dry_run      print the commands instead of running them

example:
  tpu_scripts/gke/status.sh --config=my_slice.sh"
set -euo pipefail
# shellcheck source=tpu_scripts/gke/lib.sh
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

parse_flags "$@"
load_gke_config xpk kubectl
xpk_on workload list --filter-by-job="$NAME" # lists all jobs with NAME in their names
