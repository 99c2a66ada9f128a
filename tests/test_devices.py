"""Which device is taken, and what is said when CUDA cannot be had. No GPU is needed: the reasons are planted."""

from __future__ import annotations

import ctypes
import os
import threading
from importlib import metadata
from types import SimpleNamespace

import pytest
from onnx import helper
from tiny_bundle import write_bundle

import tfmx
from tfmx import InputError, TfmxError
from tfmx.runtime import devices
from tfmx.runtime.bundle import Bundle
from tfmx.runtime.devices import (
    PROBE_MODEL,
    Device,
    DeviceError,
    OnnxRuntimeMissingError,
    check_assignment,
    choose_device,
    cuda_problem,
)
from tfmx.runtime.extras import install_advice

CUDA, CPU = "CUDAExecutionProvider", "CPUExecutionProvider"


class Driver:
    def __init__(self, status=0, count=1):
        self.status, self.count = status, count

    def cuInit(self, _flags):  # noqa: N802 (the driver's own names)
        return self.status

    def cuDeviceGetCount(self, count):  # noqa: N802
        count._obj.value = self.count
        return 0


class Runtime:
    """onnxruntime-gpu on a machine with a GPU, but for what a test breaks."""

    def __init__(self):
        self.said = ""
        self.given = [CUDA, CPU]
        self.result = [3.0]
        self.asked = []
        self.severities = []

    def get_available_providers(self):
        return [CUDA, CPU]

    def preload_dlls(self):
        print(self.said)

    def set_default_logger_severity(self, severity):
        self.severities.append(severity)

    class SessionOptions:
        def __init__(self):
            self.entries = {}

        def add_session_config_entry(self, key, value):
            self.entries[key] = value

    def InferenceSession(self, model, options, providers, enable_fallback):  # noqa: N802
        self.asked.append((model, options.entries, providers, enable_fallback))
        if isinstance(self.given, Exception):
            raise self.given
        result = SimpleNamespace(tolist=lambda: self.result)
        return SimpleNamespace(get_providers=lambda: self.given, run=lambda *_: [result])


@pytest.fixture
def machine(monkeypatch):
    """A machine where CUDA works."""
    runtime = Runtime()
    packages = {"onnxruntime-gpu"}

    def distribution(name):
        if name not in packages:
            raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "distribution", distribution)
    monkeypatch.setattr(devices, "import_onnxruntime", lambda: runtime)
    monkeypatch.setattr(ctypes, "CDLL", lambda _name: Driver())
    return SimpleNamespace(runtime=runtime, packages=packages)


def test_the_probe_is_one_addition():
    value = [helper.make_tensor_value_info(name, 1, ["n"]) for name in "xy"]
    graph = helper.make_graph([helper.make_node("Add", ["x", "x"], ["y"])], "probe", value[:1], value[1:])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8)
    assert model.SerializeToString(deterministic=True) == PROBE_MODEL


def test_the_probe_runs_where_onnxruntime_runs():
    import numpy as np
    import onnxruntime

    session = devices.make_session(PROBE_MODEL, onnxruntime.SessionOptions(), Device("cpu", "test"))
    assert session.run(None, {"x": np.asarray([1.5], np.float32)})[0].tolist() == [3.0]


def test_cuda_is_taken_where_it_works(machine):
    assert cuda_problem() is None
    assert choose_device("cuda") == Device("cuda", "asked for")
    assert choose_device("auto") == Device("cuda", "CUDA works here")
    assert choose_device("cpu") == Device("cpu", "asked for")
    assert machine.runtime.severities[-1] == 2  # the log level is put back


def test_the_probe_allows_no_fallback(machine):
    cuda_problem()
    model, entries, providers, enable_fallback = machine.runtime.asked[0]
    assert model == PROBE_MODEL
    assert entries["session.disable_cpu_ep_fallback"] == "1"
    assert [provider for provider, _ in providers] == [CUDA]
    assert enable_fallback == 0


def no_driver(_name):
    raise OSError("not found")


def break_packages(machine, monkeypatch):
    machine.packages.add("onnxruntime")


def break_provider(machine, monkeypatch):
    machine.packages.clear()
    machine.packages.add("onnxruntime")
    machine.runtime.get_available_providers = lambda: [CPU]


def break_build(machine, monkeypatch):
    machine.packages.clear()
    machine.runtime.get_available_providers = lambda: [CPU]


def break_driver(machine, monkeypatch):
    monkeypatch.setattr(ctypes, "CDLL", no_driver)


def break_init(machine, monkeypatch):
    monkeypatch.setattr(ctypes, "CDLL", lambda _name: Driver(status=999))


def break_count(machine, monkeypatch):
    monkeypatch.setattr(ctypes, "CDLL", lambda _name: Driver(count=0))


def break_libraries(machine, monkeypatch):
    machine.runtime.said = "Failed to load libcublasLt.so.13: cannot open\nFailed to load libcudnn.so.9: no"


def break_session(machine, monkeypatch):
    machine.runtime.given = RuntimeError("cuDNN\nversion mismatch")


def break_silently(machine, monkeypatch):
    machine.runtime.given = [CPU]


def break_arithmetic(machine, monkeypatch):
    machine.runtime.result = [0.0]


PROBLEMS = {
    break_packages: "both onnxruntime and onnxruntime-gpu are installed, and they overwrite each other's files; "
    "`pip uninstall onnxruntime onnxruntime-gpu`, then " + install_advice("cuda"),
    break_provider: "the installed onnxruntime is the CPU package; "
    "`pip uninstall onnxruntime`, then " + install_advice("cuda"),
    break_build: "the installed onnxruntime was built without CUDA; in a new environment, "
    + install_advice("cuda"),
    break_driver: "there is no NVIDIA driver here (libcuda.so.1 is not found); install one, or run with --device cpu",
    break_init: "the NVIDIA driver does not start (error 999); see `nvidia-smi`, or run with --device cpu",
    break_count: "the NVIDIA driver sees no GPU; see `nvidia-smi`, or run with --device cpu",
    break_libraries: "CUDA libraries are missing (libcublasLt.so.13, libcudnn.so.9); "
    "they come with " + install_advice("cuda"),
    break_session: "a test run failed (cuDNN version mismatch); see `nvidia-smi`, and `tfmx doctor` for the versions",
    break_silently: f"a test run failed (onnxruntime gave {CPU} instead of {CUDA}); "
    "see `nvidia-smi`, and `tfmx doctor` for the versions",
    break_arithmetic: "a test run gave [0.0] for 1.5 + 1.5",
}


@pytest.mark.parametrize(
    ("fault", "line"), PROBLEMS.items(), ids=lambda value: getattr(value, "__name__", None)
)
def test_cuda_asked_for_in_vain_says_why_and_what_to_do(machine, monkeypatch, capsys, fault, line):
    fault(machine, monkeypatch)
    with pytest.raises(DeviceError) as caught:
        choose_device("cuda")
    assert str(caught.value) == f"CUDA cannot be used: {line}"
    assert isinstance(caught.value, InputError)
    chosen = choose_device("auto")
    assert chosen == Device("cpu", f"no CUDA: {line}")
    assert capsys.readouterr() == ("", "")  # what onnxruntime prints is not passed on


def test_an_unknown_device_is_an_error():
    with pytest.raises(DeviceError, match=r"^there is no device 'tpu'; choose cpu, cuda or auto$"):
        choose_device("tpu")


def test_onnxruntime_missing_says_what_to_install(monkeypatch):
    import builtins

    real = builtins.__import__

    def without(name, *args, **kwargs):
        if name == "onnxruntime":
            raise ImportError("No module named 'onnxruntime'")
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    line = r"^onnxruntime cannot be imported \(No module named 'onnxruntime'\); `pip install '\.\[cpu\]'` in a clone"
    with pytest.raises(OnnxRuntimeMissingError, match=line) as caught:
        choose_device("cpu")
    assert isinstance(caught.value, TfmxError)


@pytest.mark.parametrize(
    ("flavour", "dtype", "refused"),
    [("capacity", "fp32", True), ("capacity", "fp16", False), ("append", "fp32", False)],
)
def test_a_bundle_without_cuda_kernels_is_refused_before_anything_is_tried(
    machine, tmp_path, flavour, dtype, refused
):
    write_bundle(tmp_path / "b", flavour, dtype=dtype)
    bundle = Bundle.open(tmp_path / "b")
    if not refused:
        assert choose_device("cuda", bundle).kind == "cuda"
        return
    with pytest.raises(DeviceError, match=r"export with --dtype fp16 or --target portable$"):
        choose_device("cuda", bundle)
    assert choose_device("auto", bundle).kind == "cpu"
    assert machine.runtime.asked == []


def test_this_machine_says_what_it_is(tmp_path):
    """Whatever the machine: auto works, and cuda works or says why not."""
    write_bundle(tmp_path / "b", "append")
    model = tfmx.load(tmp_path / "b", device="auto")
    assert model.device.reason
    assert len(list(model.generate([1, 2], max_new_tokens=2))) == 2
    problem = cuda_problem()
    if problem is not None:
        with pytest.raises(DeviceError):
            tfmx.load(tmp_path / "b", device="cuda")


def assigned(provider, *ops):
    return SimpleNamespace(ep_name=provider, get_nodes=lambda: [SimpleNamespace(op_type=op) for op in ops])


def test_real_work_on_the_cpu_in_a_cuda_session_is_refused():
    check_assignment([assigned(CUDA, "MatMul", "Softmax"), assigned(CPU, "Shape", "Gather", "Range")])
    with pytest.raises(
        DeviceError, match=r"^MatMul of this bundle has no CUDA kernel here; run with --device cpu$"
    ):
        check_assignment([assigned(CUDA, "Softmax"), assigned(CPU, "Shape", "MatMul")])


def test_the_assignment_record_is_what_onnxruntime_gives():
    """The CPU build has it too: the names that check_assignment reads exist."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.add_session_config_entry("session.record_ep_graph_assignment_info", "1")
    session = devices.make_session(PROBE_MODEL, options, Device("cpu", "test"))
    record = session.get_provider_graph_assignment_info()
    assert [(part.ep_name, [node.op_type for node in part.get_nodes()]) for part in record] == [
        (CPU, ["Add"])
    ]


@pytest.mark.cuda
@pytest.mark.parametrize(("flavour", "dtype"), [("append", "fp32"), ("append", "fp16"), ("capacity", "fp16")])
def test_cuda_gives_what_the_cpu_gives(flavour, dtype, tmp_path):
    problem = cuda_problem()
    if problem is not None:
        pytest.skip(f"no CUDA: {problem}")
    from tfmx.runtime.sampling import SamplingOptions

    write_bundle(tmp_path / "b", flavour, dtype=dtype, select=True)
    free = SamplingOptions(ignore_eos=True)
    prompts = [[5, 9, 17], [7], list(range(1, 40))]
    results = {}
    for device in ("cpu", "cuda"):
        model = tfmx.load(tmp_path / "b", device=device)
        results[device] = [
            result.token_ids for result in model.generate_batch(prompts, free, max_new_tokens=24)
        ]
    assert results["cpu"] == results["cuda"]


def test_int8_caches_have_the_plain_attention_and_the_environment_is_left_as_it_was(monkeypatch):
    variable, seen = "ORT_GQA_DISABLE_FLASH_ATTENTION", []
    monkeypatch.delenv(variable, raising=False)
    with devices.fastest_attention(int8_cache=True):
        seen.append(os.environ[variable])
    assert seen == ["1"]
    assert variable not in os.environ
    with devices.fastest_attention(int8_cache=False):
        assert variable not in os.environ
    monkeypatch.setenv(variable, "0")  # the user has chosen
    with devices.fastest_attention(int8_cache=True):
        assert os.environ[variable] == "0"
    assert os.environ[variable] == "0"


def test_two_threads_do_not_take_each_others_setting_for_the_users(monkeypatch):
    variable, seen, entered = "ORT_GQA_DISABLE_FLASH_ATTENTION", [], threading.Event()
    monkeypatch.delenv(variable, raising=False)

    def make():
        with devices.fastest_attention(int8_cache=True):
            entered.set()
            seen.append(os.environ.get(variable))

    other = threading.Thread(target=make)
    with devices.fastest_attention(int8_cache=True):
        other.start()
        assert not entered.wait(0.2)
    other.join(30)
    assert seen == ["1"]
    assert variable not in os.environ
