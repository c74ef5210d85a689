"""``vla-rl report`` and ``compare``."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from tyro.conf import Positional, arg

from sims.errors import UserError


@dataclass(frozen=True)
class Report:
    """Write RUN/report.html: curves, success per task, timing and videos on one page that needs no network."""

    run_path: Annotated[Positional[Path], arg(metavar="RUN")]
    """a run folder"""

    def run(self) -> None:
        from vla_rl.report import write_report

        print(write_report(self.run_path))


@dataclass(frozen=True)
class Compare:
    """Several runs on one page, and their final success side by side in the terminal."""

    run_paths: Annotated[Positional[tuple[Path, ...]], arg(metavar="RUN RUN ...", help_behavior_hint="")]
    """two or more run folders"""
    out: Path = Path("compare.html")
    """the page to write"""

    def run(self) -> None:
        from vla_rl.report import write_comparison
        from vla_rl.report.table import print_comparison

        if len(self.run_paths) < 2:
            raise UserError("compare needs two or more run folders")
        page = write_comparison(self.run_paths, self.out)
        print_comparison(self.run_paths)
        print(page)
