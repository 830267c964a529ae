#!/usr/bin/env bash
# Puts Debian's bubblewrap into .tools/bubblewrap, for tests of task folders' sandboxes on a machine without it. Nothing is installed.
set -euo pipefail
cd "$(dirname "$0")/.."
target=.tools/bubblewrap
if [[ -x $target/usr/bin/bwrap ]]; then
    echo "bubblewrap is in $target already"
    exit 0
fi
deploy/fetch_debian.sh "$target" bubblewrap
echo "bubblewrap is in $target"
