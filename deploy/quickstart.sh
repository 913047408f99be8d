#!/usr/bin/env bash
# Takes a fresh Debian 12 machine to a running service: installs, builds, makes
# the demo model, starts weftd on the loopback interface, trains four adapters
# at once over gRPC, shows the metrics page and stops. It may be run again.
#
#   deploy/quickstart.sh              # SmolLM2-135M-Instruct
#   deploy/quickstart.sh --model DIR  # another Hugging Face folder
#   deploy/quickstart.sh --keep       # leave the server running
set -euo pipefail

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
readonly ROOT
readonly RUN="${ROOT}/run/quickstart"
readonly DEMO_MODEL="${ROOT}/models/smollm2-135m-instruct"
readonly PYTHON="${ROOT}/.venv/bin/python"
readonly START_LIMIT_SECONDS=120
DAEMON_PID=""
INSTALLER_PID=""
MODEL="${DEMO_MODEL}"
KEEP=false

usage() {
  sed -n '2,/^set/ { /^set/d; s/^# \{0,1\}//; p }' "${BASH_SOURCE[0]}"
}

while (($# > 0)); do
  case "$1" in
    --model)
      [[ $# -ge 2 ]] || { echo "--model needs a folder" >&2; exit 2; }
      MODEL="$(cd "$2" && pwd)"
      shift 2
      ;;
    --keep) KEEP=true; shift ;;
    -h | --help) usage; exit 0 ;;
    *) echo "unknown argument: $1; see --help" >&2; exit 2 ;;
  esac
done
readonly MODEL KEEP

heading() { printf '\n== %s (%s s)\n' "$1" "${SECONDS}"; }

# stop_daemon: sends SIGTERM, waits, and returns the daemon's exit status.
stop_daemon() {
  local pid="${DAEMON_PID}"
  DAEMON_PID=""
  [[ -n "${pid}" ]] || return 0
  kill -TERM "${pid}" 2>/dev/null || true
  wait "${pid}"
}

on_exit() {
  local status=$?
  stop_daemon || true
  # No package stays half-installed.
  [[ -z "${INSTALLER_PID}" ]] || wait "${INSTALLER_PID}" || true
  if [[ "${status}" != 0 ]]; then
    echo "quickstart failed (exit status ${status})." >&2
    if [[ -s "${RUN}/weftd.log" ]]; then
      echo "Last lines of ${RUN}/weftd.log:" >&2
      tail -n 20 "${RUN}/weftd.log" >&2
    fi
  fi
}
trap on_exit EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

# The port file holds the gRPC address and the metrics address, with the ports
# that were bound.
wait_for_ports() {
  local limit=$((SECONDS + START_LIMIT_SECONDS))
  until [[ "$(wc -w 2>/dev/null <"${RUN}/ports" || echo 0)" -ge 2 ]]; do
    if ! kill -0 "${DAEMON_PID}" 2>/dev/null; then
      echo "weftd ended before it listened." >&2
      return 1
    fi
    if ((SECONDS > limit)); then
      echo "weftd did not listen within ${START_LIMIT_SECONDS} s." >&2
      return 1
    fi
    sleep 0.1
  done
}

# Polls the health service over gRPC, as an orchestrator would, until weftd is
# ready.
wait_until_ready() {
  "${PYTHON}" - "${GRPC_ADDRESS}" "${DAEMON_PID}" "${START_LIMIT_SECONDS}" <<'EOF'
import os, sys, time
import weft

address, pid, seconds = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
limit = time.monotonic() + seconds
with weft.Client(address) as client:
    while not client.healthy():
        os.kill(pid, 0)  # Raises if the daemon has ended.
        if time.monotonic() > limit:
            sys.exit(f"weftd was not ready within {seconds:.0f} s.")
        time.sleep(0.2)
EOF
}

scrape() {
  "${PYTHON}" - "$1" <<'EOF'
import sys, urllib.request
page = urllib.request.urlopen(f"http://{sys.argv[1]}/metrics", timeout=10)
sys.stdout.write(page.read().decode())
EOF
}

cd "${ROOT}"
heading "Install"
deploy/setup.sh --debian
install_log="$(mktemp)"
readonly install_log
deploy/setup.sh >"${install_log}" 2>&1 &
INSTALLER_PID=$!

# build TARGET...: builds programs, and shows what is left.
build() { NINJA_STATUS="[%f/%t %es] " cmake --build --preset cpu --target "$@"; }

# Python and LibTorch are installed on one core, so the other core builds what
# needs neither.
if [[ ! -d build/cpu ]]; then
  heading "Build what does not need LibTorch"
  cmake --preset cpu -DWEFT_WITH_TORCH=OFF
  build weft_server weft_log weft_model_config weft_dispatch || true
fi
status=0
wait "${INSTALLER_PID}" || status=$?
INSTALLER_PID=""
cat "${install_log}"
rm -f "${install_log}"
if ((status)); then exit "${status}"; fi

heading "Build weftd"
cmake --preset cpu -DWEFT_WITH_TORCH=ON
build weftd
readonly WEFTD="${ROOT}/build/cpu/server/weftd"

if [[ "${MODEL}" == "${DEMO_MODEL}" ]]; then
  heading "Demo model"
  "${PYTHON}" deploy/prepare_demo_model.py --out "${MODEL}"
fi

heading "Start weftd"
if [[ -s "${RUN}/pid" ]] && kill -0 "$(<"${RUN}/pid")" 2>/dev/null; then
  echo "A server left by --keep still runs: kill $(<"${RUN}/pid")" >&2
  exit 1
fi
rm -rf "${RUN}"
mkdir -p "${RUN}"
nohup "${WEFTD}" --model "${MODEL}" --checkpoint-dir "${RUN}/checkpoints" \
  --listen 127.0.0.1:0 --metrics-listen 127.0.0.1:0 \
  --port-file "${RUN}/ports" >"${RUN}/weftd.log" 2>&1 &
DAEMON_PID=$!
wait_for_ports
read -r -d '' -a addresses <"${RUN}/ports" || true # read returns 1 at the end of the file.
readonly GRPC_ADDRESS="${addresses[0]}" METRICS_ADDRESS="${addresses[1]}"
wait_until_ready
echo "gRPC on ${GRPC_ADDRESS}, metrics on http://${METRICS_ADDRESS}/metrics," \
  "log in ${RUN}/weftd.log"

heading "Train four adapters at once, then sample"
"${PYTHON}" deploy/demo.py --server "${GRPC_ADDRESS}" --model "${MODEL}"

heading "Metrics page (excerpt)"
scrape "${METRICS_ADDRESS}" >"${RUN}/metrics.txt"
grep -E '^(weft_(train|prompt|sampled)_tokens_total|weft_adapters|weft_adapter_bytes|weft_optim_steps_total|weft_queue_depth|weft_step_seconds_(count|sum)|weft_kv_cache|weft_build_info|grpc_server_handled_total|process_resident_memory_bytes)' \
  "${RUN}/metrics.txt" | grep -v '^grpc.* 0$'

if [[ "${KEEP}" == true ]]; then
  heading "Build weftctl"
  build weftctl
  heading "Left running: process ${DAEMON_PID}"
  cat <<EOF
  build/cpu/client/weftctl/weftctl info --server ${GRPC_ADDRESS}
  build/cpu/client/weftctl/weftctl adapters list --server ${GRPC_ADDRESS}
  .venv/bin/python deploy/demo.py --server ${GRPC_ADDRESS} --model ${MODEL}
  kill ${DAEMON_PID}   # Finishes what runs, then stops.
EOF
  echo "${DAEMON_PID}" >"${RUN}/pid"
  DAEMON_PID=""
  exit 0
fi

heading "Stop weftd"
stop_daemon
heading "Done: the service was installed, built, used and stopped"
