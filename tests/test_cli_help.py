"""Help texts are as committed, cheap to show, and wrong usage is one line with exit code 2.

After a change of an option: `COLUMNS=100 python tests/test_cli_help.py > tests/data/help.txt`, and read the diff.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # when it is run as a program

from command_line import program, tfmx

import tfmx as package
from tfmx.cli import boundary
from tfmx.cli.entry import COMMANDS

HELP = Path(__file__).parent / "data" / "help.txt"


def help_texts() -> str:
    texts = []
    for command in ((), *((name,) for name in COMMANDS)):
        done = tfmx(*command, "--help")
        assert (done.code, done.err) == (0, "")
        texts.append(f"$ tfmx {' '.join((*command, '--help'))}\n{done.out}")
    return "\n".join(texts)


def test_the_help_texts_are_as_committed(monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    assert help_texts() == HELP.read_text(encoding="utf-8")


@pytest.mark.parametrize("command", COMMANDS)
def test_every_option_is_explained_with_its_default(command):
    from tfmx.cli.entry import group

    found = group.get_command(None, command)
    for option in found.params:
        if option.param_type_name == "option":
            assert option.help, option.name
            says_default = option.show_default or "[default:" in option.help
            needs_none = option.is_flag or option.required or option.multiple or option.name in NO_DEFAULT
            assert says_default or needs_none, f"{command} {option.opts}: {option.help}"


NO_DEFAULT = {"file", "ids", "logprobs", "against", "quality", "plot"}  # off unless given


@pytest.mark.parametrize("command", [(), *((name,) for name in COMMANDS)])
def test_every_help_has_all_exit_codes_as_the_readme_has_them(command, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    codes = {str(code) for code in (0, 1, 2, boundary.INTERRUPTED, boundary.BROKEN_PIPE, boundary.TERMINATED)}
    assert set(re.findall(r"\d+", boundary.EXIT_CODES)) == codes
    assert boundary.EXIT_CODES in " ".join(tfmx(*command, "--help").out.split())
    assert boundary.EXIT_CODES in (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")


def test_help_needs_nothing_heavy():
    code = (
        "import json, sys\nfrom tfmx.cli.boundary import run_guarded\nfrom tfmx.cli.entry import group\n"
        "for command in ([], ['export'], ['run'], ['attend'], ['verify'], ['inspect'], ['bench'], ['doctor']):\n"
        "    assert run_guarded(group, [*command, '--help']) == 0\n"
        "print(json.dumps(sorted({name.split('.')[0] for name in sys.modules})))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = set(json.loads(done.stdout.splitlines()[-1]))
    assert "click" in loaded
    assert loaded & {"rich", "numpy", "onnxruntime", "torch", "onnx", "tokenizers", "jinja2", "PIL"} == set()


def test_the_group_loads_only_the_command_that_is_asked_for():
    code = (
        "import sys\nfrom tfmx.cli.boundary import run_guarded\nfrom tfmx.cli.entry import group\n"
        "run_guarded(group, ['doctor', '--help'])\n"
        "print([name for name in sys.modules if name.startswith('tfmx.cli.')], file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "tfmx.cli.doctor" in done.stderr
    assert "tfmx.cli.run" not in done.stderr
    assert "tfmx.cli.export" not in done.stderr


def test_it_runs_as_a_program():
    assert program("--version").out == f"tfmx {package.__version__}\n"
    assert program("-h").out.startswith("Usage: tfmx ")


def test_without_a_command_it_shows_the_help_and_fails():
    done = tfmx()
    assert (done.code, done.out) == (2, "")
    assert done.err == tfmx("--help").out


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["rum"], ["No such command", "rum", "did you mean run?", "`tfmx --help`"]),
        (["exprot", "s"], ["No such command 'exprot' (did you mean export?)", "there are export, run"]),
        (["xyz"], ["No such command 'xyz'; there are export, run"]),
        (["--bogus"], ["No such option", "--bogus"]),
        (["run"], ["Missing argument", "BUNDLE", "`tfmx run --help`"]),
        (["run", "b", "p", "q"], ["unexpected extra argument"]),
        (["run", "b", "p", "--tempratur", "1"], ["No such option", "--temperature"]),
        (["run", "b", "p", "--temperature", "warm"], ["--temperature", "warm"]),
        (["run", "b", "p", "--device", "gpu"], ["'gpu' is not one of 'cpu', 'cuda', 'auto' (see"]),
        (
            ["export", "s", "-o", "b", "--target", "portble"],
            ["'portble' is not one of", "(did you mean portable?)"],
        ),
        (["export", "s", "-o", "b", "--quant", "int-4"], ["'int-4' is not one of", "(did you mean int4?)"]),
        (["export", "s", "-o", "b", "--quant-roundd", "x"], ["No such option", "--quant-round"]),
        (["export", "s", "-o", "b", "--quant-activation", "x"], ["No such option", "--quant-activations"]),
        (["export", "s", "-o", "b", "--no-verfy"], ["No such option", "--no-verify"]),
        (["run", "b", "p", "--device", "tpu"], ["--device", "tpu", "cuda"]),
        (["run", "b", "p", "--threads", "many"], ["--threads", "many"]),
        (["export", "s"], ["Missing option", "-o"]),
        (["export", "s", "-o", "b", "--target", "trt"], ["--target", "trt", "portable"]),
        (["export", "s", "-o", "b", "--dtype", "int4"], ["--dtype", "int4", "fp16"]),
        (["export", "s", "-o", "b", "--opset", "new"], ["--opset", "new"]),
        (["export", "s", "-o", "b", "--max-context", "1e3"], ["--max-context", "1e3"]),
        (["export", "s", "-o", "b", "--attentions", "first"], ["--attentions is 'first'", "all", "0,2-4"]),
        (["attend", "b", "i"], ["Missing option", "-o"]),
        (["attend", "b", "i", "-o", "m.jpg"], ["--out is 'm.jpg'", ".png or .html"]),
        (["attend", "b", "i", "-o", "m.png", "--of", "all"], ["--of", "cross"]),
        (["verify"], ["Missing argument", "BUNDLE"]),
        (["verify", "b", "--against"], ["--against"]),
        (["verify", "b", "--against", "s", "--device", "cuda"], ["--against compares on the CPU"]),
        (["inspect"], ["Missing argument", "BUNDLE"]),
        (["inspect", "b", "--json"], ["No such option", "--json"]),
        (["verify", "b", "--quality"], ["--quality compares with the source; add --against SOURCE"]),
        (["bench"], ["Missing argument", "BUNDLE"]),
        (["bench", "b", "--batch", "few"], ["--batch", "few"]),
        (["bench", "b", "--lengths", "1-5"], ["--lengths is '1-5'; wanted numbers such as 32,512"]),
        (["doctor", "x"], ["unexpected extra argument"]),
    ],
)
def test_wrong_usage_is_one_line(arguments, parts):
    tfmx(*arguments).fails(2, *parts)


if __name__ == "__main__":
    print(help_texts(), end="")
