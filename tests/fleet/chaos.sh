#!/usr/bin/env bash
# Kills and freezes daemons under load (test_chaos.py), and shows how far it is:
#   tests/fleet/chaos.sh --kills 200 --zombies 40 --seed 7 --clients 8
# Without arguments, the short form of the tests.
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")"
ROOT="$(cd ../.. && pwd)"
readonly ROOT
export WEFT_BUILD_DIR="${WEFT_BUILD_DIR:-${ROOT}/build/cpu}"
exec "${ROOT}/.venv/bin/python" -m pytest -q -s -rs test_chaos.py "$@"
