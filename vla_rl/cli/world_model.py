"""``vla-rl world-model fit | evaluate | imagine CONFIG``"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from tyro.conf import Positional, arg

from sims.errors import UserError

if TYPE_CHECKING:
    from vla_rl.config.experiment import Experiment
    from vla_rl.runners.world_model import ImaginationConfig


@dataclass(frozen=True)
class WorldModel:
    """Fit a world model to recorded episodes, say how far it can be believed, or film what it imagines."""

    verb: Positional[Literal["fit", "evaluate", "imagine"]]
    config: Annotated[Positional[Path], arg(metavar="CONFIG")]
    """a YAML file with a section 'imagination', see configs/"""
    episodes: tuple[Path, ...] = ()
    """episode stores (default: imagination.stores of CONFIG)"""
    out: Path | None = None
    """folder of the world model (default: runs/<name of CONFIG>-world)"""
    bundles: tuple[Path, ...] = ()
    """evaluate: also compare the imagined with the real success of these policies"""
    starts: int = 64
    """evaluate: held-out starts for each of those policies"""
    episode: int = 0
    """imagine: number of the held-out episode to begin at"""
    keys: str = ""
    """imagine: drive the robot: w s a d move, r f up and down, c o close and open (default: the recorded actions)"""
    seed: int = 0
    json: Annotated[bool, arg(help="one JSON object on standard output")] = False

    def run(self) -> None:
        from vla_rl.config.experiment import Experiment
        from vla_rl.config.loader import load_config

        experiment = load_config(Experiment, self.config)
        settings = experiment.imagination
        if settings is None:
            raise UserError(f"{self.config} has no section 'imagination'; see configs/imagined_pick.yaml")
        stores = self.episodes or tuple(Path(store) for store in settings.stores)
        if not stores:
            raise UserError("no episodes: give stores with --episodes, or as imagination.stores")
        do = {"fit": self._fit, "evaluate": self._evaluate, "imagine": self._imagine}
        result = do[self.verb](experiment, settings, stores)
        print(json.dumps(result) if self.json else "\n".join(f"{key}: {value}" for key, value in result.items()))

    def place(self) -> Path:
        return self.out or Path("runs") / f"{self.config.stem}-world"

    def _fit(self, experiment: Experiment, settings: ImaginationConfig, stores: tuple[Path, ...]) -> dict[str, Any]:
        from vla_rl.runners.world_model import fit_world

        return fit_world(settings.model, stores, self.place(), seed=self.seed)

    def _evaluate(
        self, experiment: Experiment, settings: ImaginationConfig, stores: tuple[Path, ...]
    ) -> dict[str, Any]:
        from sims.registry import make_env
        from vla_rl.runners.imagination import compare_success
        from vla_rl.runners.world_model import report_trust

        env = make_env(experiment.sim)
        try:
            report = report_trust(settings.model, self.place(), stores, sim=experiment.sim, env=env, seed=self.seed)
            if self.bundles:
                report |= compare_success(
                    settings.model,
                    self.place(),
                    stores,
                    env=env,
                    bundles=self.bundles,
                    count=self.starts,
                    seed=self.seed,
                )
        finally:
            env.close()
        return report

    def _imagine(self, experiment: Experiment, settings: ImaginationConfig, stores: tuple[Path, ...]) -> dict[str, Any]:
        from vla_rl.runners.world_model import WORLD_FILE, open_clips
        from vla_rl.runners.world_model_videos import film_keys, film_side_by_side, recorded
        from world_models.bundle import load_world

        fitted = load_world(self.place() / WORLD_FILE)
        clips = open_clips(stores, settings.model, "held_out")
        if not 0 <= self.episode < len(clips.entries):
            raise UserError(f"--episode must be within 0..{len(clips.entries) - 1}, got {self.episode}")
        path = self.place() / f"imagined_{self.episode}{'_keys' if self.keys else ''}.mp4"
        if self.keys:
            film_keys(fitted, clips, self.episode, self.keys, path)
        else:
            shown = recorded(clips, self.episode, fitted.world.action_horizon)
            film_side_by_side(fitted, clips, self.episode, shown, path, caption=clips.entries[self.episode].instruction)
        return {"video": str(path), "instruction": clips.entries[self.episode].instruction}
