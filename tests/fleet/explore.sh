# Sourced by model.sh and moves.sh.
# shellcheck shell=bash
# shellcheck disable=SC2034  # Both use it.
readonly BROKEN=3  # The exit status of a model whose promise is broken.

# explore MODEL STATUS ARGUMENT...: runs the model, which must end with the status.
explore() {
  local expected="$2" status=0 output
  output="$(python3 "$1" "${@:3}")" || status=$?
  if ((status == expected)); then
    echo "ok: ${output}"
  else
    echo "FAILED with status ${status}, not ${expected}: $1 ${*:3}: ${output}"
    return 1
  fi
}

# explore_all MODEL RUN...: runs the model on all cores, the first runs first. A run is
# a status and arguments.
explore_all() {
  local model="$1" workers=0 failed=0 run
  shift
  for run in "$@"; do
    if ((workers == $(nproc))); then
      wait -n || failed=1
      workers=$((workers - 1))
    fi
    # shellcheck disable=SC2086  # A run is words.
    explore "${model}" ${run} &
    workers=$((workers + 1))
  done
  while ((workers > 0)); do
    wait -n || failed=1
    workers=$((workers - 1))
  done
  echo "$# runs in ${SECONDS} s, $( ((failed)) && echo "at least one FAILED" || echo "all as they should")"
  return "${failed}"
}
