"""A fitted model of a reward as a folder: KIND-HASH.safetensors (weights) and KIND.json.

``report.json`` beside them says how good it is; nothing reads it. As with a policy's bundle the JSON is replaced last
and names the weights by their hash.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Generic, TypeVar

from policies.bundle import read_hashed, read_manifest, tensors_of, write_hashed
from policies.device import CPU, Device
from sims.numbers.finite import check_tree
from vla_rl.rewards.classifier import SuccessClassifier, SuccessClassifierConfig
from vla_rl.rewards.preferences.model import PreferenceConfig, PreferenceModel
from vla_rl.rewards.progress.model import ProgressConfig, ProgressModel
from vla_rl.rewards.scorer import RewardModelError, Scorer, Sensors

FORMAT = 1
REPORT = "report.json"
M = TypeVar("M", bound=Scorer)


@dataclass(frozen=True, kw_only=True)
class Info:
    """What the JSON of every kind has. ``tasks``: of the episodes that it was fitted to."""

    format: int
    sha256: str
    sensors: Sensors
    tasks: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class ClassifierInfo(Info):
    config: SuccessClassifierConfig


@dataclass(frozen=True, kw_only=True)
class ProgressInfo(Info):
    config: ProgressConfig


@dataclass(frozen=True, kw_only=True)
class PreferenceInfo(Info):
    config: PreferenceConfig


@dataclass(frozen=True, kw_only=True)
class Kind(Generic[M]):
    """``fit``: the verb of ``vla-rl reward`` that makes one."""

    name: str
    model: type[M]
    info: type[Any]
    fit: str

    @property
    def manifest(self) -> str:
        return f"{self.name}.json"

    def in_folder(self, path: Path) -> bool:
        return (path / self.manifest).is_file()


CLASSIFIER = Kind(name="classifier", model=SuccessClassifier, info=ClassifierInfo, fit="fit")
PROGRESS = Kind(name="progress", model=ProgressModel, info=ProgressInfo, fit="fit-progress")
PREFERENCES = Kind(name="preferences", model=PreferenceModel, info=PreferenceInfo, fit="fit-preferences")


def save_reward_model(kind: Kind[M], model: M, path: Path, *, tasks: tuple[str, ...]) -> str:
    """Write ``model`` to the folder ``path``; a crash leaves the old or the new one. Its hash. Raises NotFinite."""
    check_tree(model, f"{kind.name} weight", where=f"{model.WHAT} {path}")
    data = tensors_of(model)
    sha256 = hashlib.sha256(data).hexdigest()
    info = kind.info(format=FORMAT, sha256=sha256, config=model.config, sensors=model.sensors, tasks=tasks)
    manifest = json.dumps(asdict(info), indent=2, default=str).encode()
    write_hashed(path / kind.manifest, manifest, kind=kind.name, sha256=sha256, tensors=data)
    return sha256


def load_reward_model(kind: Kind[M], path: Path, device: Device = CPU) -> M:
    """On ``device``, in eval mode, bit for bit as it was saved. Raises RewardModelError."""
    info = _read_info(kind, path)
    build, what = partial(kind.model, info.config, info.sensors), kind.model.WHAT
    model = read_hashed(
        path / kind.manifest, build, kind=kind.name, sha256=info.sha256, what=what, error_class=RewardModelError
    )
    return device.place(model).eval()


def _read_info(kind: Kind[Any], path: Path) -> Any:
    """The manifest."""
    manifest = path / kind.manifest
    if not manifest.is_file():
        raise RewardModelError(
            f"{path} is not a {kind.model.WHAT}: it has no {manifest.name}; fit one with: vla-rl reward {kind.fit} "
            "STORE"
        )
    return read_manifest(manifest, kind.info, format=FORMAT, again="Fit it again", error_class=RewardModelError)


def tells_progress(path: Path) -> bool:
    """Whether ``path`` is the folder of a model that does."""
    return PROGRESS.in_folder(path) or PREFERENCES.in_folder(path)


def load_progress_model(path: Path, device: Device = CPU) -> ProgressModel | PreferenceModel:
    """Whichever of both the folder holds, as ``load_reward_model`` does."""
    model: ProgressModel | PreferenceModel = load_reward_model(_progress_kind(path), path, device)
    return model


def fitted_sha256(path: Path) -> str:
    """Of all that acts in the model in this folder: its manifest, which names the weights. Raises RewardModelError."""
    kind = CLASSIFIER if CLASSIFIER.in_folder(path) else _progress_kind(path)
    _read_info(kind, path)
    return hashlib.sha256((path / kind.manifest).read_bytes()).hexdigest()


def progress_sha256(path: Path) -> str:
    """Of what ``load_progress_model`` reads, as its manifest says. Raises RewardModelError."""
    sha256: str = _read_info(_progress_kind(path), path).sha256
    return sha256


def _progress_kind(path: Path) -> Kind[Any]:
    return PREFERENCES if PREFERENCES.in_folder(path) else PROGRESS
