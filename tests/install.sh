# For scripts to source, with `ensure PROGRAM [PACKAGE [PACKAGE_ON_DEBIAN]]`: installs a program if it is missing. A package that is
# not given has the name of the program.
ensure() {
  local program="$1" package="${2:-$1}" debian="${3:-$1}" as_root=""
  command -v "$program" >/dev/null && return
  echo "$program is missing: installing it"
  [ "$(id -u)" = 0 ] || as_root="sudo"
  if command -v apt-get >/dev/null; then
    in_turn install_by_apt "$debian"
  elif command -v dnf >/dev/null; then
    $as_root dnf install -y -q "$package"
  elif command -v apk >/dev/null; then
    $as_root apk add -q "$package"
  elif command -v brew >/dev/null; then
    brew install -q "$package"
  else
    echo "$0: no package manager found; install $program and run this again" >&2
    return 1
  fi
}

# Runs a command when no other of these scripts has its turn: apt-get fails while another one has its lists.
in_turn() {
  (
    flock 9
    "$@"
  ) 9>"${TMPDIR:-/tmp}/tests-install.lock"
}

# Installs packages of Debian.
install_by_apt() {
  local as_root=""
  [ "$(id -u)" = 0 ] || as_root="sudo"
  $as_root apt-get update -qq && $as_root env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq "$@"
}
