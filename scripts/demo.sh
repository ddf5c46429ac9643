#!/usr/bin/env bash
# The story in two minutes: a pool of real processes, blocks stored through the proxy, one shard killed, nothing missing,
# the degradation told in words, the shard back, all healthy. Everything runs on loopback and is removed at the end.
set -euo pipefail
cd "$(dirname "$0")/.."

blocks=48
say() { printf '\n\033[1m%s\033[0m\n' "$*"; }

./tests/setup.sh redis
if [ -z "${KVPOOL_BIN:-}" ]; then
    say "Building kvpool"
    cargo build --release --locked --package kvpool
    KVPOOL_BIN="${CARGO_TARGET_DIR:-$PWD/target}/release/kvpool"
fi

dir=$(mktemp -d)
victim_again=
finish() {
    if [ -n "$victim_again" ]; then kill "$victim_again" 2>/dev/null || true; fi
    if [ -n "${dev:-}" ]; then kill -INT "$dev" 2>/dev/null || true; wait "$dev" 2>/dev/null || true; fi
    rm -rf "$dir"
}
trap finish EXIT

# ask EXPRESSION: a value of the ready file, e.g. ask 'd["proxy"]["resp"]'
ask() { python3 -c 'import json, sys; d = json.load(open(sys.argv[1])); print(eval(sys.argv[2]))' "$dir/ready.json" "$1"; }

say "1. Three coordinators, three shards, one proxy: kvpool dev"
read -r resp lm http < <(python3 -c '
import socket
s = [socket.socket() for _ in range(3)]
[x.bind(("127.0.0.1", 0)) for x in s]
print(*[x.getsockname()[1] for x in s])')
"$KVPOOL_BIN" dev --data-dir "$dir/data" --ready-file "$dir/ready.json" \
    --resp-port "$resp" --lm-port "$lm" --http-port "$http" >"$dir/dev.log" 2>&1 &
dev=$!
for _ in $(seq 300); do
    if [ -s "$dir/ready.json" ]; then break; fi
    kill -0 "$dev" 2>/dev/null || { cat "$dir/dev.log"; exit 1; }
    sleep 0.1
done
cat "$dir/dev.log"
KVPOOL_ENDPOINTS=$(ask '",".join(c["endpoint"] for c in d["coordinators"])')
export KVPOOL_ENDPOINTS KVPOOL_JOIN_TOKEN_FILE="$dir/data/join-token"
status() { "$KVPOOL_BIN" status || true; }
healthy() {
    for _ in $(seq 600); do
        if "$KVPOOL_BIN" status >/dev/null 2>&1; then return; fi
        sleep 0.2
    done
    echo "the pool did not become healthy within two minutes"
    return 1
}
healthy
status

say "2. $blocks blocks of 1 MiB go in through the proxy; each is held by two shards"
for i in $(seq "$blocks"); do
    head -c 1048576 /dev/urandom >"$dir/block"
    sha256sum <"$dir/block" >"$dir/sum.$i"
    redis-cli -p "$resp" -x SET "demo:$i" <"$dir/block" >/dev/null
done
count() {
    local hits=0 i
    for i in $(seq "$blocks"); do
        # redis-cli ends its output with a newline that is not part of the value
        if redis-cli -p "$resp" GET "demo:$i" | head -c 1048576 | sha256sum | cmp -s - "$dir/sum.$i"; then
            hits=$((hits + 1))
        fi
    done
    echo "$hits of $blocks blocks read back, every byte compared"
}
count

victim=$(ask 'd["shards"][1]["pid"]')
id=$(ask 'd["shards"][1]["id"]')
mapfile -d '' command <"/proc/$victim/cmdline"
mapfile -d '' environment <"/proc/$victim/environ"
say "3. Shard $id (pid $victim) is killed with SIGKILL; the client does not notice"
kill -KILL "$victim"
count

say "4. kvpool says in words what is degraded and why"
for _ in $(seq 150); do
    if ! "$KVPOOL_BIN" status >/dev/null 2>&1; then break; fi
    sleep 0.2
done
status

say "5. The shard is started again by the same command; its copies are filled from the others"
env -i "${environment[@]}" "${command[@]}" >>"$dir/dev.log" 2>&1 &
victim_again=$!
healthy
status
count

say "Done. Ctrl-C of kvpool dev stops all of it"
