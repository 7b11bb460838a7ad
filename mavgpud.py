#!/usr/bin/env python3
"""mavgpud: keeps a local LLM on the card while nobody else wants it.

One AMD card (amdgpu, ROCm) is shared by llama-server and by its owner's own jobs, and the owner
comes first. The rule, decided once per poll, in one thread, by one function (`decide`):

    yield    when a contender has been seen in `evict_after_polls` polls in a row, or at once when
             somebody waits for the card lock or has got hold of it;
    unload   a child that has had nothing in flight for its `idle_timeout`;
    start    the next child when the card has been clear for `start_after_polls` polls in a row,
             nobody has a claim on the lock, no back-off or rest is pending, and there is VRAM.

A contender is any process on the KFD (/sys/class/kfd/kfd/proc) that is not of our making. The
kernel lists a process there when it opens /dev/kfd, seconds before it allocates anything large;
that is why presence is the trigger and never an amount of VRAM: by the time VRAM is short, the
other job has already failed.

Who does what:

    poll loop   the only thread that starts, stops or reaps a child, and the only one that writes
                its state. A stop is a state with deadlines, so polls go on during one.
    watcher     one epoll for everything that may happen while nobody looks: a client that hangs
                up, a child that dies, a signal. It wakes the poll loop or cuts an exchange.
    probers     one per running child: GET its health path, and note the result.
    handlers    one thread per client connection: the front and the proxy.

Other threads read what the poll loop has published (`Child.run`, `Run.ready`, `Child.reason`,
`Supervisor.snapshot`); they never change a child, they only ask for the next poll to come now.
"""

from __future__ import annotations

import sys

# http.client loads OpenSSL wherever it is found, and shutil what packs archives: 4.5 MB, and 15 ms
# at every start, that nobody needs who speaks to his own children only.
for unused in ("ssl", "bz2", "lzma", "zlib"):
    sys.modules.setdefault(unused, None)  # type: ignore[arg-type]

import _thread
import argparse
import atexit
import collections
import contextlib
import errno
import fcntl
import fnmatch
import functools
import html
import http.client
import http.server
import json
import logging
import math
import os
import queue
import re
import resource
import select
import shutil
import signal
import socket
import socketserver
import struct
import subprocess
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from http import HTTPStatus
from typing import Any, NamedTuple, Union

VERSION = "1.0"

log = logging.getLogger("mavgpud")

GIB = 1 << 30
MIB = 1 << 20


def gib(amount: int) -> str:
    """`amount` bytes as people read VRAM: in GiB with one decimal."""
    return f"{amount / GIB:.1f} GiB"


def spell(seconds: float) -> str:
    """A duration in Go's notation, as the configuration has it: 40ms, 0.9s, 15m, 1h30m."""
    if 0 < seconds < 0.1:
        return f"{math.ceil(seconds * 1000)}ms"
    if seconds < 60:
        return f"{seconds:.1f}".rstrip("0").rstrip(".") + "s"
    whole = round(seconds)
    parts = ((whole // 3600, "h"), (whole % 3600 // 60, "m"), (whole % 60, "s"))
    return "".join(f"{n}{unit}" for n, unit in parts if n)


def in_background(name: str, job: Callable[..., object], *args: Any) -> None:
    """Runs `job` in a thread of its own, which does not keep the program from ending."""
    threading.Thread(target=job, name=name, args=args, daemon=True).start()


# ---- configuration -------------------------------------------------------------------------------

Address = tuple[str, int]

NEVER = math.inf


class ConfigError(Exception):
    """The configuration cannot be used; the text has one line per fault."""


class ChildConfig(NamedTuple):
    """One process to keep on the card. Durations in seconds, sizes in bytes."""

    name: str
    bin: str
    args: tuple[str, ...]
    env: Mapping[str, str]
    addr: Address | None
    health: str
    routes: tuple[str, ...]
    min_free_vram_bytes: int
    idle_timeout: float
    idle_rest: float
    stop_grace: float
    load_timeout: float

    @property
    def command(self) -> tuple[Any, ...]:
        """What cannot be changed while the process runs."""
        return (self.bin, self.args, self.env, self.addr)


class Config(NamedTuple):
    """The file, checked. Durations in seconds, sizes in bytes."""

    listen: Address
    kfd_root: str
    drm_device: str
    poll: float
    evict_after_polls: int
    start_after_polls: int
    wait_for_model: float
    passive_paths: tuple[str, ...]
    ignore: tuple[str, ...]
    unseen_vram_bytes: int
    evict_unseen: bool
    card_lock: str
    max_connections: int
    history: float
    children: tuple[ChildConfig, ...]


# Go's time.ParseDuration: decimal numbers, each with a unit, without spaces.
DURATION_PART = r"(\d+(?:\.\d*)?|\.\d+)(ns|us|µs|ms|s|m|h)"
UNITS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}

Keys = Mapping[str, tuple[Callable[[Any], Any], Any]]  # key: (parser, default as in a file)


def must(fine: object, value: Any, what: str) -> None:
    """ValueError, with what is wrong with `value`, unless it is fine."""
    if not fine:
        raise ValueError(f"{json.dumps(value)} {what}")


def duration(value: Any, least: float = 0.0, never: bool = False) -> float:
    """A Go duration of at least `least` seconds, or "never" where that is allowed."""
    if never and value == "never":
        return NEVER
    known = isinstance(value, str) and re.fullmatch(f"0|(?:{DURATION_PART})+", value, re.ASCII)
    must(known, value, 'is not a duration such as "15m", "1h30m" or "300ms"'
         + ' or "never"' * never)
    seconds = sum(float(n) * UNITS[unit] for n, unit in re.findall(DURATION_PART, value, re.ASCII))
    must(seconds >= least, value, f"is too short, the least is {spell(least)}")
    must(seconds < 1 << 32, value, "is longer than a century")
    return seconds


def whole(value: Any, least: int = 0) -> int:
    must(type(value) is int, value, "is not a whole number")  # a bool is an int, too
    must(value >= least, value, f"is too small, the least is {least}")
    must(value < 1 << 63, value, "is too large")
    return int(value)


def text(value: Any) -> str:
    """A string that may be given to the kernel as a path or an argument."""
    must(isinstance(value, str) and "\0" not in value, value, "is not a string")
    encoding = sys.getfilesystemencoding()
    try:
        value.encode(encoding)
    except UnicodeEncodeError:
        must(False, value, f"cannot be written in {encoding}")
    return str(value)


def texts(value: Any, each: Callable[[Any], str] = text) -> tuple[str, ...]:
    """A list of strings; null is an empty one, as in Go."""
    must(isinstance(value, (list, type(None))), value, "is not a list of strings")
    return tuple(map(each, value or ()))


def flag(value: Any) -> bool:
    must(isinstance(value, bool), value, "is neither true nor false")
    return bool(value)


def environment(value: Any) -> dict[str, str]:
    must(isinstance(value, dict), value, "is not an object of strings")
    for key, item in value.items():
        must(text(key) and "=" not in key, key, "cannot be the name of an environment variable")
        text(item)
    return dict(value)


def path(value: Any) -> str:
    """An absolute path, of a file or in a URL."""
    must(text(value).startswith("/"), value, 'does not begin with "/"')
    return str(value)


def address(value: Any, local: bool = False) -> Address:
    """HOST:PORT, an IPv6 host in brackets; HOST may be left out, but not of a `local` one."""
    host_port = r"(\[[\dA-Fa-f:.]+\]|(?:[\w-]{1,63}\.)*[\w-]{0,63}):(\d{1,5})"
    match = re.fullmatch(host_port, text(value), re.A)
    host, port = (match[1].strip("[]"), int(match[2])) if match else ("", 0)
    must(1 <= port <= 65535, value, 'is not HOST:PORT, such as "127.0.0.1:8081"')
    must(host or not local, value, f'lacks a host, such as "127.0.0.1{value}"')
    return (host, port)


def program(value: Any) -> str:
    """A program, by path or to be found in PATH, that we may execute."""
    found = shutil.which(text(value))
    must(found, value, "is not a program that can be executed here")
    return str(found)


def label(value: Any) -> str:
    """A child's name: it stands in URLs and in the log."""
    must(re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", text(value)), value,
         "is not a name of letters, digits, '.', '_' and '-'")
    return str(value)


def sequence(value: Any) -> list[Any]:
    """A list of anything; its items are checked one by one."""
    must(isinstance(value, list), value, "is not a list")
    return list(value)


REQUIRED = object()

TOP_KEYS: Keys = {
    "listen": (address, ":8080"),
    "llama_addr": (partial(address, local=True), "127.0.0.1:8081"),
    "llama_bin": (program, REQUIRED),
    "llama_args": (texts, []),
    "kfd_root": (path, "/sys/class/kfd/kfd/proc"),
    "drm_device": (
        lambda value: value if value == "auto" else path(value), "/sys/class/drm/card1/device"),
    "poll": (partial(duration, least=0.01), "1s"),
    "idle_timeout": (partial(duration, least=0.001), "15m"),
    "idle_rest": (partial(duration, never=True), "0s"),
    "stop_grace": (duration, "20s"),
    "load_timeout": (partial(duration, least=0.001), "10m"),
    "min_free_vram_bytes": (whole, 15 * GIB),
    "evict_after_polls": (partial(whole, least=1), 2),
    "start_after_polls": (partial(whole, least=1), 5),
    "wait_for_model": (duration, "0s"),
    "passive_paths": (
        partial(texts, each=path),
        ["/metrics", "/slots", "/props", "/models", "/v1/models", "/v1/health"]),
    "ignore": (texts, ["amd-smi", "rocm-smi", "rocminfo", "rdcd", "gpuagent"]),
    "unseen_vram_bytes": (whole, GIB),
    "evict_unseen": (flag, False),
    "card_lock": (lambda value: value if value == "" else path(value), ""),
    "max_connections": (partial(whole, least=1), 512),
    "history": (partial(duration, least=60), "24h"),
    "children": (sequence, []),
}
# A child that does not say otherwise takes these from the top of the file.
INHERITED = ("idle_timeout", "idle_rest", "stop_grace", "load_timeout")
CHILD_KEYS: Keys = {
    "name": (label, REQUIRED),
    "bin": (program, REQUIRED),
    "args": (texts, []),
    "env": (environment, {}),
    "addr": (lambda value: None if value is None else address(value, local=True), None),
    "health": (path, "/health"),
    "routes": (partial(texts, each=path), []),
    "min_free_vram_bytes": (whole, 0),
    **{key: TOP_KEYS[key] for key in INHERITED},
}


def values_of(given: Mapping[str, Any], keys: Keys, faults: list[str],
              where: str = "") -> dict[str, Any]:
    """The values of `keys` in `given`; a key with a fault is missing from the result."""
    for key in given:
        if key not in keys and not key.startswith("_"):
            import difflib  # only a file with a fault pays for it

            near = difflib.get_close_matches(key.lower(), keys, 1)
            hint = f", did you mean {near[0]}?" if near else ""
            faults.append(f"{where}{key}: unknown key{hint}")
    values = {}
    for key, (parse, default) in keys.items():
        value = given.get(key, default)
        if value is REQUIRED:
            faults.append(f"{where}{key}: is required")
            continue
        try:
            values[key] = parse(value)
        except ValueError as fault:
            faults.append(f"{where}{key}: {fault}")
    return values


def load_config(source: str) -> Config:
    """Reads and checks the file; ConfigError names every fault in it, one per line."""
    faults: list[str] = []

    def members(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        for key, count in collections.Counter(key for key, _ in pairs).items():
            if count > 1 and not key.startswith("_"):
                faults.append(f"{key}: stands {count} times, keep one of them")
        return dict(pairs)

    try:
        with open(source, encoding="utf-8") as file:
            config = checked(json.load(file, object_pairs_hook=members), faults)
    except OSError as error:
        raise ConfigError(f"{source}: {error.strerror}") from None
    except ValueError as error:  # JSON's and UTF-8's own say where
        raise ConfigError(f"{source}: not JSON: {error}") from None
    except RecursionError:  # also where a fault is to show it
        raise ConfigError(f"{source}: not JSON that anyone means: nested too deeply") from None
    if not config:
        raise ConfigError("\n".join(f"{source}: {fault}" for fault in faults))
    return config


def checked(given: Any, faults: list[str]) -> Config | None:
    """What the file says, unless it has faults, which are added to `faults`."""
    if not isinstance(given, dict):
        faults.append("not a JSON object")
        return None
    top = values_of(given, TOP_KEYS, faults)
    children: dict[str, dict[str, Any]] = {"llama_": {
        "name": "llama", "env": {}, "health": "/health", "routes": (),
        **{key: top.get("llama_" + key) for key in ("bin", "args", "addr")},
        **{key: top.get(key) for key in ("min_free_vram_bytes", *INHERITED)},
    }}
    inherited = {key: given[key] for key in INHERITED if key in given and key in top}
    for index, item in enumerate(top.get("children", ())):
        where = f"children[{index}]"
        if not isinstance(item, dict):
            faults.append(f"{where}: {json.dumps(item)} is not an object")
            continue
        where += "."
        children[where] = values_of({**inherited, **item}, CHILD_KEYS, faults, where)
    check_together(children, top.get("listen"), faults)
    if faults:
        return None
    top["children"] = tuple(ChildConfig(**child) for child in children.values())
    return Config(**{key: top[key] for key in Config._fields})


def check_together(children: Mapping[str, Mapping[str, Any]], listen: Address | None,
                   faults: list[str]) -> None:
    """What no child can be asked alone: names, addresses and routes are each used once."""
    seen: dict[tuple[str, str], str] = {}
    for where, child in children.items():
        addr, routes = child.get("addr"), child.get("routes", ())
        shown = addr and f"{addr[0]}:{addr[1]}"
        uses = [("name", child.get("name")), ("addr", shown), *(("routes", r) for r in routes)]
        for key, value in uses:
            if (key, value) in seen:
                faults.append(f"{where}{key}: {value} is taken by {seen[key, value]}")
            elif value:
                seen[key, value] = str(child.get("name"))
        if routes and "addr" in child and not addr:
            faults.append(f"{where}routes: need an addr to be proxied to")
        if addr and listen and addr[1] == listen[1] and listen[0] in ("", "0.0.0.0", "::", addr[0]):
            faults.append(f"{where}addr: {shown} is what listen has, use another port")


# ---- the card ------------------------------------------------------------------------------------

DRM, PROC = "/sys/class/drm", "/proc"


class Unknown(Exception):
    """Something could not be read: not zero, not nobody, but not known. The text says what."""


class Contender(NamedTuple):
    """A process that wants the card or, with VRAM, has a part of it."""

    pid: int
    comm: str
    vram: int = 0

    def __str__(self) -> str:
        held = f", {gib(self.vram)}" if self.vram else ""
        return f"{printable(self.comm)} (pid {self.pid}{held})"


def printable(comm: str) -> str:
    """A name from outside, fit for a log line and a terminal: comm may hold any byte."""
    shown = comm.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in shown) or "?"


def named(contenders: Iterable[Contender]) -> str:
    return ", ".join(map(str, contenders))


def slurp(source: str) -> str:
    """The text of a small file of sysfs or /proc; OSError as the kernel gives it.

    O_NONBLOCK, since nothing that we look at may make a poll wait (a FIFO in a test tree would).
    """
    fd = os.open(source, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        return os.read(fd, 65536).decode("utf-8", "surrogateescape")
    finally:
        os.close(fd)


NUMBER = re.compile("[0-9]{1,19}")


def number(source: str) -> int:
    """A decimal number in a file of sysfs. Unknown if it cannot be read or is none."""
    try:
        found = slurp(source).strip()
    except OSError as error:
        raise Unknown(f"{source}: {error.strerror}") from None
    if not NUMBER.fullmatch(found):
        raise Unknown(f"{source} reads {found[:40]!r}, not a number")
    return int(found)


class Stat(NamedTuple):
    """What /proc/PID/stat says of a process (proc(5): fields 1 to 6)."""

    pid: int
    comm: str
    state: str
    group: int
    session: int
    threads: int

    @property
    def dead(self) -> bool:
        """A zombie holds no memory and no card; the main thread alone may have ended, too."""
        return self.state in "ZX" and self.threads < 2


def session_of(pid: int) -> int | None:
    """The session of a process, 0 if that may not be asked, None if there is no such process."""
    try:
        return os.getsid(pid)
    except (ProcessLookupError, OverflowError):
        return None
    except PermissionError:
        return 0  # a security module's doing; somebody is there


def stat(pid: int) -> Stat | None:
    """The process `pid`, None if there is none. Of one that is hidden we know the session alone."""
    session = session_of(pid)  # which costs less than an open that fails
    if session is None:
        return None
    try:
        content = slurp(f"{PROC}/{pid}/stat")
    except OSError:
        if session_of(pid) is None:
            return None  # it has ended just now
        return Stat(pid, "?", "?", 0, session, 1)  # hidden, by hidepid
    # comm is in parentheses and may itself hold parentheses and spaces: the last one counts.
    head, _, rest = content.rpartition(")")
    fields = rest.split()
    return Stat(pid, head.partition("(")[2], fields[0], int(fields[2]), int(fields[3]),
                int(fields[17]))


def session_members(session: int) -> list[Stat]:
    """The live processes of a session. OSError if /proc cannot be read."""
    found = (stat(int(name)) for name in os.listdir(PROC) if name.isdigit())
    return [p for p in found if p and p.session == session and not p.dead]


KFD_NAME = re.compile(r"(?:pid:)?([0-9]+)(?:-id:[0-9]+)?")


class Card:
    """The card as sysfs shows it. Nothing is executed and nothing is opened below /dev.

    Only mem_info_vram_* (plain counters of TTM, they neither wake nor block the card) and the
    listing of the KFD's folder are read in every poll. sdma_* and stats_* are never opened:
    reading them while a process exits has crashed kernels.
    """

    STALE_AFTER = 15.0  # seconds that a dead process may stay listed without a word

    def __init__(self, kfd_root: str, drm_device: str, ignore: Iterable[str]) -> None:
        self.kfd_root = kfd_root
        self.drm_device = drm_device
        self.auto = drm_device == "auto"
        self.drm_names: list[str] | None = None  # what DRM had when the card was chosen
        self.ignore = tuple(ignore)
        self.has_kfd = True
        self.stale: dict[int, float] = {}  # dead pid -> since when, NEVER once that is said
        # Our unit's cgroup, where systemd started us as a service of ours alone.
        alone = os.environ.get("SYSTEMD_EXEC_PID") == str(os.getpid())
        self.unit = cgroup(os.getpid()) if alone else ""
        self.gpus: dict[str, str] = {}  # PCI address -> gpu_id
        self.generation: str | None = None  # of the topology that they were read from

    def device(self) -> str:
        """The card's folder in sysfs. Unknown while there is no (single) such card.

        With "auto" it is chosen again whenever DRM has changed: the driver of an integrated GPU
        may be there before that of the card.
        """
        names = listing(DRM) if self.auto else None
        if names != self.drm_names:
            try:
                self.drm_device = pick_card(DRM)
            except ConfigError as error:
                raise Unknown(str(error)) from None
            self.drm_names = names
        return self.drm_device

    def vram(self) -> tuple[int, int]:
        """Total and used VRAM in bytes. Unknown unless 0 <= used <= total and total > 0."""
        folder = self.device()
        total = number(folder + "/mem_info_vram_total")
        used = number(folder + "/mem_info_vram_used")
        if used > total or not total:  # `number` gives none below 0
            raise Unknown(f"{folder}: {used} bytes of VRAM used of {total} cannot be")
        return total, used

    def contenders(self, ours: Iterable[int]) -> list[Contender]:
        """The processes on the KFD but for those in the sessions `ours`.

        A tree that does not exist is a machine without amdkfd, and so without ROCm jobs: nobody.
        Any other error is Unknown.
        """
        try:
            names = os.listdir(self.kfd_root)
            self.has_kfd = True
        except FileNotFoundError:
            names, self.has_kfd = [], False
        except OSError as error:
            raise Unknown(f"{self.kfd_root}: {error.strerror}") from None
        own, now = set(ours), time.monotonic()
        found: dict[int, Contender] = {}
        stale: dict[int, float] = {}
        for name in names:
            match = KFD_NAME.fullmatch(name)
            if not match or int(match[1]) in found:
                continue
            pid = int(match[1])
            process = stat(pid)
            if not process:  # on its way out, or left behind: some kernels forget to remove it
                stale[pid] = self.stale.get(pid, now)
                if now - stale[pid] > self.STALE_AFTER:
                    log.warning("%s/%s has been left behind by a dead process, ignored",
                                self.kfd_root, name)
                    stale[pid] = NEVER
                continue
            if process.session in own or (self.unit and cgroup(pid) == self.unit):
                continue
            if process.dead:
                continue  # its memory map is gone; what VRAM it held is on the way back
            if any(fnmatch.fnmatchcase(process.comm, pattern) for pattern in self.ignore):
                continue
            if not self.elsewhere(name):
                found[pid] = Contender(pid, process.comm)
        self.stale = stale
        return list(found.values())

    def elsewhere(self, name: str) -> bool:
        """Whether a KFD process is at work, and only on other GPUs than ours.

        Whatever cannot be read counts for our card: a needless yield costs seconds, a missed one
        costs somebody's training run.
        """
        ours = self.our_gpu()
        if ours is None:
            return False
        used: set[str] = set()  # the gpu_id of every GPU that it has queues or VRAM on
        try:
            for folder in self.contexts(name):
                items = os.listdir(folder)
                used.update(item[5:] for item in items
                            if item.startswith("vram_") and number(f"{folder}/{item}"))
                for queue_id in os.listdir(folder + "/queues") if "queues" in items else ():
                    try:
                        used.add(slurp(f"{folder}/queues/{queue_id}/gpuid").strip())
                    except OSError as error:
                        if error.errno not in (errno.ENOENT, errno.ENODEV):
                            raise  # else a queue that has just been destroyed
        except (OSError, Unknown):
            return False
        return bool(used) and used <= set(self.gpus.values()) - {ours}

    def contexts(self, name: str) -> list[str]:
        """A KFD entry's folder and those of its secondary contexts (kernel 6.19)."""
        top = f"{self.kfd_root}/{name}"
        return [top] + [f"{top}/{item}" for item in listing(top) if item.startswith("context_")]

    def our_gpu(self) -> str | None:
        """Our card's gpu_id on a machine with several GPUs; None with one, or if unknown.

        The id is a hash that the KFD gives out; the topology ties it to a PCI address by
        `domain` and `location_id` (bus << 8 | device << 3 | function).
        """
        topology = os.path.dirname(self.kfd_root) + "/topology"
        try:
            generation = slurp(topology + "/generation_id")
        except OSError:
            return None
        if generation != self.generation:
            self.generation = generation
            try:
                self.gpus = gpu_ids(topology)
            except (OSError, ValueError) as error:
                log.warning("%s cannot be read (%s), so every process on the KFD counts as one on"
                            " our card", topology, error)
                self.gpus = {}
        try:
            return self.gpus.get(pci_address(self.device())) if len(self.gpus) > 1 else None
        except Unknown:
            return None

    def held(self, pid: int) -> int:
        """The VRAM of a process on our card as the KFD accounts it; what is unreadable counts 0.

        For naming only: these files belong to the process, so they are not read in every poll.
        """
        ours = self.our_gpu()
        total = 0
        for name in listing(self.kfd_root):
            match = KFD_NAME.fullmatch(name)
            for folder in self.contexts(name) if match and int(match[1]) == pid else ():
                for item in listing(folder):
                    if item.startswith("vram_") and ours in (None, item[5:]):
                        with contextlib.suppress(Unknown):  # the process is on its way out
                            total += number(f"{folder}/{item}")
        return total


def listing(folder: str) -> list[str]:
    """The names in a folder of sysfs; none if it has vanished meanwhile."""
    try:
        return os.listdir(folder)
    except OSError:
        return []


def gpu_ids(topology: str) -> dict[str, str]:
    """PCI address -> gpu_id of every GPU node of a KFD topology; OSError if one is forbidden."""
    found = {}
    for node in os.listdir(topology + "/nodes"):
        folder = f"{topology}/nodes/{node}"
        gpu = slurp(folder + "/gpu_id").strip()
        if gpu in ("", "0"):
            continue  # a CPU
        values = dict(re.findall(r"^(\S+) (\S+)$", slurp(folder + "/properties"), re.M))
        place, domain = int(values.get("location_id", 0)), int(values.get("domain", 0))
        found[f"{domain:04x}:{place >> 8:02x}:{place >> 3 & 31:02x}.{place & 7}"] = gpu
    return found


def pci_address(folder: str) -> str:
    """The PCI address of a card's folder in sysfs. Unknown if it does not show one."""
    address = os.path.basename(os.path.realpath(folder))
    if not re.fullmatch(r"[0-9a-f]{4}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]", address):
        raise Unknown(f"{folder} shows no PCI address")
    return address


def pick_card(drm: str) -> str:
    """The folder of the AMD card with the most VRAM below `drm` (/sys/class/drm).

    cardN changes from boot to boot and an integrated GPU may come first, so neither the name nor
    the order counts. Unknown if there is none or one cannot be read: its probe may not be over, and
    it shows up in `drm` before it has its files. ConfigError if two have equally much.
    """
    cards: dict[str, int] = {}
    for name in listing(drm):
        folder = os.path.realpath(f"{drm}/{name}/device")
        driver = os.path.basename(os.path.realpath(folder + "/driver"))
        if re.fullmatch("card[0-9]+", name) and driver == "amdgpu":
            cards[folder] = number(folder + "/mem_info_vram_total")
    if not cards:
        raise Unknown(f"{drm} has no amdgpu card")
    most = max(cards.values())
    best = sorted(folder for folder, total in cards.items() if total == most)
    if len(best) > 1:
        raise ConfigError(f'drm_device: "auto" cannot choose between {" and ".join(best)} with'
                          f" {gib(most)} each, name one of them")
    return best[0]


def cgroup(pid: int) -> str:
    """The v2 cgroup of a process, "" if it cannot be read or is the root."""
    try:
        content = slurp(f"{PROC}/{pid}/cgroup")
    except OSError:
        return ""
    match = re.search(r"^0::(/.+)$", content, re.M)
    return match[1] if match else ""


class Returning:
    """VRAM on its way back after a stop: gone is not yet free, that takes 0.5 to 1.5 s more.

    Over when used VRAM is down to what it was before the load plus a residue that ROCm leaves,
    when it has stopped falling, when somebody else fills it up again, or after 15 s.
    """

    RESIDUE = 512 * MIB
    STILL = 1.0  # seconds without a fall, once it had begun to fall
    LIMIT = 15.0  # seconds

    def __init__(self, began: float, now: float, before: int, used: int) -> None:
        self.began = began  # when the stop was decided
        self.since = self.fell = now
        self.before = before  # bytes used before the load
        self.high = self.low = used  # bytes used with the child, and the least since

    def over(self, now: float, used: int | None, contended: bool) -> bool:
        """Whether the wait is over, by a new reading of used VRAM (None: unknown)."""
        if used is not None:
            if contended and used > self.low:
                return True
            if used < self.low:
                self.low, self.fell = used, now
            if used <= self.before + self.RESIDUE:
                return True
        falling = self.low < self.high or contended  # beside somebody else's, ours may not show
        return (falling and now - self.fell >= self.STILL) or self.late(now)

    def late(self, now: float) -> bool:
        return now - self.since >= self.LIMIT


# ---- the card lock -------------------------------------------------------------------------------

LOCKED = re.compile(r"FLOCK +\S+ +\S+ +([0-9]+) (\S+)")  # of /proc/locks: pid, file


class CardLock:
    """The card as a lock: flock(1) on this file waits until the card is really free.

    We hold it exclusively while children run. Whether anybody else wants it is read from
    /proc/locks and never tried, since trying would make the owner's `flock -n` fail at random.
    A lock ends with its holder, so none is ever stale.
    """

    def __init__(self, file: str) -> None:
        self.file = file  # may be changed; "": off
        # The file's descriptor is the last. Before it, those of files that it has replaced: their
        # holders and waiters still count, and what we hold we let go when the card is free.
        self.fds: list[int] = []
        self.unused: list[int] = []  # those of which nobody is known to have or await the lock
        self.held = False

    def claims(self) -> list[Contender]:
        """Who else holds this lock or waits for it. Unknown if the file cannot be had."""
        try:
            self.open()
            names = {fd: lock_name(fd) for fd in self.fds}
            with open("/proc/locks", encoding="ascii", errors="replace") as table:
                locks = LOCKED.findall(table.read())
        except OSError as error:
            raise Unknown(f"card_lock {self.file}: {error.strerror}") from None
        found = {}
        for pid in [int(pid) for pid, name in locks if name in names.values()]:
            if pid != os.getpid():
                process = stat(pid)  # it may have ended, and left the lock to another
                found[pid] = Contender(pid, process.comm if process else "?")
        in_use = {name for _, name in locks}
        self.unused = [fd for fd in self.fds[:-1] if names[fd] not in in_use]
        return list(found.values())

    def open(self) -> None:
        """Opens the file, again if it was replaced: a job locks the one that lies there now."""
        flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK
        try:
            if self.fds and os.path.samestat(os.stat(self.file), os.fstat(self.fds[-1])):
                return
            fd = os.open(self.file, flags)
        except FileNotFoundError:
            fd = os.open(self.file, flags | os.O_CREAT, 0o644)
            os.fchmod(fd, 0o644)  # whatever the umask: every user's jobs are to lock it
        self.fds.append(fd)
        self.held = False

    def take(self) -> bool:
        """Locks the card for us if it is free; False if somebody was faster."""
        try:
            fcntl.flock(self.fds[-1], fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return False
        self.held = True
        return True

    def release(self) -> None:
        """Hands the card to whoever has waited longest."""
        for fd in self.fds:
            with contextlib.suppress(OSError):  # a file system without locks
                fcntl.flock(fd, fcntl.LOCK_UN)
        self.held = False
        # Not before: /proc/locks comes in pieces, so that a line may be missing from it at times.
        for fd in self.unused if self.file else self.fds:  # turned off: nobody asks for claims
            os.close(fd)
        self.fds = [fd for fd in self.fds if self.file and fd not in self.unused]
        self.unused = []


def lock_name(fd: int) -> str:
    """An open file's name in /proc/locks."""
    there = os.fstat(fd)
    return f"{os.major(there.st_dev):02x}:{os.minor(there.st_dev):02x}:{there.st_ino}"


# ---- jobs that the KFD never sees ----------------------------------------------------------------


def drm_clients(fdinfo: str, pci: str) -> Iterator[tuple[str, int]]:
    """(client id, bytes of VRAM) of one fdinfo text, if it is of an amdgpu client on card `pci`.

    Documentation/gpu/drm-usage-stats.rst; resident-vram since Linux 6.13, before that its older
    name memory-vram. A number without a unit is bytes, which is how zero is printed.
    """
    values = dict(re.findall(r"^(drm-[a-z-]+):[ \t]*(.+)$", fdinfo, re.M))
    if values.get("drm-pdev") != pci or "drm-client-id" not in values:
        return
    amount = values.get("drm-resident-vram") or values.get("drm-memory-vram") or "0"
    match = re.fullmatch("([0-9]+)(?: (KiB|MiB|GiB))?", amount)
    if match:
        unit = {"KiB": 1024, "MiB": MIB, "GiB": GIB}.get(match[2], 1)
        yield values["drm-client-id"], int(match[1]) * unit


def holders(pci: str, limit: float = 2.0) -> tuple[list[Contender], int]:
    """Who holds VRAM on card `pci`, most first, and how many processes could not be looked at.

    A client is counted once however many descriptors, also of other processes, lead to it. Takes
    about `limit` seconds, but on old kernels one read may hang behind a hung client.
    """
    deadline = time.monotonic() + limit
    seen: set[str] = set()
    found: list[Contender] = []
    closed = 0
    for pid in sorted(int(name) for name in os.listdir(PROC) if name.isdigit()):
        if time.monotonic() > deadline:
            closed += 1
            continue
        try:
            infos = os.listdir(f"{PROC}/{pid}/fdinfo")
        except OSError as error:
            closed += isinstance(error, PermissionError)  # else it has ended
            continue
        clients: dict[str, int] = {}
        for fd in infos:
            with contextlib.suppress(OSError):  # closed meanwhile
                clients.update(drm_clients(slurp(f"{PROC}/{pid}/fdinfo/{fd}"), pci))
        total = sum(vram for client, vram in clients.items() if client not in seen)
        seen.update(clients)
        process = stat(pid) if total else None
        if process:
            found.append(Contender(pid, process.comm, total))
    return sorted(found, key=lambda c: c.vram, reverse=True), closed


def describe_holders(pci: str) -> str:
    found, closed = holders(pci)
    more = f" and {len(found) - 8} more" if len(found) > 8 else ""
    hidden = f"; {closed} more could not be looked at" if closed else ""
    return f"{named(found[:8]) or 'nobody that can be seen'}{more}{hidden}"


# ---- children ------------------------------------------------------------------------------------

STOPPED, LOADING, READY, STOPPING, WEDGED = "stopped", "loading", "ready", "stopping", "wedged"
RUNNING = LOADING, READY

DESCRIPTORS = resource.getrlimit(resource.RLIMIT_NOFILE)  # before we raise ours


def raise_limit(connections: int) -> None:
    """Makes room for the descriptors of so many connections; select(2) is not used here."""
    soft, hard = DESCRIPTORS
    wanted = max(soft, 4 * connections + 256)
    limit = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))


# What a child must never inherit: systemd's protocol with us, and the sign by which llama-server
# would take itself for a child of its own router and wait on its standard input.
PRIVATE_ENVIRONMENT = re.compile(r"LLAMA_SERVER_ROUTER_PORT|NOTIFY_SOCKET|(WATCHDOG|LISTEN)_.+")


def die_with_us() -> list[str]:
    """The command that puts a child under a parent-death signal, and without our capabilities.

    setpriv(1) of util-linux, tried each time. Where it is missing, a supervisor that is killed
    with SIGKILL outside of systemd leaves its children behind, which is said.
    """
    found = shutil.which("setpriv") or "setpriv"  # not by the PATH that the child may be given
    command = [found, "--pdeathsig", "TERM", "--ambient-caps", "-all", "--inh-caps", "-all"]
    try:
        subprocess.run([*command, "true"], check=True, stdin=subprocess.DEVNULL,
                       capture_output=True, timeout=1)
    except (OSError, subprocess.SubprocessError) as error:
        log.warning("setpriv --pdeathsig cannot be used (%s): children may outlive us", error)
        return []
    return command


class Run:
    """One life of a child, from its start until its whole session is gone.

    It has a session of its own, so that whatever it starts is known to be ours and is stopped
    with it. The leader is reaped last: as long as it is a zombie, its number and with it that of
    the group cannot belong to anybody else.
    """

    PROBE_TIME = 2.0  # seconds without an answer
    MISSES = 3  # failed probes in a row that make a ready child not ready

    def __init__(self, config: ChildConfig, now: float, used: int) -> None:
        ours = {k: v for k, v in os.environ.items() if not PRIVATE_ENVIRONMENT.fullmatch(k)}
        self.process = subprocess.Popen(
            [*die_with_us(), config.bin, *config.args], stdin=subprocess.DEVNULL,
            env={**ours, **config.env}, start_new_session=True,
        )
        self.config = config
        self.pid = self.process.pid
        self.started = now
        self.stop_began = now
        self.used_before = used  # bytes of VRAM
        self.last_request = now
        self.ready = False  # may be sent requests; written by the poll loop alone
        self.healthy = not config.addr  # its last probes say so; written by the prober alone
        self.exchanges: set[Exchange] = set()  # in flight; handlers enter and leave by themselves
        self.pool = Pool()
        self.over = threading.Event()
        self.pidfd = -1
        try:
            self.pidfd = os.pidfd_open(self.pid)
            # We have raised our own limit; programs that use select(2) do not expect that.
            resource.prlimit(self.pid, resource.RLIMIT_NOFILE, DESCRIPTORS)
        except OSError as error:
            log.warning("%s: %s", self, error)

    def __str__(self) -> str:
        return f"{self.config.name} (pid {self.pid})"

    def exited(self) -> str | None:
        """How the leader ended, in words, or None while it lives. Does not reap it."""
        result = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if result is None:
            return None
        if result.si_code == os.CLD_EXITED:
            return f"exited with status {result.si_status}"
        names = {number.value: number.name for number in signal.Signals}
        name = names.get(result.si_status, f"signal {result.si_status}")  # a real-time one has none
        return f"exited, killed by {name}"

    def gone(self) -> bool:
        """Whether nothing of the session is left; reaps the leader then."""
        try:
            if self.exited() is None or session_members(self.pid):
                return False
        except OSError:
            return False  # /proc cannot be read now
        self.process.wait()
        self.over.set()
        return True

    def kill(self, signum: int) -> None:
        """Signals the group, and whoever has left it without leaving the session."""
        try:
            others = [m.pid for m in session_members(self.pid) if m.group != self.pid]
        except OSError:
            others = []  # /proc cannot be read now; the group is what matters
        for pid in [-self.pid, *others]:  # the leader is not reaped, so the numbers are still ours
            try:
                os.kill(pid, signum)
            except ProcessLookupError:
                continue  # it was faster
            except PermissionError:
                log.warning("%s: pid %d may not be signalled", self.config.name, abs(pid))

    def cut(self, why: str) -> None:
        """Ends every exchange with this process and every idle connection to it."""
        self.ready = False
        self.pool.close()
        for exchange in list(self.exchanges):
            exchange.cut(why)

    def probe(self) -> bool:
        assert self.config.addr
        request = f"GET {self.config.health} HTTP/1.1\r\nHost: mavgpud\r\nConnection: close\r\n\r\n"
        deadline = time.monotonic() + self.PROBE_TIME
        try:
            with contextlib.closing(Upstream(self.config.addr)) as upstream:
                wire = upstream.wire
                wire.send(request.encode())
                while not (head := wire.head()):
                    if not wire.fill_by(deadline):
                        return False
                return Response(head, b"GET").status == 200
        except (OSError, Ended, Stalled, Malformed):
            return False

    def watch_health(self, tell: Callable[[], None]) -> None:
        """Probes and sweeps until it is over: every 100 ms while loading, then once a second."""
        misses = 0
        while not self.over.wait(1.0 if self.healthy else 0.1):
            self.pool.sweep(time.monotonic())
            misses = 0 if self.probe() else misses + 1
            healthy = misses == 0 or (self.healthy and misses < self.MISSES)
            if healthy != self.healthy:
                self.healthy = healthy
                tell()


class Pool:
    """Idle connections to one run of a child, the one used last on top.

    llama-server closes an idle connection after 5 s, and a request that crosses that close may
    or may not have run; so none is used that has been idle for more than MAX_IDLE.
    """

    MAX_IDLE = 2.0  # seconds

    def __init__(self) -> None:
        self.idle: collections.deque[tuple[float, Upstream]] = collections.deque()
        self.closed = False

    def take(self, now: float) -> Upstream | None:
        """A connection that is still open and has nothing to say, or None."""
        while True:
            try:
                since, upstream = self.idle.pop()
            except IndexError:
                return None
            if now - since <= self.MAX_IDLE and upstream.quiet():
                return upstream
            upstream.close()

    def give(self, upstream: Upstream, now: float) -> None:
        """Takes back a connection on which one exchange has ended cleanly."""
        self.idle.append((now, upstream))
        if self.closed:
            self.close()

    def sweep(self, now: float) -> None:
        with contextlib.suppress(IndexError):
            while now - self.idle[0][0] > self.MAX_IDLE:
                self.idle.popleft()[1].close()

    def close(self) -> None:
        """Closes all of them, and whatever is still given back."""
        self.closed = True
        self.sweep(NEVER)


class Child:
    """A child through all its lives. Changed by the poll loop only; others read `run`, `reason`."""

    BACK_OFF = 5.0, 300.0  # seconds after the first failure and at most; doubles in between
    HEALTHY_AFTER = 60.0  # seconds of being ready after which failures are forgotten
    CUT_TIME = 0.1  # seconds for the handlers to close their upstream connections
    KILL_TIME = 5.0  # seconds that a process may live on after SIGKILL

    def __init__(self, config: ChildConfig) -> None:
        self.name = config.name
        self.config = config
        self.state = STOPPED
        self.run: Run | None = None
        self.since = time.monotonic()
        self.deadline = NEVER  # of the state, or of the phase of stopping
        self.phase = 0  # of stopping: 0 connections cut, 1 SIGTERM sent, 2 SIGKILL sent
        self.failures = 0
        self.next_try = 0.0
        self.rest_from = NEVER  # when an idle rest began; NEVER: there is none
        self.wanted = False  # a request has come meanwhile; set by handlers
        self.waiters: set[threading.Event] = set()
        self.reason = "not started yet"
        self.told = ""  # the kind of reason, see `decide`, that the log has last given for it
        self.retry = 10  # seconds, for Retry-After
        self.starts = self.crashes = 0
        self.load_seconds: float | None = None  # of the last load that became ready
        self.spent: Mapping[str, float] = {}  # seconds in each state; replaced, never changed
        self.history: tuple[Entry, ...] = ()

    def copied(self) -> Child:
        """Like copy.copy, which would cost a tenth of a poll."""
        twin = object.__new__(Child)
        twin.__dict__.update(self.__dict__)
        return twin

    def enter(self, state: str, now: float, deadline: float = NEVER) -> None:
        """Changes the state and wakes whoever waits for a change."""
        before = self.spent.get(self.state, 0.0) + now - self.since
        self.spent = {**self.spent, self.state: before}
        self.state, self.since, self.deadline = state, now, deadline
        self.wake_waiters()

    def wake_waiters(self) -> None:
        for waiter in list(self.waiters):
            waiter.set()

    def start(self, now: float, used: int) -> Run:
        """Starts the process. OSError if that cannot be."""
        self.rest_from = NEVER
        self.wanted = False
        self.starts += 1
        self.run = Run(self.config, now, used)
        log.info("started %s", self.run)
        self.enter(LOADING, now, now + self.config.load_timeout)
        return self.run

    def fail(self, now: float, what: str, why: str) -> None:
        """Stops what runs, for the reason `why`, and says what has failed and when the next try is.

        Trying again at once, for ever, is not only noise: it has hung AMD cards.
        """
        self.stop(now, why)
        self.crashes += 1
        self.failures += 1
        first, most = self.BACK_OFF
        pause = min(first * 2 ** min(self.failures - 1, 30), most)
        self.next_try = now + pause
        log.error("%s: %s; next try in %s", self.name, what, spell(pause))
        self.told = "failed"

    def stop(self, now: float, why: str) -> None:
        """Begins to stop: no new requests, those in flight cut, then the process."""
        if self.run and self.state in RUNNING:
            self.reason = why  # before anybody is told that it is not ready
            self.run.cut(why)
            self.run.stop_began = now
            self.phase = 0
            self.enter(STOPPING, now, now + (self.CUT_TIME if self.run.exchanges else 0.0))

    def advance(self, now: float) -> None:
        """Whatever has happened to the process since the last pass."""
        run = self.run
        if not run:
            return
        if self.state in RUNNING:
            ended = run.exited()
            if ended:
                self.fail(now, f"pid {run.pid} {ended} while {self.state}, after"
                          f" {spell(now - self.since)}", f"{self.name} has crashed")
            elif self.state == LOADING and run.healthy:
                self.become_ready(now, run)
            elif self.state == READY and not run.healthy:
                self.reason = LOADING  # before anybody is told that it is not ready
                run.ready = False
                self.enter(LOADING, now, now + self.config.load_timeout)
                log.warning("%s does not answer any more", run)
            elif now >= self.deadline:  # only a load has one
                limit = spell(self.config.load_timeout)
                self.fail(now, f"pid {run.pid} is not ready after load_timeout ({limit})",
                          f"{self.name} is restarted")
            elif self.state == READY and now - self.since >= self.HEALTHY_AFTER:
                self.failures = 0
        if self.state in (STOPPING, WEDGED):
            self.pursue(now, run)

    def become_ready(self, now: float, run: Run) -> None:
        run.last_request = now
        run.ready = True
        if self.since == run.started:
            self.load_seconds = now - run.started
            log.info("%s is ready after %s (pid %d)", self.name, spell(self.load_seconds), run.pid)
        else:  # it has been loading since it ceased to answer
            log.info("%s answers again", run)
        self.enter(READY, now)

    def pursue(self, now: float, run: Run) -> None:
        """The next step of a stop, when it is due: connections, SIGTERM, SIGKILL, wedged."""
        if run.gone():
            log.info("%s is gone after %s", run, spell(now - run.stop_began))
            self.run = None
            self.enter(STOPPED, now)
        elif self.phase == 0 and (not run.exchanges or now >= self.deadline):
            self.phase, self.deadline = 1, now + self.config.stop_grace
            run.kill(signal.SIGTERM)
        elif self.phase == 1 and now >= self.deadline:
            self.phase, self.deadline = 2, now + self.KILL_TIME
            log.warning("%s ignored SIGTERM for %s, killing it", run, spell(self.config.stop_grace))
            run.kill(signal.SIGKILL)
        elif self.phase == 2 and now >= self.deadline:
            self.enter(WEDGED, now)  # which has no deadline
            log.error("%s is wedged: SIGKILL does not end it, so nothing else is started", run)
            self.told = "wedged"

    def seen(self, now: float) -> ChildSeen:
        run, config = self.run, self.config
        return ChildSeen(self.name, self.state, config.min_free_vram_bytes, in_flight(self),
                         now - run.last_request if run else 0.0,
                         config.idle_timeout if config.addr else NEVER, self.held(now))

    def held(self, now: float) -> tuple[str, str] | None:
        """Why it must not be started now whatever the card is like: (kind, words), or None."""
        if now < self.next_try:
            left = spell(math.ceil(self.next_try - now))
            times = "once" if self.failures == 1 else f"{self.failures} times"
            return ("failed", f"it has failed {times}, next try in {left}")
        if self.rest_from != NEVER and not self.wanted:
            left_of_rest = self.rest_from + self.config.idle_rest - now
            if left_of_rest == NEVER:
                return ("rest", "unloaded when idle, the next request brings it back")
            if left_of_rest > 0:
                return ("rest", f"resting after idle for another {spell(math.ceil(left_of_rest))}")
        return None


def taken(addr: Address) -> bool:
    """Whether another program listens there: it would be taken for our child, or make it fail."""
    host = "127.0.0.1" if addr[0] == "localhost" else addr[0]
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        socket.inet_pton(family, host)  # looking up a name could take longer than a poll may
        with socket.socket(family) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host, addr[1]))
    except OSError as error:
        return error.errno == errno.EADDRINUSE
    return False


# ---- the decision --------------------------------------------------------------------------------


class ChildSeen(NamedTuple):
    """A child as one poll finds it."""

    name: str
    state: str
    need: int = 0  # bytes of free VRAM to start
    in_flight: int = 0
    idle_for: float = 0.0  # seconds
    idle_timeout: float = NEVER
    held: tuple[str, str] | None = None  # why it must not be started now, (kind, words)


class Seen(NamedTuple):
    """All that a decision is made from."""

    tick: bool  # a regular poll, which counts for the streaks, or a pass in between
    children: tuple[ChildSeen, ...]
    contenders: str = ""  # who is on the KFD, in words
    claim: str = ""  # who holds the card lock or waits for it, in words
    blind: str = ""  # what cannot be read
    settling: str = ""  # what of our own has to end first
    free: int | None = None  # bytes of VRAM; None: unknown


class Streaks(NamedTuple):
    """For how many polls in a row the card has been wanted by others, or clear."""

    contended: int = 0
    clear: int = 0  # -1: just claimed


class Decision(NamedTuple):
    """What to do now, and for each child that is not to run, why (kind, words)."""

    streaks: Streaks
    yield_to: str = ""
    unload: tuple[str, ...] = ()
    start: str = ""
    why: Mapping[str, tuple[str, str]] = {}


def decide(seen: Seen, past: Streaks, evict_after: int, start_after: int) -> Decision:
    """The whole decision. Yielding comes before unloading, and unloading before starting.

    Kinds of `why`: yielded, blind, wedged, settling, failed, rest, streak, turn, vram. What cannot
    be read stops nothing that runs and starts nothing.
    """
    contended = past.contended + seen.tick if seen.contenders else 0
    quiet = not (seen.contenders or seen.claim or seen.blind or seen.settling)
    # Whoever gets the lock is nowhere to be seen until he has woken up, so that the clear streak
    # begins one poll later behind a claim.
    streaks = Streaks(contended, past.clear + seen.tick if quiet else -bool(seen.claim))
    whom = seen.claim or seen.contenders
    lasting = seen.claim or contended >= evict_after
    yielded = ("yielded" if lasting else "streak", f"yielded to {whom}")

    running = [c for c in seen.children if c.state in RUNNING]
    if running and lasting:
        return Decision(streaks, whom, why={c.name: yielded for c in seen.children})
    idle = tuple(c.name for c in running
                 if c.state == READY and not c.in_flight and c.idle_for >= c.idle_timeout)
    settling = seen.settling or (f"{', '.join(idle)} is being stopped" if idle else "")

    wedged = ", ".join(c.name for c in seen.children if c.state == WEDGED)
    loading = ", ".join(c.name for c in running if c.state == LOADING)
    start, why = "", {}
    for child in seen.children:
        if child.state in RUNNING:
            continue
        if wedged:
            reason = ("wedged", f"{wedged} is wedged: SIGKILL does not end it")
        elif whom:
            reason = yielded
        elif seen.blind:
            reason = ("blind", seen.blind)
        elif settling:
            reason = ("settling", settling)
        elif child.held:
            reason = child.held
        elif streaks.clear < start_after:
            clear = max(0, streaks.clear)
            reason = ("streak", f"the card is clear in {clear} of {start_after} polls")
        elif loading or start:
            reason = ("turn", f"waiting for {loading or start} to load")
        elif seen.free is None or seen.free < child.need:
            have = "unknown" if seen.free is None else gib(seen.free)
            beside = "".join(f" beside {c.name}" for c in running)
            reason = ("vram", f"free VRAM is {have}, {gib(child.need)} needed{beside}")
        else:
            start = child.name
            reason = ("turn", "starting")
        why[child.name] = reason
    return Decision(streaks, unload=idle, start=start, why=why)


# ---- the supervisor ------------------------------------------------------------------------------


class Handover(NamedTuple):
    """One yield, for the record. Durations in seconds from the decision."""

    when: float  # Unix time
    began: float  # the same on the monotonic clock
    to: str
    gone: float | None = None  # until the last process was gone
    free: float | None = None  # until the VRAM was back


class Supervisor:
    """Owns the card and the children: looks, decides, acts and publishes, one pass at a time."""

    SHUTDOWN_TIME = 5.0  # seconds that running requests get after SIGTERM

    def __init__(self, source: str, config: Config) -> None:
        self.source = source
        self.config = config
        self.card = Card(config.kfd_root, config.drm_device, config.ignore)
        self.lock = CardLock(config.card_lock)
        self.children = [Child(child) for child in config.children]
        self.streaks = Streaks()
        self.vram: tuple[int, int] | None = None  # bytes, in all and in use; None: unknown
        self.loaded = 0  # bytes in use with all that runs, or that has not given it back yet
        self.contenders: list[Contender] = []
        self.claims: list[Contender] = []  # on the card lock
        self.returning: Returning | None = None
        self.handovers: collections.deque[Handover] = collections.deque(maxlen=20)
        self.yields = Yields()
        self.unseen_base: tuple[int, int] | None = None  # used VRAM, and our own part of it
        self.unseen = ""
        self.told: dict[str, str] = {}
        self.sentence = "not started yet"
        self.signals: collections.deque[int] = collections.deque()
        self.closing = NEVER  # when the time of the running requests is up
        self.hurry = False
        self.systemd = Systemd()
        self.loop = PollLoop(config.poll, self.poll)
        self.wake = self.loop.wake.set  # makes the next poll come at once
        self.watcher = Watcher(self)
        self.front: Front | None = None
        self.set_routes(self.children)
        self.snapshot = Snapshot(self, time.monotonic())

    # What other threads may call, besides `wake`

    def child_for(self, target: bytes) -> Child:
        """The child that a request target goes to: the longest route wins, llama has the rest."""
        return next(child for prefix, child in self.routes if target.startswith(prefix))

    # One pass

    def poll(self, tick: bool, now: float) -> float:
        """Looks, decides, acts and publishes; gives the time at which the next pass is due.

        `tick`: this is a regular poll, and not a pass in between for an event or a deadline.
        """
        self.take_signals(now)
        for child in self.children:
            run = child.run
            child.advance(now)
            if run and not child.run:
                self.ended(child, run, now)
        wanted = self.config.children
        self.children = [child for child in self.children if child.run or child.config in wanted]
        seen = self.look(tick, now)
        decision = decide(seen, self.streaks, self.config.evict_after_polls,
                          self.config.start_after_polls)
        self.streaks = decision.streaks
        why = self.act(decision, seen, now)
        self.watch_unseen(seen)
        self.publish(why, now)
        self.report(seen.blind, why)
        self.systemd.pass_done(now, self.sentence, self.closing != NEVER)
        return self.next_pass(now)

    def look(self, tick: bool, now: float) -> Seen:
        """What this pass finds. Whatever cannot be read makes it blind, and is said once."""
        blind, settling, used, free = "", "", None, None
        self.vram = None
        self.contenders, self.claims = [], []
        try:
            self.vram = total, used = self.card.vram()
            free = total - used
        except Unknown as trouble:
            blind = str(trouble)
        try:
            if self.lock.file:
                self.claims = self.lock.claims()
                if self.returning or any(child.run for child in self.children):
                    self.lock.take()  # the file may be a new one
        except Unknown as trouble:
            blind = str(trouble)
        try:
            self.contenders = self.card.contenders(c.run.pid for c in self.children if c.run)
        except Unknown as trouble:
            blind = str(trouble)
        contenders = named(self.contenders) or (self.unseen if self.config.evict_unseen else "")
        stopping = ", ".join(child.name for child in self.children if child.state == STOPPING)
        if used is not None:  # what is being stopped may still have been loading
            self.loaded = max(self.loaded, used) if stopping or self.returning else used
        returning = None if stopping else self.returning  # the last one's VRAM is what counts
        if returning and returning.over(now, used, bool(contenders) and not self.claims):
            self.card_is_free(returning, now)
        if self.closing != NEVER:
            settling = "mavgpud is shutting down"
        elif stopping:
            settling = f"{stopping} is being stopped"
        elif self.returning:
            settling = "VRAM is on its way back"
        return Seen(tick, tuple([child.seen(now) for child in self.children]), contenders,
                    named(self.claims), blind, settling, free)

    def act(self, decision: Decision, seen: Seen, now: float) -> Mapping[str, tuple[str, str]]:
        """Carries a decision out; gives its `why`, with what has kept a child from starting."""
        why = dict(decision.why)
        if seen.claim or decision.streaks.contended >= self.config.evict_after_polls:
            for child in self.children:
                child.rest_from = NEVER  # the card changes hands, which ends every rest
        if decision.yield_to:
            whom = seen.claim or named(
                c._replace(vram=self.card.held(c.pid)) for c in self.contenders)
            log.info("yielding the card to %s", whom or decision.yield_to)
            self.handovers.append(Handover(time.time(), now, decision.yield_to))
            for child in self.children:
                child.stop(now, f"yielded to {decision.yield_to}")
        for child in self.children:
            if child.name in decision.unload and child.run:
                self.unload(child, child.run, now)
            elif child.name == decision.start:
                obstacle = self.start_child(child, now)
                if obstacle:
                    why[child.name] = obstacle
        if self.closing != NEVER:
            self.shut_down(now)
        if not self.returning and not any(child.run for child in self.children):
            self.lock.release()
        return why

    def unload(self, child: Child, run: Run, now: float) -> None:
        """Stops an idle child, unless a request has come since we looked."""
        child.rest_from, run.ready = now, False  # from here on, a request ends the rest
        if run.exchanges:
            child.rest_from, run.ready = NEVER, True
            child.wake_waiters()  # who has found it unready meanwhile
            return
        idle = spell(now - run.last_request)
        log.info("%s is idle for %s, unloading it", child.name, idle)
        child.stop(now, f"{child.name} is unloaded after {idle} of rest")

    def start_child(self, child: Child, now: float) -> tuple[str, str] | None:
        """Starts a child; gives the reason, (kind, words), if that cannot be."""
        addr = child.config.addr
        if addr and taken(addr):
            return ("start", f"{addr[0]}:{addr[1]} is in use by another program")
        if self.lock.file and not self.lock.take():
            return ("start", "the card lock is held by a process that the kernel does not name")
        assert self.vram  # or there would be no room
        try:
            run = child.start(now, self.vram[1])
            if run.pidfd >= 0:
                self.watcher.add(run.pidfd, select.EPOLLIN, self.wake)
            if addr:
                in_background(child.name, run.watch_health, self.wake)
            else:
                self.wake()  # it is ready already
        except (OSError, RuntimeError) as error:  # a failure like a crash; RuntimeError: no threads
            what = error.strerror if isinstance(error, OSError) else error
            child.fail(now, f"{child.config.bin} cannot be started: {what}", "it cannot be started")
        return child.held(now)

    def ended(self, child: Child, run: Run, now: float) -> None:
        """A run is over: its VRAM comes back now."""
        if run.pidfd >= 0:
            self.watcher.remove(run.pidfd)
            os.close(run.pidfd)
        if child.rest_from != NEVER:
            child.rest_from = now
        began, before = run.stop_began, run.used_before
        if self.returning:
            began, before = min(began, self.returning.began), min(before, self.returning.before)
        self.returning = Returning(began, now, before, self.loaded)
        self.unseen_base, self.unseen = None, ""
        last = self.handovers[-1] if self.handovers else None
        if last and last.gone is None and not any(c.run for c in self.children):
            self.handovers[-1] = last._replace(gone=now - last.began)
            self.yields = self.yields.plus(now - last.began)

    def card_is_free(self, returning: Returning, now: float) -> None:
        self.returning = None
        took, back = now - returning.began, returning.high - returning.low
        if returning.late(now):
            log.warning("VRAM does not come back: %s of it in %s", gib(back), spell(took))
        else:
            log.info("card free in %s, %s back", spell(took), gib(back))
        last = self.handovers[-1] if self.handovers else None
        if last and last.gone is not None and last.free is None:
            self.handovers[-1] = last._replace(free=now - last.began)

    # Jobs that the KFD does not list

    def watch_unseen(self, seen: Seen) -> None:
        """Notices VRAM that is taken by nobody on the KFD while a model is loaded.

        What our own children have come to hold meanwhile is not counted; that is asked for only
        when the growth is large enough to matter.
        """
        if not self.vram:
            return
        states = {child.state for child in self.children}
        strangers = seen.contenders not in ("", self.unseen)
        if READY not in states or LOADING in states or strangers:
            self.unseen_base = None
            return
        if self.unseen_base is None:
            self.unseen_base = self.vram[1], self.own_vram()
        growth = self.vram[1] - self.unseen_base[0]
        if growth > self.config.unseen_vram_bytes:
            growth -= self.own_vram() - self.unseen_base[1]
        if growth <= self.config.unseen_vram_bytes // 2:
            self.unseen = ""
        elif growth > self.config.unseen_vram_bytes and not self.unseen:
            self.unseen = f"a job that is not on the KFD ({gib(growth)} of VRAM)"
            self.explain(f"{gib(growth)} of VRAM taken since the model became ready, by nobody on"
                         " the KFD; it is held by")

    def own_vram(self) -> int:
        try:
            return sum(self.card.held(process.pid) for child in self.children if child.run
                       for process in session_members(child.run.pid))
        except OSError:
            return 0  # /proc cannot be read now

    def explain(self, what: str) -> None:
        """Logs `what` and who holds VRAM; in a thread, since that look may take its time."""

        def look() -> None:
            try:
                log.warning("%s %s", what, describe_holders(pci_address(self.card.device())))
            except (OSError, Unknown) as error:
                log.warning("%s somebody who cannot be told: %s", what, error)

        try:
            in_background("fdinfo", look)
        except RuntimeError as error:
            log.warning("%s somebody who cannot be told: %s", what, error)

    # Saying it

    def news(self, topic: str, what: str) -> bool:
        """Whether `what` is not what was said last on its topic; "" is silence."""
        old, self.told[topic] = self.told.get(topic, ""), what
        return what not in ("", old)

    def publish(self, why: Mapping[str, tuple[str, str]], now: float) -> None:
        """Puts into words, for whoever asks, what each child does or why it does not run."""
        sentences = []
        unix = time.time()
        for child in self.children:
            kind, words = why.get(child.name, (child.state, child.state))
            entry = Entry(unix, *self.phase(child, kind))
            child.history = recorded(child.history, entry, unix - self.config.history)
            child.retry = 10
            if child.state == LOADING:
                words = f"loading for {spell(math.floor(now - child.since))}"
                if child.load_seconds:
                    words += f", the last load took {spell(child.load_seconds)}"
                child.retry = max(1, math.ceil((child.load_seconds or 5) - (now - child.since)))
            elif child.state == STOPPED and now < child.next_try:
                child.retry = math.ceil(child.next_try - now)
            if child.state != READY:  # who was told "not ready" a moment ago may still ask why
                child.reason = words
            ready = f"{child.name} is ready"
            sentences.append(ready if child.state == READY else f"{child.name} not loaded: {words}")
        self.sentence = "; ".join(sentences)
        self.snapshot = Snapshot(self, now)

    def report(self, blind: str, why: Mapping[str, tuple[str, str]]) -> None:
        """Logs why nothing runs, if that is new. After `publish`, so that all say the same.

        Numbers that change from poll to poll are part of the words, but do not make them new.
        """
        if self.news("blind", blind):
            log.warning("%s: nothing is started blind", blind)
            for child in self.children:
                child.told = "blind"
        if self.news("kfd", "" if self.card.has_kfd else self.card.kfd_root):
            log.warning("%s does not exist: no job can be seen coming, only free VRAM decides",
                        self.card.kfd_root)
        for child in self.children:
            kind, words = why.get(child.name, ("", ""))
            said = f"{kind}: {words}" if kind in ("yielded", "start") else kind
            if child.state in RUNNING:
                child.told = ""
            elif said != child.told and kind not in ("", "settling", "streak", "turn"):
                child.told = said
                if kind == "vram":
                    self.explain(f"{child.name} not loaded: {words}; VRAM is held by")
                else:
                    log.info("%s not loaded: %s", child.name, words)

    def phase(self, child: Child, kind: str) -> tuple[str, str]:
        """What the time line has for a child: the kind of an Entry, and who."""
        if child.state in RUNNING:
            return child.state, ""
        if kind == "yielded":
            who = sorted({printable(c.comm) for c in self.claims or self.contenders})
            return "yielded", ", ".join(who) or self.unseen
        if kind in ("failed", "vram", "blind", "wedged"):
            return "stopped", {"vram": "no room"}.get(kind, kind)
        return ("idle" if child.rest_from != NEVER else "stopped"), ""

    def next_pass(self, now: float) -> float:
        """When the next pass is due apart from the regular poll, on the monotonic clock."""
        due = [now + self.systemd.interval, *[child.deadline for child in self.children]]
        if self.returning or any(c.state == STOPPING for c in self.children):
            due.append(now + 0.1)
        if now < self.closing:
            due.append(self.closing)
        return min(due)

    # Signals

    def take_signals(self, now: float) -> None:
        arrived = [self.signals.popleft() for _ in range(len(self.signals))]
        if signal.SIGHUP in arrived:
            self.reload(now)  # once, or a storm of them would leave no time for a poll
        for signum in arrived:
            if signum == signal.SIGHUP:
                continue
            if self.closing == NEVER:
                self.closing = now + self.SHUTDOWN_TIME
                if self.front:
                    self.front.close_listener()
                log.info("%s: stopping", signal.Signals(signum).name)
                self.systemd.say("STOPPING=1")
            else:
                self.closing, self.hurry = now, True

    def shut_down(self, now: float) -> None:
        """First the running requests may end, then the children go, then so do we."""
        if now < self.closing and any(c.run and c.run.exchanges for c in self.children):
            return
        for child in self.children:
            child.stop(now, "mavgpud is shutting down")
        left = any(child.run and child.state != WEDGED for child in self.children)
        if not left and (self.hurry or not self.returning):
            self.loop.cancel()

    def end(self) -> int:
        """After the poll loop: 0, or 1 if it did not end by itself. No child is left either way."""
        for child in self.children:
            if child.run:
                child.run.kill(signal.SIGKILL)
        return 0 if self.loop.finished.is_set() else 1

    # Configuration

    def set_routes(self, children: list[Child]) -> None:
        pairs = [(route.encode(), c) for c in children for route in c.config.routes]
        pairs.append((b"", children[0]))
        self.routes = tuple(sorted(pairs, key=lambda pair: len(pair[0]), reverse=True))
        self.passive = frozenset(path.encode() for path in self.config.passive_paths)

    def reload(self, now: float) -> None:
        """Takes over a changed file. One with faults changes nothing."""
        self.systemd.say("RELOADING=1", f"MONOTONIC_USEC={time.monotonic_ns() // 1000}")
        try:
            self.adopt(load_config(self.source), now)
        except ConfigError as error:
            for line in str(error).splitlines():
                log.error("%s", line)
            log.error("%s has faults, so the old configuration stays in force", self.source)
        self.systemd.say("READY=1")

    def adopt(self, config: Config, now: float) -> None:
        """Puts a new configuration into force; a child is restarted only if its command changed."""
        old, self.config = self.config, config
        if config.listen != old.listen:
            log.warning("listen has changed: that needs a restart of mavgpud")
        self.lock.file = config.card_lock  # what is held stays so until the card is free
        self.card = Card(config.kfd_root, config.drm_device, config.ignore)
        self.loop.interval = config.poll
        self.loop.due = min(self.loop.due, now + config.poll)
        raise_limit(config.max_connections)
        if config.drm_device != old.drm_device:
            self.unseen_base, self.unseen = None, ""
        known = {child.name: child for child in self.children}
        fresh = [known.pop(c.name) if c.name in known else Child(c) for c in config.children]
        for child, wanted in zip(fresh, config.children):
            if child.run and child.config.command != wanted.command:
                log.info("%s is restarted: its command has changed", child.name)
                child.stop(now, f"{child.name} is restarted")
            elif child.run:
                child.run.config = wanted  # its prober looks there
                if child.state == LOADING:
                    child.deadline = child.since + wanted.load_timeout
            child.config, child.next_try = wanted, 0.0
        for child in known.values():
            if child.config in old.children:
                log.info("%s is no longer configured", child.name)
            child.stop(now, f"{child.name} is no longer configured")
        self.children = fresh + list(known.values())
        self.set_routes(fresh)
        log.info("%s read again", self.source)


class PollLoop(threading.Timer):
    """A timer that fires for ever: at every interval, when it is woken, and when it asked to.

    It also is the thread that children are started from, and lives as long as they do: the
    parent-death signal is tied to the thread, not to the process.
    """

    def __init__(self, interval: float, function: Callable[[bool, float], float]) -> None:
        super().__init__(interval, function)
        self.name = "poll"
        self.due = time.monotonic()  # the next regular poll
        self.wake = threading.Event()

    def run(self) -> None:
        while not self.finished.is_set():
            self.wake.clear()
            now = time.monotonic()
            tick = now >= self.due
            if tick:  # a late one is not made up for: two polls are two moments
                self.due += self.interval
                if self.due <= now:
                    self.due = now + self.interval
            following = self.function(tick, now)
            self.wake.wait(max(0.0, min(self.due, following) - time.monotonic()))


class Watcher(threading.Thread):
    """One epoll for what must be noticed while nobody looks; it only calls what it was given.

    Every descriptor is watched for one edge, so a busy one costs nothing per request. Whoever
    adds a descriptor removes it before closing it.
    """

    def __init__(self, supervisor: Supervisor) -> None:
        super().__init__(name="watcher", daemon=True)
        self.supervisor = supervisor
        self.epoll = select.epoll()
        self.calls: dict[int, Callable[[], None]] = {}
        # Python's own handlers run late and may nest; the wake-up descriptor does neither.
        self.signal_fd, write_fd = os.pipe()
        os.set_blocking(write_fd, False)
        signal.set_wakeup_fd(write_fd, warn_on_full_buffer=False)
        self.add(self.signal_fd, select.EPOLLIN, self.read_signals)

    def add(self, fd: int, events: int, call: Callable[[], None]) -> None:
        self.calls[fd] = call
        self.epoll.register(fd, events | select.EPOLLET)

    def remove(self, fd: int) -> None:
        """Forgets a descriptor; closing it then takes it out of the epoll."""
        self.calls.pop(fd, None)

    def read_signals(self) -> None:
        self.supervisor.signals.extend(os.read(self.signal_fd, 65536))
        self.supervisor.wake()

    def run(self) -> None:
        while True:
            for fd, _ in self.epoll.poll():
                call = self.calls.get(fd)
                if call:
                    call()


# ---- the front: messages -------------------------------------------------------------------------

MAX_LINE = 32 * 1024  # bytes of a request line (414)
MAX_HEAD = 128 * 1024  # bytes of a head (431)
MAX_FIELDS = 256  # fields of a head, or of a trailer section (431)
MAX_CHUNK_LINE = 4096  # bytes of a chunk's size line
MAX_TRAILERS = 64 * 1024  # bytes of a trailer section
MAX_INTERIM = 32  # 1xx responses before the final one
LOT = 4096  # bytes that arrive at once of a stream that is faster than any model

# RFC 9110 5.6.2 (token) and 5.5 (field value, obs-text included), RFC 9112 2 to 5: what does not
# match is not looked at any further.
TOKEN = rb"[!#$%&'*+\-.^_`|~0-9A-Za-z]+"
REQUEST_LINE = re.compile(rb"(" + TOKEN + rb") ([\x21-\x7e\x80-\xff]+) HTTP/1\.([0-9])")
BARE_LF = re.compile(rb"(?<!\r)\n")
OTHER_VERSION = re.compile(rb"[^ ]+ [^ ]+ HTTP/[02-9]\.[0-9]")
STATUS_LINE = re.compile(rb"HTTP/1\.([0-9]) ([1-5][0-9][0-9])(?: ([\t\x20-\x7e\x80-\xff]*))?")
FIELD = re.compile(rb"(" + TOKEN + rb"):([\t\x20-\x7e\x80-\xff]*)")
EVENTS = re.compile(rb"(?i)\r\ncontent-type:.*text/event-stream")
HOST = re.compile(
    rb"(?:\[[0-9A-Fa-f:.]+\]|(?:[A-Za-z0-9\-._~!$&'()*+;=]|%[0-9A-Fa-f]{2})*)(?::[0-9]{0,5})?"
)
ABSOLUTE = re.compile(rb"(?i:https?)://([^/?]+)/?(.*)")
# A chunk's size line, and what may still become one; RFC 9112 7.1.
CHUNK = re.compile(rb"([0-9A-Fa-f]{1,15})(?:[ \t]*;[\t\x20-\x7e\x80-\xff]*)?")
PARTIAL = re.compile(rb"(?:[0-9A-Fa-f]{1,15}(?:[ \t]*(?:;[\t\x20-\x7e\x80-\xff]*)?)?\r?)?")

# Fields that belong to one connection (RFC 9110 7.6.1), and those that we have to understand.
# The rest of a head is passed on as it came, byte for byte.
HOP_BY_HOP = frozenset(
    (b"connection", b"keep-alive", b"proxy-connection", b"proxy-authenticate",
     b"proxy-authorization", b"te", b"trailer", b"transfer-encoding", b"upgrade")
)
UNDERSTOOD = HOP_BY_HOP | {b"content-length"}
UNDERSTOOD_IN_REQUEST = UNDERSTOOD | {b"host", b"expect", b"x-forwarded-for"}

CHUNKED, UNTIL_CLOSE = -1, -2  # framings of a body that have no length


class Malformed(Exception):
    """A message that is not HTTP/1.1, or more than we take. `status` is what a client is told."""

    def __init__(self, status: int, what: str) -> None:
        super().__init__(what)
        self.status = status


class Ended(Exception):
    """The peer has closed or reset the connection, or one of our own threads has."""


class Stalled(Exception):
    """The peer has neither sent nor taken a byte for as long as we wait for that."""


Known = dict[bytes, list[bytes]]
Piece = Union[bytes, memoryview]


def split_head(head: bytes, understood: frozenset[bytes]) -> tuple[bytes, list[bytes], Known]:
    """The first line of a head, the field lines to pass on, and the values of those understood.

    Fields that Connection nominates end with their connection, but for those that say what the
    message is. Malformed unless every line is a field.
    """
    first, *lines = head[:-4].split(b"\r\n")
    if len(lines) > MAX_FIELDS:
        raise Malformed(431, f"more than {MAX_FIELDS} header fields")
    kept = []
    known = Known()
    for line in lines:
        match = FIELD.fullmatch(line)
        if not match:
            raise Malformed(400, "malformed header field")
        name = match[1].lower()
        if name in understood:
            known.setdefault(name, []).append(match[2].strip(b" \t"))
        else:
            kept.append(line)
    if b"connection" in known:
        tokens = b",".join(known[b"connection"]).lower().split(b",")
        known[b"connection"] = tokens = [token.strip(b" \t") for token in tokens]
        kept = [line for line in kept if line.partition(b":")[0].lower() not in tokens]
    return first, kept, known


def framing(known: Known, otherwise: int) -> int:
    """How long a body is: a number of bytes, CHUNKED, or `otherwise` where nothing is said.

    RFC 9112 6.3, without its tolerance: whatever two parsers might read in two ways is Malformed.
    """
    lengths, codings = known.get(b"content-length"), known.get(b"transfer-encoding")
    if codings:
        if lengths:
            raise Malformed(400, "both Content-Length and Transfer-Encoding")
        if len(codings) != 1 or codings[0].lower() != b"chunked":
            raise Malformed(400, "a Transfer-Encoding other than chunked")
        return CHUNKED
    if lengths:
        if len(lengths) != 1 or not lengths[0].isdigit() or len(lengths[0]) > 18:
            raise Malformed(400, "malformed Content-Length")
        return int(lengths[0])
    return otherwise


class Request:
    """The head of a request, checked; never changed. Malformed says why it is refused."""

    def __init__(self, head: bytes) -> None:
        line, kept, known = split_head(head, UNDERSTOOD_IN_REQUEST)
        self.method, self.target, self.old = request_line(line)
        hosts = known.get(b"host", [b""] if self.old else [])
        if len(hosts) != 1:
            raise Malformed(400, "not exactly one Host")
        host = hosts[0]
        if not self.target.startswith(b"/"):
            absolute = ABSOLUTE.fullmatch(self.target)
            if absolute:  # RFC 9112 3.2.2: its authority overrides Host
                host, self.target = absolute[1], b"/" + absolute[2]
            elif self.target != b"*" or self.method != b"OPTIONS":
                raise Malformed(400, "malformed request target")
        if not HOST.fullmatch(host):
            raise Malformed(400, "malformed Host")
        if self.old and b"transfer-encoding" in known:
            raise Malformed(400, "Transfer-Encoding in HTTP/1.0")
        self.framing = framing(known, 0)
        options = known.get(b"connection", ())
        self.close = self.old or b"close" in options
        # Nothing but websocket: with h2c, requests could be smuggled past us.
        websocket = b",".join(known.get(b"upgrade", ())).lower() == b"websocket"
        self.upgrade = websocket and b"upgrade" in options and not (self.framing or self.old)
        expect = [] if self.old else known.get(b"expect", [])
        self.expects = b"100-continue" in map(bytes.lower, expect)

        # The head as the child gets it, but for the client's own address at its end.
        lines = [b"%s %s HTTP/1.1\r\nHost: %s" % (self.method, self.target, host), *kept]
        lines += [b"Expect: " + value for value in expect]
        if self.framing == CHUNKED:
            lines.append(b"Transfer-Encoding: chunked")
        elif b"content-length" in known:
            lines.append(b"Content-Length: " + known[b"content-length"][0])
        if self.upgrade:
            lines += [b"Connection: Upgrade", b"Upgrade: " + known[b"upgrade"][0]]
        addresses = [*known.get(b"x-forwarded-for", ()), b""]
        self.forwarded = b"\r\n".join(lines) + b"\r\nX-Forwarded-For: " + b", ".join(addresses)


def request_line(line: bytes) -> tuple[bytes, bytes, bool]:
    """Method, target, and whether it is HTTP/1.0. Malformed (400, 405, 414, 505)."""
    if len(line) > MAX_LINE:
        raise Malformed(414, f"request line of more than {MAX_LINE} bytes")
    match = REQUEST_LINE.fullmatch(line)
    if not match:
        if OTHER_VERSION.fullmatch(line):
            raise Malformed(505, "only HTTP/1.0 and HTTP/1.1 are served here")
        raise Malformed(400, "malformed request line")
    method, target, minor = match.groups()
    if method in (b"CONNECT", b"TRACE"):
        raise Malformed(405, f"{method.decode()} is not served here")
    return method, target, minor == b"0"


class Response:
    """The head of a child's response, checked. Malformed if it is none."""

    def __init__(self, head: bytes, method: bytes) -> None:
        line, kept, self.known = split_head(head, UNDERSTOOD)
        match = STATUS_LINE.fullmatch(line)
        if not match:
            raise Malformed(502, "malformed status line")
        self.status = int(match[2])
        self.kept = b"\r\n".join((b"HTTP/1.1 %b %b" % (match[2], match[3] or b""), *kept))
        length = framing(self.known, UNTIL_CLOSE)
        bodiless = method == b"HEAD" or self.status < 200 or self.status in (204, 304)
        self.framing = 0 if bodiless else length
        closes = match[1] != b"1" or b"close" in self.known.get(b"connection", ())
        # llama-server closes after every chunked response, whatever it has announced.
        self.reusable = not closes and self.status >= 200 and self.framing >= 0

    def is_events(self) -> bool:
        """Whether the body is a stream of server-sent events."""
        return EVENTS.search(self.kept) is not None

    def client_head(self, old: bool, close: bool) -> bytes:
        """The head as a client gets it, framed for HTTP/1.1 or, if `old`, for HTTP/1.0."""
        lines = [self.kept]
        if self.status >= 200 and self.status != 204:
            coded = b"transfer-encoding" in self.known and self.status != 304
            if b"content-length" in self.known:
                lines.append(b"Content-Length: " + self.known[b"content-length"][0])
            elif not old and (self.framing == UNTIL_CLOSE or coded):
                lines.append(b"Transfer-Encoding: chunked")
        if self.status == 101:
            lines += [b"Connection: Upgrade", b"Upgrade: websocket"]
        elif close and self.status >= 200:
            lines.append(b"Connection: close")
        return b"\r\n".join(lines) + b"\r\n\r\n"


# A client that polls, and llama-server in answering it, send the same head again and again, and to
# read one costs more than all else that is done for a small request. What is kept is bounded.
MAX_REMEMBERED = 1024  # bytes of a head
remembered_request = functools.lru_cache(maxsize=256)(Request)
remembered_response = functools.lru_cache(maxsize=256)(Response)


# ---- the front: one side of an exchange ----------------------------------------------------------


def timeval(seconds: float) -> bytes:
    """A struct timeval for SO_RCVTIMEO and SO_SNDTIMEO; rounded up, for 0 means for ever.

    The kernel keeps the time, so that a socket with a limit costs no poll(2) before each call.
    """
    return struct.pack("@ll", *divmod(math.ceil(seconds * 1e6), 1000000))


class Wire:
    """A socket and the bytes that have arrived on it and are not used yet.

    One buffer per socket; what is handed out of it is valid until the next `fill`.
    """

    SMALL, LARGE = 8 * 1024, 512 * 1024  # bytes of buffer; no head or trailer section fills it

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.buffer = bytearray(self.SMALL)
        self.view = memoryview(self.buffer)
        self.start = self.end = 0
        self.limited = 0.0  # seconds that `fill` waits before it is Stalled; 0: for ever

    def fill(self) -> bool:
        """Waits for bytes and appends them; False at the peer's end. Ended, Stalled."""
        if self.end == len(self.buffer):  # it grows for a large body, or a head or trailers
            grows = self.start == self.end or self.start < self.end // 2
            self.resize(min(self.end * 4, self.LARGE) if grows else self.end)
        elif self.start == self.end:
            self.start = self.end = 0
        try:
            count = self.sock.recv_into(self.view[self.end :])
        except BlockingIOError:
            raise Stalled from None
        except OSError:
            raise Ended from None
        self.end += count
        return count > 0

    def resize(self, size: int) -> None:
        """A buffer of that size, with what is not used yet at its beginning."""
        rest = bytes(self.view[self.start : self.end])
        if size != len(self.buffer):
            self.buffer = bytearray(size)
            self.view = memoryview(self.buffer)
        self.start, self.end = 0, len(rest)
        self.view[: self.end] = rest

    def send(self, data: Piece) -> None:
        """Sends all of it. Ended; Stalled when not a byte goes out for the socket's time limit."""
        try:
            self.sock.sendall(data)
        except BlockingIOError:
            raise Stalled from None
        except OSError:
            raise Ended from None

    def limit(self, seconds: float) -> None:
        """Sets how long `fill` waits before it is Stalled; 0 for ever. Ended."""
        if seconds == self.limited:
            return
        try:
            self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, timeval(seconds))
        except OSError:
            raise Ended from None
        self.limited = seconds

    def fill_by(self, deadline: float) -> bool:
        """`fill`, but Stalled at `deadline` (monotonic), however steadily bytes trickle in."""
        left = deadline - time.monotonic()
        if left <= 0:
            raise Stalled
        self.limit(left)
        return self.fill()

    def head(self) -> bytes | None:
        """The next head, if it has arrived whole; Malformed if it is too large already."""
        at = self.buffer.find(b"\r\n\r\n", self.start, self.end)
        stop = at + 4 if at >= 0 else self.end
        if stop - self.start > MAX_HEAD:
            raise Malformed(431, f"header of more than {MAX_HEAD} bytes")
        if at < 0:
            return None
        head = bytes(self.view[self.start : stop])
        self.start = stop
        return head


class Body:
    """A message body on a wire: checks its framing and hands out its content as it arrives."""

    def __init__(self, wire: Wire, framing: int) -> None:
        self.wire = wire
        self.framing = framing
        self.left = framing if framing > 0 else 0  # bytes to come of it, or of a chunk with its end
        self.done = framing == 0

    def arrived(self) -> list[Piece]:
        """The content that has arrived, without waiting. Malformed."""
        if self.framing == CHUNKED:
            return self.chunks(True)
        wire = self.wire
        count = wire.end - wire.start
        if self.framing >= 0:
            count = min(count, self.left)
            self.left -= count
            self.done = not self.left
        if not count:
            return []
        wire.start += count
        return [wire.view[wire.start - count : wire.start]]

    def wait(self) -> None:
        """Waits for something to arrive. Ended (also where it ends too early), Stalled."""
        if not self.wire.fill():
            if self.framing != UNTIL_CLOSE:
                raise Ended
            self.done = True

    def passed(self, chunked: bool) -> Piece:
        """What has arrived, framed for a peer that takes chunks or does not. Malformed.

        Chunks go on as they came, whole or in part.
        """
        if not chunked or self.framing != CHUNKED:
            return framed(self.arrived(), chunked, self.done)
        begin = self.wire.start
        self.chunks(False)
        return self.wire.view[begin : self.wire.start]

    def chunks(self, wanted: bool) -> list[Piece]:
        """Goes through all that has arrived; its content, in pieces, if that is wanted. Malformed.

        Trailers are no content, so those of a request do not reach the child: RFC 9110 6.5.1 lets
        nobody rely on them.
        """
        view = self.wire.view[self.wire.start : self.wire.end]
        pieces: list[Piece] = []
        at, end = 0, len(view)
        # To look into a copy costs less, but inside a large chunk there is nothing to look for.
        data = bytes(view) if self.left < end + 2 else b""
        many = end >= LOT and not wanted
        while not self.done:
            if not self.left:
                if many:
                    many = False
                    at += plain_chunks(data[at:])
                if at == end:
                    break
                stop = data.find(b"\r\n", at)
                if stop < 0:
                    if not PARTIAL.fullmatch(data, at) or end - at > MAX_CHUNK_LINE:
                        raise Malformed(400, "malformed chunk")
                    break
                size = chunk_size(data[at:stop])
                if not size:
                    trailers, whole, _ = data[stop:].partition(b"\r\n\r\n")
                    if len(trailers) > MAX_TRAILERS:
                        raise Malformed(431, "trailers of more than 64 KiB")
                    if whole:
                        split_head(trailers + whole, UNDERSTOOD)
                        at = stop + len(trailers) + 4
                        self.done = True
                    break
                self.left = size + 2
                at = stop + 2
            after = at + self.left
            stop = after - 2 if after - 2 < end else end
            if wanted and at < stop:
                pieces.append(view[at:stop])
            ending = data[stop:after]
            at = after if ending == b"\r\n" else stop
            self.left = after - at
            if self.left:
                if ending not in (b"", b"\r"):
                    raise Malformed(400, "a chunk longer than it says")
                break
        self.wire.start += at
        return pieces


@functools.lru_cache(maxsize=256)
def chunk_size(line: bytes) -> int:
    """The size, in bytes, in a chunk's size line. Malformed. Cached: tokens have few sizes."""
    match = CHUNK.fullmatch(line)
    if not match or len(line) > MAX_CHUNK_LINE:
        raise Malformed(400, "malformed chunk")
    return int(match[1], 16)


# The size lines of what a token takes, as llama-server writes them.
TOKEN_SIZES = {b"%x" % size: size for size in range(1, 512)}


def plain_chunks(data: bytes) -> int:
    """How many bytes of whole chunks `data` begins with, if none is large or has a CR LF inside.

    Else 0. They are compared all at once, in a third of the time that one after the other takes.
    """
    lines = data.split(b"\r\n")
    rest = 2 - len(lines) % 2  # lines of a chunk that has not arrived whole
    sizes, contents = lines[:-rest:2], lines[1:-rest:2]
    if list(map(TOKEN_SIZES.get, sizes)) != list(map(len, contents)):
        return 0
    return len(data) - len(b"\r\n".join(lines[-rest:]))


def framed(pieces: list[Piece], chunked: bool, last: bool) -> Piece:
    """`pieces` as one message: as one chunk, with the last chunk behind it, or as they are."""
    content = pieces[0] if len(pieces) == 1 else b"".join(pieces)
    if not chunked:
        return content
    ends = b"0\r\n\r\n" if last else b""
    return b"".join((b"%x\r\n" % len(content), content, b"\r\n", ends)) if content else ends


DONTWAIT = int(socket.MSG_DONTWAIT)


class Upstream(http.client.HTTPConnection):
    """A connection to a child: http.client opens and closes it, heads and bodies are ours."""

    CONNECT_TIMEOUT = 3.0  # seconds; it is on this machine
    SEND_LIMIT = 60.0  # seconds without progress

    def __init__(self, addr: Address) -> None:
        super().__init__(addr[0], addr[1], timeout=self.CONNECT_TIMEOUT)
        self.connect()  # OSError
        self.sock.settimeout(None)
        self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, timeval(self.SEND_LIMIT))
        self.wire = Wire(self.sock)
        self.poller = select.poll()  # costs less than a recv that fails
        self.poller.register(self.sock, select.POLLIN)

    def quiet(self) -> bool:
        """Whether it is open and without a stray byte, which the next answer would begin with."""
        return not self.poller.poll(0)

    def response(self, method: bytes) -> Response:
        """The next head, of an interim or a final response. Malformed, Ended."""
        while not (head := self.wire.head()):
            if not self.wire.fill():
                raise Ended
        read = remembered_response if len(head) <= MAX_REMEMBERED else Response
        return read(head, method)


# ---- the front: handlers -------------------------------------------------------------------------


def shut(sock: socket.socket, how: int = socket.SHUT_RDWR) -> None:
    """Ends a connection without closing its descriptor, which wakes whoever is blocked in it."""
    with contextlib.suppress(OSError):  # it has ended by itself
        sock.shutdown(how)


def linger(wire: Wire, seconds: float = 2.0) -> None:
    """Ends our side, and reads what the client still sends for a while.

    Closing at once would answer that with a reset, which overtakes our answer (RFC 9112 9.6).
    """
    shut(wire.sock, socket.SHUT_WR)
    deadline = time.monotonic() + seconds
    wire.start = wire.end
    with contextlib.suppress(Ended, Stalled):
        while wire.fill_by(deadline):
            wire.start = wire.end


class Lost(Exception):
    """The client cannot be sent the rest of a response."""


class Handler(http.server.BaseHTTPRequestHandler):
    """One client connection, in one thread: reads requests, answers or forwards each in turn.

    BaseHTTPRequestHandler gives the frame (setup, a loop over handle_one_request, finish); its
    parsing is lenient where requests are smuggled, so ours is used.
    """

    HEAD_TIME = 15.0  # seconds to send a whole head
    IDLE_TIME = 75.0  # seconds between two requests
    STALL_TIME = 60.0  # seconds without progress in a body

    server: Front

    def setup(self) -> None:
        self.supervisor = self.server.supervisor
        self.sock: socket.socket = self.request
        self.wire = Wire(self.sock)
        self.exchange: Exchange | None = None
        self.waiter: threading.Event | None = None  # making one costs a tenth of a connection
        self.gone = False  # the client has closed or reset its connection
        self.idle = True  # between two requests
        self.wire.limited = self.HEAD_TIME  # the listener gives it to its sockets
        client: str = self.client_address[0].removeprefix("::ffff:")
        self.client_line = client.encode() + b"\r\n\r\n"  # the end of X-Forwarded-For
        self.supervisor.watcher.add(self.sock.fileno(), select.EPOLLRDHUP, self.client_left)
        self.server.handlers.add(self)

    def finish(self) -> None:
        self.supervisor.watcher.remove(self.sock.fileno())
        self.server.handlers.discard(self)

    def client_left(self) -> None:
        """Called by the watcher: nobody wants the answer any more, so the child need not go on."""
        poller = select.poll()
        try:
            poller.register(self.sock, select.POLLRDHUP)
            if not poller.poll(0):
                return  # this was about an earlier socket of the same number
        except (OSError, ValueError):
            return  # closed meanwhile
        self.gone = True
        waiter, exchange = self.waiter, self.exchange
        if waiter:
            waiter.set()
        if exchange:
            exchange.cut("the client has left")

    # Reading a request

    def handle_one_request(self) -> None:
        self.close_connection = True
        try:
            head = self.next_head()
            if head:
                read = remembered_request if len(head) <= MAX_REMEMBERED else Request
                request = read(head)
                body = Body(self.wire, request.framing)
                self.close_connection = request.close or self.supervisor.closing != NEVER
                self.answer(request, body)
                self.close_connection |= not body.done  # its rest must never be read as a request
        except Malformed as fault:
            self.close_connection = True
            with contextlib.suppress(Ended, Stalled):  # it has gone without waiting for that
                self.send_page(trouble_page(fault.status, str(fault), "invalid_request_error"))
                linger(self.wire)
        except (Ended, Stalled):
            self.close_connection = True

    def next_head(self) -> bytes | None:
        """The next request's head, None if there is none to come. Malformed, Ended, Stalled."""
        wire = self.wire
        if wire.start == wire.end:
            if len(wire.buffer) > wire.SMALL:
                wire.resize(wire.SMALL)  # it has grown with a large body
            self.idle = True
            if self.supervisor.closing != NEVER or not wire.fill():
                return None
            self.idle = False
        blank = wire.buffer.startswith(b"\r\n", wire.start, wire.end)
        head = (None if blank else wire.head()) or self.slow_head()
        wire.limit(self.IDLE_TIME)
        return head

    def slow_head(self) -> bytes | None:
        """A head that comes in pieces, or after empty lines (RFC 9112 2.2), within HEAD_TIME."""
        wire = self.wire
        deadline = time.monotonic() + self.HEAD_TIME
        blank = checked = 0
        while True:
            while blank < 4 and wire.buffer.startswith(b"\r\n", wire.start, wire.end):
                wire.start += 2
                blank += 1
            if not checked:  # a bad request line is refused as soon as it is there
                line, ends, _ = bytes(wire.view[wire.start : wire.end]).partition(b"\r\n")
                if ends or len(line) > MAX_LINE:
                    request_line(line)
                    checked = len(line)
            head = wire.head()
            if head:
                return head
            if BARE_LF.search(wire.buffer, wire.start + checked, wire.end):
                raise Malformed(400, "a line that does not end in CR LF")
            if checked:  # so that a head that comes byte by byte is not read again at each
                checked = wire.end - wire.start - 1
            try:
                if not wire.fill_by(deadline):
                    return None
            except Stalled:
                raise Malformed(408, f"no whole request in {spell(self.HEAD_TIME)}") from None

    # Answering it

    def answer(self, request: Request, body: Body) -> None:
        """Answers a request here, or has a child do it."""
        supervisor = self.supervisor
        path = request.target.partition(b"?")[0]
        page = local_page(supervisor, request.method, path)
        if not page:
            child = supervisor.child_for(request.target)
            passive = path in supervisor.passive and request.method in (b"GET", b"HEAD", b"OPTIONS")
            while run := self.ready_run(child, passive):
                if self.forward(request, body, run, passive):
                    return
            page = not_loaded(child)
        self.reply(request, body, page)

    def ready_run(self, child: Child, passive: bool) -> Run | None:
        """The child's process once it is ready, for which `wait_for_model` is waited at most."""
        run = child.run
        if run and run.ready:
            return run
        supervisor = self.supervisor
        if not passive and child.rest_from != NEVER and not child.wanted:
            child.wanted = True  # ends an idle rest
            supervisor.wake()
        self.waiter = waiter = threading.Event()
        child.waiters.add(waiter)
        deadline = time.monotonic() + supervisor.config.wait_for_model
        try:
            while True:
                run, left = child.run, deadline - time.monotonic()
                if self.gone:
                    raise Ended
                if run and run.ready:
                    return run
                dropped = child.config not in supervisor.config.children
                if left <= 0 or dropped or supervisor.closing != NEVER:
                    return None
                waiter.wait(left)
                waiter.clear()
        finally:
            self.waiter = None
            child.waiters.discard(waiter)

    def forward(self, request: Request, body: Body, run: Run, passive: bool) -> bool:
        """Has a child answer; False if it must not be asked any more."""
        exchange = self.exchange = Exchange(self, request, body, run)
        run.exchanges.add(exchange)
        try:
            # In this order: the poll loop takes `ready` back before it looks who is left to cut.
            if not run.ready:
                return False
            exchange.carry()
            return True
        finally:
            self.exchange = None
            if not passive:  # first, or a poll in between would find it idle for long
                run.last_request = time.monotonic()
            run.exchanges.discard(exchange)
            if not run.ready:
                self.supervisor.wake()  # it waits for the last of us to be gone

    def reply(self, request: Request, body: Body, page: Page) -> None:
        """Answers here; the connection goes on only if the request's body has arrived whole."""
        body.arrived()
        self.close_connection |= not body.done
        self.send_page(page, request.method)
        if not body.done:
            linger(self.wire)

    def send_page(self, page: Page, method: bytes = b"") -> None:
        self.server.count(page.status)
        self.wire.send(page.message(self.close_connection, method == b"HEAD"))


class Exchange:
    """One request that is forwarded, and its response.

    `cut` may end it from outside: it shuts sockets down, which wakes a handler that is blocked in
    one; only the handler itself closes them, so no descriptor is ever closed while it is in use.
    """

    # Seconds between two lots of events. Such a stream brings as much as is there whenever we look,
    # and the less often we do, the more of the CPU is left to the child and to the client.
    PAUSE = 0.002

    def __init__(self, handler: Handler, request: Request, body: Body, run: Run) -> None:
        self.handler = handler
        self.request = request
        self.body = body
        self.run = run
        self.guard = threading.Lock()  # for the three below
        self.upstream: Upstream | None = None
        self.why = ""  # it has been cut
        self.stuck = False  # waiting for the client to take more
        self.reset = False  # the client's connection ends with a reset
        self.upload: Upload | None = None
        self.response: Response | None = None  # the one whose head the client has been sent
        self.answer: Body | None = None  # of that response

    def cut(self, why: str) -> None:
        """Ends the exchange, whatever its handler is blocked in.

        One that waits for a client to take more must be freed as well: a server that is blocked in
        writing to us is only freed when our end is closed. SHUT_RD wakes it and sends nothing: an
        end of ours would look like the end of the body to a client of HTTP/1.0.
        """
        with self.guard:
            self.why = self.why or why
            if self.upstream:
                shut(self.upstream.sock)
            if self.stuck:
                shut(self.handler.sock, socket.SHUT_RD)

    def carry(self) -> None:
        """Forwards the request and sends the client an answer, the child's or one of ours.

        Malformed, Ended: the request's body is at fault, and nothing has been answered yet.
        """
        body, handler = self.body, self.handler
        content = framed(body.arrived(), body.framing == CHUNKED, body.done)
        first = b"".join((self.request.forwarded, handler.client_line, content))
        try:
            self.relay(self.ask(first))
        except (Lost, OSError, Ended, Stalled, Malformed) as error:
            self.let_go()
            self.fail(error)
        finally:
            self.end_upload()
            self.let_go()

    def ask(self, first: bytes) -> Response:
        """Sends the request; gives the final response's head, or that of an upgrade."""
        request = self.request
        response = self.first_response(first)
        interim = 0
        while response.status < 200 and response.status != 101:
            interim += 1
            if interim > MAX_INTERIM:
                raise Malformed(502, "no end of interim responses")
            if not request.old and (response.status != 100 or request.expects):
                self.deliver(response.client_head(False, False))
            assert self.upstream
            response = self.upstream.response(request.method)
        if response.status == 101 and not request.upgrade:
            raise Malformed(502, "an upgrade that was not asked for")
        return response

    def first_response(self, first: bytes) -> Response:
        """Sends the request, on an idle connection if there is one.

        llama-server may close an idle connection at the very moment that we use it. Whether it
        then has run the request cannot be known, so only what is safe to repeat is repeated, and
        a request whose body is still to come always has a connection of its own.
        """
        request, run = self.request, self.run
        if self.body.done and not request.upgrade:
            idle = run.pool.take(time.monotonic())
            if idle:
                try:
                    return self.send(idle, first)
                except Ended:
                    untouched = idle.wire.start == idle.wire.end
                    if request.method not in (b"GET", b"HEAD") or request.framing or not untouched:
                        raise
                    self.let_go()
        assert run.config.addr
        return self.send(Upstream(run.config.addr), first)

    def send(self, upstream: Upstream, first: bytes) -> Response:
        """Sends the request on a connection that `cut` finds from here on."""
        with self.guard:
            self.upstream = upstream
            if self.why or self.handler.gone:
                raise Ended
        upstream.wire.send(first)
        if not self.body.done:
            self.upload = Upload(self, self.body)
        return upstream.response(self.request.method)

    def let_go(self, reusable: bool = False) -> None:
        """Closes the connection to the child, or gives it back to be used again.

        While the upload's thread uses it, it is only shut down; that frees the thread as well.
        """
        upstream, upload = self.upstream, self.upload
        if not upstream:
            return
        if upload and not upload.over.is_set():
            shut(upstream.sock)
            return
        with self.guard:
            self.upstream = None
        broken = self.why or (upload and upload.broken)
        if reusable and not broken and upstream.wire.start == upstream.wire.end:
            self.run.pool.give(upstream, time.monotonic())
        else:
            upstream.close()

    def relay(self, response: Response) -> None:
        """Sends the client the response: whatever has arrived in one write, at once."""
        request, handler, upload = self.request, self.handler, self.upload
        assert self.upstream
        tunnel = response.status == 101
        body = Body(self.upstream.wire, UNTIL_CLOSE if tunnel else response.framing)
        chunked = body.framing < 0 and not request.old and not tunnel
        handler.close_connection |= body.framing < 0 and not chunked
        if tunnel:
            self.upload = Upload(self, Body(handler.wire, UNTIL_CLOSE))
        elif upload and not (upload.over.wait(0.01) and self.body.done):
            handler.close_connection = True  # an answer before the request has ended
        head = response.client_head(request.old, handler.close_connection)
        data: Piece = b"".join((head, body.passed(chunked)))
        handler.server.count(response.status)
        self.response, self.answer = response, body
        self.deliver(data)
        events = response.is_events()
        while not body.done:
            body.wait()
            if body.done and (self.why or (upload and upload.broken)):
                raise Ended  # that was our end, or a reset, which may have swallowed some of it
            data = body.passed(chunked)
            if data:
                self.deliver(data)
                if events and len(data) >= LOT:
                    time.sleep(self.PAUSE)
        self.let_go(response.reusable)

    def deliver(self, data: Piece) -> None:
        """Sends to the client; Lost if it is gone or takes nothing. A slow one is waited for."""
        sock = self.handler.sock
        try:
            sent = sock.send(data, DONTWAIT)
        except OSError:
            sent = 0  # it is slow; or gone, which the next send finds as well
        if sent == len(data):
            return
        with self.guard:
            if self.why:
                raise Lost
            self.stuck = True
        poller = select.poll()
        poller.register(sock, select.POLLOUT | select.POLLRDHUP)
        try:
            while sent < len(data):
                ready = poller.poll(self.handler.STALL_TIME * 1000)
                if self.why or not ready:
                    raise Lost
                with contextlib.suppress(BlockingIOError):  # it takes nothing yet
                    sent += sock.send(memoryview(data)[sent:], DONTWAIT)
        except OSError:
            raise Lost from None
        finally:
            self.stuck = False

    def fail(self, error: Exception) -> None:
        """Tells the client that there is no answer, or no more of it."""
        handler, upload = self.handler, self.upload
        lost = handler.gone or isinstance(error, Lost)
        if lost or self.response:
            self.break_off(lost)
        elif upload and upload.fault:
            upload.over.wait()  # it is about to be, and then leaves the client's connection alone
            raise upload.fault
        else:
            if self.why and not self.run.ready:
                page = trouble_page(503, f"model not loaded: {self.why}", "unavailable_error", 10)
            else:
                what = f"{self.run.config.name} gave no answer: {self.why or self.trouble(error)}"
                page = trouble_page(502, what, "upstream_error")
            if upload:  # which reads the body on; end_upload lingers
                handler.close_connection = True
                handler.send_page(page, self.request.method)
            else:
                handler.reply(self.request, self.body, page)

    @staticmethod
    def trouble(error: Exception) -> str:
        """What a child did instead of answering, in words."""
        if isinstance(error, OSError):
            return error.strerror or str(error)
        if isinstance(error, Malformed):
            return f"it sent a malformed answer ({error})"
        if isinstance(error, Ended):
            return "it closed the connection without an answer"
        return "it does not take the request"

    def break_off(self, lost: bool) -> None:
        """Ends a response visibly before its end; a stream of events says why, between chunks.

        The last chunk, or some of the bytes announced, is missing; for HTTP/1.0 clients, to whom
        the end of the connection is the end of the body, it takes a reset.
        """
        handler, response, answer = self.handler, self.response, self.answer
        handler.close_connection = True
        if not response or not answer or response.framing >= 0:
            return
        if self.request.old:
            self.reset = True
            handler.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        elif self.why and not lost and answer.left <= 0 and response.is_events():
            event = json.dumps(trouble_object(503, f"cut off: {self.why}", "unavailable_error"))
            data = framed([f"data: {event}\n\n".encode()], True, False)
            with contextlib.suppress(OSError):  # the end is visible even if it takes nothing now
                handler.sock.send(data, DONTWAIT)

    def end_upload(self) -> None:
        """Waits for the upload's thread, which uses both sockets."""
        upload, handler = self.upload, self.handler
        if not upload or upload.over.is_set():
            return
        handler.close_connection = True
        upload.broken = True  # it only reads on, so that no reset overtakes our answer
        # An end of ours before a reset would be taken for the end of the body.
        shut(handler.sock, socket.SHUT_RD if self.reset else socket.SHUT_WR)
        if not upload.over.wait(2.0):
            shut(handler.sock)
            upload.over.wait()


class Upload:
    """A request's body on its way up, in a thread of its own: it had not arrived with the head.

    So a response may begin before the request has ended, and neither direction blocks the other.
    """

    def __init__(self, exchange: Exchange, body: Body) -> None:
        assert exchange.upstream
        self.exchange = exchange
        self.body = body
        self.wire = exchange.upstream.wire
        self.over = threading.Event()
        self.fault: Exception | None = None  # the client's
        self.broken = False  # the child takes no more
        exchange.handler.server.run(self.go_on)

    def go_on(self) -> None:
        """What the thread does: sends what has arrived and what comes, until its end."""
        body, handler = self.body, self.exchange.handler
        try:
            body.wire.limit(0 if body.framing == UNTIL_CLOSE else handler.STALL_TIME)
            while True:
                self.send(framed(body.arrived(), body.framing == CHUNKED, body.done))
                if body.done:
                    break
                body.wait()
            body.wire.limit(handler.IDLE_TIME)
        except (Malformed, Ended, Stalled) as fault:
            stalled = Malformed(408, "the request's body does not come")
            self.fault = stalled if isinstance(fault, Stalled) else fault
            self.exchange.cut("the request ended early")
        finally:
            self.over.set()

    def send(self, data: Piece) -> None:
        if not data or self.broken:
            return
        try:
            self.wire.send(data)
        except Ended:
            self.broken = True  # it may have answered before it closed, which the handler sees
        except Stalled:
            self.broken = True
            self.exchange.cut("it does not take the request")


class Front(http.server.ThreadingHTTPServer):
    """Accepts clients and gives each a thread. A thread that has become idle takes the next one."""

    request_queue_size = 1024
    IDLE_THREAD_TIME = 2.0  # seconds; starting a thread costs more than a small request
    TURNED_AWAY = 32  # clients over the limit that are told so at the same time

    def __init__(self, supervisor: Supervisor) -> None:
        self.supervisor = supervisor
        self.served: set[socket.socket] = set()  # from accepting them to closing them
        self.turned_away: set[socket.socket] = set()
        self.handlers: set[Handler] = set()
        self.jobs: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self.idle = threading.Semaphore(0)
        self.guard = threading.Lock()  # for the next
        self.answers = [0] * 6  # by the first digit of their status
        host, port = supervisor.config.listen
        if ":" in host or (not host and socket.has_dualstack_ipv6()):
            self.address_family = socket.AF_INET6
        super().__init__((host, port), Handler)

    def server_bind(self) -> None:
        """Binds, without http.server's look-up of our own name: that takes seconds without DNS."""
        if self.address_family == socket.AF_INET6:
            only = int(self.server_address[0] != "")  # or every address, those of IPv4 too
            self.socket.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, only)
        options = (
            # A client that vanishes without a word is found out in a minute: by keepalive when
            # nothing is sent, by the user timeout when what was sent is never acknowledged.
            (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
            (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 15),
            (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5),
            (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3),
            (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(Handler.STALL_TIME * 1000)),
            (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1),
            (socket.SOL_SOCKET, socket.SO_RCVTIMEO, timeval(Handler.HEAD_TIME)),
            (socket.SOL_SOCKET, socket.SO_SNDTIMEO, timeval(Handler.STALL_TIME)),
        )
        for level, option, value in options:
            self.socket.setsockopt(level, option, value)  # accepted sockets inherit them (tcp(7))
        socketserver.TCPServer.server_bind(self)

    def process_request(self, request: Any, client_address: Any) -> None:
        limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        most = max(1, (limit - 96) // 3)  # the polls must never lack a descriptor
        group = self.served
        job: Callable[[Any, Any], None] = self.process_request_thread
        if len(group) >= min(self.supervisor.config.max_connections, most):
            group, job = self.turned_away, self.turn_away
            if len(group) >= self.TURNED_AWAY:
                request.close()
                return
        group.add(request)
        try:
            self.run(lambda: job(request, client_address))
        except (OSError, MemoryError) as error:
            log.error("a connection of %s is dropped: %s", client_address[0], error)
            self.shutdown_request(request)

    def serve_forever(self, poll_interval: float = 0.5) -> None:
        """Accepts, on one CPU and as a batch, which the threads started from here inherit.

        Threads of Python do not run at the same time anyway. On several CPUs each of their many
        hand-overs of the interpreter lock wakes another CPU: twice the work for half the requests.
        SCHED_BATCH (sched(7)): one that wakes up lets the running one finish, instead of taking
        the CPU from it only to find the lock taken. Where jobs keep all CPUs busy, an answer may
        take some ms longer. The poll loop, and so the children, are not concerned.
        """
        try:
            os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
        except OSError as error:
            log.warning("the front cannot be scheduled as it should, so it is slower: %s", error)
        while self.supervisor.closing == NEVER:
            try:
                request, client_address = self.socket.accept()
            except OSError as error:  # that client has gone, or nobody has come for HEAD_TIME
                if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
                    time.sleep(0.05)  # or it would fail in a loop
            else:
                self.process_request(request, client_address)

    def turn_away(self, request: Any, _: Any) -> None:
        wire = Wire(request)
        page = trouble_page(503, "too many connections", "unavailable_error", 5)
        with contextlib.suppress(Ended, Stalled):  # it has gone by itself
            wire.send(page.message(True, False))
            linger(wire)
        self.shutdown_request(request)

    def shutdown_request(self, request: Any) -> None:
        """Only closes: an end before the close would make a clean end of an aborted response."""
        self.served.discard(request)  # first, for whoever sees the end may come again at once
        self.turned_away.discard(request)
        request.close()

    def handle_error(self, request: Any, client_address: Any) -> None:
        log.exception("a fault of mavgpud in serving %s", client_address[0])

    # Threads

    def run(self, job: Callable[[], None]) -> None:
        """Runs `job` in an idle thread or a new one. OSError if there can be none."""
        if self.idle.acquire(blocking=False):
            self.jobs.put(job)
            return
        try:
            # threading.Thread would wait until the new thread runs: a crowd gets in half as fast.
            _thread.start_new_thread(self.work, (job,))
        except RuntimeError as error:
            raise OSError(errno.EAGAIN, str(error)) from None

    def work(self, job: Callable[[], None] | None) -> None:
        while job:
            job()
            self.idle.release()
            try:
                job = self.jobs.get(timeout=self.IDLE_THREAD_TIME)
            except queue.Empty:
                # Somebody may have counted on this thread just now: then its job is on the way.
                job = None if self.idle.acquire(blocking=False) else self.jobs.get()

    def count(self, status: int) -> None:
        with self.guard:
            self.answers[status // 100] += 1

    def close_listener(self) -> None:
        """Takes no more connections and ends the idle ones; what is in flight goes on."""
        shut(self.socket)
        for handler in list(self.handlers):
            if handler.idle:
                shut(handler.sock, socket.SHUT_RD)
            waiter = handler.waiter
            if waiter:
                waiter.set()


# ---- status --------------------------------------------------------------------------------------


class Page(NamedTuple):
    """An answer of our own."""

    status: int
    body: bytes
    kind: str
    fields: tuple[str, ...] = ()  # more of the head

    def message(self, close: bool, head_only: bool) -> bytes:
        lines = [f"HTTP/1.1 {self.status} {HTTPStatus(self.status).phrase}",
                 f"Content-Type: {self.kind}", f"Content-Length: {len(self.body)}", *self.fields]
        lines += ["Connection: close"] if close else []
        head = "\r\n".join(lines) + "\r\n\r\n"
        return head.encode() + (b"" if head_only else self.body)


def trouble_object(status: int, what: str, kind: str) -> dict[str, Any]:
    """An error in the form that llama-server has for it."""
    return {"error": {"code": status, "message": what, "type": kind}}


def trouble_page(status: int, what: str, kind: str, retry: int = 0) -> Page:
    """The same as a page; `retry` is in seconds."""
    body = json.dumps(trouble_object(status, what, kind)).encode()
    return Page(status, body, "application/json", (f"Retry-After: {retry}",) * bool(retry))


HEALTHY = Page(200, b'{"status":"ok"}', "application/json")


def not_loaded(child: Child) -> Page:
    """The answer for a child that is not ready."""
    return trouble_page(503, f"model not loaded: {child.reason}", "unavailable_error", child.retry)


def local_page(supervisor: Supervisor, method: bytes, path: bytes) -> Page | None:
    """What is answered here, at no cost to the card: /health, /health/NAME and /mavgpud/.

    None for a path that only begins like one of them.
    """
    kind, _, rest = path[1:].partition(b"/")
    if kind == b"health":
        name = rest.decode("latin-1") or "llama"
        for child in supervisor.children:
            if child.name == name:
                run = child.run
                return HEALTHY if run and run.ready else not_loaded(child)
        return trouble_page(404, f"there is no child named {name}", "not_found_error")
    if kind != b"mavgpud":
        return None
    make = PAGES.get(path)
    if not make:
        page = trouble_page(404, f"only {b', '.join(PAGES).decode()} are here", "not_found_error")
    elif method not in (b"GET", b"HEAD"):
        page = trouble_page(405, "only GET and HEAD are served here", "invalid_request_error")
        page = page._replace(fields=("Allow: GET, HEAD",))
    else:
        page = make(supervisor, time.monotonic())
    return page._replace(fields=(*page.fields, "Cache-Control: no-store"))


class Entry(NamedTuple):
    """A stretch of the time line of a child. Unix time."""

    begin: float
    kind: str  # ready, loading, yielded, idle or stopped
    who: str = ""  # has taken the card, or what keeps the child from running
    end: float = NEVER  # it goes on


HISTORY_LIMIT = 500  # entries per child: each costs the page half a microsecond


def recorded(past: tuple[Entry, ...], new: Entry, oldest: float) -> tuple[Entry, ...]:
    """A time line with one more entry if that is news, without what had ended before `oldest`."""
    if not past:
        return (new,)
    last = past[-1]
    if (last.kind, last.who) == (new.kind, new.who):
        return past
    ended = (*past[:-1], last._replace(end=new.begin))
    return (*[entry for entry in ended if entry.end > oldest][1 - HISTORY_LIMIT :], new)


# Seconds, as Prometheus writes them.
YIELD_BOUNDS = ("0.05", "0.1", "0.2", "0.5", "1.0", "2.0", "5.0", "10.0", "30.0", "+Inf")


class Yields(NamedTuple):
    """How long all yields so far took until the processes were gone."""

    seconds: float = 0.0
    within: tuple[int, ...] = (0,) * len(YIELD_BOUNDS)  # how many took no more than a bound

    def plus(self, took: float) -> Yields:
        within = (n + (took <= float(bound)) for n, bound in zip(self.within, YIELD_BOUNDS))
        return Yields(self.seconds + took, tuple(within))


def in_flight(child: Child) -> int:
    return len(child.run.exchanges) if child.run else 0  # as it is now


def child_facts(child: Child, now: float) -> dict[str, Any]:
    """A child as JSON; durations in seconds."""
    run = child.run if child.state == READY else None
    idle = now - run.last_request if run and not run.exchanges else None
    waits = child.state == STOPPED and now < child.next_try
    return {
        "name": child.name,
        "state": child.state,
        "since": round(now - child.since, 3),
        "reason": None if child.state == READY else child.reason,
        "pid": child.run.pid if child.run else None,
        "in_flight": in_flight(child),
        "idle_for": idle and round(idle, 3),
        "starts": child.starts,
        "crashes": child.crashes,
        "next_try_in": round(child.next_try - now, 3) if waits else None,
        "load_seconds": child.load_seconds and round(child.load_seconds, 3),
    }


class Snapshot:
    """What one pass has found and done.

    The pages show this and nothing else, so none of them needs a lock or can delay a poll.
    """

    def __init__(self, s: Supervisor, now: float) -> None:
        self.polled = now  # monotonic
        self.when = time.time()  # Unix time
        self.sentence = s.sentence
        self.device = s.card.drm_device
        self.vram = s.vram  # bytes, in all and in use
        self.contenders, self.claims = s.contenders, s.claims  # lists that no pass changes
        self.locked = s.lock.held if s.lock.file else None  # None: there is no card lock
        self.streaks = s.streaks
        self.children = [child.copied() for child in s.children]  # as the pass has left them
        self.handovers = list(s.handovers)
        self.yields = s.yields


def people(contenders: Iterable[Contender]) -> list[dict[str, Any]]:
    return [{"pid": c.pid, "comm": printable(c.comm)} for c in contenders]


def status_page(supervisor: Supervisor, now: float) -> Page:
    seen = supervisor.snapshot
    total, used = seen.vram or (None, None)
    loaded = any(child.state in RUNNING for child in seen.children)
    facts = {
        "version": VERSION,
        "time": iso(seen.when),
        "sentence": seen.sentence,
        "why_nothing_runs": None if loaded else seen.sentence,
        "card": {"device": seen.device, "total": total, "used": used,
                 "free": seen.vram and seen.vram[0] - seen.vram[1]},
        "contenders": people(seen.contenders),
        "streaks": {"contended": seen.streaks.contended, "clear": max(0, seen.streaks.clear)},
        "lock": None if seen.locked is None
        else {"held_by_us": seen.locked, "claims": people(seen.claims)},
        "children": [child_facts(child, now) for child in seen.children],
        "yields": [
            {"when": iso(h.when), "to": h.to, "gone_seconds": h.gone and round(h.gone, 3),
             "free_seconds": h.free and round(h.free, 3)}
            for h in reversed(seen.handovers)
        ],
    }
    return Page(200, (json.dumps(facts, indent=1) + "\n").encode(), "application/json")


def iso(when: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(when))


def metrics_page(supervisor: Supervisor, now: float) -> Page:
    """The same for Prometheus, in its text format 0.0.4."""
    seen = supervisor.snapshot
    lines: list[str] = []

    def family(name: str, what: str, *samples: tuple[str, float | None], kind: str = "") -> None:
        kind = kind or ("counter" if name.endswith("_total") else "gauge")
        lines.append(f"# HELP mavgpud_{name} {what}\n# TYPE mavgpud_{name} {kind}")
        lines.extend(f"mavgpud_{name}{label} {v:.15g}" for label, v in samples if v is not None)

    def per_child(name: str, what: str, value: Callable[[Child], float | None]) -> None:
        family(name, what, *((f'{{child="{c.name}"}}', value(c)) for c in seen.children))

    family("info", "The program.", (f'{{version="{VERSION}"}}', 1))
    family("poll_age_seconds", "Time since the last poll.", ("", now - seen.polled))
    family("vram_size_bytes", "VRAM of the card.", ("", seen.vram and seen.vram[0]))
    family("vram_used_bytes", "VRAM in use, by whomever.", ("", seen.vram and seen.vram[1]))
    family("contenders", "Processes of others on the card.", ("", len(seen.contenders)))
    per_child("child_ready", "Whether it may be sent requests.", lambda c: int(c.state == READY))
    per_child("child_in_flight", "Requests in flight.", in_flight)
    per_child("child_load_seconds", "Time that the last load took.", lambda c: c.load_seconds)
    per_child("child_starts_total", "Starts.", lambda c: c.starts)
    per_child("child_crashes_total", "Crashes and failed starts.", lambda c: c.crashes)
    family("child_state_seconds_total", "Time spent in each state.", *(
        (f'{{child="{c.name}",state="{state}"}}',
         c.spent.get(state, 0.0) + (now - c.since if c.state == state else 0.0))
        for c in seen.children for state in (STOPPED, LOADING, READY, STOPPING, WEDGED)
    ))
    answers = supervisor.front.answers if supervisor.front else [0] * 6
    family("requests_total", "Requests answered, by the class of the status.", *(
        (f'{{code="{digit}xx"}}', answers[digit]) for digit in range(1, 6)
    ))
    yields = seen.yields
    family("yields_total", "Times that the card was yielded.", ("", yields.within[-1]))
    family("yield_seconds", "Time from the decision to yield until we were gone.",
           *((f'_bucket{{le="{bound}"}}', n) for bound, n in zip(YIELD_BOUNDS, yields.within)),
           ("_sum", yields.seconds), ("_count", yields.within[-1]), kind="histogram")
    return Page(200, ("\n".join(lines) + "\n").encode(), "text/plain; version=0.0.4; charset=utf-8")


STYLE = """
:root { color-scheme: light dark; --page: #f6f7f9; --card: #fff; --line: #dfe3e8; --ink: #1b2330;
  --soft: #5d6878; --ready: #2f9e5b; --loading: #4c8dff; --yielded: #e8590c; --idle: #a3afc0 }
@media (prefers-color-scheme: dark) { :root { --page: #11151b; --card: #1a2029; --line: #2c3542;
  --ink: #e5eaf1; --soft: #97a3b4; --ready: #37b26a; --loading: #5b97ff; --yielded: #ff7b33;
  --idle: #5f6d80 } }
* { box-sizing: border-box }
body { margin: 0 auto; padding: 1rem; max-width: 60rem; background: var(--page); color: var(--ink);
  font: 1rem/1.45 system-ui, sans-serif; overflow-wrap: anywhere }
h1 { font-size: 1.3rem; margin: .5rem 0 } h2 { font-size: 1rem; margin: 0 0 .5rem }
section { background: var(--card); border: 1px solid var(--line); border-radius: .6rem;
  padding: .9rem 1rem; margin: .8rem 0 }
p { margin: .4rem 0 0 } p, th, footer, .axis { color: var(--soft); font-size: .875rem }
.bar, svg { display: block; width: 100%; background: var(--line); border-radius: .3rem;
  overflow: hidden; height: 1.1rem } svg { height: 2.2rem }
.bar i { display: block; height: 100%; background: var(--loading) }
.axis { display: flex; justify-content: space-between } .axis i { font-style: normal }
b::before { content: ""; display: inline-block; width: .7em; height: .7em; margin-right: .4em;
  border-radius: .2em; background: var(--kind) } path { stroke: var(--kind) }
.ready { --kind: var(--ready) } .loading { --kind: var(--loading) } .idle { --kind: var(--idle) }
.yielded { --kind: var(--yielded) } .stopped { --kind: var(--line) }
table { width: 100%; border-collapse: collapse; overflow-wrap: normal; font-size: .9375rem }
th { text-align: left; font-weight: normal } td { border-top: 1px solid var(--line) }
td, th { padding: .2rem .6rem .2rem 0; vertical-align: top }
td:last-child, th:last-child { text-align: right; padding-right: 0 }
td:first-child { white-space: nowrap } td:nth-child(2) { overflow-wrap: anywhere }
a { color: inherit }
"""

def safe(words: str) -> str:
    """Words that may hold names from outside, for HTML; they cannot reorder what is around."""
    return f'<bdi dir="ltr">{html.escape(printable(words))}</bdi>'


def clock(when: float, form: str = "%a %H:%M") -> str:
    return time.strftime(form, time.localtime(when))


def shown(history: tuple[Entry, ...], start: float, end: float) -> list[Entry]:
    """The part of a time line that is shown."""
    line = [entry for entry in history if entry.end > start]
    if line:
        line[0] = line[0]._replace(begin=max(line[0].begin, start))
        line[-1] = line[-1]._replace(end=end)
    return line


@functools.lru_cache(maxsize=64)  # a page lists 16 of them
def described(entry: Entry) -> tuple[str, str, str]:
    """Since when, what, and for how long."""
    what = "loaded" if entry.kind == READY else entry.kind
    if entry.who:
        what += (" to " if entry.kind == "yielded" else ": ") + entry.who
    seconds = max(0.0, entry.end - entry.begin)
    lasted = spell(seconds if seconds < 3600 else seconds // 60 * 60)
    return clock(entry.begin), what, lasted


BORN = time.time()  # where x is 0: the numbers of SVG have 32 bits, too few for Unix time


@functools.lru_cache(maxsize=4 * HISTORY_LIMIT)  # what is over is drawn only once
def drawn(entry: Entry, scale: float) -> str:
    """A stretch as SVG. However short, a yield is drawn."""
    width, title = (entry.end - entry.begin) * scale, ""
    if entry.kind == "yielded" and width >= 2:  # one that a pointer can find
        words = "{1}, from {0} for {2}".format(*described(entry))
        title = f"<title>{html.escape(printable(words))}</title>"
    elif entry.kind != "yielded" and width < 0.5:
        return ""
    return f'<path d="M{(entry.begin - BORN) * scale:.1f} .5h{max(width, 2):.1f}">{title}</path>'


def lane(line: list[Entry], start: float, end: float) -> str:
    """A time line as SVG, 1000 units wide. Yields are above the rest."""
    scale = 1000 / (end - start)
    layers: dict[str, list[str]] = {k: [] for k in (STOPPED, "idle", LOADING, READY, "yielded")}
    for entry in line:
        layers[entry.kind].append(drawn(entry, scale))
    marks = "".join(f'<g class="{kind}">{"".join(paths)}</g>' for kind, paths in layers.items())
    return (f'<svg viewBox="{(start - BORN) * scale:.1f} 0 1000 1" preserveAspectRatio="none"'
            f' role="img" aria-label="time line of the states below">{marks}</svg>')


def table(heads: str, rows: Iterable[tuple[str, ...]]) -> str:
    """Rows of cells that are HTML already."""
    lines = ["<th>" + heads.replace(",", "<th>")] + ["<td>" + "<td>".join(row) for row in rows]
    return "<table><tr>" + "<tr>".join(lines) + "</table>"


def child_section(child: Child, line: list[Entry], start: float, end: float, now: float) -> str:
    facts = child_facts(child, now)
    said = [
        f"pid {facts['pid']}, {facts['in_flight']} in flight" if facts["pid"] else "",
        f"idle for {spell(math.floor(facts['idle_for']))}" if facts["idle_for"] else "",
        f"starts: {child.starts}, crashes: {child.crashes}",
        f"the last load took {spell(child.load_seconds)}" if child.load_seconds else "",
        f"next try in {spell(math.ceil(facts['next_try_in']))}" if facts["next_try_in"] else "",
    ]
    form = "%H:%M" if end - start <= 86400 else "%b %d"
    axis = "".join(f"<i>{clock(start + (end - start) * n / 4, form)}</i>" for n in range(5))
    return (
        f'<section><h2><b class="{line[-1].kind if line else "stopped"}">{child.name}</b>'
        f" {child.state} for {spell(math.floor(now - child.since))}</h2>{lane(line, start, end)}"
        f'<div class="axis">{axis}</div><p>{" &middot; ".join(filter(None, said))}</section>'
    )


def overview_page(supervisor: Supervisor, now: float) -> Page:
    """One snapshot for people: without scripts, and with nothing to fetch."""
    seen = supervisor.snapshot
    end = time.time()
    start = end - supervisor.config.history
    lines = [(child, shown(child.history, start, end)) for child in seen.children]
    vram = "<p>How much is in use cannot be read."
    if seen.vram:
        total, used = seen.vram
        vram = (f'<div class="bar"><i style="width:{100 * used / total:.1f}%"></i></div>'
                f"<p>{gib(used)} of {gib(total)} in use, {gib(total - used)} free.")
    others = safe(named(seen.contenders)) if seen.contenders else "nobody"
    claims = f" Card lock: {safe(named(seen.claims))}." if seen.claims else ""
    lately = sorted(((entry, child.name) for child, line in lines for entry in line[-16:]),
                    reverse=True)[:16]
    body = "".join((
        '<!DOCTYPE html><html lang="en"><head><meta charset="utf-8"><title>mavgpud</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        # Without an icon, browsers ask for /favicon.ico, which would be a request for the model.
        '<meta http-equiv="refresh" content="5"><link rel="icon" href="data:,">'
        f"<style>{STYLE}</style></head><body><h1>{safe(seen.sentence)}</h1>",
        f"<section><h2>VRAM</h2>{vram} Others on the card: {others}.{claims}</section>",
        *(child_section(child, line, start, end, now) for child, line in lines),
        "<section><h2>Lately</h2>", table("since,,for", (
            (since, f'<b class="{entry.kind}"></b>{name} {safe(what)}', lasted)
            for entry, name in lately for since, what, lasted in [described(entry)]
        )),
        "</section><section><h2>Last yields</h2>", table("when,to,gone in,free in", (
            (clock(h.when, "%b %d %H:%M"), safe(h.to),
             *("" if seconds is None else spell(seconds) for seconds in (h.gone, h.free)))
            for h in reversed(seen.handovers)
        )),
        f"</section><footer>mavgpud {VERSION}, polled at {clock(seen.when, '%H:%M:%S')}."
        ' <a href="status">JSON</a>, <a href="metrics">metrics</a></footer></body></html>',
    ))
    policy = "Content-Security-Policy: default-src 'none'; style-src 'unsafe-inline'; img-src data:"
    return Page(200, body.encode("utf-8", "replace"), "text/html; charset=utf-8", fields=(policy,))


PAGES: dict[bytes, Callable[[Supervisor, float], Page]] = {
    b"/mavgpud": lambda *_: Page(308, b"", "text/plain", fields=("Location: /mavgpud/",)),
    b"/mavgpud/": overview_page,
    b"/mavgpud/status": status_page,
    b"/mavgpud/metrics": metrics_page,
}


# ---- systemd -------------------------------------------------------------------------------------


class Systemd:
    """sd_notify(3): what systemd is told, if it asked to be."""

    def __init__(self) -> None:
        self.address = re.sub("^@", "\0", os.environ.get("NOTIFY_SOCKET", ""))
        watchdog = int(os.environ.get("WATCHDOG_USEC", "0")) / 1e6
        ours = os.environ.get("WATCHDOG_PID", str(os.getpid())) == str(os.getpid())
        self.interval = watchdog / 2 if watchdog and ours else NEVER  # seconds between two signs
        self.last_sign = -NEVER
        self.status = ""
        self.fault = ""  # of the last attempt, so that each is said once

    def say(self, *lines: str) -> None:
        """Tells systemd, unless that would take waiting, which a poll must not."""
        if not self.address or not lines:
            return
        data = "\n".join(lines).encode("utf-8", "replace")
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK) as sock:
                sock.sendto(data, self.address)
            self.fault = ""
        except BlockingIOError:
            self.status = ""  # so that it is said again
        except OSError as error:
            if str(error) != self.fault:
                self.fault = str(error)
                log.warning("systemd cannot be told %s: %s", lines[0], error)

    def pass_done(self, now: float, sentence: str, closing: bool) -> None:
        """The poll loop lives; and what it has to say."""
        lines = ["EXTEND_TIMEOUT_USEC=10000000"] if closing else []
        if now - self.last_sign >= self.interval / 2:
            lines.append("WATCHDOG=1")
            self.last_sign = now
        if sentence != self.status:
            lines.append("STATUS=" + sentence)
            self.status = sentence
        self.say(*lines)


class Priority(logging.Formatter):
    """journald's <N> before each line, where standard error is the journal (sd-daemon(3))."""

    def format(self, record: logging.LogRecord) -> str:
        level = {logging.INFO: 6, logging.WARNING: 4}.get(record.levelno, 3)
        return "\n".join(f"<{level}>{line}" for line in super().format(record).splitlines())


class BackgroundLog(logging.Handler):
    """Writes to standard error in a thread of its own.

    Whoever reads it may stall (a journal that hangs, a terminal that was stopped), and the polls
    must go on all the same. What finds no room then is lost.
    """

    ROOM = 1000  # lines

    def __init__(self) -> None:
        super().__init__()
        self.lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        self.ended = threading.Event()
        in_background("log", self.write)
        atexit.register(self.end)

    def emit(self, record: logging.LogRecord) -> None:
        if self.lines.qsize() < self.ROOM:
            self.lines.put(self.format(record) + "\n")

    def write(self) -> None:
        while (line := self.lines.get()):
            data = line.encode("utf-8", "backslashreplace")
            try:
                while data:
                    data = data[os.write(2, data) :]
            except OSError:
                continue  # nobody reads it any more
        self.ended.set()

    def end(self) -> None:
        """Gives what has been logged a second to get out."""
        self.lines.put("")
        self.ended.wait(1.0)


def set_up_log() -> None:
    """Logs to standard error, with the time unless the journal adds it."""
    try:
        there = os.fstat(2)
    except OSError:  # it is closed, and whatever is opened next would be taken for it
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        os.set_inheritable(2, True)  # it is not where `open` gave 2 itself
        there = os.fstat(2)
    handler = BackgroundLog()
    if os.environ.get("JOURNAL_STREAM") == f"{there.st_dev}:{there.st_ino}":
        handler.setFormatter(Priority("%(message)s"))
    else:
        handler.setFormatter(logging.Formatter("%(asctime)s mavgpud: %(message)s"))
    log.addHandler(handler)
    log.setLevel(logging.INFO)


# ---- --check -------------------------------------------------------------------------------------


class Check:
    """Looks at this machine through the supervisor's eyes, and says what it would see and do."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.faults = 0

    def say(self, what: str) -> None:
        print("  " + what)

    def fault(self, what: str, remedy: str) -> None:
        self.faults += 1
        print(f"! {what}\n  -> {remedy}")

    def run(self) -> int:
        """0 if it would work, 1 if something has to be changed."""
        card = Card(self.config.kfd_root, self.config.drm_device, self.config.ignore)
        self.kfd(card)
        self.card(card)
        self.permissions(card)
        self.addresses()
        self.lock()
        print(f"{self.faults} to change, see above" if self.faults else "it would work")
        return 1 if self.faults else 0

    def kfd(self, card: Card) -> None:
        try:
            found = card.contenders(())
        except Unknown as trouble:
            self.fault(str(trouble), "nothing is started blind: make it readable for this user")
            return
        if not card.has_kfd:
            self.fault(f"{card.kfd_root} does not exist, so no job can be seen coming",
                       "load amdgpu with amdkfd (a kernel with CONFIG_HSA_AMD)")
            return
        users = named(c._replace(vram=card.held(c.pid)) for c in found)
        self.say(f"KFD {card.kfd_root}: {users or 'nobody there'}")
        if users:
            self.say("nothing would be started beside them (see `ignore` for monitors)")

    def card(self, card: Card) -> None:
        try:
            folder = card.device()
            total, used = card.vram()
        except Unknown as trouble:
            self.fault(str(trouble), 'set drm_device to the card\'s folder in sysfs, or to "auto"')
            return
        try:
            pci = pci_address(folder)
            held = describe_holders(pci)
        except Unknown:
            pci, held = "address unknown", "unknown"
        free = total - used
        self.say(f"card {folder}: {product(folder)}, PCI {pci}")
        self.say(f"VRAM {gib(total)}, {gib(used)} used, {gib(free)} free; held by {held}")
        if re.search(r"/card\d+/", folder):
            self.say("cardN may be another card after the next boot; its PCI path never is")
        together = 0
        for child in self.config.children:
            need = child.min_free_vram_bytes
            together += need
            if need > total:
                self.fault(f"{child.name} needs {gib(need)} of VRAM, the card has {gib(total)}",
                           "lower its min_free_vram_bytes")
            elif need > free:
                self.fault(f"{child.name} needs {gib(need)} of free VRAM, {gib(free)} are free now",
                           "end what holds it, or lower its min_free_vram_bytes")
        if together > total and len(self.config.children) > 1:
            self.fault(f"all children together need {gib(together)}, the card has {gib(total)}",
                       "lower min_free_vram_bytes where a child does not need that much")

    def permissions(self, card: Card) -> None:
        render = sorted(n for n in listing("/dev/dri") if n.startswith("renderD"))
        for node in ("/dev/kfd", *(f"/dev/dri/{n}" for n in render)):
            if not os.path.exists(node):
                self.fault(f"{node} does not exist", "is amdgpu loaded?")
            elif not os.access(node, os.R_OK | os.W_OK):
                self.fault(f"{node} may not be opened by this user",
                           "add the user to the groups render and video")
        try:
            gpus = gpu_ids(os.path.dirname(card.kfd_root) + "/topology")
            self.say(f"KFD topology: {len(gpus)} GPU" + "s" * (len(gpus) != 1))
        except (OSError, ValueError) as error:
            self.say(f"KFD topology cannot be read ({error}): with several GPUs, a job on any of"
                     " them would count as one on this card")
        if not die_with_us():
            self.fault("setpriv --pdeathsig does not work here", "install util-linux 2.34 or newer")

    def addresses(self) -> None:
        host, port = self.config.listen
        if taken((host or "0.0.0.0", port)):
            self.fault(f"listen: port {port} is in use", "stop that program (or is mavgpud"
                       " running already?), or choose another port")
        for child in self.config.children:
            if not child.addr:
                continue
            host, port = child.addr
            if taken(child.addr):
                self.fault(f"{child.name}: {host}:{port} is in use",
                           "stop that program (or is mavgpud running already?)")
            there, number = bound(child.args)
            fits = there in ("localhost", "127.0.0.1") if host == "localhost" else there == host
            if child.name == "llama" and not (
                number == str(port) and (fits or there in ("0.0.0.0", "::"))
            ):
                self.fault(f"llama_args bind {there}:{number}, llama_addr is {host}:{port}",
                           f'add "--host", "{host}", "--port", "{port}" to llama_args')

    def lock(self) -> None:
        file = self.config.card_lock
        if not file:
            self.say("no card_lock: jobs can only be seen coming, they cannot be waited for")
            return
        lock = CardLock(file)
        try:
            claims = lock.claims()
        except Unknown as trouble:
            self.fault(str(trouble), "create its folder, mode 0755, owned by this user (in the"
                       " unit: RuntimeDirectory=)")
            return
        whose = f"wanted or held by {named(claims)}" if claims else "free"
        self.say(f"card lock {file}: {whose}")
        there = os.fstat(lock.fds[-1]).st_dev
        device = f" {os.major(there)}:{os.minor(there)} "
        with open("/proc/self/mountinfo", encoding="utf-8", errors="replace") as mounts:
            on_tmpfs = any(device in m and re.search(" - (tmp|ram)fs ", m) for m in mounts)
        if not on_tmpfs:
            self.fault(f"card_lock {file} is not on a tmpfs", "put it below /run: other file"
                       " systems may show other device numbers in /proc/locks")


def bound(args: Iterable[str]) -> tuple[str, str]:
    """The host and the port that llama-server is told to bind, or its own defaults."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--host", nargs="?")
    parser.add_argument("--port", nargs="?")
    found, _ = parser.parse_known_args(list(args))
    return found.host or "127.0.0.1", found.port or "8080"


def product(folder: str) -> str:
    """A card's name by its PCI id, from the list of pciutils or hwdata, or "unknown"."""
    for file in ("/usr/share/misc/pci.ids", "/usr/share/hwdata/pci.ids"):
        with contextlib.suppress(OSError), open(file, encoding="utf-8", errors="replace") as ids:
            device = re.escape(slurp(folder + "/device").strip()[2:])
            amd = re.search(rf"^1002 .*\n(?:[\t#].*\n)*?\t{device}  (.*)", ids.read(), re.M)
            if amd:
                return amd[1]
    return "unknown"


# ---- main ----------------------------------------------------------------------------------------


def main() -> int:
    parser = argparse.ArgumentParser(
        "mavgpud", description="Keeps llama-server on the card while nobody else wants it.")
    parser.add_argument("--config", "-config", metavar="FILE", default="/etc/mavgpud.json",
                        help="configuration (default: %(default)s)")
    parser.add_argument("--check", action="store_true",
                        help="look at this machine, say what would happen, and end")
    parser.add_argument("--version", action="version", version=f"mavgpud {VERSION}")
    options = parser.parse_args()
    set_up_log()
    try:
        config = load_config(options.config)
        if config.drm_device == "auto":
            pick_card(DRM)
    except Unknown as trouble:
        log.warning("%s yet, looking on", trouble)  # the driver may still be loading
    except ConfigError as error:
        for line in str(error).splitlines():
            log.error("%s", line)
        return os.EX_CONFIG  # the unit does not restart after it

    if options.check:
        return Check(config).run()

    raise_limit(config.max_connections)
    supervisor = Supervisor(options.config, config)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # where it is ignored, children reap themselves
    for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(signum, lambda *_: None)  # the watcher reads them from the wake-up descriptor

    listen = "{}:{}".format(*config.listen)
    try:
        front = supervisor.front = Front(supervisor)
    except OSError as error:
        log.error("%s: listen: %s cannot be bound: %s", options.config, listen, error.strerror)
        return 1
    log.info("listening on %s, model %s", listen, config.children[0].bin)
    supervisor.watcher.start()
    supervisor.systemd.say("READY=1")
    supervisor.loop.start()  # with a whole stack, for SIGHUP may have it read any file
    threading.stack_size(256 * 1024)  # from here on: the front may need very many
    in_background("accept", front.serve_forever)
    supervisor.loop.join()
    return supervisor.end()


if __name__ == "__main__":
    sys.exit(main())
