#!/usr/bin/env bash
# Installs, builds and runs tests. Without arguments it runs what shows that a
# build does what it should. `gates` runs what a change must pass besides:
# sanitizer builds, the CUDA build if nvcc is found, linters, deployment, crashes
# of ranks, and more numbers. With other arguments it runs the tests with one of
# these labels. Label image, which builds a container image, runs only if it is
# named.
#
#   tests/run.sh                  # all but the gates
#   tests/run.sh gates
#   tests/run.sh all              # both, but not label image
#   tests/run.sh unit             # about three minutes once it is built
#   tests/run.sh oracle deploy
set -euo pipefail

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
readonly ROOT
JOBS="$(nproc)"
readonly JOBS

case "${1:-}" in
  -h | --help)
    sed -n '2,/^set/ { /^set/d; s/^# \{0,1\}//; p }' "${BASH_SOURCE[0]}"
    exit 0
    ;;
esac

heading() { printf '\n== %s (%s s)\n' "$1" "${SECONDS}"; }

cd "${ROOT}"
heading "Install what the build needs"
deploy/setup.sh --cpu

case "$*" in
  "") selection=(--label-exclude '^gate$') ;;
  gates) selection=(--label-regex '^gate$') ;;
  all) selection=() ;;
  *) selection=(--label-regex "^($(IFS='|' && echo "$*"))\$") ;;
esac
if [[ " $* " == *" image "* ]]; then selection+=(--build-config image); fi

# dpkg uses one core, so the tests' packages are installed during the build.
install_rest() {
  .venv/bin/python deploy/prepare_demo_model.py && deploy/setup.sh "$@"
}
# Looks for clang++ before the installer starts, because CMake must not look at
# a compiler that is being installed.
meanwhile=()
if [[ "$*" == gates || "$*" == all ]]; then
  if command -v clang++ >/dev/null; then meanwhile+=(asan:clang++); fi
  meanwhile+=(tsan:g++)
fi
packages=(--tests)
if [[ " $* " == *" image "* ]]; then packages+=(--image); fi
log="$(mktemp)"
readonly log
install_rest "${packages[@]}" >"${log}" 2>&1 &
readonly installer=$!
# If the build fails, waits for the installer, so that no package stays
# half-installed.
trap 'wait; rm -f "${log}"' EXIT

heading "Configure and build (preset cpu)"
cmake --preset cpu
export NINJA_STATUS="[%p, %f/%t, %es] "
cmake --build --preset cpu --parallel "${JOBS}"
if [[ -n "$*" ]]; then
  cmake --build --preset cpu --parallel "${JOBS}" --target gate_programs
fi

# While the installer runs on one core, the other core builds presets that need
# none of its packages. If a build fails, the preset's test builds again.
for preset in "${meanwhile[@]}"; do
  if ! kill -0 "${installer}" 2>/dev/null; then break; fi
  heading "Build (preset ${preset%:*})"
  tests/deploy/run_preset.sh "${preset%:*}" "${preset#*:}" || true
done

heading "What the tests need, installed beside the build"
status=0
wait "${installer}" || status=$?
cat "${log}"
rm -f "${log}"
trap - EXIT
if ((status)); then exit "${status}"; fi

heading "Test ${*:-without gates}"
# Waiting compute threads must not spin, because other tests need the core.
export OMP_WAIT_POLICY="${OMP_WAIT_POLICY:-passive}"
export WEFT_BUILD_DIR="${WEFT_BUILD_DIR:-${ROOT}/build/cpu}"
exec tests/run_ctest.sh build/cpu "${selection[@]}"
