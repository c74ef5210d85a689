"""``vla-rl data info | verify | rebuild | merge | compact | import | export STORE``"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from tyro.conf import Positional, arg

from episodes.formats.export_format import ExportFormat
from sims.errors import UserError
from sims.numbers.ranges import PositiveFloat, PositiveInt
from vla_rl.cli.arguments import Json
from vla_rl.cli.result import Result

Store = Annotated[Positional[Path], arg(metavar="STORE", help="an episode store")]


@dataclass(frozen=True)
class Info:
    """Count episodes, steps and bytes, and name the files that are unreadable or of the wrong size."""

    path: Store
    json: Json = False

    def run(self) -> Result:
        from episodes.maintenance import info

        return Result(info(self.path))


@dataclass(frozen=True)
class Verify:
    """As info, after comparing the content of every file with its hash; exit code 1 where one is damaged."""

    path: Store
    json: Json = False

    def run(self) -> Result:
        from episodes.maintenance import verify

        found = verify(self.path)
        return Result(found, failed=bool(found["corrupt"]))


@dataclass(frozen=True)
class Rebuild:
    """Write the catalog again from the episode files."""

    path: Store
    json: Json = False

    def run(self) -> Result:
        from episodes.maintenance import rebuild

        return Result(rebuild(self.path))


@dataclass(frozen=True)
class Merge:
    """Copy the episodes and labels of another store that this one does not have."""

    path: Store
    source: Annotated[Path, arg(metavar="STORE")]
    """the store whose episodes are copied"""
    json: Json = False

    def run(self) -> Result:
        from episodes.maintenance import merge

        merged = merge(self.path, self.source)
        return Result(merged, failed=bool(merged["corrupt"]))


@dataclass(frozen=True)
class Compact:
    """Remove the files of deleted episodes for good."""

    path: Store
    json: Json = False

    def run(self) -> Result:
        from episodes.maintenance import compact

        return Result(compact(self.path))


@dataclass(frozen=True)
class Import:
    """Add the episodes of a recording in another format; what was imported before is left out."""

    path: Store
    source: Annotated[Path, arg(metavar="FILE_OR_FOLDER")]
    """a robomimic (also LIBERO's) or D4RL file (.hdf5), or the folder of a LeRobot or Minari data set"""
    camera: tuple[str, ...] = ()
    """NAME=KEY, the simulator's camera and the recording's key of its images"""
    state: tuple[str, ...] = ()
    """the recording's keys that are concatenated to the state, in order"""
    task: str | None = None
    """the task's name (default: the instruction)"""
    instruction: str | None = None
    """instead of the recording's"""
    control_hz: PositiveFloat | None = None
    """instead of the recording's"""
    action_low: tuple[float, ...] = (-1.0,)
    """action of the recording that becomes -1, one number or one per dimension"""
    action_high: tuple[float, ...] = (1.0,)
    """action of the recording that becomes 1"""
    orientation: Literal["as_recorded", "upside_down", "half_turn"] = "as_recorded"
    """how the recording's images are oriented, relative to the simulator's"""
    image_size: Annotated[tuple[PositiveInt, PositiveInt] | None, arg(metavar="HEIGHT WIDTH")] = None
    """of all cameras, in pixels; images are cropped to these proportions, as an arm's (default: as recorded)"""
    success: str = "recorded"
    """recorded (without rewards: at the end), end, none, or a rule such as next.reward>=0.95"""
    skip_bad: bool = False
    """leave out episodes that cannot be imported, and list them with the reasons"""
    json: Json = False

    def run(self) -> Result:
        from episodes.formats.importer import import_episodes
        from episodes.formats.recording import ImportMapping
        from episodes.formats.success import parse_success
        from episodes.maintenance import store_to_fill

        pairs = [pair.partition("=") for pair in self.camera]
        if any(not key for _, _, key in pairs):
            raise UserError(f"data import needs every --camera as NAME=KEY, got {' '.join(self.camera)}")
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
        with store_to_fill(self.path) as store:
            result = import_episodes(self.source, store, mapping, skip_bad=self.skip_bad)
        present = f", {result['present']} were there already" if result["present"] else ""
        imported = f"{result['episodes']} episodes imported, {result['successes']} of them successes{present}"
        skipped = result["skipped"]
        left_out = [f"{len(skipped)} left out:", *(f"{one['episode']}: {one['reason']}" for one in skipped)]
        return Result(result, "\n".join([f"{self.path}: {imported}", *(left_out if skipped else [])]))


@dataclass(frozen=True)
class Export:
    """Write all episodes, with their labels, in another format."""

    path: Store
    out: Path
    """the folder (for robomimic the file) to write"""
    to: ExportFormat = "lerobot"
    """LeRobotDataset 3.0 with videos, or with exact images in its tables; a robomimic file (.hdf5); or MCAP"""
    json: Json = False

    def run(self) -> Result:
        from episodes.formats.exporter import export_episodes
        from episodes.store import EpisodeStore

        result = export_episodes(EpisodeStore(self.path), self.out, self.to)
        return Result(result, f"{self.out}: {result['episodes']} episodes of {result['steps']} steps written")
