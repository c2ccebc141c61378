# SPDX-License-Identifier: Apache-2.0
"""Native modules: Cython over plain C, no torch ABI. Typed by the stubs beside them."""
