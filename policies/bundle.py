"""A trained policy as a folder: ``policy-HASH.safetensors`` (weights and normalizer) and ``bundle.json`` (the rest).

The JSON is replaced last, in one rename, and names the tensors by their hash: a crash leaves the old bundle or the new
one, and damage is detected on reading.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from functools import cache, partial
from pathlib import Path
from typing import TypeVar

import torch
from pydantic import ConfigDict, TypeAdapter, ValidationError
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import nn

from episodes.files import write_atomically
from policies.device import CPU, Device
from policies.policy import Policy, RobotSpec
from policies.residual.registry import BundledConfig, build_bundled
from sims.devices.crossing import crossing
from sims.errors import UserError
from sims.numbers.finite import check_tree, is_finite, named_tensors

M = TypeVar("M")
T = TypeVar("T")
N = TypeVar("N", bound=nn.Module)

FORMAT = 2
MANIFEST = "bundle.json"
ANY_SHA256 = "[0-9a-f]" * 12  # a pattern: another file named policy-*.safetensors is not ours to delete


class BundleError(UserError):
    """A bundle is missing, damaged, of another format, or made for another robot. The message says which."""


@dataclass(frozen=True, kw_only=True)
class Provenance:
    """Where a policy came from. ``parent``: tensors' sha256 of the bundle it was trained from."""

    git_revision: str | None = None
    parent: str | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)
    created: str | None = None


@dataclass(frozen=True, kw_only=True)
class BundleInfo:
    """Everything in ``bundle.json``."""

    format: int
    sha256: str
    config: BundledConfig
    robot: RobotSpec
    provenance: Provenance

    @property
    def tensors(self) -> str:
        """Name of the weights' file."""
        return tensors_name(self.sha256)


def tensors_name(sha256: str) -> str:
    """Of the weights' file in a bundle whose tensors have this hash."""
    return hashed_name("policy", sha256)


def hashed_name(kind: str, sha256: str) -> str:
    return f"{kind}-{sha256[:12]}.safetensors"


def save_bundle(policy: Policy, path: Path, *, provenance: Provenance | None = None) -> BundleInfo:
    """Write ``policy`` to the folder ``path``, replacing a bundle that is there; a crash leaves the old or the new.

    ``created`` and torch's version are filled in where ``provenance`` does not say. Raises NotFinite.
    """
    given = provenance or Provenance()
    check_tree(policy, "policy weight", where=f"bundle {path}")
    data = tensors_of(policy)
    info = BundleInfo(
        format=FORMAT,
        sha256=hashlib.sha256(data).hexdigest(),
        config=policy.config,
        robot=policy.spec.robot,
        provenance=Provenance(
            git_revision=given.git_revision,
            parent=given.parent,
            metrics=given.metrics,
            versions={"torch": torch.__version__, **given.versions},
            created=given.created or datetime.now(UTC).isoformat(timespec="seconds"),
        ),
    )
    manifest = json.dumps(asdict(info), indent=2).encode()
    write_hashed(path / MANIFEST, manifest, kind="policy", sha256=info.sha256, tensors=data)
    for name in (MANIFEST, f"policy-{ANY_SHA256}.safetensors"):
        for leftover in path.glob(f".{name}.*.partial"):
            leftover.unlink()
    return info


def install_bundle(path: Path, *, manifest: bytes, tensors: bytes) -> None:
    """Write the files of a bundle to the folder ``path``, as ``save_bundle`` does.

    Raises BundleError if the weights are not those that the manifest names.
    """
    sha256 = hashlib.sha256(tensors).hexdigest()
    if json.loads(manifest)["sha256"] != sha256:
        raise BundleError(f"the weights of the bundle for {path} are damaged: sha256 {sha256[:12]}")
    write_hashed(path / MANIFEST, manifest, kind="policy", sha256=sha256, tensors=tensors)


def copy_bundle(source: Path, path: Path) -> None:
    """Write the bundle in the folder ``source`` to the folder ``path``, as ``save_bundle`` does. Raises BundleError."""

    def copy(info: BundleInfo) -> None:
        try:
            manifest, tensors = (source / MANIFEST).read_bytes(), (source / info.tensors).read_bytes()
        except FileNotFoundError:
            raise BundleError(f"{source} is not a whole bundle: it has no {info.tensors}") from None
        install_bundle(path, manifest=manifest, tensors=tensors)

    _of_one_bundle(source, copy)


def _of_one_bundle(path: Path, read: Callable[[BundleInfo], T]) -> T:
    """What ``read`` makes of the bundle in ``path``, again where another replaced it meanwhile. Raises BundleError."""
    info = read_bundle_info(path)
    while True:
        try:
            return read(info)
        except BundleError:
            before, info = info, read_bundle_info(path)
            if info.sha256 == before.sha256:
                raise


def tensors_of(module: nn.Module) -> bytes:
    """Its state as a safetensors file."""
    with crossing("weights"):
        return save({name: tensor.detach().to("cpu").contiguous() for name, tensor in module.state_dict().items()})


def write_hashed(path: Path, manifest: bytes, *, kind: str, sha256: str, tensors: bytes) -> None:
    """KIND-HASH.safetensors, then the manifest ``path`` beside it that names it; then other such tensors of KIND go."""
    tensors_path = path.with_name(hashed_name(kind, sha256))
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(tensors_path, tensors)
    write_atomically(path, manifest)
    for leftover in path.parent.glob(f"{kind}-{ANY_SHA256}.safetensors"):
        if leftover != tensors_path:
            leftover.unlink(missing_ok=True)


def read_bundle_info(path: Path) -> BundleInfo:
    """The manifest alone. Raises BundleError."""
    if not (path / MANIFEST).is_file():
        near = (path / "bundle", path.parent / "imitation" / "bundle", path.parent)  # of a run, of one under way
        named = next((f"; name {other}" for other in near if (other / MANIFEST).is_file()), "")
        why = "it is a file" if path.is_file() else f"it has no {MANIFEST}"
        raise BundleError(f"{path} is not a bundle: {why}{named}")
    return read_manifest(path / MANIFEST, BundleInfo, format=FORMAT, again="Train it again", error_class=BundleError)


def bundle_version(path: Path) -> str:
    """SHA-256 of everything that acts in the bundle ``path``: the weights, and the settings that its file says.

    It names what is published, served, recorded with and rolled back, also for a vla-rl that has more settings. Raises
    BundleError.
    """
    read_bundle_info(path)
    return manifest_version((path / MANIFEST).read_bytes())


def manifest_version(manifest: bytes) -> str:
    """``bundle_version`` of the bundle with this file."""
    given = json.loads(manifest)
    acting = {"weights": given["sha256"], "config": given["config"], "robot": given["robot"]}
    return hashlib.sha256(json.dumps(acting, sort_keys=True).encode()).hexdigest()


def read_manifest(path: Path, cls: type[M], *, format: int, again: str, error_class: type[UserError]) -> M:
    """The JSON file ``path`` as a ``cls``, every key checked; ``again``: what to do about one of another format.

    Raises ``error_class``, in one line.
    """
    try:
        manifest = json.loads(path.read_text())
    except ValueError as error:
        raise error_class(f"{path} is damaged: {error}") from None
    got = manifest.get("format") if isinstance(manifest, dict) else None
    if got != format:
        raise error_class(f"{path} has format {got!r}; this version reads {format}. {again}")
    try:
        section: type = cls
        return _strict(section).validate_json(json.dumps([manifest]))[0]
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"][1:])
        if first["type"] == "unexpected_keyword_argument":
            problem = f"unknown key, got {first['input']!r}; another version of vla-rl may have written it"
        else:
            problem = f"{first['msg']}, got {first['input']!r}"
            if first["type"] == "union_tag_invalid":
                problem += "; one of another package is known once that is installed"
        raise error_class(f"{path}: {where}: {problem}") from None
    except ValueError as error:
        raise error_class(f"{path}: {error}") from None


@cache
def _strict(cls: type) -> TypeAdapter:
    # In a list, because only there the settings reach every level. A key that nothing reads would change behavior
    # silently in the version that wrote it.
    return TypeAdapter(list[cls], config=ConfigDict(extra="forbid", strict=True, allow_inf_nan=False))


def check_robot(path: Path, info: BundleInfo, robot: RobotSpec) -> None:
    """Raises BundleError unless the bundle ``path`` was made for ``robot``."""
    if differences := info.robot.differences(robot):
        raise BundleError(f"{path} was made for another robot or simulator: {differences}")


def load_bundle(
    path: Path | str,
    *,
    robot: RobotSpec | None = None,
    device: Device = CPU,
) -> Policy:
    """The policy of the folder ``path`` on ``device``, in eval mode, bit for bit as it was saved.

    ``robot``: of the simulator or arm that it is to act on; given, it must match. Raises BundleError.
    """
    path = Path(path)

    def read(info: BundleInfo) -> Policy:
        if robot is not None:
            check_robot(path, info, robot)
        build = partial(build_bundled, info.config, info.robot)
        return read_hashed(
            path / MANIFEST, build, kind="policy", sha256=info.sha256, what="bundle", error_class=BundleError
        )

    return device.place(_of_one_bundle(path, read)).eval()


def read_hashed(
    path: Path, build: Callable[[], N], *, kind: str, sha256: str, what: str, error_class: type[UserError]
) -> N:
    """What ``build`` makes, with the tensors that the manifest ``path`` names by their hash. Raises ``error_class``."""
    tensors = path.with_name(hashed_name(kind, sha256))
    try:
        data = tensors.read_bytes()
    except FileNotFoundError:
        raise error_class(f"{path.parent} is not a whole {what}: it has no {tensors.name}") from None
    digest = hashlib.sha256(data).hexdigest()
    if digest != sha256:
        raise error_class(
            f"{tensors} is truncated or was changed: sha256 {digest[:12]}, the manifest says {sha256[:12]}"
        )
    try:
        module = build()
        module.load_state_dict(load(data))
    except (SafetensorError, RuntimeError, ValueError) as error:
        first = str(error).strip().splitlines()
        detail = first[1].strip() if len(first) > 1 else first[0]  # torch lists every tensor, one a line
        raise error_class(f"{path.parent}: the tensors do not fit the config in {path.name}: {detail}") from None
    if wrong := [name for name, tensor in named_tensors(module) if not is_finite(tensor)]:
        raise error_class(f"{path.parent}: {wrong[0]} has entries that are not finite; make it again")
    return module
