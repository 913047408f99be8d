#!/usr/bin/env bash
# Prints rules.yml as the object that the Prometheus operator reads:
#   deploy/prometheus/as_prometheus_rule.sh | kubectl apply -f -
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
sed 's/^\(.\)/  \1/' "$(dirname "${BASH_SOURCE[0]}")/rules.yml"
