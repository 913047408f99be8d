#!/usr/bin/env bash
# run_ctest.sh BUILD [ARGUMENT...]: runs ctest in a build folder, shows how far it
# is, and counts the tests inside the ctest entries. The last line is `N passed, N failed, N skipped`. The
# exit status is that of ctest, or 1 if only the count finds a failure.
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
readonly here build="$1"
shift
readonly reports="${build}/reports"
python="${here}/../.venv/bin/python"
if [[ ! -x "${python}" ]]; then python=python3; fi
readonly python

rm -rf "${reports}"
mkdir -p "${reports}"
status=0
ctest --test-dir "${build}" --show-only=json-v1 "$@" >"${reports}/entries.json"
# Runs two more entries than there are cores, because entries do not always
# compute: they wait for a start, a stop, a disk or their own threads.
ctest --test-dir "${build}" --output-on-failure --parallel "$(($(nproc) + 2))" --no-tests=error \
  --output-junit reports/ctest.xml "$@" 2>&1 |
  "${python}" "${here}/support/progress.py" "${reports}/entries.json" \
    "${build}/Testing/Temporary/CTestCostData.txt" || status=$?
"${python}" "${here}/count.py" "${reports}" || status=$((status ? status : 1))
exit "${status}"
