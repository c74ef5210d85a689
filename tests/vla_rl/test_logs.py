"""Recorded episodes in, policy and evaluated world model out, with no simulator in the configuration."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests import dot_episodes
from vla_rl.cli.main import main

CONFIG = """\
sim: {name: none}
start:
  store: store
  policy: {encoder: {width: 32, text_width: 32}, expert: {depth: 1}}
  bc: {steps: 2, batch_size: 4}
imagination:
  stores: [store]
  model:
    dynamics: {action_horizon: 4, width: 8, deep_width: 16, blocks: 1, deep_blocks: 1, condition: 16}
    fit: {steps: 2, batch_size: 2}
    reward_model:
      encoder: {width: 32, text_width: 32}
      steps: 2
      batch_size: 8
      imagined_clips: 4
      min_successes: 1
    imagined_env: {num_envs: 4, reward_every: 2}
"""


@pytest.mark.slow
def test_a_world_model_is_fitted_and_evaluated_without_a_simulator(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    dot_episodes.store(tmp_path / "store", 60)
    config, world = tmp_path / "logs.yaml", str(tmp_path / "world")
    config.write_text(CONFIG)
    main(["imitate", str(config), "--out", str(tmp_path / "cloned")])
    main(["world-model", "fit", str(config), "--out", world])
    main(["world-model", "imagine", str(config), "--out", world])
    capsys.readouterr()
    bundle = str(tmp_path / "cloned" / "bundle")
    main(["world-model", "evaluate", str(config), "--out", world, "--bundles", bundle, "--json"])
    report = json.loads(capsys.readouterr().out)
    (row,) = report["policies"]
    assert row["real"] is None
    low, high = row["interval"]
    assert low - 1e-9 <= row["imagined"] <= high + 1e-9
    assert row["episodes"] == report["episodes"]
    assert report["delta_success"] is not None  # of the recorded actions


def test_what_needs_a_simulator_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tmp_path / "logs.yaml"
    config.write_text(CONFIG)
    with pytest.raises(SystemExit) as stopped:
        main(["train", str(config), "--run-dir", str(tmp_path / "run")])
    assert stopped.value.code == 2
    assert "sim.name is none, and this needs a simulator" in capsys.readouterr().err
