#!/usr/bin/env bash
USAGE="usage: delete.sh [--config=FILE] [--dry_run]

Deletes the queued resource and its slices, with all jobs on them, and waits until they are deleted. Buckets are not
changed. Does nothing if the queued resource does not exist.

  --config=FILE  settings (default: config.sh in this script's folder; see config.example.sh)
  --dry_run      print the commands instead of running them

example:
  tpu_scripts/delete.sh --config=my_slice.sh"
set -euo pipefail
# shellcheck source=tpu_scripts/lib.sh
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

parse_flags "$@"
load_config
explain_interrupts

state=ACTIVE
"$DRY_RUN" || state="$(slice_state)"
case "$state" in
  ABSENT) say "there is no $NAME in $ZONE: nothing to delete" ;;
  DELETING) wait_for ABSENT ;;
  *) delete_slice ;;
esac
