#!/usr/bin/env bash
# Makes a certificate for the edge, signed by an authority of its own.
set -euo pipefail

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)"
readonly ROOT

usage() {
  cat <<'USAGE'
Usage: certificate.sh [--dir DIR] [--force] NAME...
       certificate.sh [--dir DIR] [--force] --client NAME
  NAME      a name or an address that clients dial, such as weft.example.org
  --client  makes a client's certificate for mutual TLS, in DIR/clients
  --dir     default: run/edge of the checkout
  --force   replaces a certificate. The authority stays, so clients keep ca.crt
USAGE
}

dir="${ROOT}/run/edge"
force=0
client=""
names=()
while (($# > 0)); do
  case "$1" in
    --dir) dir="${2:?--dir needs a folder}"; shift 2 ;;
    --client) client="${2:?--client needs a name}"; shift 2 ;;
    --force) force=1; shift ;;
    -h | --help) usage; exit 0 ;;
    -*) echo "certificate: unknown option $1" >&2; usage >&2; exit 2 ;;
    *) names+=("$1"); shift ;;
  esac
done
if [[ -z "${client}" && "${#names[@]}" == 0 ]] || [[ -n "${client}" && "${#names[@]}" != 0 ]]; then
  usage >&2
  exit 2
fi
for name in ${client:+"${client}"} "${names[@]}"; do
  if [[ ! "${name}" =~ ^[A-Za-z0-9*:._-]+$ ]]; then
    echo "certificate: ${name} is neither a name nor an address" >&2
    exit 2
  fi
done

umask 077
mkdir -p "${dir}/tls" "${dir}/clients"
readonly KEY=(-newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes)
readonly CA="${dir}/tls/ca.crt" CA_KEY="${dir}/authority.key"

openssl_quiet() {
  local answer
  answer="$(openssl "$@" 2>&1)" || { echo "${answer}" >&2; return 1; }
}

# sign SUBJECT EXTENSIONS CERTIFICATE KEY: both files appear when both are made.
sign() {
  local work
  work="$(mktemp -d "${dir}/new.XXXXXX")"
  openssl_quiet req "${KEY[@]}" -subj "/CN=$1" -keyout "${work}/key" -out "${work}/csr"
  printf '%s\nbasicConstraints=critical,CA:FALSE\nkeyUsage=critical,digitalSignature\n' \
    "$2" >"${work}/extensions"
  openssl_quiet x509 -req -in "${work}/csr" -days 365 -extfile "${work}/extensions" \
    -CA "${CA}" -CAkey "${CA_KEY}" -set_serial "0x$(openssl rand -hex 16)" \
    -out "${work}/crt"
  mv "${work}/key" "$4"
  mv "${work}/crt" "$3"
  rm -r "${work}"
}

# fresh FILE: refuses to replace it without --force.
fresh() {
  if [[ -e "$1" && "${force}" == 0 ]]; then
    echo "certificate: $1 exists; --force replaces it" >&2
    exit 1
  fi
}

if [[ -n "${client}" ]]; then
  [[ -e "${CA_KEY}" ]] || { echo "certificate: ${dir} has no authority; make the edge's certificate first" >&2; exit 1; }
  fresh "${dir}/clients/${client}.crt"
  sign "${client}" "extendedKeyUsage=clientAuth" \
    "${dir}/clients/${client}.crt" "${dir}/clients/${client}.key"
  echo "${dir}/clients/${client}.crt and ${client}.key: WEFT_CLIENT_CERT and WEFT_CLIENT_KEY of this client"
  exit
fi

fresh "${dir}/tls/tls.crt"
if [[ ! -e "${CA_KEY}" ]]; then
  openssl_quiet req -x509 "${KEY[@]}" -days 3650 -subj "/CN=Weft edge" \
    -addext "keyUsage=critical,keyCertSign,cRLSign" -keyout "${CA_KEY}" -out "${CA}"
  chmod 0644 "${CA}"
fi
alternatives=()
for name in "${names[@]}"; do
  if [[ "${name}" =~ ^[0-9.]+$ || "${name}" == *:* ]]; then
    alternatives+=("IP:${name}")
  else
    alternatives+=("DNS:${name}")
  fi
done
# Edges of a fleet are clients of each other.
sign "${names[0]}" "extendedKeyUsage=serverAuth,clientAuth
subjectAltName=$(IFS=, && echo "${alternatives[*]}")" \
  "${dir}/tls/tls.crt" "${dir}/tls/tls.key"
echo "${CA}: give this file to clients (WEFT_CA, --ca); it is not secret"
