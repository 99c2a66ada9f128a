"""A vision transformer of timm (`pip install timm`, with the torchvision that fits your torch).

    tfmx export examples/own/vit_timm.py:build -o vit
    tfmx run vit photo.png

Nothing is subclassed: `declared` adds the two declarations. Mean and std are the checkpoint's, so that the bundle reads image
files of its size; of its head's 1000 classes the bundle knows the numbers (labels= takes names).
"""

from __future__ import annotations

import timm
import torch
from torch import nn

from tfmx.tfm_model.declarations import classes, declared, images


def build() -> nn.Module:
    torch.manual_seed(1234)
    model = timm.create_model("vit_tiny_patch16_224", pretrained=False)  # yours would be pretrained=True
    about = model.pretrained_cfg
    channels, height, width = about["input_size"]
    pixels = images(channels, height, width, mean=about["mean"], std=about["std"])
    return declared(model, pixels, classes(model.num_classes))
