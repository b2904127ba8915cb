"""Sizes that train in a blink."""

from foretoken.train.config import TrainConfig
from foretoken.train.shapes import LlamaShape

TINY = LlamaShape(32, 48, 1, 2, 1, 16, 64)
STEPS = TrainConfig(steps=6, batch=2, window=16, learning_rate=1e-2, compile=False)
