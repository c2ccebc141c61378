# SPDX-License-Identifier: Apache-2.0
"""Run the kill loop of ``tests/faults/kill_rounds.py``: processes killed while they save and load.

python scripts/kill_loop.py --rounds 50
"""

import runpy
import sys
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1] / "tests"

if __name__ == "__main__":
    sys.path[:0] = [str(TESTS / "faults"), str(TESTS / "integration" / "engines")]
    runpy.run_module("kill_rounds", run_name="__main__")
