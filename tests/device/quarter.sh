#!/usr/bin/env bash
# Checks a GPU in a quarter of an hour: runs steps of run.sh, the most telling
# ones first, from an unpacked bundle (bundle.sh):
#
#   tests/device/quarter.sh [OPTIONS]
#
#   --device NAME     cuda (default); cpu tries the steps on tiny sizes
#   --output FOLDER   logs, JSON lines and summary.txt (default: quarter)
#   --total N         time limit in seconds (default: 780)
#
# Ends at the first step that fails. A step that takes longer than three minutes
# has failed too, but others follow, because its numbers may be right. The exit
# status is run.sh's.
set -euo pipefail

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)"
readonly ROOT

usage() { sed -n '2,/^set/ { /^set/d; s/^# \{0,1\}//; p }' "${BASH_SOURCE[0]}"; }

# The kernels that few runs on a device have had.
readonly NEW='*Delta*:*Int8*:*Sampler*'
readonly STEPS=(
  kernels ops
  lora head optim model executor device draw_rows
  "kernel_bench=delta,int8,sampler,lora_few"
  memcheck="${NEW}" racecheck="${NEW}"
  hybrid hybrid_bf16 in_flight supports options distill experts
  e2e recovery muon
  train_step=qwen3.5-0.8b decode_bench=qwen3.5-0.8b moe decode_moe sample=qwen3.5-0.8b
  trace=qwen3.5-0.8b
)

device=cuda output=quarter total=780
while (($# > 0)); do
  case "$1" in
    --device) device="$2" && shift ;;
    --output) output="$2" && shift ;;
    --total) total="$2" && shift ;;
    -h | --help) usage && exit 0 ;;
    *) echo "quarter.sh: unknown option $1" >&2 && exit 2 ;;
  esac
  shift
done
mkdir -p "${output}"
{
  date -u '+%F %T UTC'
  cat "${ROOT}/VERSION"
  nvidia-smi -L 2>/dev/null || true
} >"${output}/summary.txt"
"${ROOT}/tests/device/run.sh" --device "${device}" --output "${output}" --total "${total}" \
  --seconds 180 --stop "${STEPS[@]}" | tee -a "${output}/summary.txt"
