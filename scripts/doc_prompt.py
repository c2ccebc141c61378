# SPDX-License-Identifier: Apache-2.0
"""Store the first blocks of ``prompt.json`` as the engine of ``engine.json`` would; for the pages.

    python doc_prompt.py NUM_BLOCKS

Run in the folder that ``doc_commands`` has furnished; a process of its own, for it imports vLLM.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from kvxfer.cli.deployment import read_deployment
from kvxfer.keys import index_array
from kvxfer.spaces import RankSpaces
from kvxfer.stores import open_store
from kvxfer.vllm_specs.offline import describe_engine


def main(num_blocks: int) -> None:
    """Store the values; their bytes are zeros."""
    engine = describe_engine(read_deployment("engine.json", Path("model")).engine_arguments())
    hashes = engine.block_hashes(json.loads(Path("prompt.json").read_text()))
    spaces = RankSpaces(engine.config.cache_prefix, engine.facts, engine.names, engine.layout)
    store = open_store(engine.config.store)
    for space in (space for group in spaces.saved.values() for space in group):
        keys = space.keys(b"".join(hashes), len(hashes[0]), index_array(range(num_blocks)))
        store.put_from(keys, [memoryview(bytes(space.value_bytes)) for _ in keys])
    store.close()


if __name__ == "__main__":
    main(int(sys.argv[1]))
