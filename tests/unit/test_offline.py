# SPDX-License-Identifier: Apache-2.0
"""What cannot be described from arguments alone says so; the rest is compared with real engines.

``tests/integration/engines/test_cli_explain.py`` does that.
"""

from types import SimpleNamespace

import pytest

pytest.importorskip("vllm")

from kvxfer.errors import UnsupportedError
from kvxfer.vllm_specs import offline


def config(stages=1, speculative=None):
    parallel = SimpleNamespace(pipeline_parallel_size=stages)
    return SimpleNamespace(parallel_config=parallel, speculative_config=speculative)


@pytest.mark.parametrize(
    "refused", [config(stages=2), config(speculative=SimpleNamespace(method="eagle"))]
)
def test_engine_with_layers_elsewhere_is_not_described(refused):
    with pytest.raises(offline.NotDescribedError, match="without starting it"):
        offline._refuse_what_takes_ranks(refused)
    assert issubclass(offline.NotDescribedError, UnsupportedError)


@pytest.mark.parametrize("method", ["ngram", "ngram_gpu"])
def test_engine_that_drafts_without_layers_is_described(method):
    offline._refuse_what_takes_ranks(config(speculative=SimpleNamespace(method=method)))


def test_process_groups_have_the_sizes_of_the_engine(monkeypatch):
    parallel = SimpleNamespace(world_size=4, tensor_parallel_size=4, decode_context_parallel_size=2)
    for name in offline._SIZES:
        monkeypatch.setattr(offline.parallel_state, name, None, raising=False)
    offline._stand_alone(parallel)
    sizes = {name: getattr(offline.parallel_state, name).world_size for name in offline._SIZES}
    assert sizes == {"_WORLD": 4, "_TP": 4, "_EP": 4, "_DCP": 2, "_PCP": 1, "_PP": 1, "_DP": 1}
    assert offline.parallel_state._TP.device_group.size() == 4
