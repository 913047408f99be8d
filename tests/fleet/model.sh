#!/usr/bin/env bash
# Explores the take-over protocol of a log (model_log.py): the design must hold in
# all states within the bounds below, and each mutant, which lacks one rule, must
# break. Runs on all cores, half a minute on two.
set -euo pipefail
cd -P "$(dirname "${BASH_SOURCE[0]}")"
readonly BROKEN=3  # The exit status of model_log.py.
# The longest first. `copies` are requests that the network executes late and
# several times.
readonly RUNS=(
  "0 --daemons 2 --steps 3 --epochs 3 --crashes 1"
  "0 --daemons 2 --steps 2 --epochs 3 --crashes 0 --copies 1"
  "0 --daemons 2 --steps 1 --epochs 3 --crashes 1 --copies 2"
  "${BROKEN} --mutant delete-seals"
  "${BROKEN} --mutant early-snapshot"
  "${BROKEN} --mutant no-recheck"
  "${BROKEN} --mutant any-412"
  "${BROKEN} --mutant no-seal"
  "${BROKEN} --mutant skip-to-end"
)

# explore STATUS ARGUMENT...: runs the model, which must end with the status.
explore() {
  local expected="$1" status=0 output
  output="$(python3 model_log.py "${@:2}")" || status=$?
  if ((status == expected)); then
    echo "ok: ${output}"
  else
    echo "FAILED with status ${status}, not ${expected}: ${*:2}: ${output}"
    return 1
  fi
}

workers=0 failed=0
for run in "${RUNS[@]}"; do
  if ((workers == $(nproc))); then
    wait -n || failed=1
    workers=$((workers - 1))
  fi
  # shellcheck disable=SC2086  # A run is words.
  explore ${run} &
  workers=$((workers + 1))
done
while ((workers > 0)); do
  wait -n || failed=1
  workers=$((workers - 1))
done
echo "${#RUNS[@]} runs in ${SECONDS} s, $( ((failed)) && echo "at least one FAILED" || echo "all as they should")"
exit "${failed}"
