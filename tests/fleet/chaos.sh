#!/usr/bin/env bash
# Kills and freezes daemons under load while adapters move (test_chaos.py), and shows
# how far it is:
#   tests/fleet/chaos.sh --logs 3 --daemons 4 --kills 100 --zombies 20 --moves 100
# Without arguments, the short forms of the tests.
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")"
ROOT="$(cd ../.. && pwd)"
readonly ROOT
export WEFT_BUILD_DIR="${WEFT_BUILD_DIR:-${ROOT}/build/cpu}"
exec "${ROOT}/.venv/bin/python" -m pytest -q -s -rs test_chaos.py "$@"
