"""``report.html``: one run, or several side by side, on one page for a browser without a network.

No script, font or image is loaded: charts are SVG drawn in svg.py, videos are embedded. What a run does not have yet
(an evaluation, videos) is left out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from vla_rl.report.comparison import comparison_page
from vla_rl.report.page import run_page
from vla_rl.report.run_data import read_run
from vla_rl.report.sweep import sweep_page

__all__ = ["write_comparison", "write_report", "write_sweep_page"]


def write_report(run_dir: Path) -> Path:
    """Write ``run_dir/report.html`` and return it. Raises UserError if ``run_dir`` is not the folder of a run."""
    page = run_dir / "report.html"
    page.write_text(run_page(read_run(run_dir)), encoding="utf-8")
    return page


def write_comparison(run_dirs: Sequence[Path], page: Path) -> Path:
    """Write one page of all runs to ``page`` and return it. Raises UserError where one is not the folder of a run."""
    html = comparison_page([read_run(run_dir) for run_dir in run_dirs])
    page.parent.mkdir(parents=True, exist_ok=True)
    page.write_text(html, encoding="utf-8")
    return page


def write_sweep_page(sweep: Mapping[str, Any], page: Path) -> Path:
    """Write the page of a sweep, as sweep.json has it, to ``page`` and return it."""
    page.write_text(sweep_page(sweep, page.parent), encoding="utf-8")
    return page
