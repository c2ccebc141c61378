# SPDX-License-Identifier: Apache-2.0
"""Run the soak of ``tests/faults/soak.py``: real engines over a faulty store, for minutes.

python scripts/soak.py --minutes 10 --store lmdb
"""

import runpy
import sys
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1] / "tests"

if __name__ == "__main__":
    sys.path[:0] = [str(TESTS), str(TESTS / "faults"), str(TESTS / "integration" / "engines")]
    runpy.run_module("soak", run_name="__main__")
