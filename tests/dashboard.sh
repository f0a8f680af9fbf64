#!/usr/bin/env bash
# Checks the dashboard and the alerts of examples/metrics with a real Prometheus: promtool lints and tests the alerts, and
# every query of the dashboard has to return data while the example runs under load and Redis stops for a moment.
#
#   bash tests/dashboard.sh
#
# Debian's packages are unpacked into target/prometheus where programs are missing. They are not installed, because that
# would start services.
set -euo pipefail
cd "$(dirname "$0")/.."
. tests/install.sh

UNPACKED="$PWD/target/prometheus"
export PATH="$PATH:$UNPACKED/usr/bin"

missing() {
  local program
  for program in prometheus promtool prometheus-redis-exporter; do
    command -v "$program" >/dev/null || return 0
  done
  return 1
}

unpack() {
  local as_root="" download=(apt-get download -qq -o APT::Sandbox::User= prometheus prometheus-redis-exporter)
  command -v apt-get >/dev/null || return 1
  mkdir -p "$UNPACKED"
  cd "$UNPACKED"
  if ! "${download[@]}"; then
    [ "$(id -u)" = 0 ] || as_root="sudo"
    in_turn $as_root apt-get update -qq && "${download[@]}" || return 1
  fi
  for package in ./*.deb; do dpkg -x "$package" . || return 1; done
  rm ./*.deb
}

for program in python3 redis-server; do
  if ! command -v "$program" >/dev/null; then
    echo "tests/dashboard.sh: install $program and run this again" >&2
    exit 1
  fi
done
if missing && ! (unpack) || missing; then
  echo "tests/dashboard.sh: put prometheus, promtool and redis_exporter (as prometheus-redis-exporter) into the PATH and run this again" >&2
  exit 1
fi

promtool check config examples/metrics/prometheus.yml
promtool test rules tests/dashboard/alerts_test.yml
for alert in $(sed -n 's/.*- alert: //p' examples/metrics/alerts.yml); do
  if ! grep -q "alertname=\"$alert\"" tests/dashboard/alerts_test.yml; then
    echo "tests/dashboard.sh: tests/dashboard/alerts_test.yml has no test of $alert" >&2
    exit 1
  fi
done

# The profile of `cargo test`, so that nothing is compiled twice.
cargo build --profile test --all-features --example metrics
exec python3 tests/dashboard/check.py "${CARGO_TARGET_DIR:-target}/debug/examples/metrics" \
  prometheus promtool prometheus-redis-exporter
