#!/usr/bin/env bash
# Explores the moves of an adapter between two logs (model_move.py): the design must
# hold in all states within the bounds below, and each mutant, which lacks one rule,
# must break. Runs on all cores, 25 seconds on two.
set -euo pipefail
cd -P "$(dirname "${BASH_SOURCE[0]}")"
# shellcheck source=SCRIPTDIR/explore.sh
source explore.sh

NO_CLIENTS="--deletions 0 --claims 0"
# The longest first.
explore_all model_move.py \
  "0 --take-overs 2 --moves 1 --steps 1 ${NO_CLIENTS}" \
  "0 --take-overs 1 --moves 1 --steps 1 --deletions 1 --claims 1" \
  "0 --take-overs 1 --moves 2 --steps 1 ${NO_CLIENTS}" \
  "0 --take-overs 1 --moves 2 --steps 0 --deletions 1 --claims 0" \
  "0 --take-overs 0 --moves 3 --steps 1 --deletions 1 --claims 1" \
  "${BROKEN} --mutant any-swap" \
  "${BROKEN} --mutant any-stay" \
  "${BROKEN} --mutant free-arriving" \
  "${BROKEN} --mutant no-look --claims 0" \
  "${BROKEN} --mutant reborn --steps 0 --deletions 0" \
  "${BROKEN} --mutant keep-refused --steps 0 ${NO_CLIENTS}" \
  "${BROKEN} --mutant early-swap --steps 0 ${NO_CLIENTS}" \
  "${BROKEN} --mutant early-own ${NO_CLIENTS}" \
  "${BROKEN} --mutant no-hold ${NO_CLIENTS}" \
  "${BROKEN} --mutant no-leaving ${NO_CLIENTS}" \
  "${BROKEN} --mutant no-number ${NO_CLIENTS}" \
  "${BROKEN} --mutant no-rewrite ${NO_CLIENTS}" \
  "${BROKEN} --mutant stay-blind ${NO_CLIENTS}"
