#!/usr/bin/env bash
# Puts Debian's sshd and rsync, with the libraries that they need, into .tools/sshd: the test of `ray up` makes hosts of this machine's
# loopback addresses with them (tests/deploy/loopback_hosts.py). Nothing is installed, nothing is started.
set -euo pipefail
cd "$(dirname "$0")/.."
target=.tools/sshd
if [[ -x $target/usr/sbin/sshd && -x $target/usr/bin/rsync ]]; then
    echo "sshd is in $target already"
    exit 0
fi
deploy/fetch_debian.sh "$target" openssh-server rsync libwrap0 libpopt0 libnss-wrapper
echo "sshd and rsync are in $target"
