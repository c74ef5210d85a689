"""What may compute a policy's chunks. On its own, so that the command line knows it without loading anything."""

from typing import Literal

Runtime = Literal["eager", "compiled", "onnx"]
