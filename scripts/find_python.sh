#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Print the Python that kvxfer is set up with: $PYTHON where it is set, else the first of
# python3.11, python3.12 and python3.13 that runs, else a plain python3.
#
# Running one is the test, since a version manager's shim may stand for a Python that is not there.
# A python3 of another version is printed as well: preflight.py runs on any Python from 3.8 on and
# says what is wrong with it. With no Python at all, says how to get one and exits 1.

runs() {
    command -v "$1" >/dev/null 2>&1 &&
        "$1" -c 'import sys; sys.exit(sys.version_info < (3, 8))' >/dev/null 2>&1
}

if [ -n "${PYTHON:-}" ]; then
    if runs "$PYTHON"; then
        command -v "$PYTHON"
        exit 0
    fi
    echo "PYTHON=$PYTHON does not run, or is older than 3.8; unset it or name another." >&2
    exit 1
fi

for candidate in python3.11 python3.12 python3.13 python3; do
    if runs "$candidate"; then
        command -v "$candidate"
        exit 0
    fi
done

printf '%s\n' >&2 \
    'preflight: no Python 3 was found. kvxfer needs Python 3.11, 3.12 or 3.13 with venv and headers,' \
    'and a C and a C++ compiler:' \
    '  Debian, Ubuntu:  sudo apt-get install -y python3 python3-venv python3-dev build-essential' \
    '  Fedora, RHEL 9:  sudo dnf install -y python3.12 python3.12-devel gcc gcc-c++' \
    '  elsewhere:       install them with the package manager of the system'
exit 1
