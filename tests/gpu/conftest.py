# SPDX-License-Identifier: Apache-2.0
"""What tests on a GPU share: the device, and the reason why there is none.

``KVXFER_REQUIRE_GPU=1``, which scripts/gpu_check.sh sets, makes that reason a failure.
The oracle of copies is that of ``tests/property``, which is put on the path.
"""

import importlib.util
import os
import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "property"))


def reason_to_skip():
    """Return why no test can run here; None where they can."""
    for module in ("torch", "cupy"):
        if importlib.util.find_spec(module) is None:
            return f"{module} is not installed"
    import torch

    return None if torch.cuda.is_available() else "torch finds no CUDA device"


class GpuDevice:
    """One GPU with the face of ``cuda_fakes.FakeDevice``."""

    name = "cuda:0"

    def __init__(self):
        import torch

        self.torch = torch

    def upload(self, array):
        return self.torch.from_numpy(self._flat(array)).to(self.name)

    def upload_pinned(self, array):
        return self.torch.from_numpy(self._flat(array)).pin_memory()

    def download(self, tensor):
        self.torch.cuda.synchronize()
        return tensor.cpu().numpy().copy()

    def empty(self, num_bytes):
        return self.torch.empty(num_bytes, dtype=self.torch.uint8, device=self.name)

    def rows(self, tensor, num_rows):
        return tensor.view(num_rows, tensor.numel() // max(num_rows, 1))

    @staticmethod
    def _flat(array):
        return np.ascontiguousarray(array).view(np.uint8).ravel().copy()


@pytest.fixture(scope="session")
def device():
    if reason := reason_to_skip():
        if os.environ.get("KVXFER_REQUIRE_GPU", "") == "1":
            pytest.fail(f"KVXFER_REQUIRE_GPU=1, but {reason}")
        pytest.skip(reason)
    return GpuDevice()
