#!/usr/bin/env bash
# Throughput and delays of POST /check and of gRPC, in turns: without a decision (bare), with one by the layer in the server's process (layer), and
# by the service: in process (memory), on Redis, and on Redis with prefetch.
#
#   bash service/bench/run.sh [ROUNDS] [SECONDS]
#
# It needs wrk, h2load (nghttp2-client) and redis-server.
set -euo pipefail
cd "$(dirname "$0")/../.."
rounds=${1:-3} seconds=${2:-5}
cargo build --release -q -p sliding-window-service --bins --examples
target=${CARGO_TARGET_DIR:-target}/release
work=$(mktemp -d)
pids=()
trap 'kill "${pids[@]}" 2>/dev/null; rm -rf "$work"' EXIT

redis-server --port 18090 --save '' --dir "$work" >/dev/null & pids+=($!)
PORT=18091 "$target/examples/bare" & pids+=($!)
port=18095
for store in memory: redis://127.0.0.1:18090 "redis://127.0.0.1:18090 prefetch"; do
  read -r store prefetch <<<"$store"
  cat >"$work/$port.toml" <<TOML
listen = "127.0.0.1:$port"
grpc_listen = "127.0.0.1:$((port + 1))"
store = "$store"
[[rule]]
name = "steady"
domain = "web"
descriptor = ["client"]
limits = ["steady=1000000/s${prefetch:+ $prefetch}"]
TOML
  "$target/sliding-window-service" "$work/$port.toml" >/dev/null & pids+=($!)
  port=$((port + 2))
done
# A question of Envoy, by hand: a domain, and a descriptor of one entry.
python3 - "$work/question" <<'PYTHON'
import struct, sys
field = lambda number, value: bytes([number << 3 | 2, len(value)]) + value
message = field(1, b"web") + field(2, field(1, field(1, b"client") + field(2, b"203.0.113.7")))
open(sys.argv[1], "wb").write(b"\0" + struct.pack(">I", len(message)) + message)
PYTHON
sleep 1

for round in $(seq "$rounds"); do
  for server in bare:18091 layer:18093 memory:18095 redis:18097 prefetch:18099; do
    name=${server%:*} port=${server#*:}
    LIMIT=steady PATH_OF=/check wrk -t1 -c32 -d"${seconds}s" --latency -s service/bench/check.lua "http://127.0.0.1:$port" |
      awk -v name="$name" '/50%/ { p50 = $2 } /99%/ { p99 = $2 } /Requests\/sec/ { rate = $2 } /Non-2xx/ { bad = $0 }
        END { printf "/check %-8s %8.0f/s  p50 %s  p99 %s %s\n", name, rate, p50, p99, bad }'
    h2load -t1 -c4 -m8 -D"$seconds" -d "$work/question" -H 'content-type: application/grpc' -H 'te: trailers' --log-file="$work/log" \
      "http://127.0.0.1:$((port + 1))/envoy.service.ratelimit.v3.RateLimitService/ShouldRateLimit" >"$work/h2load"
    awk '$2 == 200 { print $3 }' "$work/log" | sort -n >"$work/delays"; rm "$work/log"
    count=$(wc -l <"$work/delays")
    at() { sed -n "$((count * $1 / 100 + 1))p" "$work/delays"; }
    printf 'gRPC   %-8s %8d/s  p50 %dus  p99 %dus\n' "$name" $((count / seconds)) "$(at 50)" "$(at 99)"
  done
done
