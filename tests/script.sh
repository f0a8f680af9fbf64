#!/usr/bin/env bash
# Checks the script: each file with luacheck, and then its golden pairs.
#
# A file takes and gives the names that its head says, and no others: luacheck sees it as a function that takes the ones and returns
# the others. Then it sees all files in a row.
#
# A golden pair is the arguments of a call, and its reply, commands, and what the keys have after it. Each difference to
# `script/golden.txt` is shown within seconds, and nothing is compiled. `script/cases.lua` has the calls, `script/replay.lua` makes them.
#
#   bash tests/script.sh           # compares
#   bash tests/script.sh --write   # accepts the replies of now
set -euo pipefail
cd "$(dirname "$0")/.."
. tests/install.sh
ensure redis-server redis
ensure luacheck luacheck lua-check

FOLDER=src/store/redis/script

# Prints a file, with `unit.lua` in the place of a line with its name.
expand() {
  sed -e "/^ *--> unit.lua$/{r $FOLDER/unit.lua" -e 'd}' "$1"
}

# Prints the script as `mod.rs` makes it: files, and lines between them.
assemble() {
  sed -n '/PARTS: &str/,/^);/p' "$FOLDER/mod.rs" | while IFS= read -r line; do
    case "$line" in
      *include_str!*) expand "$FOLDER/$(cut -d '"' -f 2 <<<"$line")" ;;
      *'"'*) printf '%b' "$(cut -d '"' -f 2 <<<"$line")" ;;
    esac
  done
}

# Prints the names that the head of a file has behind this word.
names() {
  awk -v word="-- $1  " '
    index($0, word) == 1 { is_on = 1; $0 = "--        " substr($0, length(word) + 1) }
    is_on && !/^--        [^ ]/ { exit }
    is_on { print substr($0, 11) }' "$2" | grep -vx nothing || true
}

is_clean=true
lint() {
  local file="$1" warnings
  shift
  warnings="$(luacheck "$@" --quiet --no-color --std lua51 --read-globals redis KEYS ARGV struct --no-max-line-length --filename "$file" -)" && return
  echo "$warnings"
  is_clean=false
}

# Prints a file as a function. The lines keep their numbers.
as_function() {
  local takes
  takes="$(names Takes "$1")"
  [ -z "$takes" ] || echo "local" $takes "= ..." | tr '\n' ' '
  expand "$1"
  grep -q '^return ' "$1" || echo "return" $(names Gives "$1")
}

taken=" $(for file in "$FOLDER"/*.lua; do names Takes "$file"; done | tr -s ',\n' ' ') $(assemble | sed -n 's/^return \([A-Za-z_, ]*\)$/\1/p' | tr ',\n' ' ') "
for file in "$FOLDER"/*.lua; do
  [ "${file##*/}" != unit.lua ] || continue
  lint "$file" < <(as_function "$file")
  for name in $(names Gives "$file" | tr -d ,); do
    [[ "$taken" == *" $name "* ]] || grep -q '^return ' "$file" || { echo "$file gives $name, which no file takes"; is_clean=false; }
  done
done
# Functions of `mod.rs` have names of `head.lua` as arguments.
lint "all files of $FOLDER" --ignore 431 < <(assemble)
$is_clean

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
