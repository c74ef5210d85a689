"""The configurations that ship with the package, found by name where no file of that name exists."""

from __future__ import annotations

import difflib
from pathlib import Path

from vla_rl.config.errors import ConfigError

_INSTALLED = Path(__file__).parents[1] / "configs"  # the wheel puts configs/ of a checkout here
PACKAGED = _INSTALLED if _INSTALLED.is_dir() else Path(__file__).parents[2] / "configs"


def find_config(path: Path, folder: str = ".") -> Path:
    """``path`` itself, or the packaged file that a name such as ``quickstart`` or ``off_policy/iql.yaml`` means.

    folder: of the packaged files, "." for experiments or "robots". Another path with folders is returned as it is.
    Raises ConfigError for a folder, and for a bare name that is neither a file nor packaged.
    """
    if path.exists() and not path.is_dir():
        return path
    if (packaged := find_packaged(path, folder)) is not None:
        return packaged
    if path.is_dir():
        raise ConfigError(f"{path} is a folder; {_instead(path)}")
    if path != Path(path.name):
        return path
    names = sorted(file.stem for file in (PACKAGED / folder).glob("*.yaml"))
    near = difflib.get_close_matches(path.name.removesuffix(".yaml"), names, n=1)
    hint = f"did you mean '{near[0]}'?" if near else f"those are: {', '.join(names)}"
    raise ConfigError(f"{path}: no such file, and no configuration of that name comes with vla-rl; {hint}")


def _instead(folder: Path) -> str:
    """What to name instead of a folder."""
    files = sorted(file.name for file in folder.glob("*.y*ml"))
    return f"name a YAML file in it: {', '.join(files)}" if files else "name a YAML file, it has none"


def find_packaged(name: Path, folder: str = ".") -> Path | None:
    """The packaged file of this name, with or without ``.yaml``; None where there is none."""
    if name.is_absolute() or ".." in name.parts or not name.name:
        return None
    packaged = PACKAGED / folder / name.with_name(f"{name.name.removesuffix('.yaml')}.yaml")
    return packaged if packaged.is_file() else None
