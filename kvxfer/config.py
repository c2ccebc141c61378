# SPDX-License-Identifier: Apache-2.0
"""All settings of ``kv_connector_extra_config``, read, checked and logged in this one place."""

from __future__ import annotations

import dataclasses
import difflib
import enum
import logging
import math
import os
import reprlib
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal
from urllib.parse import quote

from kvxfer.errors import ConfigError
from kvxfer.stores.uri import LONGEST_S, parse_size

logger = logging.getLogger(__name__)

MOONCAKE_CONFIG_VARIABLE = "MOONCAKE_CONFIG_PATH"


class Role(enum.StrEnum):
    """vLLM's ``kv_role``: a producer saves, a consumer does not; all look up and load."""

    PRODUCER = "kv_producer"
    CONSUMER = "kv_consumer"
    BOTH = "kv_both"

    @property
    def saves_prompts(self) -> bool:
        """Whether blocks of the prompt are saved."""
        return self is not Role.CONSUMER


ValueOrder = Literal["native", "token_major", "head_major"]
LoadWhen = Literal["always", "faster"]
"""Order of the bytes of one layer's part of a value."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KVXferConfig:
    """Settings of one engine; every field is a key of ``kv_connector_extra_config``.

    Units end the names. ``None`` means that the value is derived where it is used, as each
    field's text says.
    """

    store: str
    """Where values live: ``lmdb:///folder?capacity=8GiB`` or ``mooncake://host:port``. Default: the
    embedded store in its default folder, or Mooncake where MOONCAKE_CONFIG_PATH is set."""
    cache_prefix: str = "default"
    """First part of every key; engines with different prefixes never meet."""
    model_id: str | None = None
    """What the model is called in keys; None: vLLM's model name and the checkpoint's content."""
    store_tp: int | None = None
    """Head shards per chunk, the same in all engines of a pool; None: tensor-parallel size."""
    value_order: ValueOrder = "native"
    """``native``, ``token_major`` or ``head_major``; the same in all engines of a pool."""
    checksums: bool = False
    """Keep a digest beside each value and compare it at each load; the same in all engines of a
    pool. Without it a value of the right size is believed."""
    enable_lookup: bool = True
    """False: never look up, hence never load."""
    lookup_async: bool = True
    """False: the scheduler waits for each lookup, at most ``lookup_timeout_s``."""
    lookup_timeout_s: float = 1.0
    """A lookup without an answer by then is a miss."""
    max_lookups_in_flight: int = 128
    """Lookups sent and not answered; more wait in the scheduler's process."""
    max_open_lookups: int = 16384
    """Lookups that some request waits for; more are misses."""
    answer_max_age_s: float = 10.0
    """A hit that could not be scheduled for so long is looked up again."""
    load_when: LoadWhen = "always"
    """``always``, or ``faster``: only while loads bring more tokens a second than prefills compute,
    both measured as the scheduler sees them."""
    min_load_tokens: int = 1
    """A hit of fewer tokens beyond vLLM's own is computed."""
    load_tokens_per_s: float | None = None
    """With ``load_when=faster``: the rate of loads; None: measured."""
    prefill_tokens_per_s: float | None = None
    """With ``load_when=faster``: the rate of prefills; None: measured."""
    min_sightings: int = 1
    """Save what so many requests have had in their prompt, and no generated tokens above 1."""
    load_async: bool = True
    """Loads run between steps. False is refused: see the README's list of what is not done."""
    load_timeout_s: float = 30.0
    """A load that is not complete by then has failed."""
    save_timeout_s: float = 60.0
    """A save that is not complete by then has failed."""
    save_decode_cache: bool = False
    """Save blocks of generated tokens too, and recurrent states of them as far as vLLM retains
    those (``--prefix-cache-retention-interval``): the next turn of a conversation hits there."""
    max_pinned_blocks: int | None = None
    """Blocks kept from reuse while saves read them; None: an eighth of the KV cache."""
    max_queued_saves: int = 256
    """Saves waiting in one worker; more are skipped and counted."""
    max_queued_loads: int = 1024
    """Loads waiting in one worker; more fail, that is, are recomputed."""
    num_save_threads: int = 1
    num_load_threads: int = 2
    staging_bytes: int = 128 << 20
    """Host memory between KV cache and store, per worker."""
    device_staging_bytes: int = 128 << 20
    """GPU memory between KV cache and ``staging_bytes``, per worker, at most; unused on a CPU."""
    start_timeout_s: float = 30.0
    """Longest wait of start-up for the lookup server, for a machine busy with starting up."""
    reset_timeout_s: float = 30.0
    """A reset that has not drained the saves by then reports failure."""
    close_timeout_s: float = 10.0
    """Longest wait for a thread at shutdown; a stuck one is abandoned, logged and counted."""

    @classmethod
    def from_extra(
        cls, extra: Mapping[str, object], environ: Mapping[str, str] = os.environ
    ) -> KVXferConfig:
        """Read ``kv_connector_extra_config``; ConfigError names the setting and the way out."""
        known = {field.name: field for field in dataclasses.fields(cls)}
        for name in extra:
            if name not in known:
                raise ConfigError(_unknown(name, known))
        types = typing.get_type_hints(cls)
        values = {name: _convert(name, value, types[name]) for name, value in extra.items()}
        values.setdefault("store", default_store(environ))
        config = cls(**values)  # type: ignore[arg-type]
        config.check()
        return config

    def check(self) -> None:
        """Raise ConfigError for a value that no engine could run with."""
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if isinstance(value, bool) or not isinstance(value, (int, float)):
                continue
            most = _largest(field.name)
            if not 0 < value <= most:  # NaN is refused too
                raise ConfigError(
                    f"{field.name} is {_shown(value)}; it must be positive and at most {most}"
                )
        if not self.load_async:
            raise ConfigError(
                "load_async=false is not supported: synchronous loads are not tested yet, and for "
                "models with recurrent states vLLM copies the state before they run. Remove the "
                "setting; loads then run between steps."
            )

    def log(self) -> None:
        """Log every setting once, in one line."""
        text = " ".join(f"{f.name}={getattr(self, f.name)}" for f in dataclasses.fields(self))
        logger.info("kvxfer settings: %s", text)


def default_store(environ: Mapping[str, str]) -> str:
    """Return the store URI of an engine that sets none."""
    path = environ.get(MOONCAKE_CONFIG_VARIABLE)
    return f"mooncake://?config={quote(path, safe='/')}" if path else "lmdb://"


def _unknown(name: str, known: Mapping[str, object]) -> str:
    near = difflib.get_close_matches(name, known, n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"known settings: {', '.join(known)}"
    return f"kv_connector_extra_config has an unknown setting {name!r}; {hint}"


def _convert(name: str, value: object, kind: object) -> object:
    """Return ``value`` as ``kind``; JSON's own types, and sizes with units (``256MiB``)."""
    options = typing.get_args(kind) or (kind,)
    if typing.get_origin(kind) is Literal:
        return _choice(name, value, options)
    if value is None and type(None) in options:
        return None
    for option in options:
        if option is float and type(value) is int:
            return _as_float(value)
        if option is int and isinstance(value, str) and name.endswith("_bytes"):
            return parse_size(value, name)
        if option is str and isinstance(value, str) and not _is_utf8(value):
            raise ConfigError(f"{name} is {_shown(value)}, which is no text that UTF-8 can hold")
        if isinstance(option, type) and type(value) is option:
            return value
    wanted = " or ".join(o.__name__ for o in options if isinstance(o, type) and o is not type(None))
    raise ConfigError(f"{name} is {_shown(value)}; it must be {wanted}")


def _choice(name: str, value: object, choices: tuple[object, ...]) -> object:
    if value not in choices:
        raise ConfigError(
            f"{name} is {_shown(value)}; choose one of {', '.join(map(str, choices))}"
        )
    return value


_LARGEST = {"_per_s": 2**47, "_s": LONGEST_S, "_bytes": 2**47, "_threads": 256}
"""By the unit that ends a setting's name: a day, the address space, more threads than cores."""
_LARGEST_COUNT = 2**31 - 1

_short = reprlib.Repr()
_short.maxstring = _short.maxlong = _short.maxother = 99


def _largest(name: str) -> int:
    """Return the largest value of a setting that anybody can mean."""
    return next((most for unit, most in _LARGEST.items() if name.endswith(unit)), _LARGEST_COUNT)


def _as_float(value: int) -> float:
    """Return ``value``; what no float can hold becomes infinite, which ``check`` refuses."""
    try:
        return float(value)
    except OverflowError:
        return math.copysign(math.inf, 1 if value > 0 else -1)


def _is_utf8(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _shown(value: object) -> str:
    """Return a value for a message: whole if it is short."""
    return _short.repr(value)
