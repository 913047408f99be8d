#!/usr/bin/env bash
# run_fuzzer.sh FUZZER SEEDS WORK: runs a fuzzer for WEFT_FUZZ_SECONDS (60) from
# the files of SEEDS. Inputs that reach new code stay in WORK/corpus for the
# next run. An input that fails is written to WORK, and the output names its
# file.
set -euo pipefail
readonly fuzzer="$1" seeds="$2" work="$3"

mkdir -p "${work}/corpus"
exec "${fuzzer}" -max_total_time="${WEFT_FUZZ_SECONDS:-60}" -timeout=10 \
  -rss_limit_mb=2048 -artifact_prefix="${work}/" -print_final_stats=1 \
  "${work}/corpus" "${seeds}"
