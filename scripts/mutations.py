# SPDX-License-Identifier: Apache-2.0
"""What ``scripts/mutate.py`` breaks: for each promise, pieces of its mechanism and their tests."""

from __future__ import annotations

from typing import NamedTuple

SCHEDULER = "tests/unit/scheduler"
SAVE_LIFE = "tests/property/test_save_life.py"
TRANSFER = "tests/unit/transfer"
TWO_SIDES = "tests/integration/test_two_sides.py"
HITS = "tests/unit/hits"
LOOKUP = "tests/unit/lookup"
SPECS = "tests/unit/test_vllm_specs.py"
CONTRACT = "tests/contract"


class Mutation(NamedTuple):
    """One piece of a mechanism taken away: ``old`` becomes ``new``, and a test has to fail."""

    promise: int
    what: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]

    def applied_to(self, text: str) -> str:
        """Return the text with the mutation; ValueError unless ``old`` is there once."""
        if text.count(self.old) != 1:
            raise ValueError(f"{self.file} has {text.count(self.old)} times {self.old!r}, not once")
        return text.replace(self.old, self.new)


MUTATIONS = (
    Mutation(
        1,
        "a hit of the whole prompt is not derived again",
        "kvxfer/hits/coordinator.py",
        "if hit.tokens < num_tokens:",
        "if True:",
        (HITS,),
    ),
    Mutation(
        1,
        "hits are not rounded to a boundary",
        "kvxfer/hits/coordinator.py",
        "return num_tokens // self.align_tokens * self.align_tokens",
        "return num_tokens",
        (HITS,),
    ),
    Mutation(
        1,
        "the scheduler side believes any answer",
        "kvxfer/scheduler/side.py",
        "if 0 <= hit_tokens < num_tokens and hit_tokens % self._alignment == 0:",
        "if True:",
        (SCHEDULER,),
    ),
    Mutation(
        2,
        "a chunk counts as stored where its first shard is",
        "kvxfer/lookup/presence.py",
        "if others and num_there:",
        "if False:",
        (f"{LOOKUP}/test_presence.py",),
    ),
    Mutation(
        2,
        "rank 0 is not told of other ranks' shards",
        "kvxfer/worker.py",
        "self._spaces.set_all_shards(told.key_prefixes)",
        "pass",
        (TWO_SIDES,),
    ),
    Mutation(
        2,
        "a load goes on where a needed block was not allocated",
        "kvxfer/scheduler/chunk_planner.py",
        "if len(chunks) < len(block_idx):",
        "if False:",
        (SCHEDULER,),
    ),
    Mutation(
        3,
        "a job that ended can be entered again",
        "kvxfer/transfer/jobs.py",
        "return False\n            if job.state is not source:",
        "return True\n            if job.state is not source:",
        (TRANSFER,),
    ),
    Mutation(
        3,
        "an ended job is ended again",
        "kvxfer/transfer/jobs.py",
        "return False\n            self._end(job, result)",
        "pass\n            self._end(job, result)",
        (TRANSFER,),
    ),
    Mutation(
        3,
        "reports are given twice",
        "kvxfer/transfer/jobs.py",
        "self._free, self._ended = [], {}\n        return",
        "return",
        (TRANSFER,),
    ),
    Mutation(
        3,
        "a deadline ends a job in the middle of a copy",
        "kvxfer/transfer/jobs.py",
        "if job.state is JobState.COPYING:\n                    job.overdue = True",
        "if False:\n                    job.overdue = True",
        (TRANSFER,),
    ),
    Mutation(
        3,
        "an exception in a job is not reported",
        "kvxfer/transfer/threads.py",
        "self._on_error(task, error)",
        "del error",
        (TRANSFER,),
    ),
    Mutation(
        3,
        "a job that finds the queue full is forgotten",
        "kvxfer/transfer/base.py",
        "elif not self._threads.submit((job, spec)):",
        "elif self._threads.submit((job, spec)) is None:",
        (TRANSFER,),
    ),
    Mutation(
        3,
        "a failed load is offered to its request again",
        "kvxfer/scheduler/side.py",
        "state.load_failed = True",
        "pass",
        (SCHEDULER, TWO_SIDES),
    ),
    Mutation(
        4,
        "saves do not pin",
        "kvxfer/scheduler/pins.py",
        "self._pool.touch([self._pool.blocks[block] for block in block_ids])",
        "pass",
        (SCHEDULER, SAVE_LIFE),
    ),
    Mutation(
        4,
        "pins go when the first rank has packed",
        "kvxfer/scheduler/pins.py",
        "if remaining > num_ranks:",
        "if False:",
        (SCHEDULER, SAVE_LIFE),
    ),
    Mutation(
        4,
        "the pinned blocks have no bound",
        "kvxfer/scheduler/step_saves.py",
        "if num_blocks > self.num_free:",
        "if False:",
        (SCHEDULER, SAVE_LIFE),
    ),
    Mutation(
        4,
        "the pinned blocks of generated tokens have no bound",
        "kvxfer/scheduler/save_orders.py",
        "admitted = hashed[: self._step.num_free // per_request]",
        "admitted = hashed",
        (SCHEDULER, SAVE_LIFE),
    ),
    Mutation(
        4,
        "the engine may stop stepping while there are pins",
        "kvxfer/scheduler/side.py",
        "return self._pins is not None and self._pins.num_jobs > 0",
        "return False",
        (SCHEDULER, TWO_SIDES),
    ),
    Mutation(
        4,
        "blocks are free after the first batch of a save",
        "kvxfer/transfer/saver.py",
        "last=batch.stop == len(pieces)",
        "last=True",
        (TRANSFER,),
    ),
    Mutation(
        5,
        "null blocks are stored",
        "kvxfer/scheduler/chunk_planner.py",
        "return chunks.without_block(NULL_BLOCK_ID)",
        "return chunks",
        (SCHEDULER,),
    ),
    Mutation(
        5,
        "tokens are saved before they are computed",
        "kvxfer/scheduler/save_orders.py",
        "limit = min(num_computed, len(request.block_hashes) * self._facts.hash_tokens)",
        "limit = len(request.block_hashes) * self._facts.hash_tokens",
        (SCHEDULER,),
    ),
    Mutation(
        5,
        "recurrent states are saved by position",
        "kvxfer/hits/native_kinds.py",
        "return np.zeros(end_block - start_block, dtype=np.bool_)\n\n    def _boundaries",
        "return np.ones(end_block - start_block, dtype=np.bool_)\n\n    def _boundaries",
        (HITS,),
    ),
    Mutation(
        5,
        "blocks that another connector may have failed to load are saved",
        "kvxfer/scheduler/save_orders.py",
        "if self._awaits_loads(output):",
        "if False:",
        (SCHEDULER,),
    ),
    Mutation(
        6,
        "the dtype of the cache is no part of the key",
        "kvxfer/vllm_specs/names.py",
        '"cache_dtype": str(cache.cache_dtype),',
        "",
        (SPECS,),
    ),
    Mutation(
        6,
        "the revision of the model is no part of the key",
        "kvxfer/vllm_specs/names.py",
        '"revision": str(model.revision or getattr(model.hf_config, "_commit_hash", None)),',
        "",
        (SPECS,),
    ),
    Mutation(
        6,
        "the seed of the hashes is no part of the key",
        "kvxfer/vllm_specs/names.py",
        "[str(cache.prefix_caching_hash_algo), hash_seed(vllm_config)]",
        "[str(cache.prefix_caching_hash_algo)]",
        (SPECS,),
    ),
    Mutation(
        6,
        "the order of a value's bytes is no part of the key",
        "kvxfer/vllm_specs/names.py",
        '"value_order": value_order,',
        "",
        (SPECS,),
    ),
    Mutation(
        6,
        "the layers of a group are no part of the key",
        "kvxfer/vllm_specs/names.py",
        '"layers": list(layer_set.layers),',
        "",
        (SPECS,),
    ),
    Mutation(
        6,
        "a context rank's share of the tokens is no part of the key",
        "kvxfer/keys.py",
        'shard += f"c{context_rank}"',
        "pass",
        (SPECS, TWO_SIDES),
    ),
    Mutation(
        6,
        "ranks are taken for replicas without proof",
        "kvxfer/vllm_specs/layer_sets.py",
        "return min(tp_size, total) if _has_one_head_count(model, total) else tp_size",
        "return min(tp_size, total)",
        (SPECS,),
    ),
    Mutation(
        7,
        "a value of another size is copied",
        "kvxfer/stores/lmdb_reader.py",
        "if value.nbytes != target.nbytes:",
        "if False:",
        (CONTRACT,),
    ),
    Mutation(
        7,
        "a checksum is not compared",
        "kvxfer/stores/checksums.py",
        "if digest_of(key, target) == expected else Outcome.CORRUPT",
        "if True else Outcome.CORRUPT",
        (CONTRACT,),
    ),
    Mutation(
        7,
        "values that did not arrive are unpacked",
        "kvxfer/transfer/loader.py",
        "answered = [outcome == Outcome.OK for outcome in outcomes or ()][: len(keys)]",
        "answered = [True for outcome in outcomes or ()][: len(keys)]",
        (TRANSFER,),
    ),
    Mutation(
        7,
        "a value that no load can use stays",
        "kvxfer/transfer/loader.py",
        "self._remove(useless)",
        "pass",
        (TRANSFER,),
    ),
    Mutation(
        8,
        "the queue of jobs has no bound",
        "kvxfer/transfer/threads.py",
        "if self._closing or len(self._queue) >= self._max_queued:",
        "if self._closing:",
        (TRANSFER,),
    ),
    Mutation(
        8,
        "a lookup has no deadline",
        "kvxfer/lookup/client.py",
        "if question.reply is None and self._clock() >= question.deadline_s:",
        "if False:",
        (LOOKUP,),
    ),
    Mutation(
        8,
        "closing does not wake the threads",
        "kvxfer/transfer/threads.py",
        "            self._closing = True\n",
        "",
        (TRANSFER,),
    ),
    Mutation(
        9,
        "saves of before a reset go on",
        "kvxfer/transfer/saver.py",
        "if spec.epoch < self._epoch:",
        "if False:",
        (TRANSFER, TWO_SIDES),
    ),
    Mutation(
        9,
        "a reset does not wait for puts",
        "kvxfer/transfer/saver.py",
        "return self._threads.wait_idle(timeout_s)",
        "return True",
        (TRANSFER, TWO_SIDES),
    ),
    Mutation(
        9,
        "a reset misses ranks whose handshake is lost",
        "kvxfer/scheduler/side.py",
        "for endpoint in self._endpoints\n        ]",
        "for endpoint in self._endpoints if endpoint.path.name in said\n        ]",
        (SCHEDULER,),
    ),
    Mutation(
        9,
        "requests of before a reset save",
        "kvxfer/scheduler/side.py",
        "            state.may_save = False\n",
        "",
        (SCHEDULER, TWO_SIDES),
    ),
    Mutation(
        9,
        "a reset removes what others stored",
        "kvxfer/worker.py",
        "self._store.remove_prefix(self._spaces.reset_prefix)",
        'self._store.remove_prefix(b"")',
        (TWO_SIDES,),
    ),
    Mutation(
        10,
        "unknown settings are ignored",
        "kvxfer/config.py",
        "raise ConfigError(_unknown(name, known))",
        "continue",
        ("tests/unit/test_config.py",),
    ),
    Mutation(
        10,
        "any version of vLLM is taken",
        "kvxfer/vllm_specs/engine.py",
        "if found is None or not SUPPORTED[0] <= found < SUPPORTED[1]:",
        "if False:",
        (SPECS,),
    ),
    Mutation(
        10,
        "states that vLLM does not align are taken",
        "kvxfer/vllm_specs/engine.py",
        'if isinstance(spec, MambaSpec) and spec.mamba_cache_mode != "align":',
        "if False:",
        (SPECS,),
    ),
    Mutation(
        10,
        "an embedded store is taken for ranks on several hosts",
        "kvxfer/vllm_specs/engine.py",
        'if nodes > 1 and config.store.startswith("lmdb:"):',
        "if False:",
        (SPECS,),
    ),
)
