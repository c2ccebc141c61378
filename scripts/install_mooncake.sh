#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Install the Mooncake client into the environment of the Python given, and the system libraries that
# it is linked with where this user may: root on Debian or Ubuntu. Else print the line that does.
# Exits 0 also then, since only Mooncake's own tests need them: these skip themselves with that line.
set -eu
python="$1"
lock="$(dirname "$0")/../requirements/mooncake.txt"
packages="libibverbs1 librdmacm1 libnuma1 libcurl4"

imports() {
    "$python" -c "import mooncake.store" 2>&1
}

"$python" -m pip install --disable-pip-version-check --quiet --no-deps -r "$lock"
if reason="$(imports)"; then
    exit 0
fi
case "$reason" in
*"cannot open shared object file"*) ;;
*)
    echo "the Mooncake client is installed, but cannot be imported:" >&2
    echo "$reason" | tail -n 1 >&2
    exit 1
    ;;
esac
if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    echo "installing the libraries of the Mooncake client: $packages"
    # shellcheck disable=SC2086 # one argument per package
    if { apt-get install -y -qq --no-install-recommends $packages ||
        { apt-get update -qq && apt-get install -y -qq --no-install-recommends $packages; }; } \
        >/dev/null && imports >/dev/null; then
        exit 0
    fi
    reason="$(imports || true)"
fi
echo "the Mooncake client lacks a system library: $(echo "$reason" | tail -n 1)" >&2
echo "Its tests skip themselves until this has run as root, on Debian or Ubuntu:" >&2
echo "    apt-get install -y $packages" >&2
echo "(Fedora: dnf install libibverbs librdmacm numactl-libs libcurl)" >&2
