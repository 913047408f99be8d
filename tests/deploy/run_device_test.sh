#!/usr/bin/env bash
# run_device_test.sh BINARY --gtest_output=xml:REPORT NAME...: runs GoogleTests by
# name and writes their report. If the binary is missing, because preset cuda
# was not built here, each test is reported as skipped.
set -euo pipefail
readonly binary="$1" output="$2"
shift 2

if [[ ! -x "${binary}" ]]; then
  echo "SKIPPED: preset cuda was not built, so there is no ${binary}."
  {
    echo "<testsuites>"
    for name in "$@"; do
      echo "<testcase classname='${name%.*}' name='${name##*.}'><skipped/></testcase>"
    done
    echo "</testsuites>"
  } >"${output#--gtest_output=xml:}"
  exit 0
fi
filter="$(IFS=: && echo "$*")"
log="$("${binary}" "${output}" --gtest_filter="${filter}")" || {
  status=$?
  echo "${log}"
  exit "${status}"
}
echo "${log}"
# A test that the binary lacks would pass, because nothing runs. So this counts
# the tests that ran.
[[ "${log}" =~ "Running "([0-9]+)" test" ]] && ((BASH_REMATCH[1] >= $#))
