"""`tfmx run --chat`: turns, history and slash commands, from a pipe and at a real terminal; and Ctrl-C there."""

from __future__ import annotations

import contextlib
import json
import os
import re
import select
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from command_line import ENDLESS, PROGRAM, bundle, copied, long_bundle, sigint_as_usual, tfmx, without

import tfmx as package

if sys.platform == "win32":
    pytest.skip("terminals of Unix", allow_module_level=True)
import pty

from tfmx.runtime.model import Model

SHORT = (*ENDLESS, "--max-tokens", "3")  # every answer is uuu


def chat(*arguments, stdin: bytes = b"", **options):
    return tfmx("run", bundle(), "--chat", "-q", *SHORT, *arguments, stdin=stdin, **options)


@pytest.fixture
def prompts(monkeypatch):
    """The messages of each turn, as the model gets them."""
    seen = []
    answer = Model.chat

    def listen(self, messages, *arguments, **options):
        seen.append([(message["role"], message["content"]) for message in messages])
        return answer(self, messages, *arguments, **options)

    monkeypatch.setattr(Model, "chat", listen)
    return seen


# --- without a terminal ----------------------------------------------------------------------------------


def test_a_prompt_is_one_turn_through_the_template(prompts, tmp_path):
    assert chat("Hi").out == "uuu\n"
    (tmp_path / "question").write_text("Hi\n")
    assert chat("--file", tmp_path / "question").out == "uuu\n"
    assert chat("-", stdin=b"Hi\n").out == "uuu\n"
    assert prompts == [[("user", "Hi")]] * 3


def test_the_answer_is_that_of_the_library():
    with package.load(bundle()) as model:
        wanted = "".join(s.text for s in model.chat([{"role": "user", "content": "Hi"}], max_new_tokens=20))
    assert tfmx("run", bundle(), "--chat", "Hi", "--max-tokens", "20", "-q").out == wanted + "\n"


def test_a_system_message_comes_first(prompts):
    chat("Hi", "--system", "Be brief.")
    assert prompts == [[("system", "Be brief."), ("user", "Hi")]]


def test_each_line_of_a_pipe_is_a_turn_with_its_history(prompts):
    done = chat(stdin=b"One\n\n  \nTwo\n/reset\nThree")
    assert (done.code, done.out) == (0, "uuu\nuuu\nuuu\n")
    assert done.err == "the conversation is forgotten\n"
    one = [("user", "One")]
    assert prompts == [one, [*one, ("assistant", "uuu"), ("user", "Two")], [("user", "Three")]]


def test_reset_keeps_the_system_message(prompts):
    chat("--system", "Be brief.", stdin=b"One\n/reset\nTwo\n")
    assert prompts[1] == [("system", "Be brief."), ("user", "Two")]


def test_a_line_that_begins_with_a_space_is_no_command(prompts):
    chat(stdin=b" /reset\n")
    assert prompts == [[("user", "/reset")]]


def test_quit_ends_it(prompts):
    assert chat(stdin=b"One\n/quit\nTwo\n").out == "uuu\n"
    assert len(prompts) == 1


def test_help_lists_the_commands():
    done = chat(stdin=b"/help\n")
    assert done.out == ""
    assert all(command in done.err for command in ("/reset", "/save FILE", "/quit", "/help"))


def test_save_writes_the_conversation(tmp_path):
    path = tmp_path / "talk.json"
    done = chat(stdin=f"Tschüß\n/save {path}\nMore\n/save! {path}\n".encode())
    assert done.code == 0
    assert done.err == f"saved to {path}\n" * 2
    said = json.loads(path.read_text(encoding="utf-8"))
    assert [message["content"] for message in said] == ["Tschüß", "uuu", "More", "uuu"]
    assert [message["role"] for message in said] == ["user", "assistant"] * 2


@pytest.mark.parametrize(
    ("command", "part"),
    [
        ("/dance", "there is no command /dance; /help lists them"),
        ("/save", "/save needs a file name"),
        ("/save!", "/save needs a file name"),
        ("/save {folder}/there", "there exists; `/save! {folder}/there` overwrites it"),
        ("/save! {folder}", "is no file that can be replaced"),
        ("/save! {folder}/pipe", "is no file that can be replaced"),
    ],
)
def test_a_command_that_cannot_be_done_ends_a_pipe(command, part, tmp_path):
    (tmp_path / "there").write_text("mine")
    os.mkfifo(tmp_path / "pipe")
    part = part.format(folder=tmp_path)
    chat(stdin=command.format(folder=tmp_path).encode() + b"\nHi\n").fails(2, part)
    assert (tmp_path / "there").read_text() == "mine"


def test_a_conversation_does_not_overwrite_another_that_it_saved(tmp_path):
    path = tmp_path / "talk.json"
    done = chat(stdin=f"One\n/save {path}\n/reset\nTwo\n/save {path}\n".encode())
    assert done.code == 2
    assert "exists; `/save! " in done.err
    assert json.loads(path.read_text())[0]["content"] == "One"


def test_a_place_that_cannot_be_written_ends_a_pipe(tmp_path):
    done = chat(stdin=f"/save {tmp_path}/no/such/folder\nHi\n".encode())
    done.fails(1, "cannot be written: No such file or directory")


def test_json_is_one_object_a_turn():
    done = tfmx("run", bundle(), "--chat", "--json", *SHORT, stdin=b"One\nTwo\n")
    first, second = map(json.loads, done.out.splitlines())
    assert (first["text"], first["cached_tokens"]) == ("uuu", 0)
    assert second["cached_tokens"] > 0
    assert done.err == ""


def test_a_conversation_that_outgrows_the_context_is_one_line():
    done = chat(stdin=b"Hello\n" * 9)
    assert done.code == 2
    assert re.fullmatch(
        r"tfmx: error: the conversation has \d+ tokens, the context holds 96; shorten it\n", done.err
    )


def test_a_bundle_without_a_template_is_one_line():
    with copied(bundle()) as folder:
        without(folder, "chat_template.jinja")
        tfmx("run", folder, "--chat", "Hi").fails(2, "no chat template")
        tfmx("run", folder, "--chat", stdin=b"Hi\n").fails(2, "no chat template")


def test_input_that_is_no_text_is_one_line():
    chat(stdin=b"\xff\n").fails(2, "not UTF-8")


# --- at a terminal ---------------------------------------------------------------------------------------


# Makes standard input the terminal whose Ctrl-C reaches this program, then becomes the other program.
_TAKE_TERMINAL = "import fcntl, os, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); os.execv(sys.argv[1], sys.argv[1:])"


class Terminal:
    """A program at a terminal of its own."""

    def __init__(self, *arguments: object) -> None:
        self.control, side = pty.openpty()
        self.before = termios.tcgetattr(self.control)
        with sigint_as_usual():
            self.process = subprocess.Popen(
                [sys.executable, "-c", _TAKE_TERMINAL, *PROGRAM, *map(str, arguments)],
                stdin=side, stdout=side, stderr=side, start_new_session=True, env=os.environ | {"TERM": "xterm"},
            )  # fmt: skip
        os.close(side)
        self.seen = ""

    def read(self, seconds: float = 0.1) -> str:
        """What it prints within this time; "" when there is nothing, or it has ended."""
        if not select.select([self.control], [], [], seconds)[0]:
            return ""
        try:
            text = os.read(self.control, 65536).decode("utf-8", "replace")
        except OSError:  # Linux says so when the other side is closed
            return ""
        self.seen += text
        return text

    def expect(self, pattern: str, seconds: float = 60) -> str:
        """Read on until this comes; gives what was read, and forgets it."""
        end = time.monotonic() + seconds
        while not (match := re.search(pattern, self.seen)):
            assert time.monotonic() < end, f"no {pattern!r} in {self.seen[-2000:]!r}"
            self.read()
        found, self.seen = self.seen[: match.end()], self.seen[match.end() :]
        return found

    def send(self, text: str) -> None:
        os.write(self.control, text.encode())

    def press_until(self, key: str, pattern: str) -> None:
        """Press a key until this comes, as people do: Python's `input` misses a Ctrl-C just before it begins to wait."""
        for _ in range(9):
            self.send(key)
            with contextlib.suppress(AssertionError):
                self.expect(pattern, seconds=5)
                return
        self.expect(pattern, seconds=0)

    def wait(self, seconds: float = 60) -> int:
        end = time.monotonic() + seconds
        while self.process.poll() is None:
            assert time.monotonic() < end, f"it goes on: {self.seen[-2000:]!r}"
            self.read(0.005)
        while self.read(0.01):
            pass
        return self.process.returncode

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self.control)


@contextlib.contextmanager
def terminal(*arguments: object) -> Iterator[Terminal]:
    opened = Terminal(*arguments)
    try:
        yield opened
    finally:
        opened.close()


CTRL_C, CTRL_D = "\x03", "\x04"


def test_a_conversation_at_a_terminal(tmp_path):
    with terminal("run", bundle(), "--chat", *SHORT) as there:
        there.expect(r"/help lists the commands, Ctrl-D ends\r\n.*> ")
        there.send("One\r")
        there.expect(r"uuu\r\nprefill .* end: length\r\n.*> ")
        there.send("/dance\r")
        there.expect(r"tfmx: error: there is no command /dance; /help lists them\r\n.*> ")
        there.send(f"/save {tmp_path}/talk\r")
        there.expect(r"saved to .*/talk\r\n.*> ")
        there.send("half a line")
        there.expect("half a line")
        there.press_until(CTRL_C, r"\r\n.*> ")
        there.send("x" * 200 + "\r")
        there.expect(
            r"tfmx: error: the conversation has \d+ tokens, the context holds 96; shorten it\r\n.*> "
        )
        there.send("Two\r")
        there.expect(r"uuu\r\nprefill .* cached\)")
        there.expect("> ")
        there.send(CTRL_D)
        assert there.wait() == 0
        assert there.seen.endswith("\n")
        assert termios.tcgetattr(there.control) == there.before
    assert len(json.loads((tmp_path / "talk").read_text())) == 2


def test_ctrl_c_stops_the_answer_and_not_the_conversation(tmp_path):
    with terminal("run", long_bundle(), "--chat", "-q", *ENDLESS) as there:
        there.expect("> ")
        there.send("Talk\r")
        there.expect("uuuuu")
        sent = time.monotonic()
        there.send(CTRL_C)
        there.expect(r"\r\n.*> $")
        assert time.monotonic() - sent < 2  # the next test has the time that counts
        there.send(f"/save {tmp_path}/talk\r")
        there.expect("saved to")
        there.expect("> ")
        there.send("/quit\r")
        assert there.wait() == 0
    said = json.loads((tmp_path / "talk").read_text())
    assert [message["role"] for message in said] == ["user", "assistant"]
    assert re.fullmatch("u{5,}", said[1]["content"])  # what was said stays


def test_ctrl_c_ends_a_run_within_250_ms():
    """The best of four: on a busy machine the system itself may take longer to let us run."""
    times = []
    for _ in range(4):
        with terminal("run", long_bundle(), "Hello", *ENDLESS) as there:
            there.expect("uuuuu")
            sent = time.monotonic()
            there.send(CTRL_C)
            assert there.wait() == 130
            times.append(time.monotonic() - sent)
            assert there.seen.endswith("\n")  # the shell's prompt begins on a line of its own
            assert "Traceback" not in there.seen
            assert "prefill" not in there.seen
            assert termios.tcgetattr(there.control) == there.before
        if min(times) < 0.25:
            return
    raise AssertionError(times)


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="looks at Linux's /proc")
@pytest.mark.parametrize("delay", [0.0, 0.1, 0.2, 0.4])
def test_ctrl_c_at_any_moment_is_quiet(delay):
    """While it imports, loads, or runs."""
    with terminal("run", long_bundle(), "Hello", *ENDLESS) as there:
        maps = Path(f"/proc/{there.process.pid}/maps")
        while "_multiarray_umath" not in maps.read_text():  # numpy is loaded, so the boundary is set up
            there.read(0.001)
        end = time.monotonic() + delay
        while time.monotonic() < end:
            there.read(0.01)
        there.send(CTRL_C)
        assert there.wait() == 130, there.seen
        assert "Traceback" not in there.seen
        assert there.seen.count("\x1b[?25l") == there.seen.count("\x1b[?25h")  # the cursor is back


def test_a_signal_in_a_pipe_ends_a_chat_too():
    with sigint_as_usual():
        process = subprocess.Popen(
            [*PROGRAM, "run", str(long_bundle()), "--chat", *ENDLESS],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip
    process.stdin.write(b"Talk\nMore\n")
    process.stdin.flush()
    assert process.stdout.read(5) == b"uuuuu"
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (130, b"")


# --- progress --------------------------------------------------------------------------------------------


def test_bars_are_drawn_at_a_terminal_and_vanish():
    code = (
        "import time\nfrom tfmx.cli.progress import Bars\nwith Bars() as bars:\n"
        "    bars.stage('one unit', 1)\n    time.sleep(0.8)\n    bars.stage('many', 4)\n    bars.advance(2)\n"
        "    time.sleep(0.3)\nprint('done')"
    )
    with mocked_program("-c", code), terminal() as there:
        assert there.wait() == 0
        assert "one unit" in there.seen
        assert "50%" in there.seen
        assert there.seen.count("\x1b[?25l") == there.seen.count("\x1b[?25h") == 1
        assert there.seen.endswith("\x1b[2Kdone\r\n")


def test_what_takes_a_moment_draws_no_bar():
    code = (
        "from tfmx.cli.progress import Bars\nwith Bars() as bars:\n    bars.stage('quick', 1)\nprint('done')"
    )
    with mocked_program("-c", code), terminal() as there:
        assert there.wait() == 0
        assert there.seen == "done\r\n"


def test_a_pipe_gets_no_bar_and_no_rich():
    code = (
        "import sys, time\nfrom tfmx.cli.progress import Bars\nwith Bars() as bars:\n    bars.stage('x', 1)\n"
        "    time.sleep(0.7)\nprint('rich' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("False\n", "")


STAGES = (
    "import sys\nfrom tfmx.cli.progress import Bars\nwith Bars(lines=True, quiet='-q' in sys.argv) as bars:\n"
    "    bars.stage('one', 1)\n    bars.advance()\n    bars.stage('two', 4)\n    bars.advance(3)\n"
    "    print('meanwhile', file=sys.stderr)\nprint('done')"
)


@pytest.mark.parametrize(("options", "said"), [([], "one\ntwo\nmeanwhile\n"), (["-q"], "meanwhile\n")])
def test_a_pipe_gets_a_plain_line_as_each_stage_begins(options, said):
    done = subprocess.run(
        [sys.executable, "-c", STAGES, *options], capture_output=True, text=True, check=True
    )
    assert (done.stdout, done.stderr) == ("done\n", said)


def test_a_terminal_that_cannot_draw_gets_lines():
    with mocked_program("-c", f"import os\nos.environ['TERM'] = 'dumb'\n{STAGES}"), terminal() as there:
        assert there.wait() == 0
        assert there.seen == "one\r\ntwo\r\nmeanwhile\r\ndone\r\n"


def test_a_terminal_gets_no_lines():
    with mocked_program("-c", STAGES), terminal() as there:
        assert there.wait() == 0
        assert there.seen == "meanwhile\r\ndone\r\n"


@contextlib.contextmanager
def mocked_program(*arguments: str) -> Iterator[None]:
    """`terminal` runs this instead."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(globals(), "PROGRAM", (sys.executable, *arguments))
        yield
