# SPDX-License-Identifier: Apache-2.0
"""The contract of CUDA copies on a simulated device: the launcher and the kernels' loop."""

import cuda_fakes
import pytest
from block_copy_contract import BlockCopyContract


@pytest.fixture(scope="module")
def device():
    with pytest.MonkeyPatch.context() as patch:
        cuda_fakes.install(patch)
        yield cuda_fakes.FakeDevice()


class TestSimulatedCopies(BlockCopyContract):
    pass
