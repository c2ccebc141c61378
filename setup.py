# SPDX-License-Identifier: Apache-2.0
"""Build the Cython modules of ``kvxfer._native``; everything else is in pyproject.toml.

``KVXFER_DEBUG=1`` builds with bounds, None and initialised checks and ``-O0 -g``.
``KVXFER_SANITIZE=1`` builds with gcc's address and undefined-behaviour sanitizers, which end the
process at the first fault; ``scripts/sanitize.sh`` runs Python on such a build.
``KVXFER_EXTENSIONS=hits,keys`` builds only the modules named, for work on one of them.

Where nvcc is on the PATH, a build of block_copy also compiles the CUDA kernels, once per version
of their sources, into ``build/kernels``; a package gets them, and the sources for NVRTC, in
``kvxfer/blocks/kernels``. Nothing needs nvcc: ``kvxfer/blocks/cuda_kernels.py`` says what else.
"""

import json
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

from Cython.Build import cythonize
from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

NATIVE = Path("kvxfer/_native")
DEBUG = os.environ.get("KVXFER_DEBUG", "") == "1"
SANITIZE = os.environ.get("KVXFER_SANITIZE", "") == "1"
CHOSEN = set(filter(None, os.environ.get("KVXFER_EXTENSIONS", "").split(",")))
C_SOURCES = sorted(str(path) for pattern in ("*.h", "*.cu") for path in Path("csrc").glob(pattern))

DIRECTIVES = {
    "language_level": 3,
    "freethreading_compatible": False,
    "boundscheck": DEBUG,
    "wraparound": False,
    "cdivision": True,
    "nonecheck": DEBUG,
    "initializedcheck": DEBUG,
    "embedsignature": True,
    "embedsignature.format": "python",
    "show_performance_hints": not DEBUG,
}
SANITIZERS = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
if SANITIZE:
    COMPILE_ARGS = ["-O1", "-g", "-fno-omit-frame-pointer", "-fno-strict-aliasing", *SANITIZERS]
elif DEBUG:
    COMPILE_ARGS = ["-O0", "-g"]
else:
    COMPILE_ARGS = ["-O3", "-fno-strict-aliasing"]
LINK_ARGS = SANITIZERS if SANITIZE else []

CSRC = Path("csrc")
KERNELS = Path("build/kernels")
PACKAGE_KERNELS = Path("kvxfer/blocks/kernels")
sources_module = runpy.run_path("kvxfer/blocks/cuda_sources.py")
CYTHON_FOLDER = "build/cython" + ("-debug" if DEBUG else "")


def extension(source: Path) -> Extension:
    """Describe the build of one ``.pyx``; it sees the headers of ``csrc``."""
    return Extension(
        f"kvxfer._native.{source.stem}",
        [str(source)],
        include_dirs=["csrc"],
        depends=C_SOURCES,
        extra_compile_args=[*COMPILE_ARGS, "-std=c11"],
        extra_link_args=LINK_ARGS,
        define_macros=[("KVXFER_DEBUG", "1")] if DEBUG else [],
    )


class BuildExtensions(build_ext):
    """Builds the native modules, then the CUDA kernels where that is possible."""

    def run(self):
        if self.extensions:
            require_compiler()
        super().run()
        if (not CHOSEN or "block_copy" in CHOSEN) and not DEBUG and not SANITIZE:
            build_kernels()
        if not self.inplace:
            package_kernels(Path(self.build_lib) / PACKAGE_KERNELS)


def require_compiler():
    """End the build where its C compiler or Python's headers are missing: say what to install."""
    compiler = shlex.split(os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc")[0]
    header = Path(sysconfig.get_path("include"), "Python.h")
    missing = [] if shutil.which(compiler) else [f"a C compiler ({compiler} is not on the PATH)"]
    missing += [] if header.exists() else [f"Python's headers ({header})"]
    if missing:
        raise SystemExit(
            f"kvxfer is built from source here, which needs {' and '.join(missing)}.\n"
            "Debian, Ubuntu: apt-get install gcc libc6-dev python3-dev; "
            "Fedora, RHEL: dnf install gcc python3-devel; CC names another compiler.\n"
            "A wheel needs neither: pip install --only-binary=kvxfer kvxfer"
        )


def build_kernels():
    """Compile the kernels into build/kernels, unless that was done or there is no nvcc."""
    nvcc = shutil.which("nvcc")
    source_hash = sources_module["hash_source"](sources_module["read_source"](CSRC))
    record = KERNELS / sources_module["RECORD_NAME"]
    if nvcc is None or sources_module["recorded_hash"](record) == source_hash:
        return
    KERNELS.mkdir(parents=True, exist_ok=True)
    record.unlink(missing_ok=True)
    codes = known_architectures(nvcc)
    compiled = subprocess.run(nvcc_command(nvcc, codes), capture_output=True, text=True)
    if compiled.returncode != 0:
        print(
            f"the CUDA kernels are left to NVRTC; nvcc failed:\n{compiled.stderr}", file=sys.stderr
        )
        return
    record.write_text(json.dumps({"source_sha256": source_hash, "architectures": codes}) + "\n")


def known_architectures(nvcc):
    """Return the architectures of ours that this nvcc compiles for."""
    listed = subprocess.run([nvcc, "--list-gpu-code"], capture_output=True, text=True).stdout
    known = {int(number) for number in re.findall(r"^sm_(\d+)$", listed, re.MULTILINE)}
    return [number for number in sources_module["ARCHITECTURES"] if number in known]


def nvcc_command(nvcc, codes):
    """Return the command that compiles the kernels for all these architectures, and as PTX."""
    targets = [f"-gencode=arch=compute_{number},code=sm_{number}" for number in codes]
    portable = sources_module["PTX_ARCHITECTURE"]
    ptx = f"-gencode=arch=compute_{portable},code=compute_{portable}"
    target = KERNELS / sources_module["BINARY_NAME"]
    options = ["-fatbin", "-std=c++17", "-O3", *targets, ptx, "-o", str(target)]
    return [nvcc, *options, str(CSRC / sources_module["SOURCE_NAMES"][0])]


def package_kernels(target):
    """Put the kernels' sources, and their binary where there is one, into a package."""
    shutil.rmtree(target, ignore_errors=True)  # a binary of an earlier build may be stale
    target.mkdir(parents=True)
    paths = [CSRC / name for name in sources_module["SOURCE_NAMES"]]
    paths += [KERNELS / sources_module[name] for name in ("BINARY_NAME", "RECORD_NAME")]
    for path in paths:
        if path.exists():
            shutil.copy(path, target / path.name)


sources = [path for path in sorted(NATIVE.glob("*.pyx")) if not CHOSEN or path.stem in CHOSEN]
setup(
    cmdclass={"build_ext": BuildExtensions},
    ext_modules=cythonize(
        [extension(path) for path in sources],
        compiler_directives=DIRECTIVES,
        build_dir=CYTHON_FOLDER,
    ),
)
