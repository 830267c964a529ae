#!/usr/bin/env bash
# deploy/fetch_debian.sh FOLDER PACKAGE...: unpacks Debian packages into a folder, without installing anything and without being root:
# `apt-get install` of a server would start it. Linux with apt only.
set -euo pipefail
target=$1
shift
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
chmod 755 "$work"

download() { (cd "$work" && apt-get "${@:1:$#-1}" download ${!#} >download.log 2>&1); }

if ! download "$*"; then
    # No package lists on this machine: fetch them into the work folder.
    mkdir -p "$work/lists/partial" "$work/cache/archives/partial"
    own=(-o "Dir::State::Lists=$work/lists" -o "Dir::Cache=$work/cache" -o APT::Sandbox::User=)
    apt-get "${own[@]}" update >"$work/update.log" 2>&1 && download "${own[@]}" "$*" || {
        echo "$*: Debian's packages can't be fetched: $(tail -n 1 "$work/download.log")" >&2
        exit 1
    }
fi
mkdir -p "$target"
for package in "$work"/*.deb; do
    dpkg -x "$package" "$target"
done
find "$target" -xtype l -delete  # `ray up` reads every file of the folder, and ends at a link to a package that isn't here
