"""`tfmx run`: prompts from everywhere, text and JSON out, and every wrong prompt or option told in one line."""

from __future__ import annotations

import json
import os

import numpy as np
import pytest
import tiny_bundle
from command_line import ENDLESS, U, bundle, copied, exported, flip, program, tfmx, without
from PIL import Image

import tfmx as package

TEXT = "Hello you"  # which the tiny model goes on with letters


@pytest.fixture(scope="module")
def expected():
    """What the library itself gives."""
    with package.load(bundle()) as model:
        return list(model.generate(TEXT, max_new_tokens=12))


def run(*arguments, **options):
    return tfmx("run", bundle(), *arguments, **options)


# --- prompts ---------------------------------------------------------------------------------------------


def test_the_text_goes_to_stdout_and_statistics_to_stderr(expected):
    done = run(TEXT, "--max-tokens", 12)
    assert done.code == 0
    assert done.out == "".join(step.text for step in expected) + "\n"
    [line] = done.err.splitlines()
    for part in ("prefill ", " tokens/s (10 tokens)", "first token ", "decode ", "end: length"):
        assert part in line


def test_quiet_leaves_stderr_empty():
    assert run(TEXT, "--max-tokens", 12, "-q").err == ""


@pytest.mark.parametrize("end", ["", "\n", "\r\n"])
def test_a_prompt_comes_from_stdin_or_a_file_too(expected, tmp_path, end):
    (tmp_path / "prompt.txt").write_bytes((TEXT + end).encode())
    wanted = run(TEXT, "--max-tokens", 12).out
    assert run("--max-tokens", 12, stdin=(TEXT + end).encode()).out == wanted
    assert run("-", "--max-tokens", 12, stdin=(TEXT + end).encode(), terminal="in").out == wanted
    assert run("--file", tmp_path / "prompt.txt", "--max-tokens", 12).out == wanted


def test_only_one_newline_is_taken_off():
    def prompt_tokens(content: bytes) -> int:
        return json.loads(run("--json", "--max-tokens", 1, stdin=content).out)["prompt_tokens"]

    assert prompt_tokens(b"Hi\n\n") == prompt_tokens(b"Hi") + 1


def test_a_prompt_may_be_ids(expected):
    with package.load(bundle()) as model:
        ids = model.encode(TEXT)
    done = run("--ids", ",".join(map(str, ids)), "--max-tokens", 12)
    assert done.out == "".join(step.text for step in expected) + "\n"
    assert run("--ids", " ".join(map(str, ids)), "--max-tokens", 12).out == done.out


def test_an_argument_goes_before_stdin(expected):
    assert run(TEXT, "--max-tokens", 12, stdin=b"Other").out == run(TEXT, "--max-tokens", 12).out


def test_a_prompt_that_begins_with_a_dash_follows_two():
    assert run("--max-tokens", 1, "--", "--not-an-option").code == 0


def test_special_tokens_in_a_prompt_stay_text():
    found = json.loads(run("<|im_end|>", "--json", "--max-tokens", 1).out)
    assert found["prompt_tokens"] == 1 + len("<|im_end|>")


def test_a_bundle_without_a_tokenizer_speaks_in_ids(expected):
    with copied(bundle()) as folder, package.load(bundle()) as model:
        without(folder, "tokenizer.json", "chat_template.jinja")
        ids = ",".join(map(str, model.encode(TEXT)))
        done = tfmx("run", folder, "--ids", ids, "--max-tokens", 12)
        assert done.out == ",".join(str(step.token_id) for step in expected) + "\n"
        found = json.loads(tfmx("run", folder, "--ids", ids, "--max-tokens", 12, "--json").out)
        assert found["text"] is None
        tfmx("run", folder, "Hi").fails(2, "no tokenizer", "token ids")
        tfmx("run", folder, "--ids", "1", "--stop", "x").fails(2, "no tokenizer")


@pytest.mark.parametrize(
    ("arguments", "stdin", "parts"),
    [
        (["x" * 200], b"", ["201 tokens", "holds 96"]),
        (["x" * 100_000], b"", ["tokens", "holds 96"]),
        (["--ids", ",".join(["1"] * 97)], b"", ["97 tokens", "holds 96"]),
        ([""], b"", ["the prompt is empty", "INPUT"]),
        ([], b"", ["the prompt is empty", "standard input"]),
        ([], b"\n", ["the prompt is empty", "standard input"]),
        (["-"], b"", ["the prompt is empty", "standard input"]),
        (["--ids", ""], b"", ["the prompt is empty"]),
        (["--ids", "1,320"], b"", ["token 320 at place 1", "vocabulary of 320"]),
        (["--ids", "-1"], b"", ["token -1", "vocabulary of 320"]),
        (["--ids", "1,two"], b"", ["--ids", "1,two", "such as 1,42,7"]),
        ([], b"\xff\xfe", ["standard input is not UTF-8 text (byte 0)"]),
        (["a\udcffb"], b"", ["INPUT is not UTF-8 text"]),
        (["a", "--ids", "1"], b"", ["given twice", "INPUT", "--ids"]),
        (["--file", "f", "--ids", "1"], b"", ["given twice", "--file", "--ids"]),
        (["a", "--file", "f"], b"", ["given twice", "INPUT", "--file"]),
        (["--file", "/no/such/file"], b"", ["--file /no/such/file cannot be read", "No such file"]),
        (["--file", "/"], b"", ["--file / cannot be read", "directory"]),
        (["--file", "/dev/zero"], b"", ["/dev/zero has more than 64 MiB"]),
        (["a", "--system", "b"], b"", ["--system goes with --chat"]),
        (["--chat", "--ids", "1"], b"", ["--chat takes text"]),
        (["a", "--logprobs", "2"], b"", ["--logprobs goes with --json"]),
        (["a", "--threads", "0"], b"", ["threads is 0", "1 to 1024"]),
        (["a", "--threads", "1000000"], b"", ["threads is 1000000", "1 to 1024"]),
        (["a", "--device", "cuda"], b"", ["CUDA cannot be used", "--dtype fp16"]),
    ],
)  # fmt: skip
def test_what_cannot_be_used_is_one_line(arguments, stdin, parts):
    run(*arguments, stdin=stdin).fails(2, *parts)


def test_no_prompt_at_a_terminal_is_one_line():
    run(terminal="in").fails(2, "there is no prompt", "--chat")


def test_a_file_that_is_no_text_is_one_line(tmp_path):
    (tmp_path / "x").write_bytes(b"abc\x80")
    run("--file", tmp_path / "x").fails(2, "is not UTF-8 text (byte 3)")
    (tmp_path / "x").write_bytes(b"")
    run("--file", tmp_path / "x").fails(2, "the prompt is empty")


@pytest.mark.parametrize("form", ["PNG", "JPEG", "GIF", "TIFF", "WEBP"])
def test_an_image_given_to_a_model_of_text_is_asked_about(form, tmp_path):
    path = tmp_path / "cat"  # known by its content
    Image.new("RGB", (4, 3)).save(path, format=form)
    for how in ([path], ["--chat", path], [path, "--json"]):
        run(*how).fails(2, f"{path} is an image file, and this bundle takes text", "standard input", "--file")
    assert run("--max-tokens", "1", stdin=str(path).encode()).code == 0
    run("--file", path).fails(2, "not UTF-8 text")


def test_words_that_are_no_image_file_are_words(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "notes.png").write_text("a text with a strange name")
    (tmp_path / "empty").touch()
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    for words in ("notes.png", "empty", "folder", "pipe", "none.png", "x" * 5000, "a\0b"):
        done = tfmx("run", bundle(), words, "--max-tokens", "1", "-q")
        assert done.code == 0 or "the context holds" in done.err, done


# --- sampling --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["--temperature", "-1"], ["--temperature is -1.0", "0 or more"]),
        (["--temperature", "nan"], ["--temperature is nan"]),
        (["--temperature", "1", "--top-k", "0"], ["--top-k is 0", "1 or more"]),
        (["--temperature", "1", "--top-p", "0"], ["--top-p is 0.0", "above 0"]),
        (["--temperature", "1", "--top-p", "1.5"], ["--top-p is 1.5", "at most 1"]),
        (["--temperature", "1", "--min-p", "2"], ["--min-p is 2.0", "between 0 and 1"]),
        (["--top-k", "5"], ["--top-k does nothing without --temperature"]),
        (["--top-p", "0.5", "--temperature", "0"], ["--top-p does nothing without --temperature"]),
        (["--min-p", "0.5"], ["--min-p does nothing without --temperature"]),
        (["--repetition-penalty", "0"], ["--repetition-penalty is 0.0", "above 0"]),
        (["--presence-penalty", "inf"], ["--presence-penalty is inf"]),
        (["--frequency-penalty", "nan"], ["--frequency-penalty is nan"]),
        (["--logit-bias", "5"], ["--logit-bias", "is not ID=VALUE"]),
        (["--logit-bias", "a=1"], ["--logit-bias", "is not ID=VALUE"]),
        (["--logit-bias", "5=inf"], ["--logit-bias[5] is inf; it must be -inf or -1e+30 to 1e+30"]),
        (["--logit-bias", "5=1e39"], ["--logit-bias[5] is 1e+39; it must be -inf or -1e+30 to 1e+30"]),
        (["--logit-bias", "5=-1e39"], ["--logit-bias[5] is -1e+39;"]),
        (["--presence-penalty", "1e39"], ["--presence-penalty is 1e+39; it must be -1e+30 to 1e+30"]),
        (["--frequency-penalty", "-1e39"], ["--frequency-penalty is -1e+39;"]),
        (["--repetition-penalty", "1e-39"], ["--repetition-penalty is 1e-39; it must be above 0 (1e-30 to 1e+30)"]),
        (["--temperature", "1e-40"], ["--temperature is 1e-40; it must be 0 or more (1e-30 to 1e+30)"]),
        (["--logit-bias", "-5=1"], ["logit_bias is -5"]),
        (["--logit-bias", "320=1"], ["token 320", "vocabulary of 320"]),
        (["--logit-bias", "5=1", "--logit-bias", "5=2"], ["--logit-bias names a token twice"]),
        (["--temperature", "1", "--seed", "-1"], ["--seed is -1", "0 or more"]),
        (["--json", "--logprobs", "-1"], ["--logprobs is -1"]),
        (["--json", "--logprobs", "321"], ["logprobs is 321", "vocabulary of 320"]),
        (["--stop", ""], ["stop text", "not empty"]),
        (["--stop-id", "-1"], ["stop token is -1"]),
        (["--stop-id", "320"], ["token 320", "vocabulary of 320"]),
        (["--max-tokens", "0"], ["--max-tokens is 0", "1 or more"]),
    ],
)  # fmt: skip
def test_an_impossible_option_is_one_line(arguments, parts):
    run(TEXT, *arguments).fails(2, *parts)


def test_a_bias_that_bans_everything_is_one_line():
    bans = [part for token_id in range(320) for part in ("--logit-bias", f"{token_id}=-inf")]
    run(TEXT, *bans).fails(1, "bans every token")


def test_every_option_reaches_the_sampler():
    options = [
        "--temperature", "0.9", "--top-k", "50", "--top-p", "0.95", "--min-p", "0.01", "--seed", "7",
        "--repetition-penalty", "1.1", "--presence-penalty", "0.1", "--frequency-penalty", "0.2",
        "--logit-bias", "5=-inf", "--logit-bias", "6=0.5", "--stop", "zzz", "--stop-id", "3", "--max-tokens", "30",
    ]  # fmt: skip
    sampling = package.runtime.sampling.SamplingOptions(
        temperature=0.9, top_k=50, top_p=0.95, min_p=0.01, seed=7, repetition_penalty=1.1, presence_penalty=0.1,
        frequency_penalty=0.2, logit_bias={5: -np.inf, 6: 0.5}, stop=("zzz",), stop_token_ids=(3,), max_new_tokens=30,
    )  # fmt: skip
    with package.load(bundle()) as model:
        wanted = [step.token_id for step in model.generate(TEXT, sampling)]
    found = json.loads(run(TEXT, "--json", *options).out)
    assert (found["token_ids"], found["seed"]) == (wanted, 7)


def test_the_seed_of_a_draw_is_told_and_repeats_it():
    first = run(TEXT, "--temperature", "1", "--max-tokens", "20")
    seed = first.err.split("seed ")[1].strip()
    assert run(TEXT, "--temperature", "1", "--max-tokens", "20", "--seed", seed).out == first.out
    assert "seed" not in run(TEXT, "--max-tokens", "20").err


@pytest.mark.parametrize("how", [(TEXT,), ("--chat", "Hi"), (TEXT, "--json"), (TEXT, "--temperature", "0")])
def test_a_seed_that_would_do_nothing_is_refused(how):
    run(*how, "--seed", "7").fails(2, "--seed does nothing without --temperature above 0")


def test_stops_end_the_answer():
    assert run(TEXT, *ENDLESS, "--stop", "uuu", "-q").out == "\n"
    found = json.loads(run(TEXT, *ENDLESS, "--stop-id", str(U), "--json").out)
    assert (found["token_ids"], found["finish_reason"]) == ([U], "stop")


# --- JSON ------------------------------------------------------------------------------------------------


def test_json_is_one_object_with_everything(expected):
    done = run(TEXT, "--json", "--logprobs", "2", "--max-tokens", "12")
    assert done.err == ""
    assert done.out.count("\n") == 1
    assert done.out.isascii()
    found = json.loads(done.out)
    assert {key: type(value) for key, value in found.items()} == {
        "text": str, "token_ids": list, "finish_reason": str, "prompt_tokens": int, "cached_tokens": int,
        "new_tokens": int, "seed": type(None), "device": str, "timings": dict, "logprobs": list,
    }  # fmt: skip
    assert set(found["timings"]) == {
        "time_to_first_token", "decode_seconds", "prefill_tokens_per_second", "decode_tokens_per_second",
    }  # fmt: skip
    assert all(isinstance(value, float) for value in found["timings"].values())
    assert found["text"] == "".join(step.text for step in expected)
    assert found["token_ids"] == [step.token_id for step in expected]
    assert (found["new_tokens"], found["prompt_tokens"], found["finish_reason"]) == (12, 10, "length")
    for entry, token_id in zip(found["logprobs"], found["token_ids"], strict=True):
        assert entry["token_id"] == token_id == entry["top"][0]["token_id"]  # greedy takes the likeliest
        assert entry["logprob"] == entry["top"][0]["logprob"] <= 0
        assert len(entry["top"]) == 2
        assert {key: entry[key] for key in ("text", "bytes")} == {
            key: entry["top"][0][key] for key in ("text", "bytes")
        }
    spelled = [
        bytes(entry["bytes"]) for entry in found["logprobs"] if entry["bytes"] is not None
    ]  # some ids are padding
    assert b"".join(spelled).decode("utf-8", "replace") == found["text"]
    texts = [entry["text"] for entry in found["logprobs"] if entry["text"] is not None]
    assert texts == [part.decode("utf-8", "replace") for part in spelled]


def test_json_has_no_logprobs_unless_asked():
    assert "logprobs" not in json.loads(run(TEXT, "--json", "--max-tokens", "2").out)
    assert (
        json.loads(run(TEXT, "--json", "--max-tokens", "1", "--logprobs", "0").out)["logprobs"][0]["top"]
        == []
    )


# --- the bundle ------------------------------------------------------------------------------------------


def test_a_missing_bundle_is_one_line(tmp_path):
    for command in (
        ["run", tmp_path / "none", "Hi"],
        ["inspect", tmp_path / "none"],
        ["verify", tmp_path / "none"],
    ):
        tfmx(*command).fails(2, str(tmp_path / "none"), "does not exist", "tfmx export")
    tfmx("run", tmp_path, "Hi").fails(2, "no manifest.json")
    (tmp_path / "file").touch()
    tfmx("run", tmp_path / "file", "Hi").fails(2, "is not a folder")


@pytest.mark.parametrize(
    "name",
    ["weights.bin", "prefill.onnx", "decode.onnx", "tokenizer.json", "chat_template.jinja", "manifest.json"],
)
def test_a_changed_file_is_one_line_that_names_it(name):
    with copied(bundle()) as folder:
        flip(folder / name, 100)
        for command in (["run", folder, "Hi"], ["verify", folder]):
            tfmx(*command).fails(1, name)


def test_missing_cut_and_extra_files_are_one_line():
    with copied(bundle()) as folder:
        (folder / "weights.bin").unlink()
        tfmx("run", folder, "Hi").fails(1, "weights.bin is missing")
    with copied(bundle()) as folder:
        os.truncate(folder / "weights.bin", 1000)
        tfmx("run", folder, "Hi", "--no-check").fails(1, "weights.bin has 1000 bytes")
    with copied(bundle()) as folder:
        (folder / "extra").touch()
        tfmx("run", folder, "Hi").fails(1, "extra is not part of the bundle")


def test_no_check_skips_the_sums():
    with copied(bundle()) as folder:
        flip(folder / "weights.bin", 0)
        tfmx("run", folder, "Hi").fails(1, "weights.bin was changed")
        assert tfmx("run", folder, "Hi", "--no-check", "--max-tokens", "1").code == 0


def test_weights_that_are_no_numbers_are_one_line(tmp_path):
    weights = tiny_bundle.tiny_weights()
    weights["norm"] = np.full_like(weights["norm"], np.nan)
    tiny_bundle.write_bundle(tmp_path / "nan", "append", weights=weights)
    done = tfmx("run", tmp_path / "nan", "Hi")
    done.fails(1, "not finite")


# --- devices ---------------------------------------------------------------------------------------------


def test_auto_says_what_it_took():
    done = run(TEXT, "--device", "auto", "--max-tokens", "1", "-q")
    assert done.code == 0
    assert done.err.startswith("device: cpu (no CUDA: ")
    assert done.err.count("\n") == 1


def test_cuda_that_is_not_there_is_one_line(tmp_path):
    tiny_bundle.write_bundle(tmp_path / "portable", "append")
    tfmx("run", tmp_path / "portable", "Hi", "--device", "cuda").fails(
        2, "CUDA cannot be used", "pip install"
    )


def test_threads_are_taken():
    assert (
        run(TEXT, "--threads", "1", "--max-tokens", "3", "-q").out == run(TEXT, "--max-tokens", "3", "-q").out
    )


# --- at a terminal ---------------------------------------------------------------------------------------


def test_control_characters_do_not_reach_a_terminal():
    escape = tiny_bundle.tiny_tokenizer().encode("\x1b", add_special_tokens=False).ids[0]
    force = ("--logit-bias", f"{escape}=1000", "--max-tokens", "3", "-q")
    assert run(TEXT, *force).out == "\x1b\x1b\x1b\n"
    assert run(TEXT, *force, terminal="out").out == "\ufffd\ufffd\ufffd\n"


# --- a bundle that was really exported -------------------------------------------------------------------


@pytest.mark.slow
def test_an_exported_bundle_runs_as_a_program():
    folder, _ = exported()
    done = program("run", folder, "Hi", "--max-tokens", "5", "--json")
    assert done.code == 0, done
    assert json.loads(done.out)["new_tokens"] == 5
    assert program("run", folder, "--chat", "Hi", "--max-tokens", "5", "-q").code == 0
