#!/usr/bin/env bash
# Installs what the `peers` tier needs and prints the path of its Python.
#
# Debian packages: redis-server, redis-tools. Python: one virtual environment with every version of tests/requirements.txt,
# under ${XDG_CACHE_HOME:-~/.cache}/kvpool, named by a hash of that file and of the interpreter. Running it again is free;
# two runs at once wait for each other. `tests/setup.sh redis` stops after the Debian packages.
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
cache="${XDG_CACHE_HOME:-$HOME/.cache}/kvpool"
mkdir -p "$cache"

say() { printf '    %s\n' "$*" >&2; }

install_redis() {
    if command -v redis-server >/dev/null && command -v redis-cli >/dev/null; then return; fi
    command -v apt-get >/dev/null || { say "redis-server and redis-cli are missing and there is no apt-get"; return 1; }
    local sudo=""
    if [ "$(id -u)" != 0 ]; then sudo="sudo -n"; fi
    say "installing redis-server and redis-tools"
    $sudo apt-get -qq -o DPkg::Lock::Timeout=300 update >&2
    # The tests start their own servers on free ports; the packaged service is not wanted, so it is told not to start.
    $sudo env DEBIAN_FRONTEND=noninteractive RUNLEVEL=1 \
        apt-get -qq -y -o DPkg::Lock::Timeout=300 install --no-install-recommends redis-server redis-tools >&2
}

install_python() {
    local key venv
    key=$( { cat "$here/requirements.txt"; python3 -c 'import sys; print(sys.version, sys.prefix)'; } | sha256sum | cut -c1-16)
    venv="$cache/peers-$key"
    if [ ! -e "$venv/.complete" ]; then
        say "creating $venv: LMCache 0.5.6 with torch, about 2.5 GB to download and 4.4 GB on disk"
        rm -rf "$venv"
        python3 -m venv "$venv"
        # Every version is pinned, torch's CUDA list is cut on purpose: nothing to resolve.
        "$venv/bin/python" -m pip install --quiet --disable-pip-version-check --no-cache-dir --no-deps \
            --only-binary :all: -r "$here/requirements.txt" >&2
        "$venv/bin/python" -c 'import torch, lmcache.lmcache_redis, redis, pytest' >&2
        touch "$venv/.complete"
    fi
    # Environments of other versions of the list are kept while somebody uses them.
    touch "$venv"
    find "$cache" -maxdepth 1 -name 'peers-*' -mtime +30 -exec rm -rf {} +
    printf '%s\n' "$venv/bin/python"
}

exec 9>"$cache/setup.lock"
if ! flock -n 9; then
    say "another run is installing; waiting for it"
    flock -w 1800 9 || { say "the other run did not finish within 30 minutes"; exit 1; }
fi
install_redis
if [ "${1:-}" != redis ]; then install_python; fi
