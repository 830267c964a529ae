#!/usr/bin/env bash
# Puts Debian's prometheus and promtool into a folder. Used by the tests (.ci/run) and by anyone who wants to look at a run's metrics:
# .tools/prometheus/prometheus --config.file=deploy/prometheus.yml
set -euo pipefail
cd "$(dirname "$0")/.."
target=${1:-.tools/prometheus}
if [[ -x $target/prometheus && -x $target/promtool ]]; then
    echo "prometheus is in $target already"
    exit 0
fi
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
deploy/fetch_debian.sh "$work" prometheus
mkdir -p "$target"
cp "$work/usr/bin/prometheus" "$work/usr/bin/promtool" "$target/"
echo "prometheus is in $target: $("$target/prometheus" --version 2>&1 | head -n 1)"
