# SPDX-License-Identifier: Apache-2.0
"""Build the Cython modules of ``kvxfer._native``; everything else is in pyproject.toml.

``KVXFER_DEBUG=1`` builds with bounds, None and initialised checks and ``-O0 -g``.
``KVXFER_SANITIZE=1`` builds with gcc's address and undefined-behaviour sanitizers, which end the
process at the first fault; ``scripts/sanitize.sh`` runs Python on such a build.
``KVXFER_EXTENSIONS=hits,keys`` builds only the modules named, for work on one of them.
"""

import os
from pathlib import Path

from Cython.Build import cythonize
from setuptools import Extension, setup

NATIVE = Path("kvxfer/_native")
DEBUG = os.environ.get("KVXFER_DEBUG", "") == "1"
SANITIZE = os.environ.get("KVXFER_SANITIZE", "") == "1"
CHOSEN = set(filter(None, os.environ.get("KVXFER_EXTENSIONS", "").split(",")))
HEADERS = sorted(str(path) for path in Path("csrc").glob("*.h"))

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
CYTHON_FOLDER = "build/cython" + ("-debug" if DEBUG else "")


def extension(source: Path) -> Extension:
    """Describe the build of one ``.pyx``; it sees the headers of ``csrc``."""
    return Extension(
        f"kvxfer._native.{source.stem}",
        [str(source)],
        include_dirs=["csrc"],
        depends=HEADERS,
        extra_compile_args=[*COMPILE_ARGS, "-std=c11"],
        extra_link_args=LINK_ARGS,
        define_macros=[("KVXFER_DEBUG", "1")] if DEBUG else [],
    )


sources = [path for path in sorted(NATIVE.glob("*.pyx")) if not CHOSEN or path.stem in CHOSEN]
setup(
    ext_modules=cythonize(
        [extension(path) for path in sources],
        compiler_directives=DIRECTIVES,
        build_dir=CYTHON_FOLDER,
    )
)
