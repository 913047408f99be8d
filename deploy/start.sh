#!/usr/bin/env bash
# Starts the weftd of build/cpu on 127.0.0.1:50051, waits until it serves, and
# leaves it running. A server that an earlier run left is stopped first. The
# adapters live in a state folder, so they are there again afterwards.
#
#   deploy/start.sh                           # SmolLM2-135M-Instruct
#   deploy/start.sh --model DIR --dtype bf16  # weftd's flags replace those below
#   deploy/start.sh --folder DIR ...          # not run/quickstart: state and log
set -euo pipefail

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
readonly ROOT
readonly START_LIMIT_SECONDS=120
readonly STOP_LIMIT_SECONDS=90
RUN="${ROOT}/run/quickstart"

case "${1:-}" in
  -h | --help)
    sed -n '2,/^set/ { /^set/d; s/^# \{0,1\}//; p }' "${BASH_SOURCE[0]}"
    exit 0
    ;;
  --folder)
    RUN="${2:?--folder needs a folder}"
    shift 2
    ;;
esac
readonly RUN

# is_ours PID: whether the process is a weftd that uses this folder.
is_ours() {
  tr '\0' '\n' 2>/dev/null <"/proc/$1/cmdline" | grep -qxF -- "${RUN}/state"
}

# stop_earlier: ends the server that an earlier run left, if there is one.
stop_earlier() {
  local pid limit=$((SECONDS + STOP_LIMIT_SECONDS))
  [[ -s "${RUN}/pid" ]] || return 0
  pid="$(<"${RUN}/pid")"
  is_ours "${pid}" || return 0
  echo "Stopping the server that runs: process ${pid}"
  kill -TERM "${pid}"
  while is_ours "${pid}"; do
    if ((SECONDS > limit)); then
      echo "Process ${pid} did not end within ${STOP_LIMIT_SECONDS} s." >&2
      return 1
    fi
    sleep 0.1
  done
}

# ready: whether weftd answers on its metrics port that it takes work.
ready() {
  local addresses
  read -r -d '' -a addresses <"${RUN}/ports" || true # 1 at the end of the file.
  ((${#addresses[@]} >= 2)) || return 1
  ADDRESS="${addresses[0]}"
  python3 - "${addresses[1]}" 2>/dev/null <<'PYTHON'
import sys, urllib.request
urllib.request.urlopen(f"http://{sys.argv[1]}/readyz", timeout=5)
PYTHON
}

mkdir -p "${RUN}"
stop_earlier
rm -f "${RUN}/ports"
nohup "${ROOT}/build/cpu/server/weftd" \
  --model "${ROOT}/models/smollm2-135m-instruct" --listen 127.0.0.1:50051 \
  --state-dir "${RUN}/state" --checkpoint-dir "${RUN}/checkpoints" \
  --port-file "${RUN}/ports" "$@" </dev/null >"${RUN}/weftd.log" 2>&1 &
readonly PID=$!
echo "${PID}" >"${RUN}/pid"
ADDRESS=""
until [[ -s "${RUN}/ports" ]] && ready; do
  if ! kill -0 "${PID}" 2>/dev/null; then
    echo "weftd has ended; last lines of ${RUN}/weftd.log:" >&2
    tail -n 5 "${RUN}/weftd.log" >&2
    exit 1
  elif ((SECONDS > START_LIMIT_SECONDS)); then
    kill "${PID}"
    echo "weftd was not ready within ${START_LIMIT_SECONDS} s: ${RUN}/weftd.log" >&2
    exit 1
  fi
  sleep 0.1
done
cat <<EOF_LINES
weftd serves on ${ADDRESS}. Log, checkpoints and state are in ${RUN}.
  Its end:        kill ${PID}
  Its next start: deploy/start.sh (the adapters are still there)
EOF_LINES
