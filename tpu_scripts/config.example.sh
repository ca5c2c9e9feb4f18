# Example settings of a TPU slice and its job, in bash. Copy this file, fill in the copy, and pass it to every script
# as --config=FILE (default: tpu_scripts/config.sh).
# shellcheck shell=bash disable=SC2034  # the scripts use these variables

PROJECT=my-project                # Google Cloud project with TPU quota
ZONE=us-east5-a                   # zone in which the project has the quota
NAME=samtone-xxl                  # name of the queued resource and its slices: lower-case letters, digits, "-"
ACCELERATOR_TYPE=v5p-128          # gcloud's name, with a number of cores (v4-64, v5p-128) or chips (v5litepod-64, v6e-64)
SLICES=1                          # number of slices; several slices train together over the data-centre network
TIER=spot                         # spot (cheap, but may be preempted at any time), on_demand or reserved
VALID_UNTIL=12h                   # cancel the request if it is not granted by then; empty: never
EXTRAS=tpu                        # extras of jaxir to install on the workers; tpu,seqio for SeqIO tasks

# Only used by the scripts in gke/: the name of an image in an existing Artifact Registry (the scripts add a tag), the
# name of a reservation if TIER is reserved, and the maximum number of restarts after preemptions.
IMAGE=us-docker.pkg.dev/my-project/my-repository/jaxir
RESERVATION=
MAX_RESTARTS=50

# Command that every worker runs in the checkout's directory after each installation. It must fetch the data, because
# a new slice has empty disks. Join several lines by "&&", so that the first failure ends the command.
SETUP="gcloud storage cp --recursive gs://my-bucket/msmarco ."

# Training command that every worker runs in the checkout's directory. The same command resumes, so the output directory
# must be in a bucket: a slice's disks are deleted with the slice.
TRAIN=(
  python -m jaxir.train
  --gin_file=gin/samtone_xxl.gin
  --data=msmarco
  --output_dir=gs://my-bucket/samtone-xxl
)
