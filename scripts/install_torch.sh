#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Install torch's CPU build into the environment of the Python given: from where pip looks anyway,
# else from PyTorch's public index of CPU wheels as well.
set -eu
python="$1"
lock="$(dirname "$0")/../requirements/torch-cpu.txt"

if "$python" -m pip install --quiet --no-deps -r "$lock" 2>/dev/null; then
    exit 0
fi
echo "torch's CPU build is not where pip looks; asking PyTorch's index of CPU wheels"
if "$python" -m pip install --no-deps -r "$lock" \
    --extra-index-url https://download.pytorch.org/whl/cpu; then
    exit 0
fi
echo "torch's CPU build ($(grep -v '^#' "$lock")) could not be installed for $("$python" -V)." >&2
echo "With a wheel of it in a folder: PIP_FIND_LINKS=FOLDER make setup" >&2
echo "Without vLLM: 'make lint' and 'make test-core' need no torch." >&2
exit 1
