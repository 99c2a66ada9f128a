"""Image files: Pillow's pixels become the model's array, and every file that is none is one clear line."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
from PIL import Image
from tiny_kinds import IMAGE, MEAN, STD, image_classes, image_input, kind_weights, write_image_classifier

import tfmx
from tfmx import InputError
from tfmx.runtime.images import ImageError, image_array, open_image

C, HEIGHT, WIDTH = IMAGE
PIXELS = np.random.default_rng(1).integers(0, 256, (HEIGHT, WIDTH, 3), np.uint8)
GREY = replace(image_input(), image=(1, HEIGHT, WIDTH), mean=(0.5,), std=(0.25,))


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("images") / "bundle"
    write_image_classifier(folder)
    return tfmx.load(folder, threads=1)


@pytest.fixture
def png(tmp_path):
    path = tmp_path / "image.png"
    Image.fromarray(PIXELS).save(path)
    return path


def normal(pixels):
    """(C, H, W) in float64."""
    return ((pixels / 255 - MEAN) / STD).transpose(2, 0, 1)


def test_a_file_a_path_and_a_pillow_image_are_the_same(model, png):
    expected = image_classes(kind_weights(), normal(PIXELS))[0]
    for given in (str(png), png, open_image(png), normal(PIXELS)):
        assert np.abs(model.apply(given)["logits"] - expected).max() < 5e-5


def test_pixels_are_scaled_and_normalised_by_channel(png):
    found = image_array(open_image(png), image_input())
    assert found.dtype == np.float32
    assert found.flags["C_CONTIGUOUS"]
    assert np.abs(found - normal(PIXELS)).max() < 1e-6


def test_another_size_is_resized_bilinearly():
    image = Image.fromarray(PIXELS).resize((50, 40))
    expected = np.asarray(image.resize((WIDTH, HEIGHT), Image.Resampling.BILINEAR))
    assert np.abs(image_array(image, image_input()) - normal(expected)).max() < 1e-6


def test_grey_and_transparent_images_get_the_models_channels():
    image = Image.fromarray(PIXELS)
    grey = image_array(image, GREY)
    assert grey.shape == (1, HEIGHT, WIDTH)
    assert np.abs(grey[0] - (np.asarray(image.convert("L")) / 255 - 0.5) / 0.25).max() < 1e-6
    assert np.array_equal(
        image_array(image.convert("RGBA"), image_input()), image_array(image, image_input())
    )
    assert image_array(image.convert("L"), image_input()).shape == IMAGE
    assert image_array(image.convert("P"), image_input()).shape == IMAGE


@pytest.mark.parametrize(
    ("content", "line"),
    [
        (None, r"missing\.png cannot be read as an image: No such file or directory$"),
        (b"", r"file\.png is no image that Pillow knows$"),
        (b"hello, I am a text", r"file\.png is no image that Pillow knows$"),
        ("cut", r"file\.png cannot be read as an image: "),
        ("folder", r"folder cannot be read as an image: Is a directory$"),
    ],
)
def test_a_file_that_is_no_image_is_one_clear_line(model, png, tmp_path, content, line):
    path = tmp_path / ("missing.png" if content is None else "file.png")
    if content == "folder":
        path = tmp_path / "folder"
        path.mkdir()
    elif content == "cut":
        path.write_bytes(png.read_bytes()[:150])
    elif content is not None:
        path.write_bytes(content)
    with pytest.raises(InputError, match=line) as caught:
        model.apply(path)
    assert "\n" not in str(caught.value)


def test_a_bomb_is_refused(png, monkeypatch):
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 10)
    with pytest.raises(
        ImageError, match=r"image\.png cannot be read as an image: Image size \(96 pixels\) exceeds"
    ):
        open_image(png)


def test_values_that_pillow_would_cut_are_refused():
    deep = Image.fromarray(np.full((HEIGHT, WIDTH), 40_000, np.uint16))
    with pytest.raises(ImageError, match=r"^the image has mode I;16; convert it to 8 bits a channel$"):
        image_array(deep, GREY)


def test_channels_that_no_file_has_need_an_array():
    info = replace(image_input(), image=(2, 8, 12), mean=(0.0, 0.0), std=(1.0, 1.0))
    with pytest.raises(
        ImageError, match=r"^an image file cannot have the 2 channels of this bundle; give an array$"
    ):
        image_array(Image.fromarray(PIXELS), info)


def test_without_pillow_arrays_work_and_files_say_what_to_install(model, png, monkeypatch):
    monkeypatch.setitem(sys.modules, "PIL", None)  # what `import PIL` finds where it is not installed
    model.apply(normal(PIXELS))
    with pytest.raises(ImageError, match=r"^reading an image needs Pillow; `pip install '\.\[images\]'`"):
        model.apply(png)


def test_loading_a_bundle_does_not_import_pillow(tmp_path):
    write_image_classifier(tmp_path / "b")
    code = f"""
import sys, numpy, tfmx
tfmx.load({str(tmp_path / "b")!r}).apply(numpy.zeros({IMAGE}))
print("PIL" in sys.modules)
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "False"
