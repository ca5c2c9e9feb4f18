#!/usr/bin/env bash
USAGE="usage: gke/logs.sh [--config=FILE] [--worker=N] [--dry_run]

Prints the end of the log of a machine in the first slice and follows the log until Ctrl-C. The job is not interrupted.

  --worker=N     number of the machine, or --worker=all for all machines of all slices, named on each line (default: 0)
  --config=FILE  settings (default: config.sh in tpu_scripts; see config.example.sh there)
  --dry_run      print the commands instead of running them

example:
  tpu_scripts/gke/logs.sh --config=my_slice.sh --worker=3"
set -euo pipefail
# shellcheck source=tpu_scripts/gke/lib.sh
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

worker=0
own_flag() {
  [[ "$1" =~ ^--worker=([0-9]+|all)$ ]] || return 1
  worker="${BASH_REMATCH[1]}"
}

parse_flags "$@"
load_gke_config kubectl
explain_interrupts
pods="jobset.sigs.k8s.io/jobset-name=$NAME" mixed=()
if [[ "$worker" == all ]]; then
  mixed=(--prefix --max-log-requests=1000)
else
  pods+=",jobset.sigs.k8s.io/job-index=0,batch.kubernetes.io/job-completion-index=$worker"
fi
run gcloud container clusters get-credentials "$CLUSTER" --location="$REGION" --project="$PROJECT" --dns-endpoint
run kubectl logs --selector="$pods" --tail=100 --follow "${mixed[@]}"
