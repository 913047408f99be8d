#!/usr/bin/env bash
# Freezes an owner, lets another daemon take its state over and cut the log, and
# wakes the first one: it must answer nothing and end. Arguments go to pytest.
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")"
ROOT="$(cd ../.. && pwd)"
readonly ROOT
export WEFT_BUILD_DIR="${WEFT_BUILD_DIR:-${ROOT}/build/cpu}"
exec "${ROOT}/.venv/bin/python" -m pytest -q -rs test_zombie.py "$@"
