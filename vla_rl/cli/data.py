"""``vla-rl data info | verify | rebuild | merge | compact | import | export STORE``"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

from tyro.conf import Positional, arg

from episodes.formats.export_format import ExportFormat
from sims.errors import UserError
from sims.numbers.ranges import PositiveFloat, PositiveInt
from vla_rl.cli.arguments import Json


@dataclass(frozen=True)
class Data:
    """Inspect an episode store, check its integrity, rebuild its catalog, merge another store into it, remove what is
    deleted for good, import into it, or export it."""

    verb: Positional[Literal["info", "verify", "rebuild", "merge", "compact", "import", "export"]]
    path: Annotated[Positional[Path], arg(metavar="STORE")]
    """an episode store"""
    source: Path | None = None
    """import: a robomimic file (.hdf5, also LIBERO's) or the folder of a LeRobot data set; merge: another store"""
    camera: tuple[str, ...] = ()
    """import: NAME=KEY, the simulator's camera and the recording's key of its images"""
    state: tuple[str, ...] = ()
    """import: the recording's keys that are concatenated to the state, in order"""
    task: str | None = None
    """import: the task's name (default: the instruction)"""
    instruction: str | None = None
    """import: instead of the recording's"""
    control_hz: PositiveFloat | None = None
    """import: instead of the recording's"""
    action_low: tuple[float, ...] = (-1.0,)
    """import: action of the recording that becomes -1, one number or one per dimension"""
    action_high: tuple[float, ...] = (1.0,)
    """import: action of the recording that becomes 1"""
    orientation: Literal["as_recorded", "upside_down", "half_turn"] = "as_recorded"
    """import: how the recording's images are oriented, relative to the simulator's"""
    image_size: Annotated[tuple[PositiveInt, PositiveInt] | None, arg(metavar="HEIGHT WIDTH")] = None
    """import: of all cameras, in pixels; images keep their proportions, borders are black (default: as recorded)"""
    success: str = "recorded"
    """import: recorded (without rewards: at the end), end, none, or a rule such as next.reward>=0.95"""
    to: ExportFormat = "lerobot"
    """export: LeRobotDataset 3.0 with videos, or with exact images in its tables; a robomimic file (.hdf5); or MCAP"""
    out: Path | None = None
    """export: the folder (for robomimic the file) to write"""
    json: Json = False

    def run(self) -> None:
        if self.verb in ("import", "export"):
            (self._import if self.verb == "import" else self._export)()
            return
        from episodes import maintenance

        do: dict[str, Callable[[Path], dict[str, Any]]] = {
            "info": maintenance.info,
            "verify": maintenance.verify,
            "rebuild": maintenance.rebuild,
            "compact": maintenance.compact,
            "merge": partial(maintenance.merge, source=self._other_store()),
        }
        result = do[self.verb](self.path)
        if self.json:
            print(json.dumps(result))
        else:
            print("\n".join(f"{key}: {value}" for key, value in result.items()))
        if self.verb in ("verify", "merge") and result["corrupt"]:
            raise SystemExit(1)

    def _other_store(self) -> Path:
        if self.verb == "merge" and self.source is None:
            raise UserError("data merge STORE needs --source, the store whose episodes are copied")
        return self.source or self.path

    def _import(self) -> None:
        from episodes.formats.importer import import_episodes
        from episodes.formats.recording import ImportMapping
        from episodes.formats.success import parse_success
        from episodes.store import EpisodeStore

        pairs = [pair.partition("=") for pair in self.camera]
        if self.source is None or any(not key for _, _, key in pairs):
            raise UserError("data import STORE needs --source FILE_OR_FOLDER, and every --camera as NAME=KEY")
        mapping = ImportMapping(
            cameras={name: key for name, _, key in pairs},
            state=self.state,
            task=self.task,
            instruction=self.instruction,
            control_hz=self.control_hz,
            action_low=self.action_low,
            action_high=self.action_high,
            orientation=self.orientation,
            image_size=self.image_size,
            success=parse_success(self.success),
        )
        result = import_episodes(self.source, EpisodeStore(self.path, create=True), mapping)
        print(json.dumps(result) if self.json else _imported(self.path, result))

    def _export(self) -> None:
        from episodes.formats.exporter import export_episodes
        from episodes.store import EpisodeStore

        if self.out is None:
            raise UserError("data export STORE needs --out, the folder or file to write")
        result = export_episodes(EpisodeStore(self.path), self.out, self.to)
        written = f"{self.out}: {result['episodes']} episodes of {result['steps']} steps written"
        print(json.dumps(result) if self.json else written)


def _imported(path: Path, result: Mapping[str, int]) -> str:
    present = f", {result['present']} were there already" if result["present"] else ""
    return f"{path}: {result['episodes']} episodes imported, {result['successes']} of them successes{present}"
