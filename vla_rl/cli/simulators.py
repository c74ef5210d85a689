"""``vla-rl sims list | install NAME | verify NAME``"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Annotated

from tyro.conf import Positional, arg

from vla_rl.cli.arguments import Json
from vla_rl.cli.result import Result

Simulator = Annotated[Positional[str], arg(metavar="NAME", help="of a simulator; vla-rl sims list shows them")]


@dataclass(frozen=True)
class List:
    """The simulators that run in Python environments of their own, and whether they are installed."""

    json: Json = False

    def run(self) -> Result:
        from sims.install import list_simulators

        rows = [
            {
                "name": found.name,
                "summary": found.summary,
                "status": "missing" if found.python is None else "outdated" if found.outdated else "ok",
                "fix": f"vla-rl sims install {found.name}",
            }
            for found in list_simulators()
        ]
        lines = [f"{row['status']:<9}{row['name']:<12}{row['summary']}" for row in rows]
        return Result({"simulators": rows}, "\n".join(lines))


@dataclass(frozen=True)
class Install:
    """Make the Python environment of a simulator, or make it again."""

    simulator: Simulator
    json: Json = False

    def run(self) -> Result:
        from sims.install import install

        python = install(self.simulator, report=lambda line: print(line, file=sys.stderr))
        return Result({"python": str(python)}, str(python))


@dataclass(frozen=True)
class Verify:
    """Check the contract of environments with a simulator on this machine; exit code 1 where it is broken."""

    simulator: Simulator
    json: Json = False

    def run(self) -> Result:
        from sims.verification.verify import verify

        found = []
        for result in verify(self.simulator):
            found.append({"name": result.check, "status": "failed" if result.broken else "ok", "detail": result.broken})
            if not self.json:  # each takes long
                line = f"{found[-1]['status']:<8}{result.seconds:>7.1f} s  {result.check}"
                print(line if result.broken is None else f"{line}\n        {result.broken}", flush=True)
        failed = sum(check["status"] == "failed" for check in found)
        return Result(
            {"simulator": self.simulator, "checks": found}, f"{failed} of {len(found)} failed", failed=bool(failed)
        )
