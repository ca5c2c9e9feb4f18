# Functions that the scripts of tpu_scripts/gke/ share, in addition to ../lib.sh. Set USAGE before sourcing this file.
# shellcheck shell=bash

# shellcheck source=tpu_scripts/lib.sh
source "$(dirname "${BASH_SOURCE[0]}")/../lib.sh"
HERE="$SCRIPTS/gke"

# load_gke_config TOOL...: loads the settings and checks that gcloud and these tools are installed.
load_gke_config() {
  local tool
  load_config
  : "${CLUSTER:=$NAME}" "${IMAGE:=}" "${RESERVATION:=}" "${MAX_RESTARTS:=50}"
  # shellcheck disable=SC2034  # for the scripts
  REGION="${ZONE%-*}"
  [[ "$IMAGE" == *.pkg.dev/*/*/* ]] ||
    fail "$CONFIG: IMAGE must be in an Artifact Registry: REGION-docker.pkg.dev/PROJECT/REPOSITORY/NAME, not '$IMAGE'"
  [[ "$MAX_RESTARTS" =~ ^[0-9]+$ ]] || fail "$CONFIG: MAX_RESTARTS must be a whole number, not '$MAX_RESTARTS'"
  [[ "$TIER" != reserved || -n "$RESERVATION" ]] || fail "$CONFIG: TIER=reserved requires RESERVATION=NAME of a reservation"
  IMAGE+=":$(git -C "$ROOT" rev-parse --short=12 HEAD)"
  for tool in "$@"; do
    "$DRY_RUN" || command -v "$tool" >/dev/null ||
      fail "$tool is not installed, or not on the PATH: see docs/tpu_pods.md#on-gke"
  done
}

# xpk_on KIND VERB ARGS...: runs xpk on the cluster.
xpk_on() {
  local kind="$1" verb="$2"
  shift 2
  run xpk "$kind" "$verb" --cluster="$CLUSTER" --project="$PROJECT" --zone="$ZONE" "$@"
}

describe_cost() {
  local status
  if "$DRY_RUN"; then
    return
  fi
  status="$(gcloud container clusters list --project="$PROJECT" --filter="name=$CLUSTER" --format='value(status)' \
    2>/dev/null)" || status="in a state that gcloud does not report"
  if [[ -z "$status" ]]; then
    say "Nothing exists: there is no cluster $CLUSTER in $PROJECT."
  else
    say "Cluster $CLUSTER ($SLICES x $ACCELERATOR_TYPE, $TIER, and machines without TPUs) is $status: it costs money" \
      "until you run $HERE/delete.sh --config=${CONFIG@Q}"
  fi
}
