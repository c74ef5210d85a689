"""Names of the runtimes in ``real_robot/serving/registry.py``; importing this file loads nothing else."""

from typing import Literal

Runtime = Literal["eager", "compiled", "onnx"]
