"""``vla-rl report``, ``compare``, ``runs``, ``track``, ``watch`` and ``replay``."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Annotated

from tyro.conf import Positional, arg

from sims.errors import UserError
from sims.numbers.ranges import Interval
from vla_rl.cli.arguments import Json
from vla_rl.cli.result import Result


@dataclass(frozen=True)
class Report:
    """Write RUN/report.html: curves, success per task, timing and videos on one page that needs no network."""

    run_path: Annotated[Positional[Path], arg(metavar="RUN")]
    """a run folder"""
    json: Json = False

    def run(self) -> Result:
        from vla_rl.report import write_report

        page = str(write_report(self.run_path))
        return Result({"page": page}, page)


@dataclass(frozen=True)
class Compare:
    """Several runs on one page, and their final success side by side in the terminal."""

    run_paths: Annotated[Positional[tuple[Path, ...]], arg(metavar="RUN RUN ...", help_behavior_hint="")]
    """two or more run folders"""
    out: Path = Path("compare.html")
    """the page to write"""
    json: Json = False

    def run(self) -> Result:
        from vla_rl.report import write_comparison
        from vla_rl.report.table import comparison, group_rows, print_comparison

        if len(self.run_paths) < 2:
            raise UserError("compare needs two or more run folders")
        resolved = [path.resolve() for path in self.run_paths]
        if again := [str(path) for i, path in enumerate(self.run_paths) if resolved[i] in resolved[:i]]:
            raise UserError(f"compare needs each run once; given again: {', '.join(again)}")
        page = str(write_comparison(self.run_paths, self.out))
        value = {"page": page, "runs": comparison(self.run_paths), "groups": group_rows(self.run_paths)}
        return Result(value, page, table=partial(print_comparison, self.run_paths))


@dataclass(frozen=True)
class Replay:
    """Show the batch of a run that stopped at a number that is not finite, and repeat the update that failed."""

    file: Annotated[Positional[Path], arg(metavar="FILE")]
    """a file of RUN/quarantine"""
    json: Json = False

    def run(self) -> Result:
        from vla_rl.runners.replay import replay

        result = replay(self.file)
        lines = [
            f"{result['quantity']} is {result['value']} ({result['where']})",
            *(f"  {name}: {shown}" for name, shown in result["batch"].items()),
            result["reproduced"] or "not reproduced: resume the run, which repeats the iteration exactly",
        ]
        return Result(result, "\n".join(lines))


@dataclass(frozen=True)
class Runs:
    """List the runs below a folder: state, success, age and size of each, the latest first."""

    folder: Annotated[Positional[Path], arg(metavar="FOLDER")] = Path("runs")
    """where to search"""
    json: Json = False

    def run(self) -> Result:
        from vla_rl.report.table import print_runs
        from vla_rl.runs.listing import list_runs

        if not self.folder.is_dir():
            raise UserError(f"{self.folder}: no such folder")
        found = list_runs(self.folder)
        return Result({"runs": [asdict(run) for run in found]}, table=partial(print_runs, found))


@dataclass(frozen=True)
class Track:
    """Copy what results of complete runs can be checked and compared by into small text files, for version control."""

    run_paths: Annotated[Positional[tuple[Path, ...]], arg(metavar="RUN ...", help_behavior_hint="")]
    """run folders; weights, episodes and videos stay there"""
    out: Path = Path("tracked")
    """where a folder for each run is made; report and compare read it"""
    json: Json = False

    def run(self) -> Result:
        from vla_rl.runs.tracked import track_run

        names = [path.resolve().name for path in self.run_paths]
        if not names or len(set(names)) < len(names):
            raise UserError(f"track needs run folders of different names, got {', '.join(names) or 'none'}")
        copies = [track_run(path, self.out) for path in self.run_paths]
        lines = [f"{one['folder']}: {one['files']} files, {one['bytes'] / 1e3:.0f} kB" for one in copies]
        return Result({"runs": copies}, "\n".join(lines))


@dataclass(frozen=True)
class Watch:
    """Show a run in a browser while it trains: curves, videos, timing and messages, on a page of this machine alone."""

    run_path: Annotated[Positional[Path], arg(metavar="RUN")]
    """a run folder"""
    port: Annotated[int, Interval(ge=0, le=65535)] = 8730
    """of the local address; 0: a free one"""

    def run(self) -> None:
        from vla_rl.report.watch import make_server, serve

        server = make_server(self.run_path, port=self.port)
        print(f"http://127.0.0.1:{server.server_port}/  (Ctrl-C ends it)", flush=True)
        serve(server)
