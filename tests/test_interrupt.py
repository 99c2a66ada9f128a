"""Ctrl-C stops a run at once, wherever it comes, and leaves everything usable."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from command_line import sigint_as_usual

from tfmx.runtime.interrupt import run_interruptible

LIMIT = 0.25  # seconds from the signal to the exception

# A chain of matrix products that takes ten seconds or more, as one run.
LONG_RUN = """
import sys, time, types
from pathlib import Path
import numpy as np
from onnx import helper, numpy_helper
from tfmx.runtime.bundle import GraphInfo
from tfmx.runtime.devices import Device
from tfmx.runtime.session import Session, SessionError

size, count = 512, 4000
nodes = [helper.make_node("MatMul", [f"x{i}", "w"], [f"x{i + 1}"]) for i in range(count)]
value = lambda name: helper.make_tensor_value_info(name, 1, [size, size])
weight = numpy_helper.from_array(np.eye(size, dtype=np.float32), "w")
graph = helper.make_graph(nodes, "long", [value("x0")], [value(f"x{count}")], [weight])
model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8)
manifest = types.SimpleNamespace(files={}, has_int8_cache=False, quant=None, graphs={"long": GraphInfo(file="long.onnx", inputs=(), outputs=())})
bundle = types.SimpleNamespace(manifest=manifest, path=Path("."), graph=lambda _: model.SerializeToString())
session = Session(bundle, "long", Device("cpu", "test"), threads=1)
binding = session.binding()
binding.input("x0", np.ones((size, size), np.float32))
result = np.zeros((size, size), np.float32)
binding.output(f"x{count}", result)
print("running", flush=True)
for attempt in range(2):
    try:
        session.run(binding)
        print("finished", flush=True)
    except KeyboardInterrupt:
        print("interrupted", flush=True)
"""


def start(code: str) -> subprocess.Popen[str]:
    pipe = subprocess.PIPE
    with sigint_as_usual():
        return subprocess.Popen([sys.executable, "-c", code], stdin=pipe, stdout=pipe, stderr=pipe, text=True)


def read_line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    line = process.stdout.readline().strip()
    if not line:
        raise AssertionError(process.communicate()[1])
    return line


def test_ctrl_c_stops_a_long_run_in_time_and_the_session_runs_again():
    process = start(LONG_RUN)
    assert read_line(process) == "running"
    for _ in range(2):  # the second run is a fresh one: a terminated run must not poison the session
        time.sleep(0.6)
        sent = time.monotonic()
        process.send_signal(signal.SIGINT)
        assert read_line(process) == "interrupted"
        assert time.monotonic() - sent < LIMIT
    _, errors = process.communicate()
    assert process.returncode == 0
    assert errors == ""  # onnxruntime's own complaint about the terminated run is not shown


GENERATE = """
import sys
sys.path.insert(0, {tests!r})
from pathlib import Path
import tfmx
from tiny_bundle import reference_greedy, tiny_weights
from tfmx.runtime.sampling import SamplingOptions

model = tfmx.load({folder!r}, threads=1)
free = SamplingOptions(ignore_eos=True)
messages = [{{"role": "user", "content": "Hi"}}]
print("running", flush=True)
try:
    while True:
        for step in model.chat(messages, free):
            pass
except KeyboardInterrupt:
    print("interrupted", flush=True)
expected = reference_greedy(tiny_weights(), model.chat_ids(messages), 8)
print([step.token_id for step in model.chat(messages, free, max_new_tokens=8)] == expected, flush=True)
"""


@pytest.mark.parametrize("flavour", ["append", "capacity"])
def test_a_chat_goes_on_rightly_after_ctrl_c_at_any_moment(flavour, tmp_path):
    from tiny_bundle import write_bundle

    write_bundle(tmp_path / "b", flavour)
    code = GENERATE.format(tests=str(Path(__file__).parent), folder=str(tmp_path / "b"))
    for delay in (0.05, 0.123, 0.2):
        process = start(code)
        assert read_line(process) == "running"
        time.sleep(delay)
        sent = time.monotonic()
        process.send_signal(signal.SIGINT)
        assert read_line(process) == "interrupted"
        assert time.monotonic() - sent < LIMIT
        assert read_line(process) == "True"
        process.communicate()
        assert process.returncode == 0


def test_an_answer_imports_nothing_from_outside(tmp_path):
    """While some modules are imported (numpy.random's), Ctrl-C is lost: one press of 600 was."""
    from tiny_bundle import write_bundle

    write_bundle(tmp_path / "b", "capacity")
    code = f"""
import sys
import tfmx
from tfmx.runtime.sampling import SamplingOptions
model = tfmx.load({str(tmp_path / "b")!r}, threads=1)
before = set(sys.modules)
list(model.chat([{{"role": "user", "content": "Hi"}}], SamplingOptions(temperature=1.0), max_new_tokens=4))
print(sorted(name for name in set(sys.modules) - before if not name.startswith("tfmx.")))
"""
    assert start(code).communicate() == ("[]\n", "")


def test_work_runs_and_its_errors_come_back():
    assert run_interruptible(lambda: 42, lambda: None) == 42
    with pytest.raises(ZeroDivisionError):
        run_interruptible(lambda: 1 / 0, lambda: None)
    assert run_interruptible(threading.current_thread, lambda: None).name == "tfmx-run"


def test_another_thread_runs_its_own_work():
    names = []
    thread = threading.Thread(
        target=lambda: names.append(run_interruptible(lambda: threading.current_thread().name, lambda: None)),
        name="other",
    )
    thread.start()
    thread.join()
    assert names == ["other"]


@pytest.mark.parametrize("presses", [1, 3])
def test_an_interrupt_cancels_and_waits_until_the_work_has_ended(presses):
    """Also when the user is impatient: buffers must not be freed under the native code."""
    events: list[str] = []
    stop = threading.Event()

    def work() -> None:
        stop.wait(5)
        time.sleep(0.2)  # the native code takes a moment to notice
        events.append("work ended")

    def cancel() -> None:
        events.append("cancelled")
        stop.set()

    def press() -> None:
        for _ in range(presses):
            time.sleep(0.1)
            os.kill(os.getpid(), signal.SIGINT)

    presser = threading.Thread(target=press)
    with sigint_as_usual():
        presser.start()
        with pytest.raises(KeyboardInterrupt):
            run_interruptible(work, cancel)
        try:
            presser.join()
        except KeyboardInterrupt:
            presser.join()
    assert events == ["cancelled", "work ended"]
    assert run_interruptible(lambda: "next", lambda: None) == "next"


def test_a_forked_child_gets_a_worker_of_its_own():
    code = """
import os
from tfmx.runtime.interrupt import run_interruptible
assert run_interruptible(lambda: 1, lambda: None) == 1
child = os.fork()
if child == 0:
    os._exit(run_interruptible(lambda: 7, lambda: None))
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
print("ok")
"""
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=30, check=False
    )
    assert result.stdout.strip() == "ok", result.stderr


def test_handing_over_costs_little():
    times = []
    for _ in range(300):
        begin = time.perf_counter()
        run_interruptible(lambda: None, lambda: None)
        times.append(time.perf_counter() - begin)
    assert min(times) < 200e-6, f"{min(times) * 1e6:.0f} µs"  # 20 µs when the machine is free
