#!/usr/bin/env bash
# run_preset.sh PRESET COMPILER [LABEL]: configures and builds a CMake preset,
# and runs its tests with the label when one is given. Exit status 77: the
# compiler is not on this machine. Preset cuda is built for one architecture and
# PTX: the others are the same sources and as many minutes again.
set -euo pipefail
readonly preset="$1" compiler="$2" label="${3:-}"

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
if [[ -n "${label}" ]]; then
  ctest --test-dir "build/${preset}" --label-regex "^${label}\$" \
    --output-on-failure --parallel "$(nproc)" --no-tests=error
fi
