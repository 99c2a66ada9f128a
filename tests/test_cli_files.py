"""Files and numbers that are given on the command line: vectors in, arrays and pictures out, lists of layers."""

from __future__ import annotations

import click
import numpy as np
import pytest

from tfmx import InputError
from tfmx.cli.boundary import Terminated
from tfmx.cli.input_file import read_vectors
from tfmx.cli.number_list import parse_numbers
from tfmx.cli.output_file import OutputFileError, check_place, write_whole

# --- vectors ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "content",
    [
        "1,2\n3.5,-4e-1\n",
        "1,2\r\n3.5,-4e-1",
        "a,b\n1,2\n3.5,-4e-1\n",
        "\ufeffhigh, low\n1, 2\n3.5 ,-4e-1\n",
        '"a","b,c"\n"1","2"\n\n3.5,-0.4\n\n',
        "\n1,2\n,\n3.5,-0.4\n",
    ],
    ids=["plain", "windows", "header", "byte order mark", "quotes and empty lines", "rows of nothing"],
)
def test_a_csv_file_is_read_with_or_without_a_header(tmp_path, content):
    (tmp_path / "x.csv").write_text(content, encoding="utf-8", newline="")
    np.testing.assert_array_equal(read_vectors(str(tmp_path / "x.csv")), [[1, 2], [3.5, -0.4]])


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "int64", "uint8", ">f4"])
def test_an_npy_file_is_read_as_it_is(tmp_path, dtype):
    array = np.arange(6).reshape(3, 2).astype(dtype)
    np.save(tmp_path / "x.npy", array)
    found = read_vectors(str(tmp_path / "x.npy"))
    np.testing.assert_array_equal(found, array)
    assert found.dtype == array.dtype


@pytest.mark.parametrize(
    ("content", "parts"),
    [
        ("", ["has no rows of numbers"]),
        ("\n\n", ["has no rows of numbers"]),
        ("a,b\n", ["has no rows of numbers"]),
        ("1,2\n3\n", ["line 2: 1 columns", "have 2"]),
        ("a,b\n1,2\n3,4,5\n", ["line 3: 3 columns", "have 2"]),
        ("1,2\n3,four\n", ["line 2, column 2", "'four' is no number"]),
        ("1,b\n3,4\n", ["line 1, column 2", "'b' is no number"]),
        ("1,2\n3,\n", ["line 2, column 2", "'' is no number"]),
        ("a,b\nc,d\n", ["line 2, column 1", "'c' is no number"]),
        ("1;2\n3;4\n", ["line 2, column 1", "'3;4' is no number"]),
        ("1_0,2\n3,4\n", ["line 1, column 1", "'1_0' is no number"]),
        ('1,2\n"3,4\n', ["line 2: 1 columns"]),
    ],
)
def test_a_csv_file_that_cannot_be_used_says_where(tmp_path, content, parts):
    (tmp_path / "x.csv").write_text(content, encoding="utf-8")
    with pytest.raises(InputError) as error:
        read_vectors(str(tmp_path / "x.csv"))
    for part in ("x.csv", *parts):
        assert part in str(error.value)


def test_other_files_are_refused_in_one_line(tmp_path):
    def refused(name: str, part: str) -> None:
        with pytest.raises(InputError, match=part) as error:
            read_vectors(str(tmp_path / name))
        assert "\n" not in str(error.value)

    refused("none.npy", "No such file")
    refused("none.csv", "No such file")
    refused("x.txt", "ends in .npy or .csv")
    (tmp_path / "folder.csv").mkdir()
    refused("folder.csv", "cannot be read")
    (tmp_path / "binary.csv").write_bytes(b"1,2\n\xff\n")
    refused("binary.csv", r"not UTF-8 text \(byte 4\)")
    (tmp_path / "nul.csv").write_bytes(b"1,\x00\n")
    refused("nul.csv", "nul.csv, line 1")
    np.save(tmp_path / "objects.npy", np.array([{"a": 1}], object), allow_pickle=True)
    refused("objects.npy", "Python objects")
    np.save(tmp_path / "text.npy", np.array(["a"]))
    refused("text.npy", "holds <U1, wanted numbers")
    np.save(tmp_path / "complex.npy", np.array([1j]))
    refused("complex.npy", "holds complex128")
    with (tmp_path / "several.npy").open("wb") as file:
        np.savez(file, a=np.ones(2))
    refused("several.npy", "several arrays")
    (tmp_path / "empty.npy").touch()
    refused("empty.npy", "damaged")
    (tmp_path / "other.npy").write_bytes(b"GIF89a" * 20)
    refused("other.npy", "no array of numbers")
    np.save(tmp_path / "cut.npy", np.ones((100, 100)))
    content = (tmp_path / "cut.npy").read_bytes()
    (tmp_path / "cut.npy").write_bytes(content[: len(content) // 2])
    refused("cut.npy", "damaged")


# --- what is written -------------------------------------------------------------------------------------


def test_a_file_is_written_whole_or_not_at_all(tmp_path):
    path = tmp_path / "x.png"
    write_whole(path, lambda file: file.write(b"old"))

    def fail(file):
        file.write(b"half")
        raise OSError(28, "No space left on device")

    with pytest.raises(OutputFileError, match=r"x\.png cannot be written: No space left on device"):
        write_whole(path, fail)
    assert path.read_bytes() == b"old"
    write_whole(path, lambda file: file.write(b"new"))
    assert path.read_bytes() == b"new"
    assert [entry.name for entry in tmp_path.iterdir()] == ["x.png"]


@pytest.mark.parametrize(
    "error", [OSError(28, "No space left"), KeyboardInterrupt(), Terminated(), MemoryError()]
)
def test_nothing_hidden_is_left_when_writing_ends_early(error, tmp_path):
    def fail(file):
        file.write(b"half")
        raise error

    with pytest.raises(OutputFileError if isinstance(error, OSError) else type(error)):
        write_whole(tmp_path / "x.png", fail)
    assert list(tmp_path.iterdir()) == []


def test_nothing_hidden_is_left_or_named_when_the_place_refuses(tmp_path, monkeypatch):
    (tmp_path / "x.png").mkdir()
    (tmp_path / "x.png" / "file").touch()
    with pytest.raises(OutputFileError, match=r"x\.png cannot be written: Is a directory"):
        write_whole(tmp_path / "x.png", lambda file: file.write(b"new"))
    assert [entry.name for entry in tmp_path.iterdir()] == ["x.png"]

    def refuse(*_args, **_options):
        raise OSError(30, "Read-only file system", "/.hidden")

    monkeypatch.setattr("pathlib.Path.open", refuse)
    monkeypatch.setattr("pathlib.Path.unlink", refuse)
    with pytest.raises(OutputFileError, match=r"y\.png cannot be written: Read-only file system$"):
        write_whole(tmp_path / "y.png", lambda file: file.write(b"new"))


def test_a_name_may_be_as_long_as_the_system_allows(tmp_path):
    longest = tmp_path / ("x" * 251 + ".png")
    write_whole(longest, lambda file: file.write(b"new"))
    assert longest.read_bytes() == b"new"
    with pytest.raises(OutputFileError, match=r"x\.png cannot be written: File name too long$"):
        write_whole(tmp_path / ("x" * 252 + ".png"), lambda file: file.write(b"new"))
    assert list(tmp_path.iterdir()) == [longest]


def test_a_place_that_cannot_be_is_known_at_once(tmp_path):
    assert check_place(f"{tmp_path}/X.PNG", (".png", ".html")).name == "X.PNG"
    with pytest.raises(click.UsageError, match=r"ends in \.png or \.html"):
        check_place("x.pdf", (".png", ".html"))
    with pytest.raises(InputError, match="there is no folder"):
        check_place(f"{tmp_path}/none/x.png", (".png",))
    (tmp_path / "folder.png").mkdir()
    with pytest.raises(InputError, match="is a folder"):
        check_place(f"{tmp_path}/folder.png", (".png",))


# --- numbers ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "numbers"),
    [
        ("0", [0]),
        ("0,2", [0, 2]),
        (" 3 , 1-2", [3, 1, 2]),
        ("1,0-2,1", [1, 0, 2]),
        ("all", None),
        ("mean,0", [-1, 0]),
    ],
)
def test_numbers_are_taken_in_their_order_and_once(text, numbers):
    assert parse_numbers(text, "--heads", {"mean": -1}) == numbers


@pytest.mark.parametrize("text", ["", ",", "a", "2-1", "-1", "1-", "0,,1", "all,1", "99999", "1.5", "²"])
def test_what_is_no_list_of_numbers_is_a_usage_error(text):
    with pytest.raises(click.UsageError, match=r"--layers is .* such as 0,2-4"):
        parse_numbers(text, "--layers")
    with pytest.raises(click.UsageError, match="--layers"):
        parse_numbers("mean", "--layers")
