#!/usr/bin/env bash
USAGE="usage: create.sh [--config=FILE] [--dry_run]

Requests a TPU slice as a queued resource and waits until it is granted. If the queued resource exists already, only waits.

  --config=FILE  settings (default: config.sh in this script's folder; see config.example.sh)
  --dry_run      print the commands instead of running them

example:
  tpu_scripts/create.sh --config=my_slice.sh"
set -euo pipefail
# shellcheck source=tpu_scripts/lib.sh
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

parse_flags "$@"
load_config
explain_interrupts

state=ABSENT
"$DRY_RUN" || state="$(slice_state)"
case "$state" in
  DELETING | SUSPENDING)
    say "$NAME is $state; waiting until it is deleted, to request it again"
    wait_for ABSENT
    create_slice
    ;;
  ABSENT) create_slice ;;
  *) say "$NAME exists already; waiting until it is ACTIVE" ;;
esac
wait_for ACTIVE
