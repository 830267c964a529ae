#!/usr/bin/env bash
# Puts Debian's Redis, with the libraries that it needs, into .tools/redis: the test of a head that comes back keeps the head's memory in it
# (tests/failures/test_head_returns.py). Nothing is installed, nothing is started.
set -euo pipefail
cd "$(dirname "$0")/.."
target=.tools/redis
if [[ -x $target/usr/bin/redis-server ]]; then
    echo "Redis is in $target already"
    exit 0
fi
deploy/fetch_debian.sh "$target" redis-server redis-tools libjemalloc2 liblzf1 libatomic1
echo "Redis is in $target"
