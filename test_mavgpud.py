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
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

# A stand-in is started some hundred times, so it does without what only the tests need.
if sys.argv[1:2] != ["--stand-in"]:
    import atexit
    import functools
    import http.client
    import importlib.util
    import py_compile
    import random
    import re
    import shutil
    import subprocess
    import tempfile
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


# ---- tests: the card and its lock (to be inserted below this line) -------------------------------


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
    sys.exit(Demo().run()) if sys.argv[1:] == ["--demo"] else unittest.main()
