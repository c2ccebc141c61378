# SPDX-License-Identifier: Apache-2.0
"""Scheduler side: what to look up, what to load and what to save.

    side            KVXferScheduler: lookups, offers and loads; what the connector forwards to
    save_orders     SaveOrders: which blocks a step makes worth saving
    step_saves      StepSaves: the jobs that they become, shared by small saves, and their pins
    chunk_planner   ChunkPlanner: token ranges -> blocks of vLLM's tables and hashes at their ends
    pins            BlockPins: blocks kept from reuse while saves read them
    requests        what is remembered of an unfinished request
    lookups         the lookup channel as this side sees it
    token_counts    TokenCounts: what became of wanted tokens and of lookups
    metrics         SchedulerMetrics: what a step hands to vLLM of it

All of it lives in vLLM's scheduler thread and waits for nobody.
"""

from kvxfer.scheduler.side import KVXferScheduler

__all__ = ["KVXferScheduler"]
