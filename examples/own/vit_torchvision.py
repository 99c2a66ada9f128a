"""A vision transformer of torchvision (the build that fits your torch).

    tfmx export examples/own/vit_torchvision.py:build -o vit
    tfmx run vit photo.png

Nothing is subclassed: `declared` adds the two declarations.
"""

from __future__ import annotations

import torch
from torch import nn
from torchvision.models import VisionTransformer

from tfmx.tfm_model.declarations import classes, declared, images


def build() -> nn.Module:
    torch.manual_seed(1234)
    # yours would be vit_b_16(weights="DEFAULT"): images of 224, 1000 classes, and the mean and std below
    model = VisionTransformer(64, patch_size=16, num_layers=2, num_heads=4, hidden_dim=64, mlp_dim=128)
    nn.init.normal_(model.heads.head.weight)  # zeros to begin with
    pixels = images(3, 64, 64, mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225))
    return declared(model, pixels, classes(model.num_classes))
