#!/usr/bin/env bash
# Puts Debian's prometheus and promtool into a folder, without installing anything and without being root:
# `apt-get install prometheus` would start a service. Linux with apt only. Used by the tests (.ci/run) and by anyone who
# wants to look at a run's metrics: .tools/prometheus/prometheus --config.file=deploy/prometheus.yml
set -euo pipefail
cd "$(dirname "$0")/.."
target=${1:-.tools/prometheus}
if [[ -x $target/prometheus && -x $target/promtool ]]; then
    echo "prometheus is in $target already"
    exit 0
fi
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
chmod 755 "$work"

download() { (cd "$work" && apt-get "$@" download prometheus >download.log 2>&1); }

if ! download; then
    # No package lists on this machine: fetch them into the work folder.
    mkdir -p "$work/lists/partial" "$work/cache/archives/partial"
    own=(-o "Dir::State::Lists=$work/lists" -o "Dir::Cache=$work/cache" -o APT::Sandbox::User=)
    apt-get "${own[@]}" update >"$work/update.log" 2>&1 && download "${own[@]}" || {
        echo "prometheus: Debian's package can't be fetched: $(tail -n 1 "$work/download.log")" >&2
        exit 1
    }
fi
dpkg -x "$work"/prometheus_*.deb "$work/root"
mkdir -p "$target"
cp "$work/root/usr/bin/prometheus" "$work/root/usr/bin/promtool" "$target/"
echo "prometheus is in $target: $("$target/prometheus" --version 2>&1 | head -n 1)"
