"""A classifier with random weights, and one that always or never declares success."""

from __future__ import annotations

import torch

from policies.compact_encoder import CompactEncoderConfig
from vla_rl.rewards.classifier import SuccessClassifier, SuccessClassifierConfig
from vla_rl.rewards.scorer import Sensors

ENCODER = CompactEncoderConfig(width=32, text_width=32, text_depth=1, queries=2, query_heads=2, image_widths=(16,))
ALWAYS, NEVER = -1.0, 2.0  # thresholds


def untrained(sensors: Sensors, *, threshold: float, every: int = 1, consecutive: int = 1) -> SuccessClassifier:
    torch.manual_seed(0)
    config = SuccessClassifierConfig(encoder=ENCODER, every=every, consecutive=consecutive)
    model = SuccessClassifier(config, sensors)
    model.threshold.fill_(threshold)
    return model.eval()
