#!/usr/bin/env bash
# Makes sure that the programs which the tests start are there.
#
# usage: scripts/debian-packages.sh PROGRAM...        (the program and its Debian package share a name)
#
# As root on Debian or Ubuntu it installs what is missing; otherwise it says what is missing and how
# to get it, and fails. Elsewhere than on Linux it only says so: tests that need Linux skip there.
set -euo pipefail

missing=()
for program in "$@"; do
  command -v "$program" >/dev/null || missing+=("$program")
done
[ "${#missing[@]}" -gt 0 ] || exit 0

if [ "$(uname -s)" != Linux ]; then
  echo "waypost: not found: ${missing[*]}; tests that need them skip or fail" >&2
  exit 0
fi
if ! command -v apt-get >/dev/null; then
  echo "waypost: not found: ${missing[*]}; install them with this system's package manager" >&2
  exit 1
fi
if [ "$(id -u)" -ne 0 ]; then
  echo "waypost: not found: ${missing[*]}; install them with" >&2
  echo "    sudo apt-get install --no-install-recommends ${missing[*]}" >&2
  exit 1
fi

export DEBIAN_FRONTEND=noninteractive
log=$(mktemp)
trap 'rm -f "$log"' EXIT
echo "waypost: installing Debian packages: ${missing[*]}"
if ! { apt-get update && apt-get install -y --no-install-recommends "${missing[@]}"; } >"$log" 2>&1; then
  tail -n 20 "$log" >&2
  echo "waypost: apt-get could not install: ${missing[*]}" >&2
  exit 1
fi
