#!/usr/bin/env bash
# Runs the edge: nginx with deploy/edge/nginx.conf on port 8443, and a command
# beside it, if one is given. Each of them ends when the other does.
set -euo pipefail

HERE="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
readonly HERE

usage() {
  cat <<'USAGE'
Usage: run.sh [--dir DIR] [--listen [ADDRESS:]PORT] [--mtls] [--fleet NAME]
              [-- COMMAND...]
  --dir DIR  has the folder tls with tls.crt and tls.key, and optionally an
             nginx.conf in place of the one beside this script (default:
             run/edge of the checkout)
  --listen   in place of the port of nginx.conf, 8443 on all addresses
  --mtls     clients must show a certificate that DIR/tls/ca.crt has signed
  --fleet    sends calls to the edges of other servers, whose certificates must
             be for NAME and signed by DIR/tls/edges.crt, or else by
             DIR/tls/ca.crt
  COMMAND    for example weftd with its flags. SIGTERM goes to it first, and
             nginx serves until it has ended
Files of DIR that change are used within three seconds, and after SIGHUP.
USAGE
}

dir="${HERE}/../../run/edge"
listen=""
mtls=0
fleet=""
command=()
while (($# > 0)); do
  case "$1" in
    --dir) dir="${2:?--dir needs a folder}"; shift 2 ;;
    --listen) listen="${2:?--listen needs a port}"; shift 2 ;;
    --mtls) mtls=1; shift ;;
    --fleet) fleet="${2:?--fleet needs a name}"; shift 2 ;;
    --) shift; command=("$@"); break ;;
    -h | --help) usage; exit 0 ;;
    *) echo "edge: unknown option $1" >&2; usage >&2; exit 2 ;;
  esac
done
readonly listen NEAR_DAYS=21
if [[ -n "${listen}" && ! "${listen}" =~ ^([][0-9a-zA-Z.:-]+:)?[0-9]+$ ]]; then
  echo "edge: --listen is '${listen}', must be PORT or ADDRESS:PORT" >&2
  exit 2
fi

if [[ -n "${fleet}" && ! "${fleet}" =~ ^[0-9a-zA-Z.-]+$ ]]; then
  echo "edge: --fleet is '${fleet}', must be a name" >&2
  exit 2
fi

say() { # LEVEL MESSAGE
  printf '{"ts":"%s","level":"%s","msg":"edge: %s"}\n' "$(date -u +%FT%TZ)" "$1" "$2" >&2
}

# Debian has nginx in /usr/sbin, which is not on every user's PATH.
PATH="${PATH}:/usr/sbin"
if ! command -v nginx >/dev/null; then
  echo "edge: nginx is missing: run deploy/setup.sh --edge" >&2
  exit 1
fi
if [[ ! -r "${dir}/tls/tls.crt" || ! -r "${dir}/tls/tls.key" ]]; then
  echo "edge: ${dir}/tls has no tls.crt and tls.key that can be read:" \
    "deploy/edge/certificate.sh makes them" >&2
  exit 1
fi
dir="$(cd "${dir}" && pwd)"
readonly dir

# nginx reads and writes below one folder. So DIR may be read-only, and several
# edges may run on one machine.
work="$(mktemp -d "${TMPDIR:-/tmp}/weft-edge.XXXXXX")"
readonly work
chmod 0711 "${work}" # Root's nginx works as nobody, and writes bodies there.
loggers=()
# The loggers end with their last writer.
trap 'exec >/dev/null 2>&1; wait "${loggers[@]}" || true; rm -rf "${work}"' EXIT
ln -s "${dir}/tls" "${work}/tls"
if ((mtls)); then ln -s "${HERE}/mtls.conf" "${work}/mtls.conf"; fi
# Bodies wait for the answer whose they are, because nginx sends them again. An
# edge shows its own certificate to one that wants one (--mtls).
write_fleet() {
  local ca=ca.crt module
  if [[ -e "${dir}/tls/edges.crt" ]]; then ca=edges.crt; fi
  if [[ ! -r "${dir}/tls/${ca}" ]]; then
    echo "edge: --fleet: ${dir}/tls has no edges.crt or ca.crt with the authority" \
      "of the other edges' certificates" >&2
    exit 1
  fi
  echo "set \$fleet 1;"
  echo "proxy_request_buffering on;"
  for module in grpc proxy; do
    printf "${module}_ssl_%s;\n" "verify on" "verify_depth 4" "server_name on" \
      "name ${fleet}" "trusted_certificate tls/${ca}" \
      "certificate tls/tls.crt" "certificate_key tls/tls.key"
  done
  # Addresses need none of these.
  sed -nE 's/^nameserver ([0-9.]+)$/\1/p' /etc/resolv.conf 2>/dev/null |
    paste -sd ' ' | sed -nE 's/^(.+)$/resolver \1;/p'
}
if [[ -n "${fleet}" ]]; then write_fleet >"${work}/fleet.conf"; fi
choose_conf() {
  conf="${HERE}/nginx.conf"
  if [[ -e "${dir}/nginx.conf" ]]; then conf="${dir}/nginx.conf"; fi
}
write_conf() {
  choose_conf
  sed -E "${listen:+s@^( *listen )[^ ;]+@\1${listen}@}" "${conf}" >"${work}/nginx.draft" || return
  mv "${work}/nginx.draft" "${work}/nginx.conf"
  # nginx does not start with addresses that the machine lacks.
  if grep -q . /proc/net/if_inet6 2>/dev/null; then
    sed -nE 's/^ *listen ([0-9]+) (.*);.*/listen [::]:\1 \2 ipv6only=on;/p' \
      "${work}/nginx.conf" >"${work}/ipv6.conf"
  fi
}
write_conf

nginx_here() { nginx -p "${work}" -c nginx.conf -e stderr "$@"; }
contents() {
  choose_conf
  cat "${conf}" "${work}"/tls/{tls.crt,tls.key,ca.crt,edges.crt} 2>/dev/null | cksum || true
}
warn_of_expiry() {
  local until
  if ! openssl x509 -checkend $((NEAR_DAYS * 86400)) -noout \
    -in "${work}/tls/tls.crt" >/dev/null 2>&1; then
    until="$(openssl x509 -enddate -noout -in "${work}/tls/tls.crt" 2>/dev/null || true)"
    say warning "the certificate expires in less than ${NEAR_DAYS} days: ${until#notAfter=}"
  fi
}
public_keys() { # FILE
  local one
  while IFS= read -r -d '' one; do
    openssl x509 -noout -pubkey <<<"${one}" 2>/dev/null | sha256sum
  done < <(sed -e 's/-----END CERTIFICATE-----/&\x00/' "$1")
}
# Says what nginx would not: that the order is wrong, or a passphrase is needed.
certificate_problem() {
  local key own
  if grep -q '^ *ssl_password_file ' "${work}/nginx.conf"; then return; fi
  if ! key="$(openssl pkey -in "${work}/tls/tls.key" -passin pass: -pubout 2>/dev/null)"; then
    echo "tls.key is no private key that can be read without a passphrase"
    return
  fi
  key="$(sha256sum <<<"${key}")"
  own="$(public_keys "${work}/tls/tls.crt")"
  if [[ "${own}" == *"${key}"* && "${own}" != "${key}"* ]]; then
    echo "tls.crt must begin with the certificate of tls.key, and go on with its issuer's"
  fi
}
warn_of_missing_issuer() {
  local text
  text="$(openssl x509 -noout -ext authorityInfoAccess -in "${work}/tls/tls.crt" 2>/dev/null || true)"
  if [[ "${text}" == *"CA Issuers"* && "$(grep -c BEGIN "${work}/tls/tls.crt")" == 1 ]]; then
    say warning "tls.crt has no certificate of its issuer behind its own, so clients may refuse it"
  fi
}
reload() {
  local answer
  write_conf || return 0 # The file goes as this reads it.
  answer="$(certificate_problem)"
  if [[ -z "${answer}" ]] && answer="$(nginx_here -t -q 2>&1)"; then
    kill -HUP "${nginx}"
    say info "reloaded"
    warn_of_expiry
    warn_of_missing_issuer
  else
    say error "the files are bad, so the old ones stay: $(head -n 1 <<<"${answer//[\"\\]/}")"
  fi
}

# Each waiting call takes a descriptor.
ulimit -n "$(ulimit -Hn)"
used="$(contents)"
problem="$(certificate_problem)"
if [[ -n "${problem}" ]]; then
  echo "edge: ${dir}/tls: ${problem}" >&2
  exit 1
fi
trap 'used=""' HUP # Like nginx, uses its files anew.
# nginx and this script wait for no reader of their log. The command has the
# descriptors that this script was started with.
exec 3>&1 4>&2
mkfifo "${work}/out" "${work}/err"
"${HERE}/log.pl" <"${work}/out" >&3 3>&- 4>&- & loggers+=($!)
"${HERE}/log.pl" <"${work}/err" >&4 3>&- 4>&- & loggers+=($!)
exec >"${work}/out" 2>"${work}/err"
# With these, because the check opens the log, and stdout may be a socket, or a
# file that this user may not open.
nginx_here -t -q
if ((mtls)) && ! grep -q '^ *ssl_verify_client on;' <<<"$(nginx_here -T -q 2>/dev/null)"; then
  echo "edge: --mtls has no effect, because ${dir}/nginx.conf does not include mtls.conf" >&2
  exit 1
fi
if [[ -n "${fleet}" ]] && ! grep -q '^set .fleet 1;' <<<"$(nginx_here -T -q 2>/dev/null)"; then
  echo "edge: --fleet has no effect, because ${dir}/nginx.conf does not include fleet.conf" >&2
  exit 1
fi
warn_of_expiry
warn_of_missing_issuer
# Own sessions: Ctrl-C must reach this script alone, which ends both in order.
# If this script is killed, both end, too.
setsid setpriv --pdeathsig TERM nginx -p "${work}" -c nginx.conf -e stderr 3>&- 4>&- &
nginx=$!
beside=""
if ((${#command[@]} > 0)); then
  setsid setpriv --pdeathsig TERM "${command[@]}" >&3 2>&4 3>&- 4>&- &
  beside=$!
fi

stopping=0
stop() {
  stopping=1
  if [[ -n "${beside}" ]]; then kill -TERM "${beside}" 2>/dev/null || true; fi
}
trap stop TERM INT

alive() { [[ -n "$1" ]] && kill -0 "$1" 2>/dev/null; }
# Waits in spite of signals, and returns the status of the process.
wait_for() {
  local status
  while true; do
    status=0
    wait "$1" || status=$?
    alive "$1" || return "${status}"
  done
}

seen="${used}"
seconds=0
while ((!stopping)) && alive "${nginx}" && { [[ -z "${beside}" ]] || alive "${beside}"; }; do
  sleep 1 >/dev/null 2>&1 &
  wait $! || true
  now="$(contents)"
  # Twice the same: a certificate and its key are often copied one by one.
  if [[ "${now}" != "${used}" && "${now}" == "${seen}" ]]; then
    used="${now}"
    reload
  fi
  seen="${now}"
  if ((++seconds % 86400 == 0)); then warn_of_expiry; fi
done

status=0
if ! alive "${nginx}"; then
  say error "nginx has ended"
  # Its workers go on if it was killed.
  kill -TERM -- "-${nginx}" 2>/dev/null || true
  stop
  status=1
fi
if [[ -n "${beside}" ]]; then
  wait_for "${beside}" || status=$?
fi
# Calls that still run end by themselves. Again and again, because nginx ignores
# the signal until it has started: the shell starts it so.
while alive "${nginx}"; do
  kill -QUIT "${nginx}" 2>/dev/null || true
  sleep 0.2 || true
done
wait_for "${nginx}" || status=$((status ? status : 1))
exit "${status}"
