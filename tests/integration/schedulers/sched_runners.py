# SPDX-License-Identifier: Apache-2.0
"""The order in which vLLM's two model runners call a worker's connector, by their own code."""

from contextlib import contextmanager

from vllm.distributed.kv_transfer import kv_transfer_state
from vllm.forward_context import set_forward_context
from vllm.v1.worker.gpu.kv_connector import ActiveKVConnector
from vllm.v1.worker.kv_connector_model_runner_mixin import KVConnectorModelRunnerMixin


@contextmanager
def as_this_rank(connector):
    """Make ``connector`` what vLLM finds as this process's."""
    before = kv_transfer_state._KV_CONNECTOR_AGENT
    kv_transfer_state._KV_CONNECTOR_AGENT = connector
    try:
        yield
    finally:
        kv_transfer_state._KV_CONNECTOR_AGENT = before


class RunnerV1:
    """Runner v1: with speculative decoding results and worker meta come before the saves."""

    def __init__(self, vllm_config, connector, caches):
        self._config, self._connector = vllm_config, connector
        self._defers = vllm_config.speculative_config is not None
        connector.register_kv_caches(caches)

    def run(self, output, forward):
        """Run a step around ``forward()``; return what the connector reports."""
        with as_this_rank(self._connector):
            self._connector.handle_preemptions(output.kv_connector_metadata)
            if not output.num_scheduled_tokens:
                empty = KVConnectorModelRunnerMixin.kv_connector_no_forward(output, self._config)
                return empty.kv_connector_output
            with (
                set_forward_context(None, self._config),
                KVConnectorModelRunnerMixin.maybe_get_kv_connector_output(
                    output, defer_finalize=self._defers
                ) as reported,
            ):
                forward()
            if self._defers:
                KVConnectorModelRunnerMixin.finalize_kv_connector()
        return reported


class RunnerV2:
    """Runner v2, CUDA's default: vLLM's ActiveKVConnector alone."""

    def __init__(self, vllm_config, connector, caches):
        self._connector = connector
        with as_this_rank(connector):
            self._active = ActiveKVConnector(vllm_config, caches)

    def run(self, output, forward):
        """Run a step around ``forward()``; return what the connector reports."""
        with as_this_rank(self._connector):
            if not output.num_scheduled_tokens:
                return self._active.no_forward(output).kv_connector_output
            self._active.pre_forward(output)
            forward()
            self._active.finish_forward()
            return self._active.post_forward(output.finished_req_ids)
