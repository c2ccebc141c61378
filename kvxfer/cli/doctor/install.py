# SPDX-License-Identifier: Apache-2.0
"""Checks of the installation: Python, the native modules, torch, vLLM, GPU and CuPy."""

from __future__ import annotations

import importlib
import importlib.metadata
import re
from collections.abc import Iterator

from kvxfer.cli.doctor.findings import Check, Finding, fault, note, ok, warning
from kvxfer.cli.doctor.surroundings import Surroundings, dotted, release_of, supported_range

NATIVE_MODULES = ("block_copy", "hits", "keys")
CUPY_BUILDS = ("cupy", "cupy-cuda12x", "cupy-cuda13x")


def _python(around: Surroundings) -> Iterator[Finding]:
    text = f"Python {dotted(around.python)}"
    first, last = _python_range()
    if first <= around.python <= last:
        yield ok(text)
    else:
        yield fault(
            f"{text}; kvxfer is made for {dotted(first)} to {dotted(last)}",
            f"make the environment anew with Python {dotted(last)}",
        )


def _python_range() -> tuple[tuple[int, int], tuple[int, int]]:
    lines = importlib.metadata.metadata("kvxfer").get_all("Classifier") or ()
    found = [re.search(r":: (\d+)\.(\d+)$", line) for line in lines]
    releases = sorted((int(match[1]), int(match[2])) for match in found if match)
    return releases[0], releases[-1]


def _native(around: Surroundings) -> Iterator[Finding]:
    for name in NATIVE_MODULES:
        try:
            importlib.import_module(f"kvxfer._native.{name}")
        except ImportError as error:
            yield fault(
                f"the native module {name} cannot be imported: {error}",
                "install kvxfer again: pip install --force-reinstall --no-deps kvxfer",
            )
            return
    yield ok("native modules can be imported")


def _vllm_version(around: Surroundings) -> Iterator[Finding]:
    version = around.vllm_version
    low, high = supported_range("vllm")
    wanted = f">={dotted(low)},<{dotted(high)}"
    if version is None:
        yield warning(
            "vLLM is not installed here: kvxfer works as a library only",
            f"pip install 'vllm{wanted}' in this environment, where engines are to run in it",
        )
        return
    release = release_of(version)
    if release is None or not low <= release < high:
        yield fault(
            f"vLLM {version}; kvxfer supports {wanted} and refuses others at start-up",
            f"pip install 'vllm{wanted}', or a kvxfer release made for {version}",
        )
    else:
        yield ok(f"vLLM {version}")


def _torch(around: Surroundings) -> Iterator[Finding]:
    if around.vllm_version is None and around.version_of("torch") is None:
        return  # a library's user needs none
    torch = around.install.get("torch", around.install)
    if "error" in torch:
        yield fault(
            f"torch cannot be imported: {torch['error']}",
            "install the torch that vLLM's release names: pip install --force-reinstall vllm",
        )
    else:
        yield ok(f"torch {torch['version']}" + (f", CUDA {torch['cuda']}" if torch["cuda"] else ""))


def _connector(around: Surroundings) -> Iterator[Finding]:
    if around.vllm_version is None:
        return
    connector = around.install.get("connector", around.install)
    if "error" in connector:
        yield fault(
            f"kvxfer.connector cannot be imported as vLLM will: {connector['kind']}: "
            f"{connector['error']}",
            "install kvxfer and vLLM into the environment in which vLLM starts",
        )
    else:
        yield ok("kvxfer.connector can be imported")


def _gpu(around: Surroundings) -> Iterator[Finding]:
    if around.gpus:
        yield ok(f"{len(around.gpus)} GPU(s): {', '.join(sorted(set(around.gpus)))}")
    elif around.nvidia_driver.exists():
        yield fault(
            "an NVIDIA driver is loaded, but torch sees no GPU",
            "install vLLM's CUDA build, and look at CUDA_VISIBLE_DEVICES and the container's "
            "--gpus option",
        )
    else:
        yield note("no GPU: engines run on vLLM's CPU build")


def _cupy(around: Surroundings) -> Iterator[Finding]:
    builds = [name for name in CUPY_BUILDS if around.version_of(name)]
    if len(builds) > 1:
        yield fault(
            f"{len(builds)} builds of CuPy are installed over each other: {', '.join(builds)}",
            f"pip uninstall {' '.join(builds)}, then install the one of the driver's CUDA",
        )
        return
    if not around.gpus:
        return
    cupy = around.install["cupy"]
    if "error" in cupy:
        yield fault(
            f"CuPy loads the copy kernels, and cannot be imported: {cupy['error']}",
            f"pip install 'kvxfer[{_extra(around)}]'",
        )
    elif cupy["driver"] // 1000 < cupy["runtime"] // 1000:
        yield fault(
            f"CuPy {cupy['version']} is built for CUDA {_cuda(cupy['runtime'])}, the driver knows "
            f"{_cuda(cupy['driver'])}",
            f"pip install the build of the driver: kvxfer[cuda{cupy['driver'] // 1000}x], or a "
            "newer driver",
        )
    else:
        yield ok(f"CuPy {cupy['version']}, CUDA {_cuda(cupy['runtime'])}")


def _kernels(around: Surroundings) -> Iterator[Finding]:
    if not around.gpus:
        return
    kernels = around.install["kernels"]
    if "error" in kernels:
        yield fault(
            f"the copy kernels cannot be loaded: {kernels['error']}",
            f"pip install 'kvxfer[{_extra(around)}]', or build kvxfer where nvcc is on the PATH",
        )
    else:
        yield ok(f"copy kernels load ({kernels['origin']})")


def _extra(around: Surroundings) -> str:
    cuda = str(around.install.get("torch", {}).get("cuda"))
    return "cuda12x" if cuda.startswith("12.") else "cuda13x"


def _cuda(number: int) -> str:
    """Return CUDA's number of a version as people write it: 13020 is 13.2."""
    return f"{number // 1000}.{number % 1000 // 10}"


CHECKS = (
    Check("install.python", _python),
    Check("install.native", _native),
    Check("install.vllm", _vllm_version),
    Check("install.torch", _torch),
    Check("install.connector", _connector),
    Check("gpu.device", _gpu),
    Check("gpu.cupy", _cupy),
    Check("gpu.kernels", _kernels),
)
