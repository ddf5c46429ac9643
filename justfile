# What one does with this checkout. `just` comes from PyPI: pip install rust-just

set positional-arguments

# Show the recipes
default:
    @just --list

# Format the code
fmt:
    cargo fmt --all

# Lints, warnings denied
lint:
    cargo fmt --all --check
    cargo clippy --workspace --all-targets --release --locked -- -D warnings

# Unit, property and golden-byte tests, the chaos smoke and doc tests
test *ARGS:
    cargo test --workspace --release --locked {{ARGS}}

# What must pass before a commit: format, lints, tests, doc tests
verify:
    ./tests/run fast

# N seeds of the simulator's control plane and N of its register, from a random base seed that is printed
sim N="100":
    KVPOOL_SEEDS="{{N}}" KVPOOL_BASE_SEED="${KVPOOL_BASE_SEED:-$(date +%s)}" \
        cargo test --release --locked --workspace --test smoke -- --nocapture --test-threads 1

# Bugs seeded on purpose, one after the other; fails when the simulator misses one. KVPOOL_MUTATION=Name runs one
sim-mutations:
    cargo test --release --locked --workspace --test mutations -- --nocapture

# The end-to-end tests against real LMCache and Redis clients; ARGS go to pytest (-k NAME)
peers *ARGS:
    ./tests/run peers "$@"

# Faults on a pool of real processes, mixed by a seed, for this many minutes (docs/chaos.md); ARGS: --seed N, --report FILE
chaos MINUTES="10" *ARGS:
    cargo build --release --locked -p kvpool -p kvpool-chaos-run
    "${CARGO_TARGET_DIR:-target}/release/kvpool-chaos-run" run chaos/scenarios/mixed.toml --minutes "{{MINUTES}}" "${@:2}"

# How long clients wait at failover, each fault ROUNDS times (docs/benchmarks.md)
failover ROUNDS="20":
    cargo build --release --locked -p kvpool -p kvpool-chaos-run
    "${CARGO_TARGET_DIR:-target}/release/kvpool-chaos-run" measure --rounds "{{ROUNDS}}"

# Everything that CI runs
ci:
    ./tests/run

# The main job N times in a row for each protocol; a line per run in target/main-job.jsonl
main-job N="1":
    @mkdir -p target && rm -f target/main-job.jsonl
    KVPOOL_MAIN_JOB_REPORT="$PWD/target/main-job.jsonl" ./tests/run peers -k test_main_job --main-job-rounds "{{N}}"
    @cat target/main-job.jsonl

# The cases that wait minutes, in full
soak *ARGS:
    KVPOOL_SOAK=1 ./tests/run peers "$@"

# Throughput and CPU against a raw server and Redis, interleaved (docs/benchmarks.md)
bench *ARGS:
    ./scripts/bench.sh "$@"

# The story in two minutes: store, kill a shard, still hit, heal
demo:
    ./scripts/demo.sh

# A pool on this machine, until Ctrl-C
dev *ARGS:
    cargo run --release --locked -- dev "$@"
