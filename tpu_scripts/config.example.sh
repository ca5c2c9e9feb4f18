# Settings of one TPU slice and of what runs on it. Copy this file, fill it in, and give the copy to every
# script as --config=FILE (default: tpu_scripts/config.sh). It is bash, and read by bash.
# shellcheck shell=bash disable=SC2034  # the scripts use these variables

PROJECT=my-project                # Google Cloud project with TPU quota
ZONE=us-east5-a                   # where the quota is
NAME=samtone-xxl                  # of the queued resource and its slices: lower-case letters, digits, "-"
ACCELERATOR_TYPE=v5p-128          # as gcloud names it: v4-64, v5p-128 (cores), v5litepod-64, v6e-64 (chips)
SLICES=1                          # more than one train together over the data-centre network
TIER=spot                         # spot (cheap, preempted at any time), on_demand or reserved
VALID_UNTIL=12h                   # give up if nothing has been granted by then; empty: wait for ever
EXTRAS=tpu                        # of this package, installed on the workers; tpu,seqio for SeqIO tasks

# For the scripts in gke/ alone: an image in an Artifact Registry that you have made (they add a tag), the name of a
# reservation where TIER is reserved, and how often a job that was preempted is started again.
IMAGE=us-docker.pkg.dev/my-project/my-repository/jaxir
RESERVATION=
MAX_RESTARTS=50

# What every worker runs in the checkout's directory after each installation: fetching the data, for a new slice
# has empty disks. Of several lines each but the last ends in "&&", so that the first that fails ends it.
SETUP="gcloud storage cp --recursive gs://my-bucket/msmarco ."

# What every worker runs, in the checkout's directory. The same command resumes: its output must be in a bucket,
# for a slice's disks go with it.
TRAIN=(
  python -m jaxir.train
  --gin_file=gin/samtone_xxl.gin
  --data=msmarco
  --output_dir=gs://my-bucket/samtone-xxl
)
