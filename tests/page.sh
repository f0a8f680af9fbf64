#!/usr/bin/env bash
# Checks the pages of the examples `server` and `streams` in Chromium, with Debian's chromium and chromium-driver. Installs them first if
# they are missing.
#
#   bash tests/page.sh                              # all checks
#   bash tests/page.sh keyboard                     # those with this word in their name
#   bash tests/page.sh --screenshots docs/page      # and the screenshots of the docs
set -euo pipefail
cd "$(dirname "$0")/.."

. tests/install.sh

if ! command -v "${CHROMEDRIVER:-chromedriver}" >/dev/null; then
  echo "chromedriver is missing: installing chromium and chromium-driver"
  if ! log=$(in_turn install_by_apt --no-install-recommends chromium chromium-driver 2>&1); then
    echo "tests/page.sh: Chromium could not be installed; install it with chromedriver, or name them in CHROMIUM and CHROMEDRIVER" >&2
    exit 1
  fi
fi
for program in "${REDIS_SERVER:-redis-server}" python3; do
  if ! command -v "$program" >/dev/null; then
    echo "tests/page.sh: $program is missing; install it" >&2
    exit 1
  fi
done

# As the tests build it.
cargo build --quiet --profile test --all-features --example server --example streams
export PYTHONDONTWRITEBYTECODE=1
exec python3 tests/page/checks.py "$@"
