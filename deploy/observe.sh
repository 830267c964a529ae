#!/usr/bin/env bash
# Looks at runs of this machine: a Prometheus with deploy/prometheus.yml and, where Grafana is installed, a Grafana with the board of a run.
#   deploy/observe.sh                                    # Ctrl-C ends both
# Start a run with metrics.discovery_port=9400. Both listen on 127.0.0.1 alone; what they keep is in .tools/observe.
# EVENKEEL_PROMETHEUS_PORT and EVENKEEL_GRAFANA_PORT are other ports, EVENKEEL_OBSERVE_DATA is another folder.
set -euo pipefail
cd "$(dirname "$0")/.."
port=${EVENKEEL_PROMETHEUS_PORT:-9090}
grafana_port=${EVENKEEL_GRAFANA_PORT:-3000}
data=${EVENKEEL_OBSERVE_DATA:-.tools/observe}
[[ -x .tools/prometheus/prometheus ]] || deploy/fetch_prometheus.sh
mkdir -p "$data/prometheus" "$data/grafana"
data=$(realpath "$data")  # Grafana takes a relative path for one below its home

started=()
finish() {
    trap - EXIT INT TERM
    kill "${started[@]}" 2>/dev/null || true
    wait || true
}
trap finish EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

.tools/prometheus/prometheus --config.file=deploy/prometheus.yml --storage.tsdb.path="$data/prometheus" \
    --web.listen-address="127.0.0.1:$port" --log.level=warn &
started+=($!)
echo "Prometheus: http://127.0.0.1:$port"

grafana=$(command -v grafana-server || true)
home=/usr/share/grafana
if [[ -n $grafana ]]; then
    export EVENKEEL_PROMETHEUS=http://127.0.0.1:$port EVENKEEL_BOARDS=$PWD/deploy/grafana
    export GF_SERVER_HTTP_ADDR=127.0.0.1 GF_SERVER_HTTP_PORT=$grafana_port GF_ANALYTICS_REPORTING_ENABLED=false
    export GF_ANALYTICS_CHECK_FOR_UPDATES=false GF_AUTH_ANONYMOUS_ENABLED=true GF_PATHS_DATA=$data/grafana
    export GF_PATHS_LOGS=$data/grafana/log GF_PATHS_PLUGINS=$data/grafana/plugins GF_PATHS_PROVISIONING=$PWD/deploy/grafana/provisioning
    "$grafana" --homepath="$home" &
    started+=($!)
    echo "Grafana:    http://127.0.0.1:$grafana_port/d/evenkeel"
else
    echo "Grafana is not installed: put grafana-server on the PATH, or import deploy/grafana/evenkeel.json into one that you have"
fi
wait -n "${started[@]}"
