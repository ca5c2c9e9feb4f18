# Settings of one TPU slice and its job, in bash. Copy this file, fill it in, and pass the copy to every script as
# --config=FILE (default: tpu_scripts/config.sh).
# shellcheck shell=bash disable=SC2034  # the scripts use these variables

PROJECT=my-project                # Google Cloud project with TPU quota
ZONE=us-east5-a                   # where the quota is
NAME=samtone-xxl                  # name of the queued resource and its slices: lower-case letters, digits, "-"
ACCELERATOR_TYPE=v5p-128          # gcloud's name: v4-64, v5p-128 (cores), v5litepod-64, v6e-64 (chips)
SLICES=1                          # several slices train together over the data-centre network
TIER=spot                         # spot (cheap, preempted at any time), on_demand or reserved
VALID_UNTIL=12h                   # cancel the request if it is not granted by then; empty: never
EXTRAS=tpu                        # extras of this package to install on the workers; tpu,seqio for SeqIO tasks

# Only for the scripts in gke/: an image in an existing Artifact Registry (they add a tag), the name of a reservation
# if TIER is reserved, and the maximum number of restarts after preemptions.
IMAGE=us-docker.pkg.dev/my-project/my-repository/jaxir
RESERVATION=
MAX_RESTARTS=50

# Command that every worker runs in the checkout's directory after each installation. It must fetch the data, because
# a new slice has empty disks. Join several lines by "&&", so that the first failure ends the command.
SETUP="gcloud storage cp --recursive gs://my-bucket/msmarco ."

# Command that every worker runs in the checkout's directory. The same command resumes, so its output must be in a
# bucket: a slice's disks are deleted with it.
TRAIN=(
  python -m jaxir.train
  --gin_file=gin/samtone_xxl.gin
  --data=msmarco
  --output_dir=gs://my-bucket/samtone-xxl
)
