# SPDX-License-Identifier: Apache-2.0
"""The exceptions of kvxfer: one root, leaves that also inherit the builtin a caller would catch.

A message says what was asked, what was found and what to do about it.
"""


class KvxferError(Exception):
    """Root of every exception that kvxfer raises on purpose."""


class ConfigError(KvxferError, ValueError):
    """A setting is unknown, malformed or contradicts another one."""


class UnsupportedError(KvxferError, NotImplementedError):
    """The engine, model or version cannot be served; refused at start-up, never met at run time."""


class StoreError(KvxferError, OSError):
    """A store cannot be opened or has stopped working."""


class LayoutError(KvxferError, ValueError):
    """Tensors, blocks or buffers do not fit the block layout that they are used with."""


class ProtocolError(KvxferError, ValueError):
    """A frame of the lookup channel is malformed."""
