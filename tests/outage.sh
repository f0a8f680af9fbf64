#!/usr/bin/env bash
# Injects each fault under 200 clients, measures its effect, and prints the table in src/guide/what_happens_when.md. Run nothing
# else on the machine meanwhile, because the script measures times.
#
#   bash tests/outage.sh            10 minutes of random faults, 10,000,000 inputs for each parser: an hour
#   bash tests/outage.sh --quick    a minute of random faults, 10,000 inputs: a few minutes, most of them compiling
#
# FAULT_SECONDS and FUZZ_CASES set either one alone. The output of the tests is in target/outage.log.
set -euo pipefail
cd "$(dirname "$0")/.."

case "${1:-}" in
  "") seconds=600 cases=10000000 profile=--release ;;
  # The profile of `cargo test`, so that nothing is compiled twice.
  --quick) seconds=60 cases=10000 profile=--profile=test ;;
  *) echo "tests/outage.sh: unknown argument $1" >&2 && exit 2 ;;
esac
export FAULT_SECONDS="${FAULT_SECONDS:-$seconds}" FUZZ_CASES="${FUZZ_CASES:-$cases}"
export PROPTEST_CASES="$FUZZ_CASES"

# They run one at a time, in the order of the table. Each prints its line of the table.
FAULTS=(
  limiter::breaker::hanging_server::a_hanging_server_delays_no_request_beyond_the_deadline
  faults::recovery::a_server_that_dies_and_is_restarted
  faults::lost_replies::resent_checks_count_once
  faults::lost_replies::resent_checks_of_several_limits_count_once_and_can_be_refunded
  faults::servers::a_server_that_forgets_the_script
  redis::sentinel::the_store_follows_a_failover
  redis::sentinel::unreplicated_units_are_admitted_once_more
  redis::cluster::losing_a_primary_exceeds_no_limit
  redis::cluster::moving_a_slot_exceeds_no_limit
  faults::clock::the_clock_steps_an_hour_back_and_an_hour_forward
  limiter::fail_local::instances_without_redis_admit_the_limit_together
  faults::random::random_faults
)
PARSED="X-Forwarded-For, Forwarded and single-value headers, bearer tokens, API keys, upstreams' headers, Redis's replies"

mkdir -p target
log=target/outage.log
table=target/outage.md
is_well=true

suite() { cargo test "$profile" --all-features --test suite -- "$@"; }
failed() {
  is_well=false
  printf '| %s | FAILED: %s | |\n' "$1" "$log" >>"$table"
}

cargo test "$profile" --all-features --lib --test suite --no-run
: >"$log"
printf '| fault | seen | to reach |\n|---|---|---|\n' >"$table"
for fault in "${FAULTS[@]}"; do
  echo "$fault"
  # With an unknown name cargo test passes, but prints no line.
  if ! output=$(suite --exact "$fault" --nocapture 2>&1) || ! grep '^| ' <<<"$output" >>"$table"; then
    failed "$fault"
  fi
  printf '%s\n' "$output" >>"$log"
done

echo "fuzz, $FUZZ_CASES cases for each test"
if { suite fuzz:: && cargo test "$profile" --all-features --lib no_value_panics_or_blocks_for_more_than_a_day; } >>"$log" 2>&1; then
  printf '| random input: %s | %s inputs for each test: no panic, no accepted spoof | 10,000,000 inputs a parser: no panic, no accepted spoof |\n' \
    "$PARSED" "$FUZZ_CASES" >>"$table"
else
  failed fuzz
fi

echo
cat "$table"
$is_well
