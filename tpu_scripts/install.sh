#!/usr/bin/env bash
USAGE="usage: install.sh [--config=FILE] [--dry_run]

Copies this checkout's last commit to all workers, installs it there with Python 3.11 and JAX for the accelerator, and
runs the settings' SETUP command. Run this script again after a change; the virtual environment is kept.

  --config=FILE  settings (default: config.sh in this script's folder; see config.example.sh)
  --dry_run      print the commands instead of running them

example:
  tpu_scripts/install.sh --config=my_slice.sh"
set -euo pipefail
# shellcheck source=tpu_scripts/lib.sh
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

parse_flags "$@"
load_config
explain_interrupts
install_on_workers
