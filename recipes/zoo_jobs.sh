#!/bin/bash
# The zoo on one GPU of the Hugging Face Hub's jobs: makes, measures and publishes the rows of recipes/zoo.yaml.
#
#     recipes/zoo_jobs.sh OWNER                       # all rows
#     recipes/zoo_jobs.sh OWNER --rows 'resnet50*'    # some; any option of recipes/zoo.py
#
# What is made lies in the bucket OWNER/zoo, so that the same line goes on after a timeout. The job reads and writes with
# your token (`hf auth login`); ImageNet is gated, accept its terms first. Not run on the hub yet.
set -euo pipefail
owner=${1:?"the owner of the repositories"}
shift

hf jobs uv run --flavor h200 --timeout 24h --attempts 3 --secrets HF_TOKEN --detach \
    --volume "hf://buckets/$owner/zoo:/zoo" \
    "$(dirname "$0")/zoo.py" --to "$owner" -o /zoo "$@"
