"""``vla-rl sims verify NAME``: the contract of VectorEnv, checked with a simulator on this machine."""

from __future__ import annotations

import dataclasses
import time
import traceback
from collections.abc import Iterator
from typing import Any

from sims.errors import UserError
from sims.examples import EXAMPLES, is_installed
from sims.registry import make_env
from sims.verification.conformance import CHECKS, MAX_STEPS, NUM_ENVS


@dataclasses.dataclass(frozen=True, kw_only=True)
class Verified:
    """One check; ``broken`` says what was not so, None where the simulator keeps it."""

    check: str
    seconds: float
    broken: str | None


def verify(name: str) -> Iterator[Verified]:
    """Results of all checks, one after the other. Raises UserError where the simulator is unknown or does not start."""
    config = _short(name)
    started = time.perf_counter()
    env = make_env(config)
    yield Verified(check="starts", seconds=time.perf_counter() - started, broken=None)
    try:
        for check, run in CHECKS.items():
            started, broken = time.perf_counter(), None
            try:
                run(env)
            except AssertionError as error:  # the result of a check
                where = traceback.extract_tb(error.__traceback__)[-1]
                broken = str(error) or f"not so: {where.line}"
            yield Verified(check=check, seconds=time.perf_counter() - started, broken=broken)
    finally:
        env.close()


def _short(name: str) -> Any:
    """The example of a simulator with three environments and the checks' time limit."""
    if name not in EXAMPLES:
        raise UserError(f"sims verify: unknown simulator {name!r}; known are {', '.join(EXAMPLES)}")
    if not is_installed(name):
        raise UserError(f"{name} is not installed. Run: vla-rl sims install {name}")
    config = EXAMPLES[name].make(NUM_ENVS, EXAMPLES[name].image_size)
    if not hasattr(config, "max_steps"):
        raise UserError(f"sims verify: {name} has no setting max_steps, so its episodes cannot be kept short")
    return dataclasses.replace(config, max_steps=MAX_STEPS)
