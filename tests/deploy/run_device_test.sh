#!/usr/bin/env bash
# run_device_test.sh BINARY --gtest_output=xml:REPORT NAME...: runs GoogleTests by
# name and writes their report. Without the binary, because preset cuda was not
# built here, each is reported as skipped.
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
# A name that this binary lacks would pass by running nothing.
[[ "${log}" =~ "Running "([0-9]+)" test" ]] && ((BASH_REMATCH[1] >= $#))
