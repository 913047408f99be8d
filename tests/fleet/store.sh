#!/usr/bin/env bash
# Runs the tests of object stores against SeaweedFS and moto, also behind a proxy
# that breaks requests. Arguments go to pytest.
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")"
ROOT="$(cd ../.. && pwd)"
readonly ROOT
export WEFT_BUILD_DIR="${WEFT_BUILD_DIR:-${ROOT}/build/cpu}"
exec "${ROOT}/.venv/bin/python" -m pytest -q -rs test_store.py "$@"
