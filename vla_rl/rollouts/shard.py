"""Which of several equal parts of the environments a collector has."""

from __future__ import annotations

from dataclasses import dataclass

from sims.numbers.seeding import spawn_seed


@dataclass(frozen=True)
class Shard:
    """Part ``index`` of ``count``. Its random streams and its batches are its own, so a rollout does not depend on
    which process collects it, nor on how many processes there are."""

    index: int
    count: int

    def seed(self, seed: int, purpose: str) -> int:
        """Of the shard's stream for ``purpose``; shard 0 has the stream of a run that is not split."""
        return spawn_seed(seed, purpose, self.index) if self.index else spawn_seed(seed, purpose)


WHOLE = Shard(0, 1)
