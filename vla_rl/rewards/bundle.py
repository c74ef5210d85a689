"""A fitted success classifier as a folder: ``classifier-HASH.safetensors`` (weights, threshold), ``classifier.json``.

``report.json`` beside them says how good it is; nothing reads it. As with a policy's bundle the JSON is replaced last
and names the weights by their hash.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load, save

from policies.bundle import read_manifest, write_atomically
from policies.device import CPU, Device
from sims.devices.crossing import crossing
from sims.numbers.finite import check_tree, is_finite, named_tensors
from vla_rl.rewards.classifier import ClassifierError, Sensors, SuccessClassifier, SuccessClassifierConfig

FORMAT = 1
MANIFEST, REPORT = "classifier.json", "report.json"


@dataclass(frozen=True, kw_only=True)
class ClassifierInfo:
    """Everything in ``classifier.json``. ``tasks``: of the episodes that it was fitted to."""

    format: int
    sha256: str
    config: SuccessClassifierConfig
    sensors: Sensors
    tasks: tuple[str, ...]

    @property
    def tensors(self) -> str:
        return f"classifier-{self.sha256[:12]}.safetensors"


def save_classifier(model: SuccessClassifier, path: Path, *, tasks: tuple[str, ...]) -> ClassifierInfo:
    """Write ``model`` to the folder ``path``; a crash leaves the old or the new one. Raises NotFinite."""
    check_tree(model, "classifier weight", where=f"success classifier {path}")
    with crossing("weights"):
        data = save({name: tensor.detach().cpu().contiguous() for name, tensor in model.state_dict().items()})
    info = ClassifierInfo(
        format=FORMAT,
        sha256=hashlib.sha256(data).hexdigest(),
        config=model.config,
        sensors=model.sensors,
        tasks=tasks,
    )
    path.mkdir(parents=True, exist_ok=True)
    write_atomically(path / info.tensors, data)
    write_atomically(path / MANIFEST, json.dumps(asdict(info), indent=2).encode())
    for leftover in path.glob("classifier-*.safetensors"):
        if leftover.name != info.tensors:
            leftover.unlink()
    return info


def read_classifier_info(path: Path) -> ClassifierInfo:
    """The manifest alone. Raises ClassifierError."""
    manifest = path / MANIFEST
    if not manifest.is_file():
        raise ClassifierError(
            f"{path} is not a success classifier: it has no {MANIFEST}; fit one with: vla-rl reward fit STORE"
        )
    return read_manifest(manifest, ClassifierInfo, format=FORMAT, again="Fit it again", error_class=ClassifierError)


def load_classifier(path: Path, device: Device = CPU) -> SuccessClassifier:
    """The classifier on ``device``, in eval mode, bit for bit as it was saved. Raises ClassifierError."""
    info = read_classifier_info(path)
    try:
        data = (path / info.tensors).read_bytes()
    except FileNotFoundError:
        raise ClassifierError(f"{path} is not a whole success classifier: it has no {info.tensors}") from None
    if hashlib.sha256(data).hexdigest() != info.sha256:
        raise ClassifierError(f"{path / info.tensors} is truncated or was changed: its hash is not that of {MANIFEST}")
    try:
        model = SuccessClassifier(info.config, info.sensors)
        model.load_state_dict(load(data))
    except (SafetensorError, RuntimeError, ValueError) as error:
        detail = str(error).strip().splitlines()[-1].strip()
        raise ClassifierError(f"{path}: the tensors do not fit the settings in {MANIFEST}: {detail}") from None
    if wrong := [name for name, tensor in named_tensors(model) if not is_finite(tensor)]:
        raise ClassifierError(f"{path}: {wrong[0]} has entries that are not finite; fit it again")
    return device.place(model).eval()
