"""``vla-rl sims list | install NAME | verify NAME``"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from typing import Annotated, Literal

from tyro.conf import Positional, arg

from sims.errors import UserError
from vla_rl.cli.arguments import Json


@dataclass(frozen=True)
class Sims:
    """List the simulators that run in Python environments of their own, install one, or check one on this machine."""

    verb: Positional[Literal["list", "install", "verify"]]
    simulator: Annotated[Positional[str | None], arg(metavar="[NAME]")] = None
    """what to install or verify"""
    json: Json = False

    def run(self) -> None:
        {"list": self._list, "install": self._install, "verify": self._verify}[self.verb]()

    def _verify(self) -> None:
        from sims.verification.verify import verify

        if self.simulator is None:
            raise UserError("sims verify needs the name of a simulator; vla-rl sims list shows them")
        found = []
        for result in verify(self.simulator):
            found.append({"name": result.check, "status": "failed" if result.broken else "ok", "detail": result.broken})
            if not self.json:
                line = f"{found[-1]['status']:<8}{result.seconds:>7.1f} s  {result.check}"
                print(line if result.broken is None else f"{line}\n        {result.broken}", flush=True)
        if self.json:
            print(json.dumps({"simulator": self.simulator, "checks": found}))
        if any(check["status"] == "failed" for check in found):
            raise SystemExit(1)

    def _install(self) -> None:
        from sims.install import RECIPES, install

        if self.simulator not in RECIPES:
            raise UserError(f"sims install needs one of {', '.join(RECIPES)}; got {self.simulator or 'none'}")
        print(install(self.simulator, report=lambda line: print(line, file=sys.stderr)))

    def _list(self) -> None:
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
        if self.json:
            print(json.dumps({"simulators": rows}))
        else:
            print("\n".join(f"{row['status']:<9}{row['name']:<12}{row['summary']}" for row in rows))
