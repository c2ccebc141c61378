# SPDX-License-Identifier: Apache-2.0
"""Which blocks a step makes worth saving, ordered with their pins."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import TYPE_CHECKING, overload

from kvxfer.config import KVXferConfig, Role
from kvxfer.observe.events import SaveEvents
from kvxfer.scheduler.chunk_planner import ChunkPlanner, HandedBlock, Tables
from kvxfer.scheduler.pins import BlockPins
from kvxfer.scheduler.requests import NEVER, RequestState
from kvxfer.scheduler.step_saves import SHARED_JOB_BLOCKS, StepSaves
from kvxfer.transfer.specs import Chunks, SaveSpec
from kvxfer.vllm_specs import EngineFacts, prefill_checkpoint

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.core.kv_cache_utils import KVCacheBlock
    from vllm.v1.core.sched.output import KVConnectorBlockState, SchedulerOutput


class SaveOrders:
    """Orders saves of what a step completes; scheduler side, owns the pins of their blocks.

    Three sources: whole blocks of hashed tokens that the step computes; the part of a prompt
    below the common block, where hits may end there; recurrent states that the core hands over.
    A block is ordered once, pinned until every rank has packed it, and within
    ``max_pinned_blocks``: what finds no room is put off to a later step of its request.
    Small saves of a step share jobs (``StepSaves``).

    Two paths lead there. Any request can take the general one (``_order_due``). Requests that
    generate tokens complete one common block now and then: where every block of it is saved,
    those of a step are ordered all at once (``_order_next_blocks``), at a quarter of the cost.

    Nothing is ordered while another connector's synchronous load may yet turn out to have failed:
    vLLM then computes again what the steps meanwhile computed from unwritten blocks.
    """

    def __init__(
        self,
        config: KVXferConfig,
        facts: EngineFacts,
        planner: ChunkPlanner,
        pins: BlockPins,
        job_ids: Iterator[int],
        events: SaveEvents | None = None,
    ) -> None:
        self._config, self._facts, self._planner = config, facts, planner
        self._step = StepSaves(pins, job_ids)
        self._events = events
        self._role = Role(facts.role)
        self._saves_tails = facts.partial_hits and self._role.saves_prompts
        self._manager: KVCacheManager | None = None
        self._steps_to_wait = 0
        self.counts: Counter[str] = Counter()

    def read_tables_from(self, manager: KVCacheManager) -> None:
        """Read blocks from vLLM's manager: without, a table is copied whole for one new block."""
        self._manager = manager

    def begin_epoch(self, epoch: int) -> None:
        """Stamp ``epoch``, the number of resets so far, on every order from now on."""
        self._step.epoch = epoch

    def order(
        self, output: SchedulerOutput, requests: Mapping[str, RequestState]
    ) -> tuple[SaveSpec, ...]:
        """Return the saves of a step; most requests have none.

        A request costs a look at ``RequestState.save_due_tokens`` until it has computed so many.
        """
        self._order_step(output, requests)
        saves = self._step.take()
        if self._events is not None:
            self._events.ordered(saves)
        return saves

    def _order_step(self, output: SchedulerOutput, requests: Mapping[str, RequestState]) -> None:
        block_state = output.kv_connector_block_state
        if block_state is None or not (self._role.saves_prompts or self._config.save_decode_cache):
            return
        if self._awaits_loads(output):
            return
        handed = block_state.boundary_state_offloads
        num_scheduled = output.num_scheduled_tokens
        block_tokens = self._facts.block_tokens
        takes_next = (
            self._planner.saves_every_generated_block
            and self._manager is not None  # it has vLLM's blocks without a copy of tables
            and not handed
        )
        with_next_block: list[RequestState] = []
        for request_id, num_computed in scheduled(output):
            state = requests.get(request_id)
            if state is None:
                continue
            num_computed += num_scheduled[request_id]
            due = state.save_due_tokens
            if num_computed < due and request_id not in handed:
                continue
            is_generated = due > state.request.num_prompt_tokens
            if takes_next and is_generated and num_computed - due < block_tokens and state.may_save:
                with_next_block.append(state)
            else:
                self._order_due(state, num_computed, handed.get(request_id, ()), block_state)
        if with_next_block:
            self._order_next_blocks(with_next_block)
        for request_id, blocks in handed.items():
            self._order_handed(requests.get(request_id), blocks)

    def order_finished(
        self, state: RequestState, tables: Tables, handed: Sequence[HandedBlock]
    ) -> None:
        """Order the states that the core hands over when a request ends, with the next step."""
        if not state.may_save:
            return
        num_computed = state.request.num_computed_tokens
        self._order_handed(state, handed)
        boundary = self._due_tail(state, num_computed, handed)
        if any(tables):
            self._order_tail(state, tables, boundary, num_computed)
        self._step.close_job()  # the request's blocks are freed next

    def _awaits_loads(self, output: SchedulerOutput) -> bool:
        """Return whether a synchronous load of this step, or of one in flight, is undecided."""
        if getattr(output, "has_sync_kv_loads", False):
            self._steps_to_wait = self._facts.max_steps_in_flight
        awaits = self._steps_to_wait > 0
        self._steps_to_wait -= awaits
        return awaits

    def _order_next_blocks(self, states: Iterable[RequestState]) -> None:
        """Order the common block that ends at ``save_due_tokens`` of each request, if hashed.

        Where the pins do not admit all, the last requests are put off.
        """
        assert self._manager is not None
        get_blocks, hash_tokens = self._manager.get_blocks, self._facts.hash_tokens
        block_tokens = self._facts.block_tokens
        hashed = [
            s for s in states if len(s.request.block_hashes) * hash_tokens >= s.save_due_tokens
        ]
        per_request = self._planner.blocks_per_common_block
        admitted = hashed[: self._step.num_free // per_request]
        self.counts["saves_put_off"] += len(hashed) - len(admitted)
        per_job = max(1, SHARED_JOB_BLOCKS // per_request)
        for at in range(0, len(admitted), per_job):
            parts = [
                (s.request.block_hashes, get_blocks(s.request.request_id).blocks, s.save_due_tokens)
                for s in admitted[at : at + per_job]
            ]
            self._step.add_job(self._planner.common_blocks(parts))
        if self._events is not None:
            self._events.note(
                (s.request, s.save_due_tokens - block_tokens, s.save_due_tokens) for s in admitted
            )
        for state in admitted:
            state.saved_tokens = state.save_due_tokens
            state.save_due_tokens += block_tokens

    def _order_due(
        self,
        state: RequestState,
        num_computed: int,
        handed: Sequence[HandedBlock],
        block_state: KVConnectorBlockState,
    ) -> None:
        """Order what a request is worth saving of, and note when there will be more."""
        if not state.may_save:
            state.save_due_tokens = NEVER
            return
        start, end = self._saveable(state, num_computed)
        tail = self._due_tail(state, num_computed, handed)
        if start < end or tail:
            tables = self._tables(state.request.request_id, block_state)
            if tables is not None:
                self._order_save(state, tables, start, end)
                self._order_tail(state, tables, tail, num_computed)
        state.save_due_tokens = self._next_due(state)

    def _tables(self, request_id: str, block_state: KVConnectorBlockState) -> Tables | None:
        if self._manager is None:
            tables: Tables | None = block_state.get_block_ids(request_id)
            return tables
        return [BlockTable(blocks) for blocks in self._manager.get_blocks(request_id).blocks]

    def _next_due(self, state: RequestState) -> int:
        """Return how many tokens must be computed before there can be something to save."""
        prompt = state.request.num_prompt_tokens
        due = self._first_unsaved(state) + self._facts.block_tokens
        if due > state.worth_tokens or (due > prompt and not self._config.save_decode_cache):
            due = NEVER
        if self._saves_tails and not state.tail_ordered and state.worth_tokens:
            due = min(due, prompt)
        return due

    def _first_unsaved(self, state: RequestState) -> int:
        """Return where saving goes on, a multiple of the common block."""
        start, block = state.saved_tokens, self._facts.block_tokens
        if not self._role.saves_prompts:
            start = max(start, state.request.num_prompt_tokens // block * block)
        return start // block * block

    def _saveable(self, state: RequestState, num_computed: int) -> tuple[int, int]:
        """Return the tokens [start, end) to save: computed by this step, hashed, whole blocks."""
        request, block = state.request, self._facts.block_tokens
        hashed = len(request.block_hashes) * self._facts.hash_tokens
        limit = min(num_computed, hashed, state.worth_tokens)
        if not self._config.save_decode_cache:
            limit = min(limit, request.num_prompt_tokens)
        return self._first_unsaved(state), limit // block * block

    def _order_save(self, state: RequestState, tables: Tables, start: int, end: int) -> None:
        """Order tokens [start, end), as far as the pins admit.

        What is left over is ordered by a later step of the request, or never.
        """
        if end <= start:
            return
        block = self._facts.block_tokens
        chunks: tuple[Chunks, ...] = ()
        num_free = self._step.num_free
        end = min(end, start + num_free * block)  # a group has a block there at least
        while end > start:
            chunks = self._planner.saves(state.request, tables, start, end)
            num_blocks = sum(map(len, chunks))
            if num_blocks <= num_free:
                break
            end = start + (end - start) * num_free // num_blocks // block * block
        if end <= start:
            self.counts["saves_put_off"] += 1
            return
        state.saved_tokens = end
        self._note(state, start, end)
        self._add(chunks)

    def _due_tail(
        self, state: RequestState, num_computed: int, handed: Iterable[HandedBlock]
    ) -> int:
        """Return the boundary below the common block at which this step completes a prompt, or 0.

        It is due on the step that first covers the prompt, and again when the core hands over the
        recurrent state at it.
        """
        if not self._saves_tails:
            return 0
        prompt = state.request.num_prompt_tokens
        boundary = prefill_checkpoint(prompt, self._facts.hash_tokens, self._facts.use_eagle)
        covered = not state.tail_ordered and num_computed >= prompt
        due = covered or any(tokens == boundary for _, _, tokens in handed)
        return boundary if due and boundary <= state.worth_tokens else 0

    def _order_tail(
        self, state: RequestState, tables: Tables, boundary: int, num_computed: int
    ) -> None:
        """Order the attention blocks of a prompt's tail; nothing for boundary 0."""
        if boundary <= 0:
            return
        chunks = self._planner.prompt_tail(state.request, tables, boundary, num_computed)
        block = self._facts.block_tokens
        self._note(state, boundary // block * block, boundary + block)
        state.tail_ordered = self._add(chunks) or state.tail_ordered

    def _order_handed(self, state: RequestState | None, blocks: Iterable[HandedBlock]) -> None:
        """Order recurrent states that the core hands over, in the step in which it does.

        States of generated tokens are saved only with ``save_decode_cache``, like their blocks.
        """
        if state is None or not state.may_save or not self._role.saves_prompts:
            return
        last = state.request.num_tokens if self._config.save_decode_cache else state.prefill_tokens
        last = min(last, state.worth_tokens)
        wanted = [block for block in blocks if block[2] <= last]
        for _, _, tokens in wanted:
            self._note(state, tokens - 1, tokens)
        self._add(self._planner.handed(state.request, wanted))

    def _note(self, state: RequestState, start: int, end: int) -> None:
        """Note for KV events, where they are wanted, what tokens [start, end) may be saved."""
        if self._events is None:
            return
        request, hash_tokens = state.request, self._facts.hash_tokens
        end = min(end // hash_tokens, len(request.block_hashes)) * hash_tokens
        if start < end:
            self._events.note([(request, start, end)])

    def _add(self, chunks: tuple[Chunks, ...]) -> bool:
        """Order a save of the chunks; False without chunks or room."""
        if not chunks:
            return False
        added = self._step.add(chunks)
        self.counts["saves_put_off"] += not added
        return added


class BlockTable(Sequence[int]):
    """The block ids of vLLM's blocks of one group and request, read where they lie."""

    __slots__ = ("_blocks",)

    def __init__(self, blocks: Sequence[KVCacheBlock]) -> None:
        self._blocks = blocks

    def __len__(self) -> int:
        return len(self._blocks)

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> list[int]: ...
    def __getitem__(self, index: int | slice) -> int | list[int]:
        if isinstance(index, slice):
            return [block.block_id for block in self._blocks[index]]
        block_id: int = self._blocks[index].block_id
        return block_id


def scheduled(output: SchedulerOutput) -> Iterable[tuple[str, int]]:
    """Return every scheduled request with the tokens that were computed before the step."""
    cached = output.scheduled_cached_reqs
    new = [(each.req_id, each.num_computed_tokens) for each in output.scheduled_new_reqs]
    return chain(new, zip(cached.req_ids, cached.num_computed_tokens, strict=True))
