"""A fitted model of a reward as a folder: KIND-HASH.safetensors (weights) and KIND.json.

``report.json`` beside them says how good it is; nothing reads it. As with a policy's bundle the JSON is replaced last
and names the weights by their hash.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from safetensors import SafetensorError
from safetensors.torch import load, save

from policies.bundle import read_manifest, write_atomically
from policies.device import CPU, Device
from sims.devices.crossing import crossing
from sims.numbers.finite import check_tree, is_finite, named_tensors
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

    def file(self, sha256: str) -> str:
        return f"{self.name}-{sha256[:12]}.safetensors"

    def in_folder(self, path: Path) -> bool:
        return (path / f"{self.name}.json").is_file()


CLASSIFIER = Kind(name="classifier", model=SuccessClassifier, info=ClassifierInfo, fit="fit")
PROGRESS = Kind(name="progress", model=ProgressModel, info=ProgressInfo, fit="fit-progress")
PREFERENCES = Kind(name="preferences", model=PreferenceModel, info=PreferenceInfo, fit="fit-preferences")


def save_reward_model(kind: Kind[M], model: M, path: Path, *, tasks: tuple[str, ...]) -> str:
    """Write ``model`` to the folder ``path``; a crash leaves the old or the new one. Its hash. Raises NotFinite."""
    check_tree(model, f"{kind.name} weight", where=f"{model.WHAT} {path}")
    with crossing("weights"):
        data = save({name: tensor.detach().cpu().contiguous() for name, tensor in model.state_dict().items()})
    sha256 = hashlib.sha256(data).hexdigest()
    info = kind.info(format=FORMAT, sha256=sha256, config=model.config, sensors=model.sensors, tasks=tasks)
    path.mkdir(parents=True, exist_ok=True)
    write_atomically(path / kind.file(sha256), data)
    write_atomically(path / f"{kind.name}.json", json.dumps(asdict(info), indent=2, default=str).encode())
    for leftover in path.glob(f"{kind.name}-*.safetensors"):
        if leftover.name != kind.file(sha256):
            leftover.unlink()
    return sha256


def load_reward_model(kind: Kind[M], path: Path, device: Device = CPU) -> M:
    """On ``device``, in eval mode, bit for bit as it was saved. Raises RewardModelError."""
    what, manifest, info = kind.model.WHAT, path / f"{kind.name}.json", _read_info(kind, path)
    weights = path / kind.file(info.sha256)
    try:
        data = weights.read_bytes()
    except FileNotFoundError:
        raise RewardModelError(f"{path} is not a whole {what}: it has no {weights.name}") from None
    if hashlib.sha256(data).hexdigest() != info.sha256:
        raise RewardModelError(f"{weights} is truncated or was changed: its hash is not that of {manifest.name}")
    try:
        model = kind.model(info.config, info.sensors)
        model.load_state_dict(load(data))
    except (SafetensorError, RuntimeError, ValueError) as error:
        detail = str(error).strip().splitlines()[-1].strip()
        raise RewardModelError(f"{path}: the tensors do not fit the settings in {manifest.name}: {detail}") from None
    if wrong := [name for name, tensor in named_tensors(model) if not is_finite(tensor)]:
        raise RewardModelError(f"{path}: {wrong[0]} has entries that are not finite; fit it again")
    return device.place(model).eval()


def _read_info(kind: Kind[Any], path: Path) -> Any:
    """The manifest."""
    manifest = path / f"{kind.name}.json"
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
    if PREFERENCES.in_folder(path):
        return load_reward_model(PREFERENCES, path, device)
    return load_reward_model(PROGRESS, path, device)


def progress_sha256(path: Path) -> str:
    """Of what ``load_progress_model`` reads, as its manifest says. Raises RewardModelError."""
    sha256: str = _read_info(PREFERENCES if PREFERENCES.in_folder(path) else PROGRESS, path).sha256
    return sha256
