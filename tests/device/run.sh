#!/usr/bin/env bash
# Runs the device's tests and benches from an unpacked bundle (bundle.sh), and
# prints one line for each step, which says how it ended:
#
#   tests/device/run.sh [OPTIONS] [STEP[=PART]...]     (default: all steps)
#
#   --device NAME     cuda (default); cpu tries the steps on tiny sizes
#   --output FOLDER   logs, and one JSON line per bench (default: results)
#   --seconds N       time limit of each step (default: each step's own limit)
#   --total N         time limit of all steps; cuts off the step that runs then
#   --stop            runs no step after one that fails in its time
#   --list            names of the steps
#
# Some steps can run in part. PART is a filter of GoogleTest (kernels, memcheck,
# racecheck), names of benches such as int8,sampler (kernel_bench), or a shape
# (train_step, sample, decode_bench, trace).
#
# A step is skipped, with the reason, if it needs a device, a tool or a package
# that is missing, or if no time is left. PYTHON is the Python with torch (default: python3). The
# client's packages in the bundle are for the Python that --help prints last.
# The exit status is 1 if a step failed, or on cuda if none passed.
set -euo pipefail

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)"
readonly ROOT PYTHON="${PYTHON:-python3}"
export WEFT_BUILD_DIR="${ROOT}/build"

usage() {
  sed -n '2,/^set/ { /^set/d; s/^# \{0,1\}//; p }' "${BASH_SOURCE[0]}"
  if [[ -e "${ROOT}/VERSION" ]]; then
    sed -n 's/^python /\nPackages of the client: for Python /p' "${ROOT}/VERSION"
  fi
}

readonly TESTS=(kernels ops lora head optim model device executor draw_rows
  memcheck racecheck)
readonly SUITES=(oracle oracle_bf16 hybrid hybrid_bf16 in_flight supports options
  distill experts parallel e2e recovery muon)
readonly BENCHES=(kernel_bench decode_bench logprobs train_step train_step_qwen
  adapters_8 adapters_64 group_prompt sample train_step_small sample_small moe
  decode_moe trace)
readonly OF_PARTS=(kernels memcheck racecheck kernel_bench train_step sample
  decode_bench trace)

device=cuda output=results seconds='' total='' stop='' steps=()
while (($# > 0)); do
  case "$1" in
    --device) device="$2" && shift ;;
    --output) output="$2" && shift ;;
    --seconds) seconds="$2" && shift ;;
    --total) total="$2" && shift ;;
    --stop) stop=1 ;;
    --list) printf '%s\n' "${TESTS[@]}" "${SUITES[@]}" "${BENCHES[@]}" && exit 0 ;;
    -h | --help) usage && exit 0 ;;
    -*) echo "run.sh: unknown option $1" >&2 && exit 2 ;;
    *) steps+=("$1") ;;
  esac
  shift
done
if ((${#steps[@]} == 0)); then
  steps=("${TESTS[@]}" "${SUITES[@]}" "${BENCHES[@]}")
fi
for step in "${steps[@]}"; do
  if [[ " ${TESTS[*]} ${SUITES[*]} ${BENCHES[*]} " != *" ${step%%=*} "* ]]; then
    echo "run.sh: no step ${step}; --list names them" >&2
    exit 2
  fi
  if [[ "${step}" == *=* && " ${OF_PARTS[*]} " != *" ${step%%=*} "* ]]; then
    echo "run.sh: ${step}: only ${OF_PARTS[*]} can run in part" >&2
    exit 2
  fi
done
mkdir -p "${output}"
output="$(cd "${output}" && pwd)"
cd "${ROOT}"

# --- What the machine has ------------------------------------------------------

# Finds the folder of torch without an import, which would take seconds.
torch="$("${PYTHON}" -c 'import importlib.util
print(importlib.util.find_spec("torch").submodule_search_locations[0])' 2>/dev/null || true)"
if [[ -n "${torch}" ]]; then
  ln -sfn "${torch}" weft/lib/weft/torch
fi
# Uses the machine's own gRPC if it has one, otherwise the bundle's.
export PYTHONPATH="${ROOT}/client/python${PYTHONPATH:+:${PYTHONPATH}}"
no_client=''
if ! "${PYTHON}" -c 'import weft' 2>/dev/null; then
  PYTHONPATH="${PYTHONPATH}:${ROOT}/python"
  if ! error="$("${PYTHON}" -c 'import weft' 2>&1)"; then
    no_client="no client in ${PYTHON}: ${error##*$'\n'}"
  fi
fi
# Holds a line for each device, or no device if nvidia-smi is missing.
devices=$'\n'"$(nvidia-smi -L 2>/dev/null || true)"

# Prints the reason why a step cannot run, or nothing.
missing() {
  if [[ -z "${torch}" ]]; then
    echo "no torch in ${PYTHON}"
  elif [[ "${device}" == cuda && "${devices}" != *$'\n'"GPU "* ]]; then
    echo "no CUDA device"
  elif [[ "${device}" != cuda && " memcheck racecheck parallel oracle_bf16 kernel_bench trace " == *" $1 "* ]]; then
    echo "for a CUDA device alone"
  elif [[ "$1" == *check ]] && ! command -v compute-sanitizer >/dev/null; then
    echo "no compute-sanitizer"
  elif [[ "$1" == trace && ! -e lib/libcuda_trace.so ]]; then
    echo "no libcuda_trace.so in the bundle"
  elif [[ " ${TESTS[*]} kernel_bench " == *" $1 "* ]]; then
    return
  elif [[ -n "${no_client}" ]]; then
    echo "${no_client}"
  else
    "${PYTHON}" -c 'import sys, importlib.util as found
for name in sys.argv[1:]:
    if found.find_spec(name) is None: sys.exit(print(f"no Python package {name}"))
' grpc numpy peft pytest safetensors transformers
  fi
}

# --- Steps ---------------------------------------------------------------------

kernels() {
  local program=bin/kernels_cuda_test
  if [[ "${device}" != cuda ]]; then
    program=bin/cuda_kernels_on_host_test
  fi
  "${program}" --gtest_filter="${part:-*}"
}

# Runs pytest with up to six processes if pytest-xdist is installed. Most of the
# time goes to the reference, which uses one core.
oracles() {
  local workers=() num
  num="$(($(nproc) < 6 ? $(nproc) : 6))"
  if ((num > 2)) && "${PYTHON}" -c 'import xdist' 2>/dev/null; then
    workers=(-n "${num}" --dist loadfile)
  fi
  OMP_WAIT_POLICY=passive WEFT_TEST_DEVICE="${device}" \
    "${PYTHON}" -m pytest -q -rs -p no:cacheprovider "${workers[@]}" "$@"
}

# Prints the shape of tests/bench/shapes.py that a step takes: on a CPU a tiny one
# with layers of the same kinds.
shape_on_device() {
  case "${device} $1" in
    cuda*) echo "$1" ;;
    *qwen3.5*) echo tiny-hybrid ;;
    *moe*) echo tiny-moe ;;
    *) echo tiny ;;
  esac
}

# Runs a bench of tests/bench/run.py. On cpu the bench has tiny sizes.
bench() {
  local name="$1" shape
  shape="$(shape_on_device "$2")"
  shift 2
  if [[ "${device}" == cpu ]]; then
    case "${name}" in
      logprobs) set -- --rows 32 ;;
      moe) set -- --batch 2 --length 16 ;;
      train_step) set -- --batch 2 --length 16 ;;
      multi_adapter) set -- --adapters 2 --sequences 2 --shortest 4 --longest 16 ;;
      group_prompt) set -- --group 2 --prompt 16 --completion 4 ;;
      sample) set -- --batches 1 2 --prompt 8 --tokens 4 --group-prompt 16 ;;
    esac
    set -- "$@" --threads 1 --reps 1
  fi
  "${PYTHON}" tests/bench/run.py "${name}" --device "${device}" --shape "${shape}" \
    --rounds 1 --output "${output}/${step}.json" "$@"
}

record() {
  "${PYTHON}" tests/device/record.py "${step}" "${output}/${step}.json" "${device}" "$@"
}

kernel_bench() {
  local names=()
  IFS=, read -ra names <<<"${part}"
  record bin/cuda_kernel_bench "${names[@]}"
}

# Runs decode_bench on a shape.
decode() {
  local shape dtype=bf16 folder
  shape="$(shape_on_device "$1")"
  if [[ "${device}" == cpu ]]; then
    dtype=f32
  fi
  folder="$("${PYTHON}" -c 'import sys
sys.path[:0] = ["tests/bench", "tests/oracle"]
import shapes
print(shapes.folder(*sys.argv[1:]))' "${shape}" "${device}")"
  record bin/decode_bench "${folder}" "${dtype}" 1 32 64 "$(nproc)" "${device}"
}

# Times a shape. Then runs it again and records each kernel.
trace() {
  local program=(tests/device/trace/trace_weft.py "${part:-llama-3.1-8b}" 16 512 32)
  export WEFT_TEST_DEVICE="${device}" WEFT_TEST_DTYPE=bf16
  "${PYTHON}" "${program[@]}"
  rm -f "${output}"/trace.*.csv
  CUDA_INJECTION64_PATH="${ROOT}/lib/libcuda_trace.so" \
    CUDA_TRACE_FILE="${output}/trace" "${PYTHON}" "${program[@]}" >/dev/null
  # Takes the largest trace, which is weftd's. If the script itself used CUDA,
  # it wrote a trace too, but a smaller one.
  local largest
  largest="$(find "${output}" -name 'trace.*.csv' -printf '%s %p\n' | sort -n | tail -n 1)"
  "${PYTHON}" tests/device/trace/cuda_trace.py --gap 100 "${largest#* }"
}

# Prints a step's limit in seconds: three times what the step takes on an H100.
limit_of() {
  case "$1" in
    oracle | oracle_bf16 | sample | trace) echo 600 ;;
    train_step | train_step_qwen | adapters_* | group_prompt | sample_small) echo 450 ;;
    *) echo 300 ;;
  esac
}

run_step() {
  case "$1" in
    kernels) kernels ;;
    ops | lora | head | optim | model) "bin/$1_test" ;;
    device | executor | draw_rows)
      "bin/$1_test" --gtest_filter='*Cuda*:*DeviceWaits*'
      ;;
    memcheck | racecheck)
      WEFT_UNDER="compute-sanitizer --tool $1 --error-exitcode 9" kernels
      ;;
    oracle) oracles tests/oracle/test_{logprobs,gradients,training,peft_folders,sampling}.py ;;
    oracle_bf16) WEFT_TEST_DTYPE=bf16 oracles -m bf16 tests/oracle ;;
    hybrid) oracles tests/oracle/test_{hybrid,hybrid_sampling}.py ;;
    hybrid_bf16) WEFT_TEST_DTYPE=bf16 oracles -m bf16 tests/oracle/test_{hybrid,hybrid_sampling}.py ;;
    in_flight) oracles tests/oracle/test_in_flight.py ;;
    supports) oracles tests/oracle/test_support.py ;;
    options) oracles tests/oracle/test_sample_options.py ;;
    distill) oracles tests/oracle/test_distill.py ;;
    experts) oracles tests/oracle/test_{experts,routing}.py ;;
    parallel) oracles tests/oracle/test_parallel.py ;;
    e2e) oracles tests/e2e/test_{isolation,steps,residency}.py ;;
    recovery) oracles tests/e2e/test_{recovery,snapshots,custom_loss}.py ;;
    muon) oracles tests/e2e/test_muon.py ;;
    kernel_bench) kernel_bench ;;
    decode_bench) decode "${part:-llama-3.1-8b}" ;;
    decode_moe) decode moe-64 ;;
    moe) bench moe moe-64 --batch 8 --length 512 ;;
    logprobs) bench logprobs llama-3.1-8b --hidden 4096 --vocab 131072 ;;
    train_step) bench train_step "${part:-llama-3.1-8b}" --rank 32 ;;
    train_step_qwen) bench train_step qwen3-8b --rank 32 ;;
    train_step_small) bench train_step smollm2-135m --batch 32 ;;
    adapters_8) bench multi_adapter llama-3.1-8b --rank 32 --adapters 8 ;;
    # Rank 8, because at rank 32 the weights, gradients and moments of 64
    # adapters take 86 GB, more than an H100 has.
    adapters_64) bench multi_adapter llama-3.1-8b --rank 8 --adapters 64 --sequences 2 ;;
    group_prompt)
      bench group_prompt llama-3.1-8b --prompt 5000 --completion 256 --group 16
      ;;
    sample) bench sample "${part:-llama-3.1-8b}" --batches 1 8 64 256 ;;
    sample_small) bench sample smollm2-135m --batches 1 8 64 256 ;;
    trace) trace ;;
  esac
}

# Prints a summary from the end of a log.
outcome() {
  { grep -E '^(\[  PASSED|[a-z_]+: )|[0-9]+ passed' "$1" || true; } | tail -n 1 | cut -c 1-300
}

# Prints why pytest ran none of a step's tests, or nothing.
all_skipped() {
  if tail -n 1 "$1" | grep -qE '^[0-9]+ skipped'; then
    sed -n 's/^SKIPPED \[[0-9]*\] [^ ]* //p' "$1" | tail -n 1
  fi
}

# Prints why a step does not begin, or nothing.
held_back() {
  if [[ -n "${stop}" ]] && ((wrong > 0)); then
    echo "an earlier step failed"
  elif [[ -n "${total}" ]] && ((SECONDS >= total)); then
    echo "no time is left"
  else
    missing "$1"
  fi
}

# A step has its own process group, which must not outlive this script.
group=''
trap '[[ -z "${group}" ]] || kill -KILL -- "-${group}" 2>/dev/null || true' EXIT
# `wrong` counts the failed steps that were not too late.
passed=0 failed=0 skipped=0 wrong=0 number=0
for step in "${steps[@]}"; do
  part=''
  if [[ "${step}" == *=* ]]; then
    part="${step#*=}"
  fi
  step="${step%%=*}"
  number=$((number + 1))
  reason="$(held_back "${step}")"
  if [[ -n "${reason}" ]]; then
    echo "skipped  ${step}: ${reason}"
    skipped=$((skipped + 1))
    continue
  fi
  echo "running  ${step}: ${number} of ${#steps[@]}, at ${SECONDS} s" >&2
  begin="${SECONDS}"
  log="${output}/${step}.log"
  # The step runs in its own process group, which is killed when time is up.
  status=0
  setsid bash -c "$(declare -p ROOT PYTHON device output step part)
$(declare -f kernels oracles shape_on_device bench record kernel_bench decode trace run_step)
set -euo pipefail; run_step '${step}'" >"${log}" 2>&1 &
  group=$!
  limit="${seconds:-$(limit_of "${step}")}" cut_off='' late=''
  if [[ -n "${total}" ]] && ((total - begin < limit)); then
    limit=$((total - begin)) cut_off=1
  fi
  while kill -0 "${group}" 2>/dev/null; do
    if ((SECONDS - begin >= limit)); then
      late=1
      echo "run.sh: not done in ${limit} s" >>"${log}"
      kill -KILL -- "-${group}" 2>/dev/null || true
      break
    fi
    sleep 0.1
  done
  # The shell would report that the step was killed.
  { wait "${group}" || status=$?; } 2>/dev/null
  group=''
  # The machine has a device, so a program that did not see it has tested
  # nothing.
  if [[ "${device}" == cuda ]] && grep -q 'no CUDA device' "${log}"; then
    echo "run.sh: the program saw no device" >>"${log}"
    status=1
  fi
  took="$((SECONDS - begin)) s"
  reason="$(all_skipped "${log}")"
  if [[ -n "${late}" && -n "${cut_off}" ]]; then
    skipped=$((skipped + 1))
    echo "skipped  ${step}: cut off after ${took}, because no time is left"
  elif ((status == 0)) && [[ -n "${reason}" ]]; then
    skipped=$((skipped + 1))
    echo "skipped  ${step}: ${reason}"
  elif ((status == 0)); then
    passed=$((passed + 1))
    echo "passed   ${step}: ${took}; $(outcome "${log}")"
  else
    failed=$((failed + 1))
    if [[ -z "${late}" ]]; then
      wrong=$((wrong + 1))
    fi
    echo "FAILED   ${step}: ${took}, exit status ${status}; ${log} ends:"
    tail -n 15 "${log}" | sed 's/^/  | /'
  fi
done
echo "${passed} passed, ${failed} failed, ${skipped} skipped"
((failed == 0)) && { [[ "${device}" != cuda ]] || ((passed > 0)); }
