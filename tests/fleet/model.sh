#!/usr/bin/env bash
# Explores the take-over protocol of a log (model_log.py): the design must hold in
# all states within the bounds below, and each mutant, which lacks one rule, must
# break. Runs on all cores, half a minute on two.
set -euo pipefail
cd -P "$(dirname "${BASH_SOURCE[0]}")"
# shellcheck source=SCRIPTDIR/explore.sh
source explore.sh

# The longest first. `copies` are requests that the network executes late and
# several times.
explore_all model_log.py \
  "0 --daemons 2 --steps 3 --epochs 3 --crashes 1" \
  "0 --daemons 2 --steps 2 --epochs 3 --crashes 0 --copies 1" \
  "0 --daemons 2 --steps 1 --epochs 3 --crashes 1 --copies 2" \
  "${BROKEN} --mutant delete-seals" \
  "${BROKEN} --mutant early-snapshot" \
  "${BROKEN} --mutant no-recheck" \
  "${BROKEN} --mutant any-412" \
  "${BROKEN} --mutant no-seal" \
  "${BROKEN} --mutant skip-to-end"
