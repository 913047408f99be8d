#!/usr/bin/env bash
# Runs the program in libexec that has the name of this link, with the libraries
# of the bundle and of torch. run.sh has linked torch's folder.
set -euo pipefail

root="$(cd "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/.." && pwd)"
torch="$(readlink -f "${root}/weft/lib/weft/torch")"
export LD_LIBRARY_PATH="${root}/lib:${root}/weft/lib/weft:${torch}/lib:${torch}/../nvidia/cu13/lib"
if [[ -n "${WEFT_UNDER:-}" ]]; then
  # WEFT_UNDER is a tool with options, such as compute-sanitizer. The tool must
  # start the program itself, not this script.
  read -ra tool <<<"${WEFT_UNDER}"
  exec "${tool[@]}" "${root}/libexec/$(basename "$0")" "$@"
fi
exec "${root}/libexec/$(basename "$0")" "$@"
