#!/usr/bin/env bash
# run_device_test.sh BINARY FILTER: runs GoogleTests. Exit status 77: they were
# skipped, or preset cuda was not built here.
set -euo pipefail
readonly binary="$1" filter="$2"

if [[ ! -x "${binary}" ]]; then
  echo "SKIPPED: preset cuda was not built, so there is no ${binary}."
  exit 77
fi
output="$("${binary}" --gtest_filter="${filter}")" || {
  status=$?
  echo "${output}"
  exit "${status}"
}
echo "${output}"
if [[ "${output}" == *"[  SKIPPED ] "*" listed below"* ]]; then exit 77; fi
# A name that this binary lacks would pass by running nothing.
[[ "${output}" == *"[  PASSED  ] "[1-9]* ]]
