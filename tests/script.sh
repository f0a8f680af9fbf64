#!/usr/bin/env bash
# Replays the golden pairs of the script: arguments, reply, the commands that it runs, and what the keys have after that. It shows
# the difference to `script/golden.txt` within a second, and compiles nothing. `script/cases.lua` has the calls, `script/replay.lua`
# makes them.
#
#   bash tests/script.sh           # compares
#   bash tests/script.sh --write   # accepts the replies of now
set -euo pipefail
cd "$(dirname "$0")/.."
. tests/install.sh
ensure redis-server redis

FOLDER=src/store/redis/script

# Prints the script as `mod.rs` makes it: files, and lines between them.
assemble() {
  sed -n '/DECIDE: &str/,/^);/p' "$FOLDER/mod.rs" | while IFS= read -r line; do
    case "$line" in
      *include_str!*) cat "$FOLDER/$(cut -d '"' -f 2 <<<"$line")" ;;
      *'"'*) printf '%b' "$(cut -d '"' -f 2 <<<"$line")" ;;
    esac
  done
}

work="$(mktemp -d)"
server=""
trap '[ -z "$server" ] || kill "$server"; wait; rm -r "$work"' EXIT
"${REDIS_SERVER:-redis-server}" --port 0 --unixsocket "$work/socket" --dir "$work" --save "" >"$work/log" &
server=$!
for _ in {1..100}; do
  [ -S "$work/socket" ] && break
  sleep 0.1
done

redis-cli -s "$work/socket" --raw eval "$(<tests/script/replay.lua)" 0 "$(assemble)" "$(<tests/script/cases.lua)" >"$work/now.txt"
grep -q '^==' "$work/now.txt" || { cat "$work/now.txt" "$work/log" >&2; exit 1; }
if [ "${1:-}" = --write ]; then
  cp "$work/now.txt" tests/script/golden.txt
  exit
fi
diff -U 8 tests/script/golden.txt "$work/now.txt" && echo "tests/script.sh: $(grep -c '^==' "$work/now.txt") cases reply as before"
