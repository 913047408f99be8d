#!/usr/bin/env bash
# Builds stage runtime-cpu of deploy/Dockerfile with buildah, without an image
# registry. debootstrap makes the base image, with the package sources and the
# certificates of this machine. Run it as root, from any folder:
#   tests/deploy/build_image.sh STORE [IMAGE]
# STORE keeps the base, the layers and the image. Unchanged parts are not built
# again.
set -euo pipefail

if (($# < 1 || $# > 2)); then
  sed -n '2,/^set/ { /^set/d; s/^# \{0,1\}//; p }' "${BASH_SOURCE[0]}" >&2
  exit 2
fi
ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)"
mkdir -p "$1"
STORE="$(cd "$1" && pwd)"
readonly ROOT STORE IMAGE="${2:-weft:cpu}"
# The full name of the image that the Dockerfile builds on.
readonly BASE=docker.io/library/debian:bookworm-slim

for program in buildah debootstrap; do
  if ! command -v "${program}" >/dev/null; then
    echo "${program} is missing: run deploy/setup.sh --tests --image" >&2
    exit 1
  fi
done

# The vfs driver runs on every kernel, but copies layers. The overlay driver
# copies no layers, but needs a kernel with overlay support.
driver=vfs
if grep -qw overlay /proc/filesystems; then driver=overlay; fi
engine() {
  buildah --root "${STORE}/root" --runroot "${STORE}/run" \
    --storage-driver "${driver}" "$@"
}

# mirror: prints the URL from which apt gets Debian's packages on this machine.
mirror() {
  # shellcheck disable=SC2016  # apt's own variables.
  apt-get indextargets --format '$(REPO_URI) $(RELEASE) $(CREATED_BY)' |
    awk '$2 == "bookworm" && $3 == "Packages" { print $1; exit }'
}

# make_base FOLDER: makes a minimal Debian 12 with this machine's settings of
# apt and pip, and with its certificates.
make_base() {
  local folder="$1"
  debootstrap --variant=minbase --include=ca-certificates bookworm \
    "${folder}" "$(mirror)"
  rm -f "${folder}/etc/apt/sources.list"
  cp -a /etc/apt/sources.list* "${folder}/etc/apt/"
  apt-config dump Acquire >"${folder}/etc/apt/apt.conf.d/90machine"
  cp -a /usr/local/share/ca-certificates "${folder}/usr/local/share/"
  chroot "${folder}" update-ca-certificates
  if [[ -f /etc/pip.conf ]]; then cp /etc/pip.conf "${folder}/etc/"; fi
  rm -rf "${folder}"/var/cache/apt/archives/*.deb "${folder}"/var/lib/apt/lists/*
}

if ! engine inspect --type image "${BASE}" >/dev/null 2>&1; then
  folder="$(mktemp -d -p "${STORE}")"
  trap 'rm -rf "${folder}"' EXIT
  make_base "${folder}"
  container="$(engine from scratch)"
  engine copy --quiet "${container}" "${folder}" /
  engine commit --quiet --rm "${container}" "${BASE}"
fi

engine build --isolation chroot --layers --force-rm --pull=never \
  --target runtime-cpu --tag "${IMAGE}" \
  --file "${ROOT}/deploy/Dockerfile" "${ROOT}"
