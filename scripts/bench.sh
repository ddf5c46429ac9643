#!/usr/bin/env bash
# The data-plane bars, measured in one run with interleaved rounds: a raw loopback server (plain, and with a checksum),
# Redis 7, and three ways into kvpool: a shard alone (factor 1), a proxy before two shards and a shard with a replica (both
# factor 2). Writes the tables into docs/benchmarks.md. Everything runs on loopback and is removed at the end.
#
# Arguments go to `kvpool bench` (for example --rounds 3). KVPOOL_BIN names another binary; KVPOOL_BENCH_DRY=1 leaves the
# document alone.
set -euo pipefail
cd "$(dirname "$0")/.."

memory=1500MiB
document=docs/benchmarks.md
say() { printf '\n\033[1m%s\033[0m\n' "$*"; }

./tests/setup.sh redis
if [ -z "${KVPOOL_BIN:-}" ]; then
    say "Building kvpool"
    cargo build --release --locked --package kvpool
    KVPOOL_BIN="${CARGO_TARGET_DIR:-$PWD/target}/release/kvpool"
fi

dir=$(mktemp -d)
started=()
finish() {
    for pid in "${started[@]}"; do kill -INT "$pid" 2>/dev/null || true; done
    for pid in "${started[@]}"; do wait "$pid" 2>/dev/null || true; done
    rm -rf "$dir"
}
trap finish EXIT

# ask POOL EXPRESSION: a value of a pool's ready file, e.g. ask one 'd["proxy"]["resp"]'
ask() { python3 -c 'import json, sys; d = json.load(open(sys.argv[1])); print(eval(sys.argv[2]))' "$dir/$1.json" "$2"; }

# pool NAME SHARDS FACTOR: a pool with one coordinator, waited for.
pool() {
    "$KVPOOL_BIN" dev --coordinators 1 --shards "$2" --factor "$3" --memory-per-shard "$memory" --data-dir "$dir/$1" \
        --resp-port 0 --lm-port 0 --http-port 0 --ready-file "$dir/$1.json" >"$dir/$1.log" 2>&1 &
    started+=("$!")
    for _ in $(seq 600); do
        if [ -s "$dir/$1.json" ]; then break; fi
        kill -0 "$!" 2>/dev/null || { cat "$dir/$1.log"; exit 1; }
        sleep 0.1
    done
    for _ in $(seq 600); do
        if on "$1" status >/dev/null 2>&1; then return; fi
        sleep 0.2
    done
    on "$1" status || { echo "pool $1 did not become healthy within two minutes"; exit 1; }
}

# on POOL ARGUMENTS: kvpool against the coordinators of a pool.
on() {
    local name=$1
    shift
    KVPOOL_ENDPOINTS=$(ask "$name" 'd["coordinators"][0]["endpoint"]') KVPOOL_JOIN_TOKEN_FILE="$dir/$name/join-token" \
        "$KVPOOL_BIN" "$@"
}

say "Starting Redis and two pools"
redis_port=$(python3 -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])')
redis-server --bind 127.0.0.1 --port "$redis_port" --save "" --appendonly no --maxmemory 1500mb \
    --maxmemory-policy allkeys-lru --dir "$dir" >"$dir/redis.log" 2>&1 &
redis=$!
started+=("$redis")
pool one 1 1
pool two 2 2

shard=$(ask one 'd["shards"][0]["pid"]')
proxy=$(ask two 'd["proxy"]["pid"]')
pair=$(ask two '",".join(str(s["pid"]) for s in d["shards"])')
first=$(ask two 'd["shards"][0]["id"]')
# Keys whose primary is the shard that is asked: a forwarded write would move the bytes once more.
own_slots=$(on two get slots -o json | python3 -c '
import json, sys
print(",".join("%d-%d" % (r["first"], r["last"]) for r in json.load(sys.stdin) if r["copies"][0]["shard"] == sys.argv[1]))' "$first")

say "Measuring (some minutes; leave the machine alone)"
"$KVPOOL_BIN" bench raw raw-sum "redis=redis://127.0.0.1:$redis_port" \
    "kvpool=resp://$(ask one 'd["shards"][0]["resp"]')" \
    "forwarded=resp://$(ask two 'd["proxy"]["resp"]')" \
    "factor2=resp://$(ask two 'd["shards"][0]["resp"]')" \
    --server-pid "redis=$redis" --server-pid "kvpool=$shard" --server-pid "forwarded=$proxy,$pair" \
    --server-pid "factor2=$pair" --slots "factor2=$own_slots" \
    --bar "get throughput kvpool/raw >= 0.9" --bar "get total_cpu kvpool/raw <= 1.15" \
    --bar "put throughput kvpool/raw >= 0.75" --bar "put total_cpu kvpool/raw <= 1.5" \
    --bar "put total_cpu kvpool/raw-sum <= 1.2" \
    --bar "get throughput kvpool/redis >= 2.2" --bar "get total_cpu kvpool/redis <= 0.6" \
    --bar "put throughput kvpool/redis >= 1.6" --bar "put total_cpu kvpool/redis <= 0.95" \
    --bar "get total_cpu forwarded/kvpool <= 2.4" --bar "put total_cpu factor2/kvpool <= 2.4" \
    --json "$dir/result.json" --markdown "$dir/tables.md" "$@"

mkdir -p target
cp "$dir/result.json" target/bench.json
if [ -z "${KVPOOL_BENCH_DRY:-}" ]; then
    python3 - "$document" "$dir/tables.md" <<'PYTHON'
import os, re, subprocess, sys
from datetime import date
document, tables = sys.argv[1:]
model = re.search(r"model name\s*: (.*)", open("/proc/cpuinfo").read())
redis = subprocess.run(["redis-server", "--version"], capture_output=True, text=True).stdout.split("v=")[1].split()[0]
about = "Measured %s on %d × %s, kernel %s, Redis %s.\n" % (
    date.today(), os.cpu_count(), model.group(1) if model else os.uname().machine, os.uname().release, redis)
begin, end = "<!-- measured: begin -->", "<!-- measured: end -->"
text = open(document).read()
before, rest = text.split(begin)
after = rest.split(end)[1]
open(document, "w").write("%s%s\n%s\n%s%s%s" % (before, begin, about, open(tables).read(), end, after))
PYTHON
    say "$document and target/bench.json are written"
fi
