#!/usr/bin/env bash
# Runs every test, and installs redis-server first where it is missing.
set -euo pipefail
cd "$(dirname "$0")/.."

install_redis() {
  local as_root=""
  [ "$(id -u)" = 0 ] || as_root="sudo"
  if command -v apt-get >/dev/null; then
    $as_root apt-get update -qq && $as_root env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq redis-server
  elif command -v dnf >/dev/null; then
    $as_root dnf install -y -q redis
  elif command -v apk >/dev/null; then
    $as_root apk add -q redis
  elif command -v brew >/dev/null; then
    brew install -q redis
  else
    echo "tests/run.sh: no package manager found; install redis-server 6.2 or newer and run this again" >&2
    exit 1
  fi
}

if ! command -v redis-server >/dev/null; then
  echo "redis-server is missing: installing it"
  install_redis
fi
redis-server --version

cargo test --all-features "$@"
