"""Vision-language models as the hub has them, read from folders (``hf download``) by ``transformers``.

Nothing is ever downloaded here.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from policies.device import Device
from sims.devices.crossing import crossing
from vla_rl.rewards.scorer import RewardModelError, Sensors

T = TypeVar("T")


class PublishedModel:
    """``folder`` is read by the class of transformers of the name ``model_class``. RewardModelError.

    ``camera``: whose images it sees; None: the first one's.
    """

    def __init__(self, folder: Path, camera: str | None, device: Device, *, model_class: str) -> None:
        transformers = _transformers()
        self.processor = _read(folder, transformers.AutoProcessor.from_pretrained)
        self.model = device.place(_read(folder, getattr(transformers, model_class).from_pretrained)).eval()
        self._camera = camera

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    def cameras_among(self, sensors: Sensors, where: str) -> list[int]:
        """RewardModelError where ``where`` has no such camera."""
        cameras = sensors.cameras
        if not cameras or (self._camera is not None and self._camera not in cameras):
            wanted = "a camera" if self._camera is None else f"camera {self._camera!r}"
            raise RewardModelError(f"the reward needs {wanted}; {where} has {', '.join(cameras) or 'none'}")
        return [0 if self._camera is None else cameras.index(self._camera)]

    def _prompt(self, *content: str | None) -> str:
        """A user's turn of texts and, where None stands, images."""
        parts = [{"type": "image"} if text is None else {"type": "text", "text": text} for text in content]
        prompt: str = self.processor.apply_chat_template(
            [{"role": "user", "content": parts}], add_generation_prompt=True
        )
        return prompt

    def _inputs(self, **given: Any) -> dict[str, Tensor]:
        with crossing("observations"):
            made = self.processor(**given, return_tensors="pt", padding=True)
            return {name: tensor.to(self.device) for name, tensor in made.items()}


def published_sha256(folder: Path) -> str:
    """Of all that is read from the folder of a model. Raises OSError."""
    weights = sorted(folder.glob("*.safetensors")) or sorted(folder.glob("*.bin"))
    total = hashlib.sha256()
    for path in [*weights, *sorted(folder.glob("*.json"))]:
        with path.open("rb") as file:
            total.update(hashlib.file_digest(file, "sha256").digest())
    return total.hexdigest()


def check_places(setting: str, text: str, *filled: str) -> None:
    """ValueError unless ``text`` has a place {} for each of what is ``filled`` in, and no other."""
    marks = [f"<{i}>" for i in range(len(filled))]
    try:
        told = text.format(*marks)
    except (LookupError, ValueError, AttributeError):
        told = ""
    if not all(mark in told for mark in marks):
        raise ValueError(
            f"{setting} must have a place {{}} for {' and then one for '.join(filled)}, and no other braces ({{{{ and "
            f"}}}} stand for braces), got {text!r}"
        )


def _transformers() -> Any:
    try:
        import transformers
    except ImportError:
        raise RewardModelError("this reward reads models by transformers. Run: pip install 'vla-rl[vlm]'") from None
    return transformers


def _read(folder: Path, load: Callable[..., T]) -> T:
    if not (folder / "config.json").is_file():
        raise RewardModelError(f"{folder} is not the folder of a model: it has no config.json")
    try:
        return load(folder, local_files_only=True)
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        raise RewardModelError(f"{folder}: {str(error).strip().splitlines()[0]}") from None
