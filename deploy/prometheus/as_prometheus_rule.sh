#!/usr/bin/env bash
# Prints rules.yml as the object that the Prometheus operator reads:
#   deploy/prometheus/as_prometheus_rule.sh | kubectl apply -f -
# RUNBOOK_BASE is put in front of deploy/RUNBOOK.md in each alert's runbook_url,
# for example https://git.example.org/weft/blob/v0.2.0/.
set -euo pipefail

cat <<'HEAD'
apiVersion: monitoring.coreos.com/v1
kind: PrometheusRule
metadata:
  name: weftd
  namespace: weft
  labels:
    app.kubernetes.io/name: weftd
    app.kubernetes.io/instance: weftd
    app.kubernetes.io/part-of: weft
spec:
HEAD
sed -e 's/^\(.\)/  \1/' -e "s|runbook_url: deploy/|runbook_url: ${RUNBOOK_BASE:-}deploy/|" \
  "$(dirname "${BASH_SOURCE[0]}")/rules.yml"
