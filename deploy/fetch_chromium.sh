#!/usr/bin/env bash
# Puts Debian's Chromium, with those libraries that this machine doesn't have, into .tools/chromium: the tests of the live page look at it
# with a real browser (tests/evenkeel/dashboard). Nothing is installed. With a chromium on the PATH there is nothing to do.
set -euo pipefail
cd "$(dirname "$0")/.."
target=.tools/chromium
if command -v chromium >/dev/null || [[ -x $target/run ]]; then
    echo "Chromium is here already"
    exit 0
fi
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
chmod 755 "$work"
missing() { apt-get -s --no-install-recommends install chromium fonts-dejavu-core 2>/dev/null | awk '/^Inst/ { print $2 }'; }
if [[ -z $(missing) ]]; then
    # No package lists on this machine: fetch them into the work folder.
    mkdir -p "$work/lists/partial" "$work/cache/archives/partial"
    printf 'Dir::State::Lists "%s";\nDir::Cache "%s";\nAPT::Sandbox::User "";\n' "$work/lists" "$work/cache" >"$work/apt.conf"
    export APT_CONFIG=$work/apt.conf
    apt-get update >"$work/update.log" 2>&1 || { echo "Chromium: no package lists: $(tail -n 1 "$work/update.log")" >&2; exit 1; }
fi
deploy/fetch_debian.sh "$target" "$(missing)"
cat >"$target/run" <<'END'
#!/usr/bin/env bash
here=$(cd "$(dirname "$0")" && pwd)
export LD_LIBRARY_PATH=$(find "$here/usr/lib" "$here/lib" -maxdepth 2 -type d 2>/dev/null | paste -sd:)
exec "$here/usr/lib/chromium/chromium" "$@"
END
chmod +x "$target/run"
echo "Chromium is in $target: $("$target/run" --version --no-sandbox 2>/dev/null)"
