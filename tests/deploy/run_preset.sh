#!/usr/bin/env bash
# run_preset.sh PRESET COMPILER [LABELS]: configures and builds a CMake preset,
# and runs its tests with one of the labels (a regular expression) when some are
# given. Tests of the sources (label lint) depend on no build and run in preset
# cpu alone. Fuzzers first read their whole corpus, with what earlier runs found
# in this build folder, and then try new inputs for the rest of 5 s each. Exit
# status 77: the compiler is not on this machine. Preset cuda is built for one
# architecture and PTX, because each other architecture would compile the same
# sources again and take as long.
set -euo pipefail
readonly preset="$1" compiler="$2" labels="${3:-}"

export PATH="${PATH}:/usr/local/cuda/bin"
if ! command -v "${compiler}" >/dev/null; then
  echo "SKIPPED: no ${compiler} here, so preset ${preset} was not built."
  exit 77
fi
options=()
if [[ "${preset}" == cuda ]]; then
  options+=('-DWEFT_CUDA_ARCHITECTURES=90a-real;90-virtual')
fi
cmake --preset "${preset}" "${options[@]}"
cmake --build --preset "${preset}" --parallel "$(nproc)"
cmake --build --preset "${preset}" --target gate_programs --parallel "$(nproc)"
if [[ -n "${labels}" ]]; then
  export WEFT_FUZZ_SECONDS="${WEFT_FUZZ_SECONDS:-5}"
  tests/run_ctest.sh "build/${preset}" --label-regex "^(${labels})\$" \
    --label-exclude '^lint$'
fi
