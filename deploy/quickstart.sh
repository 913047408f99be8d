#!/usr/bin/env bash
# Takes a fresh Debian 12 machine to a running service: installs, builds, makes
# the demo model, starts weftd on 127.0.0.1:50051 (deploy/start.sh), trains four
# adapters on it at once, and leaves it running. It may be run again.
#
#   deploy/quickstart.sh              # SmolLM2-135M-Instruct
#   deploy/quickstart.sh --model DIR  # another Hugging Face folder
set -euo pipefail

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
readonly ROOT
readonly DEMO_MODEL="${ROOT}/models/smollm2-135m-instruct"
readonly PYTHON="${ROOT}/.venv/bin/python"
MODEL="${DEMO_MODEL}"

usage() {
  sed -n '2,/^set/ { /^set/d; s/^# \{0,1\}//; p }' "${BASH_SOURCE[0]}"
}

while (($# > 0)); do
  case "$1" in
    --model)
      [[ $# -ge 2 ]] || { echo "--model needs a folder" >&2; exit 2; }
      MODEL="$(cd "$2" && pwd)"
      shift 2
      ;;
    -h | --help) usage; exit 0 ;;
    *) echo "unknown argument: $1; see --help" >&2; exit 2 ;;
  esac
done
readonly MODEL

heading() { printf '\n== %s (%s s)\n' "$1" "${SECONDS}"; }

trap '(($? == 0)) || echo "quickstart failed." >&2' EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

cd "${ROOT}"
heading "Install"
deploy/setup.sh

heading "Build weftd"
cmake --preset cpu
NINJA_STATUS="[%f/%t %es] " cmake --build --preset cpu --target weftd

if [[ "${MODEL}" == "${DEMO_MODEL}" ]]; then
  heading "Demo model"
  "${PYTHON}" deploy/prepare_demo_model.py --out "${MODEL}"
fi

heading "Start weftd"
deploy/start.sh --model "${MODEL}"

heading "Train four adapters at once"
"${PYTHON}" client/python/examples/adapters.py --steps 6

heading "Done: the server runs. README's next lines talk to it"
