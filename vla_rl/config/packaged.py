"""The configurations that ship with the package, found by name where no file of that name exists."""

from __future__ import annotations

import difflib
from pathlib import Path

from vla_rl.config.errors import ConfigError

_INSTALLED = Path(__file__).parents[1] / "configs"  # the wheel puts configs/ of a checkout here
PACKAGED = _INSTALLED if _INSTALLED.is_dir() else Path(__file__).parents[2] / "configs"


def find_config(path: Path, folder: str = ".") -> Path:
    """``path`` itself, or the packaged file that a bare name such as ``quickstart`` or ``quickstart.yaml`` means.

    folder: of the packaged files, "." for experiments or "robots". A path that names a folder is returned as it is.
    Raises ConfigError for a bare name that is neither a file nor packaged.
    """
    if path.exists() or path != Path(path.name):
        return path
    packaged = PACKAGED / folder / f"{path.name.removesuffix('.yaml')}.yaml"
    if packaged.is_file():
        return packaged
    names = sorted(file.stem for file in packaged.parent.glob("*.yaml"))
    near = difflib.get_close_matches(packaged.stem, names, n=1)
    hint = f"did you mean '{near[0]}'?" if near else f"those are: {', '.join(names)}"
    raise ConfigError(f"{path}: no such file, and no configuration of that name comes with vla-rl; {hint}")
