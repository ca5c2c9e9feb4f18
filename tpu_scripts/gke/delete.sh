#!/usr/bin/env bash
USAGE="usage: gke/delete.sh [--config=FILE] [--job] [--dry_run]

Deletes the cluster with its slices and all jobs on them. Buckets and images are not changed.

  --job          delete only the job; the cluster is kept and costs money
  --config=FILE  settings (default: config.sh in tpu_scripts; see config.example.sh there)
  --dry_run      print the commands instead of running them

example:
  tpu_scripts/gke/delete.sh --config=my_slice.sh"
set -euo pipefail
# shellcheck source=tpu_scripts/gke/lib.sh
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

job=false
own_flag() {
  [[ "$1" == --job ]] || return 1
  job=true
}

parse_flags "$@"
load_gke_config xpk kubectl
explain_interrupts
if "$job"; then
  xpk_on workload delete --workload="$NAME" --force --quiet
else
  xpk_on cluster delete --force --quiet
fi
describe_cost
