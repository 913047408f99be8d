#!/usr/bin/env bash
# Runs the program in libexec whose name this link has, with the bundle's
# libraries and those of torch. run.sh has linked torch's folder.
set -euo pipefail

root="$(cd "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/.." && pwd)"
torch="$(readlink -f "${root}/weft/lib/weft/torch")"
export LD_LIBRARY_PATH="${root}/lib:${root}/weft/lib/weft:${torch}/lib:${torch}/../nvidia/cu13/lib"
if [[ -n "${WEFT_UNDER:-}" ]]; then
  # A tool and its options, such as compute-sanitizer, which must see the
  # program itself.
  read -ra tool <<<"${WEFT_UNDER}"
  exec "${tool[@]}" "${root}/libexec/$(basename "$0")" "$@"
fi
exec "${root}/libexec/$(basename "$0")" "$@"
