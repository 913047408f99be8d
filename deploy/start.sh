#!/usr/bin/env bash
# Starts the weftd of build/cpu on 127.0.0.1:50051, waits until it serves, and
# leaves it running. A server that an earlier run left is stopped first. The
# adapters live in a state folder, so they are there again afterwards.
#
#   deploy/start.sh                           # SmolLM2-135M-Instruct
#   deploy/start.sh --model DIR --dtype bf16  # weftd's flags replace those below
#   deploy/start.sh --folder DIR ...          # not run/quickstart: state and log
#
# DIR/weftd.log.1 is the log of the run before.
set -euo pipefail

ROOT="$(cd -P "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
readonly ROOT
readonly SILENCE_LIMIT_SECONDS=120
readonly STOP_LIMIT_SECONDS=90
printf -v AGAIN '%q ' "${BASH_SOURCE[0]}" "$@"
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
mkdir -p "${RUN}"
# A server is known by this path in its flags, so the folder has one spelling.
RUN="$(realpath "${RUN}")"
readonly RUN AGAIN

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

# ready: whether weftd answers on its metrics port that it takes work. Without
# that port its log says so.
ready() {
  local addresses
  [[ -s "${RUN}/ports" ]] || return 1
  mapfile -t addresses <"${RUN}/ports"
  ADDRESS="${addresses[0]}"
  if [[ -z "${addresses[1]}" ]]; then
    grep -qE '( info |"msg":")serving[ "]' "${RUN}/weftd.log"
    return
  fi
  python3 - "${addresses[1]}" 2>/dev/null <<'PYTHON'
import sys, urllib.request as http
direct = http.build_opener(http.ProxyHandler({}))
direct.open(f"http://{sys.argv[1]}/readyz", timeout=5)
PYTHON
}

# Held until this script ends. weftd does not inherit it.
exec 9<"${RUN}"
if ! flock -n 9; then
  echo "Another deploy/start.sh is starting a server in ${RUN}." >&2
  exit 1
fi
stop_earlier
rm -f "${RUN}/ports"
if [[ -e "${RUN}/weftd.log" ]]; then mv "${RUN}/weftd.log" "${RUN}/weftd.log.1"; fi
: >"${RUN}/weftd.log"
nohup "${ROOT}/build/cpu/server/weftd" \
  --model "${ROOT}/models/smollm2-135m-instruct" --listen 127.0.0.1:50051 \
  --state-dir "${RUN}/state" --checkpoint-dir "${RUN}/checkpoints" \
  --port-file "${RUN}/ports" "$@" </dev/null >"${RUN}/weftd.log" 2>&1 9<&- &
readonly PID=$!
echo "${PID}" >"${RUN}/pid"
ADDRESS=""
seen=0
heard=${SECONDS}
until ready; do
  size="$(stat -c %s "${RUN}/weftd.log")"
  if ! kill -0 "${PID}" 2>/dev/null; then
    rm "${RUN}/pid"
    echo "weftd has ended; last lines of ${RUN}/weftd.log:" >&2
    tail -n 5 "${RUN}/weftd.log" >&2
    exit 1
  elif ((size > seen)); then
    # weftd logs its progress every five seconds while it loads.
    seen=${size}
    heard=${SECONDS}
  elif ((SECONDS - heard > SILENCE_LIMIT_SECONDS)); then
    echo "weftd is not ready, and has logged nothing for ${SILENCE_LIMIT_SECONDS} s." \
      "It goes on: its log is ${RUN}/weftd.log, its end: kill ${PID}" >&2
    exit 1
  fi
  sleep 0.1
done
cat <<EOF_LINES
weftd serves on ${ADDRESS}. Log, checkpoints and state are in ${RUN}.
  Its end:        kill ${PID}
  Its next start: ${AGAIN% } (the adapters are still there)
EOF_LINES
