# SPDX-License-Identifier: Apache-2.0
"""What an operator sees: log lines, metrics through vLLM, KV events for routers.

    logs                join_vllm_logging: our log lines where vLLM's are
    definitions         METRICS: every metric, its unit, its labels; free of vLLM
    meter               Meter: what one side has counted since it was last asked, for all threads
    metered_store       MeteredStore: a store whose calls are counted
    worker_metrics      WorkerMetrics: what one rank counts: store calls, jobs, waits, queues
    stats               KVXferStats: what a step hands to vLLM, summed over ranks and steps
    prometheus          KVXferPromMetrics: what the frontend makes of it
    events              SaveEvents: which blocks are stored, told when every rank has stored them
    lost_blocks         LostBlocks: which blocks a rank has seen lose a value

The way of a number: a worker's threads note it in its rank's ``Meter``; each step vLLM takes what
has come together (``get_kv_connector_stats``), adds up the ranks and the scheduler side's own, and
sends the sum to the frontend, where the Prometheus collectors of ``build_prom_metrics`` grow by it.
Nothing is counted twice: bytes are counted by the rank that moves them, lookups, tokens and events
by the scheduler side alone.
"""
