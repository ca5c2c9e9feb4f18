#!/usr/bin/env bash
USAGE="usage: gke/create.sh [--config=FILE] [--dry_run]

Creates a GKE cluster with the settings' slices, using xpk, which also installs the queue that starts and restarts jobs.
If the cluster exists, it is updated.

  --config=FILE  settings (default: config.sh in tpu_scripts; see config.example.sh there)
  --dry_run      print the commands instead of running them

example:
  tpu_scripts/gke/create.sh --config=my_slice.sh"
set -euo pipefail
# shellcheck source=tpu_scripts/gke/lib.sh
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

parse_flags "$@"
load_gke_config xpk kubectl
explain_interrupts
case "$TIER" in
  spot) capacity=--spot ;;
  on_demand) capacity=--on-demand ;;
  reserved) capacity="--reservation=$RESERVATION" ;;
esac
xpk_on cluster create --tpu-type="$ACCELERATOR_TYPE" --num-slices="$SLICES" "$capacity"
describe_cost
