#!/usr/bin/env bash
# Checks that the crate can be published, and publishes it with `--publish`. Run `.ci/run` before.
#
#   bash tests/release.sh [--publish]
set -euo pipefail
cd "$(dirname "$0")/.."

fail() { echo "tests/release.sh: $*" >&2; exit 1; }

# crates.io makes addresses out of the relative links and pictures of the README by it.
grep -q '^repository = "https://' Cargo.toml ||
  fail 'the address of the repository is missing: write it into Cargo.toml, at `# repository`'
[ -z "$(git status --porcelain)" ] || fail "there are changes that are not committed"

version="$(sed -n 's/^version = "\(.*\)"$/\1/p' Cargo.toml | head -1)"
grep -q "^## \[\?$version" CHANGELOG.md || fail "CHANGELOG.md has no section of the version $version"
for path in $(grep -o '](\([^):#]*\))' README.md | tr -d ']()'); do
  git ls-files --error-unmatch "$path" >/dev/null 2>&1 || fail "README.md links $path, which is not in the repository"
done

# As docs.rs builds it.
packages=(-p tower-sliding-window -p tower-sliding-window-conformance)
RUSTC_BOOTSTRAP=1 RUSTDOCFLAGS="--cfg docsrs -D warnings" cargo doc --no-deps --all-features "${packages[@]}"
cargo package --no-verify "${packages[@]}"
size="$(wc -c <"target/package/tower-sliding-window-$version.crate")"
[ "$size" -lt 400000 ] || fail "the package has $size bytes, 400,000 or more"
cargo publish --dry-run "${packages[@]}"

# The crate first, since the other package depends on it.
[ "${1:-}" != --publish ] || cargo publish "${packages[@]}"
