#!/usr/bin/env bash
# Lets go wrong what can go wrong, under 200 clients, and prints what was seen: the table in src/guide/what_happens_when.md. Leave
# the machine alone meanwhile, for the times are measured.
#
#   bash tests/outage.sh            10 minutes of random faults, 10,000,000 inputs for each parser: an hour
#   bash tests/outage.sh --quick    a minute of random faults, 10,000 inputs: a few minutes, most of them compiling
#
# FAULT_SECONDS and FUZZ_CASES in front of it set either by itself. What the tests say is in target/outage.log.
set -euo pipefail
cd "$(dirname "$0")/.."

case "${1:-}" in
  "") seconds=600 cases=10000000 profile=--release ;;
  # As the tests are built: nothing is compiled twice.
  --quick) seconds=60 cases=10000 profile=--profile=test ;;
  *) echo "tests/outage.sh: what is $1?" >&2 && exit 2 ;;
esac
export FAULT_SECONDS="${FAULT_SECONDS:-$seconds}" FUZZ_CASES="${FUZZ_CASES:-$cases}"
export PROPTEST_CASES="$FUZZ_CASES"

# One at a time, in the order of the table. Each prints its line of it.
FAULTS=(
  breaker::a_server_that_hangs_delays_nobody_for_longer_than_the_deadline
  faults::recovery::a_server_that_dies_and_is_restarted
  faults::lost_replies::what_is_sent_again_counts_once
  faults::lost_replies::what_is_sent_again_by_several_limits_counts_once_and_can_be_given_back
  faults::servers::a_server_that_forgets_the_script
  sentinel::a_failover_is_followed
  sentinel::what_was_not_replicated_is_admitted_once_more
  cluster::a_primary_that_is_lost_costs_no_limit
  cluster::a_slot_that_moves_costs_no_limit
  faults::clock::an_hour_back_and_an_hour_forward
  fail_local::instances_without_redis_admit_the_limit_together_and_hand_back
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
  # A name that is no test's passes, but prints no line.
  if ! said=$(suite --exact "$fault" --nocapture 2>&1) || ! grep '^| ' <<<"$said" >>"$table"; then
    failed "$fault"
  fi
  printf '%s\n' "$said" >>"$log"
done

echo "fuzz, $FUZZ_CASES cases for each test"
if { suite fuzz:: && cargo test "$profile" --all-features --lib no_value_panics_or_closes_for_more_than_a_day; } >>"$log" 2>&1; then
  printf '| random input: %s | %s inputs for each of 11 tests: no panic, no accepted spoof | 10,000,000 inputs a parser: no panic, no accepted spoof |\n' \
    "$PARSED" "$FUZZ_CASES" >>"$table"
else
  failed fuzz
fi

echo
cat "$table"
$is_well
