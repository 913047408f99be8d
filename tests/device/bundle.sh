#!/usr/bin/env bash
# Packs what run.sh needs into one file. The target machine has a GPU, Python,
# torch, transformers and peft. It needs no Debian packages, no compiler and no
# network:
#
#   tests/device/bundle.sh [OPTIONS] OUTPUT.tar.gz
#
#   --preset NAME      cuda (default); cpu to try the bundle itself
#   --python VERSION   the target's Python, such as 3.12 (default: .venv's)
#   --tree FOLDER      tree that cmake --install made from this preset's build.
#                      With --tree, nothing is built. The build must already
#                      have the programs of the tests.
#
# On the target: tar xf OUTPUT.tar.gz && weft-device/tests/device/run.sh
set -euo pipefail

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)"
readonly ROOT PYTHON="${ROOT}/.venv/bin/python"
# Libraries that every machine has, or that come with torch.
readonly SYSTEM='^(ld-linux|lib(c|m|dl|rt|util|pthread|resolv|stdc\+\+|gcc_s)\.so)'
readonly SITE_PACKAGES=(grpcio protobuf typing-extensions)

usage() { sed -n '2,/^set/ { /^set/d; s/^# \{0,1\}//; p }' "${BASH_SOURCE[0]}"; }

preset=cuda python='' tree='' output=''
while (($# > 0)); do
  case "$1" in
    --preset) preset="$2" && shift ;;
    --python) python="$2" && shift ;;
    --tree) tree="$2" && shift ;;
    -h | --help) usage && exit 0 ;;
    -*) echo "bundle.sh: unknown option $1" >&2 && exit 2 ;;
    *) output="$1" ;;
  esac
  shift
done
if [[ -z "${output}" ]]; then
  usage >&2
  exit 2
fi

build="${ROOT}/build/${preset}"
programs=(ops/ops_test lora/lora_test loss/head_test loss/optim_test
  model/model_test executor/executor_test sampling/draw_rows_test engine/device_test
  bench/decode_bench bench/head_bench oracle/dump_weights)
targets=(weft_failpoints_preload)
if [[ "${preset}" == cuda ]]; then
  programs+=(kernels/cuda/kernels_cuda_test ../kernels/cuda/cuda_kernel_bench)
  targets+=(cuda_trace)
else
  programs+=(kernels/cuda/cuda_kernels_on_host_test)
fi

scratch="$(mktemp -d)"
trap 'rm -rf "${scratch}"' EXIT
bundle="${scratch}/weft-device"
mkdir -p "${bundle}"/{bin,libexec,lib,build/client,build/tests/support,tests,client}

if [[ -z "${tree}" ]]; then
  cmake -S "${ROOT}" --preset "${preset}"
  cmake --build "${build}" --target weftd weftctl "${programs[@]##*/}" "${targets[@]}"
  tree="${scratch}/tree"
  cmake --install "${build}" --prefix "${tree}" --strip >/dev/null
fi
cp -r "${tree}" "${bundle}/weft"
rm -f "${bundle}/weft/lib/weft/torch" # The target machine has its own torch.

# Programs are stripped. One script starts them and finds their libraries.
cp "${ROOT}/tests/device/with_libraries.sh" "${bundle}/bin/"
for program in "${programs[@]}"; do
  name="${program##*/}"
  strip -o "${bundle}/libexec/${name}" "${build}/tests/${program}"
  ln -s with_libraries.sh "${bundle}/bin/${name}"
done
for file in "${bundle}"/weft/bin/* "${bundle}"/weft/lib/weft/*.so*; do
  strip --strip-unneeded "${file}"
done
if [[ -e "${build}/tests/device/libcuda_trace.so" ]]; then
  strip -o "${bundle}/lib/libcuda_trace.so" "${build}/tests/device/libcuda_trace.so"
fi
packages="$(readlink -f "${ROOT}/.venv")"
ldd "${build}/tests/"{ops/ops_test,bench/decode_bench,oracle/dump_weights} |
  awk '$2 == "=>" && $3 ~ /^\// { print $3 }' | sort -u |
  while read -r library; do
    name="${library##*/}"
    if [[ ! "${name}" =~ ${SYSTEM} && ! -e "${bundle}/weft/lib/weft/${name}" &&
      "$(readlink -f "${library}")" != "${packages}"/* ]]; then
      cp -L "${library}" "${bundle}/lib/"
    fi
  done

# The Python tests and benches look for programs at these paths.
ln -s ../weft/bin "${bundle}/build/server"
ln -s ../../weft/bin "${bundle}/build/client/weftctl"
ln -s ../../bin "${bundle}/build/tests/bench"
ln -s ../../bin "${bundle}/build/tests/oracle"
strip -o "${bundle}/build/tests/support/libweft_failpoints.so" \
  "${build}/tests/support/libweft_failpoints.so"

for folder in tests/{bench,oracle,e2e,fleet,device} client/python proto; do
  mkdir -p "${bundle}/$(dirname "${folder}")"
  cp -r "${ROOT}/${folder}" "${bundle}/${folder}"
done
rm -rf "${bundle}/client/python/build"
find "${bundle}" -name __pycache__ -prune -exec rm -rf {} +
"${PYTHON}" "${bundle}/client/python/generate.py"

# The packages that the Python client needs and the target machine may lack.
own="$("${PYTHON}" -c 'import sys; print("%d.%d" % sys.version_info[:2])')"
if [[ "${python:-${own}}" == "${own}" ]]; then
  "${PYTHON}" "${bundle}/tests/device/copy_packages.py" "${bundle}/python" \
    "${SITE_PACKAGES[@]}"
else
  grep -E "^($(IFS='|' && echo "${SITE_PACKAGES[*]}"))==" \
    "${ROOT}/deploy/constraints.txt" >"${scratch}/packages.txt"
  "${PYTHON}" -m pip install --quiet --target "${bundle}/python" --no-deps --no-compile \
    --only-binary=:all: --python-version "${python}" -r "${scratch}/packages.txt"
fi

{
  echo "commit $(git -C "${ROOT}" describe --always --dirty 2>/dev/null || echo unknown)"
  echo "preset ${preset}"
  echo "python ${python:-${own}}"
} >"${bundle}/VERSION"
# More than the least compression saves a tenth of the size for three times the time.
tar -C "${scratch}" -c weft-device | gzip -1 >"${output}"
echo "${output}: $(du -m "${output}" | cut -f1) MiB," \
  "$(du -sm "${bundle}" | cut -f1) MiB unpacked"
