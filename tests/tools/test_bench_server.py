"""bench --server: figures of each side, the client that reads them, what is made of them."""

import json
import os
import resource
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from trtllm_lite.runtime.errors import StepError, UsageError
from trtllm_lite.tools import bench_server_report
from trtllm_lite.tools.bench_client import COMMENT, Client, Stream, Timing, read_until
from trtllm_lite.tools.bench_program import Idle, allow_files, resident_bytes
from trtllm_lite.tools.bench_server import program_arguments
from trtllm_lite.tools.bench_server_report import (
    TARGETS,
    Measured,
    server_report,
    server_summary,
    server_table,
)
from trtllm_lite.tools.bench_server_run import (
    LoadProcess,
    Round,
    Run,
    ServerBenchOptions,
    body,
)
from trtllm_lite.tools.cli import cli

OPTIONS = ServerBenchOptions(8, 5, rounds=2, warmup=1, seed=7, idle_streams=1000)
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\n"


def event(**fields: Any) -> bytes:
    return b"data: " + json.dumps(fields).encode() + b"\n\n"


def chunk(text: str, reason: str | None = None) -> bytes:
    return event(choices=[{"text": text, "finish_reason": reason}], usage=None)


END = event(choices=[], usage={"completion_tokens": 5}) + b"data: [DONE]\n\n"


class Canned:
    """A server that answers each connection with these pieces, and then closes it."""

    def __init__(self, *pieces: bytes, stays: bool = False) -> None:
        self.requests: list[bytes] = []
        self.leave = threading.Event()
        self._pieces, self._stays = pieces, stays
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.address: tuple[str, int] = self._socket.getsockname()
        self._threads: list[threading.Thread] = []
        self._thread = threading.Thread(target=self._accept, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self.leave.set()
        self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        self._thread.join()
        for thread in self._threads:
            thread.join()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return
            thread = threading.Thread(target=self._answer, args=(connection,), daemon=True)
            self._threads.append(thread)
            thread.start()

    def _answer(self, connection: socket.socket) -> None:
        with connection:
            data = connection.recv(65536)
            if not data:
                return
            self.requests.append(data)
            for piece in self._pieces:
                connection.sendall(piece)
            if self._stays:
                self.leave.wait(20)


@pytest.fixture
def serve() -> Iterator[Any]:
    made: list[Canned] = []

    def start(*pieces: bytes, stays: bool = False) -> Canned:
        made.append(Canned(*pieces, stays=stays))
        return made[-1]

    yield start
    for each in made:
        each.close()


def test_a_stream_is_timed_by_its_texts(serve: Any) -> None:
    pieces = (HEAD, chunk(""), chunk("a"), chunk("b"), chunk("", "length") + END)
    stream = Stream(serve(*pieces).address, "/v1/completions", body([1, 2], 5))
    stream.send()
    read_until([stream], 1, 10)
    stream.socket.close()
    stream.parts, stream.times = list(pieces), [1.0, 2.0, 3.0, 4.0, 5.0]
    stream.start = 0.5
    assert stream.timing() == Timing(0.5, 3.0, 5.0, 5)


@pytest.mark.parametrize(
    "answer",
    [b"HTTP/1.1 503 Service Unavailable\r\n\r\nbusy", HEAD + chunk("a"), HEAD + END, b""],
)
def test_an_answer_that_is_no_whole_stream_is_an_error(serve: Any, answer: bytes) -> None:
    server = serve(answer)
    host, port = server.address
    command = {"do": "load", "host": host, "port": port, "path": "/p", "bodies": [body("x", 5)]}
    with pytest.raises(ValueError, match=r"answered|without an end"):
        Client().run(command)


def test_the_client_is_a_program_that_answers_each_command(serve: Any) -> None:
    server = serve(HEAD + chunk("a"), chunk("b", "length") + END)
    host, port = server.address
    load = {"do": "load", "host": host, "port": port, "path": "/v1/completions"}
    with LoadProcess() as client:
        result = client.ask({**load, "bodies": [body([1], 5), body([2], 5)]})
        assert len(result["timings"]) == 2
        assert all(t["start"] <= t["first"] <= t["last"] for t in result["timings"])
        assert result["cpu_seconds"] >= 0
        with pytest.raises(StepError, match="the load failed"):
            client.ask({**load, "port": 1, "bodies": [body([1], 5)]})
        assert client.ask({**load, "bodies": [body([1], 5)]})["timings"]
    sent = sorted(json.loads(r.partition(b"\r\n\r\n")[2])["prompt"] for r in server.requests)
    assert sent == [[1], [1], [2]]
    assert all(b"connection: close" in r for r in server.requests)


def test_streams_are_held_until_they_are_released(serve: Any) -> None:
    server = serve(HEAD + COMMENT + chunk("a"), stays=True)
    host, port = server.address
    command = {"do": "hold", "host": host, "port": port, "path": "/p", "bodies": [{}] * 4}
    client = Client()
    assert client.run(command) == {"waiting": 0}
    quiet = serve(HEAD + COMMENT, stays=True)
    held = list(client._held)
    assert len(held) == 4
    client.run({"do": "release"})
    assert [stream.socket.fileno() for stream in held] == [-1] * 4
    silent = Stream(quiet.address, "/p", {})
    silent.send()
    with pytest.raises(TimeoutError, match="0 of 1 streams"):
        read_until([silent], 1, 0.05, mark=b"data: ")
    silent.socket.close()


def run_of(count: int, first: float, pace: float, cpu: float = 1.0) -> Run:
    """`count` requests of 5 tokens."""
    timing = Timing(10.0, 10.0 + first, 10.0 + first + 4 * pace, 5)
    return Run((timing,) * count, cpu, cpu / 2)


def test_figures_are_those_of_the_clock() -> None:
    run = run_of(4, 0.5, 0.25)
    assert run.ttft == pytest.approx(0.5)
    assert run.tpot == pytest.approx(0.25)
    assert run.throughput == pytest.approx(20 / 1.5)


def a_round(slower: float) -> Round:
    return Round(
        alone={"in_process": run_of(1, 0.1, 0.1), "http": run_of(1, 0.1 + slower, 0.1 + slower)},
        together={"in_process": run_of(16, 0.1, 0.1), "http": run_of(16, 0.1, 0.1 + slower)},
    )


@pytest.fixture
def facts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_server_report, "bundle_facts", lambda bundle: {"source": "s"})


@pytest.mark.parametrize(
    ("slower", "idle_bytes", "ready", "missed"),
    [
        (0.0, 100e6, 2.0, []),
        (
            *(0.006, 300e6, 4.0),
            [target.name for target in TARGETS],
        ),
    ],
)
def test_the_report_says_which_aims_are_missed(
    facts: None, slower: float, idle_bytes: float, ready: float, missed: list[str]
) -> None:
    rounds = [a_round(slower), a_round(slower), a_round(1.0)]
    idle = Idle(1000, 50_000_000, 50_000_000 + int(idle_bytes))
    measured = Measured(rounds, [ready] * 3, idle)
    bundle: Any = None
    document = server_report(bundle, OPTIONS, {"threads": 2}, measured)
    assert json.loads(json.dumps(document, allow_nan=False)) == json.loads(json.dumps(document))
    assert [t["name"] for t in document["targets"] if not t["met"]] == missed
    added = document["results"]["ttft_added_seconds"]
    assert (added["median"], added["max"]) == (pytest.approx(slower), pytest.approx(1.0))
    assert document["together"]["requests"] == 16
    assert document["together"]["http"]["client_cpu"]["median"] == 0.5
    table = server_table(document)
    assert len(table.rows) == len(TARGETS)
    assert all(len(row) == len(table.columns) for row in table.rows)
    last = server_summary(document)[-1]
    assert last == f"missed: {', '.join(missed)}" if missed else "missed" not in last


def test_what_was_not_measured_is_neither_met_nor_missed(facts: None) -> None:
    bundle: Any = None
    document = server_report(bundle, OPTIONS, {}, Measured([a_round(0.0)], [1.0], None))
    assert [t["met"] for t in document["targets"] if t["name"] == "idle_bytes"] == [None]
    assert server_table(document).rows[3][3] == "-"


def test_options_that_cannot_work_are_refused() -> None:
    OPTIONS.check(13)
    with pytest.raises(UsageError, match=r"8 \+ 5 = 13 tokens; allowed: 12"):
        OPTIONS.check(12)
    with pytest.raises(UsageError, match="output-len: got 1"):
        ServerBenchOptions(8, 1, 1, 0, 0, 0).check(100)


def test_the_program_gets_the_engines_options() -> None:
    given = {"intra_op_num_threads": 2, "spin": False, "host_cache": True, "kernels": "native"}
    assert program_arguments(given) == [
        *("--threads", "2", "--kernels", "native", "--no-spin", "--host-cache"),
    ]


def test_memory_is_that_of_the_process(tmp_path: Path) -> None:
    (tmp_path / "7").mkdir()
    (tmp_path / "7" / "status").write_text("Name:\tx\nVmRSS:\t   12 kB\nRssAnon:\t 5 kB\n")
    assert resident_bytes(7, tmp_path) == 12 * 1024
    assert resident_bytes(8, tmp_path) is None
    own = resident_bytes(os.getpid())
    assert own is None or own > 1_000_000


def test_too_many_files_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    allowed: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (100, 500))
    monkeypatch.setattr(resource, "setrlimit", lambda kind, limits: allowed.append(limits))
    allow_files(50)
    allow_files(400)
    assert allowed == [(400, 500)]
    with pytest.raises(StepError, match="600 open files are needed; the system allows 500"):
        allow_files(600)


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch, facts: None) -> list[ServerBenchOptions]:
    """Replaces the measurement; collects what it was asked for."""
    asked: list[ServerBenchOptions] = []

    def measure(
        bundle: str, options: ServerBenchOptions, values: dict[str, Any], progress: object
    ) -> dict[str, Any]:
        asked.append(options)
        assert values["kernels"] == "native"
        nothing: Any = None
        return server_report(nothing, options, {}, Measured([a_round(0.5)], [1.0], None))

    monkeypatch.setattr("trtllm_lite.tools.bench_server.measure_server", measure)
    return asked


def run(*args: str) -> Result:
    return CliRunner().invoke(cli, ["bench", "b", "--server", "--kernels", "native", *args])


def test_the_command_writes_one_document(
    measured: list[ServerBenchOptions], tmp_path: Path
) -> None:
    file = tmp_path / "out.json"
    lengths = ("--input-len", "9,3", "--output-len", "7", "--idle-streams", "0")
    result = run(*lengths, "--repeats", "4", "--json", "--output", str(file))
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout) == json.loads(file.read_text())
    assert measured == [ServerBenchOptions(9, 7, 4, warmup=1, seed=0, idle_streams=0)]


def test_the_command_shows_a_table(measured: list[ServerBenchOptions]) -> None:
    shown = run().stdout
    assert "TPOT ms, 1 request" in shown
    assert "missed: ttft_added_seconds, tpot_added_share, throughput_share" in shown


def test_what_cannot_work_is_refused_before_any_run(measured: list[ServerBenchOptions]) -> None:
    assert "--breakdown: not with --server" in run("--breakdown").stderr
    assert "does not exist" in run("--output", "/not/there/x.json").stderr
    assert measured == []
