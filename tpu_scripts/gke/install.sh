#!/usr/bin/env bash
USAGE="usage: gke/install.sh [--config=FILE] [--dry_run]

Builds the image for jobs with Cloud Build: this checkout's last commit with Python 3.11 and JAX for the accelerator. The
image is stored as the settings' IMAGE, tagged with the commit. Run this script again after a change.

  --config=FILE  settings (default: config.sh in tpu_scripts; see config.example.sh there)
  --dry_run      print the commands instead of running them

example:
  tpu_scripts/gke/install.sh --config=my_slice.sh"
set -euo pipefail
# shellcheck source=tpu_scripts/gke/lib.sh
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

parse_flags "$@"
load_gke_config git
archive_commit
run gcloud builds submit "$ARCHIVE" --config="$HERE/cloudbuild.yaml" \
  --substitutions="^;^_IMAGE=$IMAGE;_EXTRAS=$EXTRAS" --project="$PROJECT" --quiet
