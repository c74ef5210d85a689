"""Latency of the correction page, and what a policy learns from corrections.

    python -m benchmarks.corrections latency [--seconds 20]
    python -m benchmarks.corrections learning [--tasks pick] [--seeds 0] [--recipes hg_dagger]

``latency``: as ``vla-rl bench hil``. ``learning``: corrections_learning.py.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import fields
from pathlib import Path

from benchmarks.corrections_learning import Settings, compare
from vla_rl.bench.corrections import page_rows
from vla_rl.bench.record import write_record


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=("latency", "learning"))
    parser.add_argument("--seconds", type=float, default=20.0, help="of latency")
    parser.add_argument("--work", type=Path, default=Path("runs/corrections_learning"), help="of learning; resumable")
    defaults = Settings()
    for field in fields(Settings):
        value = getattr(defaults, field.name)
        flag = "--" + field.name.replace("_", "-")
        if isinstance(value, bool):
            parser.add_argument(flag, action="store_true")
        elif isinstance(value, tuple):
            parser.add_argument(flag, type=type(value[0]), default=value, nargs="+")
        else:
            parser.add_argument(flag, type=type(value), default=value)
    options = parser.parse_args()
    if options.part == "latency":
        name, rows = "corrections_latency", page_rows(options.seconds)
    else:
        settings = Settings(**{field.name: getattr(options, field.name) for field in fields(Settings)})
        name, rows = "corrections", compare(settings, options.work)
    write_record(name, rows, command=" ".join(["python -m benchmarks.corrections", *sys.argv[1:]]))
    print(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
