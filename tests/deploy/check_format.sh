#!/usr/bin/env bash
# Fails when clang-format would change a file of ours. Run from the root.
set -euo pipefail
if ! command -v clang-format >/dev/null; then
  echo "clang-format is missing: run deploy/setup.sh --tests" >&2
  exit 1
fi
mapfile -d '' -t files < <(git ls-files -z --cached --others --exclude-standard \
  -- '*.cc' '*.h' '*.cu' '*.cuh')
if ((${#files[@]} == 0)); then
  echo "git listed no files to check" >&2
  exit 1
fi
clang-format --dry-run --Werror -- "${files[@]}"
echo "${#files[@]} files are formatted"
