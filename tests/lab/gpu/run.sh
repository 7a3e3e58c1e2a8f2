#!/bin/bash
# What only a GPU can show, in two calls of eight minutes: each part writes its own file as it ends, so that a cut run still tells.
#
#     tests/lab/gpu/run.sh OUT          on a machine with a CUDA device
#     tests/lab/gpu/run.sh OUT --dry    on the CPU with tiny sizes: does the script itself still run?
#
# Packages beyond PyTorch's own: timm, safetensors, typer, rich, pydantic, ruamel.yaml, accelerate, pytest, hypothesis.
# TIMM_BENCHMARK names timm's benchmark.py (it is in its repository, not in its package), which is run beside ours.
set -u
out=$1 dry=${2:-}
root=$(cd "$(dirname "$0")/../../.." && pwd)
export PYTHONPATH=$root:$root/tests:$root/tests/lab/benchmarks:${PYTHONPATH:-} PYTHONUNBUFFERED=1
mkdir -p "$out"
: > "$out/seconds.md"
failures=0

part() {  # its name, the most seconds it may take, its command
    local name=$1 limit=$2 start=$SECONDS code
    shift 2
    timeout "$limit" "$@" > "$out/$name.md" 2> "$out/$name.err"
    code=$?
    echo "| $name | $((SECONDS - start)) | $limit | $code |" >> "$out/seconds.md"
    if [ $code -ne 0 ]; then
        failures=$((failures + 1))
        { echo; echo "The part ended with $code:"; echo; tail -25 "$out/$name.err"; } | tee -a "$out/$name.md"
    fi
    cat "$out/$name.err" >> "$out/errors.txt"
    rm "$out/$name.err"
}

measure() { part "$1" "$2" python3 "$root/tests/lab/gpu/parts.py" "$1" $dry; }

# The parts in the order of worth: a call that is cut has measured what matters most.
measure calibration 120
# In a dry run no task is named, so that only the names of the ways are checked.
tasks=policy device=cuda workers=7
[ -n "$dry" ] && tasks='' device=cpu workers=1
part policy 240 python3 "$root/tests/lab/benchmarks/after_training.py" --device $device --workers $workers \
    --rows "$out/policy.jsonl" -o "$out/after_training.md" --tasks $tasks \
    --ways "BatchNorm" "BatchNorm in eval mode" '`frozen-bn`' '`skipinit`' '`groupnorm`' '`groupnorm --groups 32`' \
    '`groupnorm --relative-eps 0.00001`' '`nf`, 500 images'
part seeds 30 python3 "$root/tests/lab/benchmarks/policy_seeds.py" --rows "$out/policy.jsonl" -o "$out/policy_seeds.md"
measure group_norms 150
measure exact_speed 240
measure speed 200
measure schemes 120
measure training 90
measure clipping 30
if [ -z "$dry" ]; then
    cd "$root" && part tests 60 python3 -m pytest -q -p no:cacheprovider -m gpu \
        tests/training/test_recipe_keys.py tests/surgery/test_network.py tests/benchmarking/test_bench.py
fi
if [ -z "$dry" ] && [ -n "${TIMM_BENCHMARK:-}" ]; then
    part timm 50 python3 "$TIMM_BENCHMARK" --model resnet50 --bench both --amp --amp-dtype bfloat16 --channels-last \
        --batch-size 128 --img-size 224 --no-retry --num-bench-iter 20
fi
cat "$out/seconds.md"
exit $failures
