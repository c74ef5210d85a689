"""How accurate is a world model of the tabletop suite, and how much does a policy improve in it alone?

    python benchmarks/world_model.py --config configs/imagined_pick.yaml [--seeds 0 1 2] [--ablations 0 1] [-- SETTINGS]

Runs the whole configuration once per seed: imprecise demonstrations, behavior cloning, rounds of real episodes and
cloning of their successes, fit, evaluation of the world model, reinforcement learning in it, 200 held-out starts in the
simulator (row ``loop``). The world model is that of the last round. Beside it, from the same first policy:
``self-imitation``, its successes cloned; ``imagination``, imagined training alone, in the same world model; and
``simulator Nx``, PPO in the simulator with N (``--times``) times as many real control steps as the whole run has taken,
those of validation too. PPO's rows come twice, with the averaged weights, which are deployed, and with the last ones:
an average that is too slow hides what was learned. ``--simulator`` changes settings of PPO in the simulator alone, so
that it can be tuned as imagined training was. Intervals of all seeds are over seeds and episodes. Then all seeds'
policies in the first seed's world model and in the simulator. ``--ablations``: the runs of these seeds again, each time
without one of their parts, from the same policies and real episodes. Writes the results and the processor time of the
fit to benchmarks/results/world_model_NAME.json. The same command resumes an interrupted benchmark.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.seeds import seeds_interval
from episodes.files import write_json
from policies.bundle import load_bundle
from policies.policy import Policy
from sims.registry import evaluation_starts, make_env
from vla_rl.algorithms.ppo import PPOConfig
from vla_rl.bench.record import write_record
from vla_rl.config.experiment import Experiment, FromBundle
from vla_rl.config.loader import load_config, save_config
from vla_rl.runners.evaluate import evaluate_policy
from vla_rl.runners.imagined_success import compare_success
from vla_rl.runners.train import train
from vla_rl.runners.world_model import WORLD_MODEL_FILE
from vla_rl.runs.checkpoint import latest_checkpoint, load_checkpoint, load_tree
from vla_rl.runs.metrics import read_metrics
from vla_rl.runs.run_dir import CONFIG_FILE, STAGES_FILE, open_run

COMPARED = 60  # starts per policy in the comparison of imagined with real success

# Variants of the run: changed settings, and which stages of the whole run are kept, in every round that has them.
RECORDED = ("demonstrate", "imitate", "evaluate_before", "validate_start", "record")
SUCCESSES, FITTED = ("clone", "validate_clone"), ("fit", "evaluate_model")
VARIANTS: dict[str, tuple[list[str], tuple[str, ...]]] = {
    "without strict rewards": (["--imagination.model.imagined_env.strict", "false"], (*RECORDED, *SUCCESSES, *FITTED)),
    "without the encoder": (["--algorithm.update.frozen", "[encoder]"], (*RECORDED, *SUCCESSES, *FITTED)),
    "without starts at keyframes": (
        ["--imagination.model.keyframes.episode_starts", "1.0"],
        (*RECORDED, *SUCCESSES, *FITTED),
    ),
    "without near successes": (["--imagination.model.reward_model.near_end_steps", "0"], (*RECORDED, *SUCCESSES)),
    "without actions": (["--imagination.model.dynamics.actions", "false"], (*RECORDED, *SUCCESSES)),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, default=Path("configs/imagined_pick.yaml"))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--ablations", type=int, nargs="+", default=[], metavar="SEED")
    parser.add_argument("--times", type=int, nargs="+", default=[1], help="real steps of PPO in the simulator")
    parser.add_argument("--simulator", nargs="+", default=[], metavar="NAME=VALUE", help="settings of that PPO")
    parser.add_argument("--work", type=Path, help="default: runs/world_model/NAME")
    parser.add_argument("settings", nargs="*", help="overrides, after a --")
    arguments = parser.parse_args()
    name = arguments.config.stem.removeprefix("imagined_")
    work: Path = arguments.work or Path("runs/world_model") / name
    runs: list[dict[str, Any]] = []

    def record(rows: list[dict[str, Any]]) -> None:
        details = [{key: value for key, value in run.items() if key not in ("rows", "bundles")} for run in runs]
        written = [*pooled(runs), *(row for run in runs for row in run["rows"]), *rows]
        parts = ["--config", arguments.config, "--seeds", *arguments.seeds]
        options = {name: getattr(arguments, name) for name in ("ablations", "times", "simulator")}
        for option, values in (*((f"--{name}", given) for name, given in options.items()), ("--", arguments.settings)):
            parts += [option, *values] if values else []
        command = " ".join(map(str, ["python benchmarks/world_model.py", *parts]))
        print(write_record(f"world_model_{name}", written, command=command, runs=details))

    for seed in arguments.seeds:
        settings = ["--seed", str(seed), *arguments.settings]
        experiment, simulated = experiments(arguments.config, settings, arguments.simulator)
        runs.append(one_seed(experiment, simulated, work / f"seed_{seed}", times=arguments.times))
        record([])
    rows = compared(load_config(Experiment, arguments.config, arguments.settings), work, runs)
    record(rows)
    for seed in arguments.ablations:
        for variant, (changed, kept) in VARIANTS.items():
            folder = work / f"seed_{seed}" / variant.replace(" ", "_")
            settings = [*arguments.settings, "--seed", str(seed), *changed]
            experiment = load_config(Experiment, arguments.config, settings)
            branch_off(work / f"seed_{seed}" / "imagined", folder, kept, experiment)
            result = finished(experiment, folder)["result"]["rl"]
            one = figure(f"success, {variant}", result["success"], "1")
            rows.append(one | {"interval": result["interval"], "seeds": [seed]})
            record(rows)


def experiments(config: Path, settings: Sequence[str], simulator: Sequence[str]) -> tuple[Experiment, Experiment]:
    """The configuration, and with the settings NAME=VALUE of PPO in the ``simulator``."""
    tuned = [word for pair in simulator for word in ("--" + pair.partition("=")[0], pair.partition("=")[2])]
    return load_config(Experiment, config, settings), load_config(Experiment, config, [*settings, *tuned])


def branch_off(run: Path, folder: Path, stages: Sequence[str], experiment: Experiment) -> None:
    """A run of ``experiment`` in which these stages of ``run`` are done already; files are linked, not copied."""
    if folder.exists():
        return
    kept = {"demonstrations": "imitate", "imitation": "imitate"}
    for one in sorted((run / "imagination").iterdir()):
        of_round = {"episodes": "record", "clone": "clone", WORLD_MODEL_FILE: "fit"}
        kept |= {f"imagination/{one.name}/{name}": stage for name, stage in of_round.items()}
    for name in [name for name, stage in kept.items() if stage in stages and (run / name).exists()]:
        if (run / name).is_dir():
            shutil.copytree(run / name, folder / name, copy_function=os.link)
        else:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            os.link(run / name, folder / name)
    known = json.loads((run / STAGES_FILE).read_text())
    write_json(folder / STAGES_FILE, {name: one for name, one in known.items() if name.rstrip("_0123456789") in stages})
    save_config(experiment, folder / CONFIG_FILE)


def one_seed(experiment: Experiment, simulated: Experiment, work: Path, *, times: Sequence[int]) -> dict[str, Any]:
    """The whole run, imagined training alone, PPO in the simulator (as ``simulated`` says)."""
    assert experiment.imagination is not None
    whole = finished(experiment, work / "imagined")
    stages, folder, last = whole["stages"], whole["dir"], experiment.imagination.rounds - 1
    runs, bundles = {"imitation": whole["result"]["bc"]}, {"imitation": folder / "imitation" / "bundle"}
    if experiment.imagination.clone_successes is None:
        runs["imagination"], bundles["imagination"] = whole["result"]["rl"], folder / "bundle"
    else:
        again = folder / "imagination" / f"round_{last}" / "clone" / "bundle"
        runs["self-imitation"], bundles["self-imitation"] = evaluated(experiment, load_bundle(again)), again
        without = replace(experiment, imagination=replace(experiment.imagination, clone_successes=None))
        branch_off(folder, work / "alone", (*RECORDED, *FITTED), without)
        alone = finished(without, work / "alone")
        runs["imagination"], bundles["imagination"] = alone["result"]["rl"], alone["dir"] / "bundle"
        runs["loop"], bundles["loop"] = whole["result"]["rl"], folder / "bundle"
    real_steps = sum(stages["reinforce"][f"{kind}_steps"] for kind in ("real", "validation", "evaluation"))
    taken = {"loop": real_steps}
    for factor in times:
        name = f"simulator {factor}x"
        wanted = in_simulator(simulated, bundles["imitation"], factor * real_steps)
        real = finished(wanted, work / name.replace(" ", "_"))
        runs[name], bundles[name] = real["result"]["rl"], real["dir"] / "bundle"
        runs[f"{name}, last weights"] = evaluated(wanted, last_weights(real["dir"]))
        taken[name] = control_steps(real["dir"])
    rows = [*learned(runs), *evaluation_rows(whole, last)]
    return {
        "seed": experiment.seed,
        "bundles": bundles,
        "success": {name: summary["success"] for name, summary in runs.items()},
        "episodes": whole["result"]["episodes"],
        "stopped_by_the_evaluation": f"imagine_{last}" not in stages,
        "real_control_steps": taken,
        "evaluation": {name: one for name, one in stages[f"evaluate_model_{last}"].items() if name != "videos"},
        "reward_model": {k: value for k, value in stages[f"fit_{last}"].items() if k not in ("world", "fitted_to")},
        "rows": [{**row, "seeds": [experiment.seed]} for row in rows],
    }


def pooled(runs: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Success over all seeds' held-out episodes, with intervals over seeds and episodes."""
    rows, episodes = [], [run["episodes"] for run in runs]
    for name in runs[0]["success"]:
        won = [round(run["success"][name] * run["episodes"]) for run in runs]
        interval = seeds_interval(won, episodes)
        rows.append(
            figure(name, sum(won) / sum(episodes), "1") | {"interval": interval, "seeds": [run["seed"] for run in runs]}
        )
    return rows


def finished(experiment: Experiment, directory: Path) -> dict[str, Any]:
    """The run's folder, stages and result; resumed where it was interrupted."""
    known = (directory / CONFIG_FILE).exists()
    result = train(experiment, directory, resume=known, command="python benchmarks/world_model.py")
    run = open_run(experiment, directory, resume=True, command="")
    with run.lock:
        return {"dir": directory, "stages": run.stages(), "result": result}


def evaluated(experiment: Experiment, policy: Policy) -> dict[str, Any]:
    """Success of a policy on the held-out starts."""
    seed, episodes, env = experiment.evaluation_seed, experiment.evaluation.episodes, make_env(experiment.sim)
    starts = evaluation_starts(experiment.sim, num_tasks=len(env.spec.tasks), seed=seed, episodes=episodes)
    try:
        return evaluate_policy(policy, env, starts, seed=seed, stochastic=False)
    finally:
        env.close()


def last_weights(run: Path) -> Policy:
    """The policy of a finished run as its last update left it, not averaged."""
    policy, latest = load_bundle(run / "bundle"), latest_checkpoint(run / "checkpoints")
    assert latest is not None
    policy.load_state_dict(load_checkpoint(latest)["update"]["policy"])
    return policy


def in_simulator(experiment: Experiment, start: Path, real_steps: int) -> Experiment:
    """PPO in the simulator from the bundle ``start`` until it has taken at least ``real_steps`` control steps."""
    algorithm, num_envs = experiment.algorithm, experiment.sim.num_envs
    assert isinstance(algorithm, PPOConfig)
    horizon = load_bundle(start).spec.action_horizon
    iterations = -(-real_steps // (num_envs * algorithm.chunks * horizon))
    return replace(
        experiment,
        start=FromBundle(path=start),
        algorithm=replace(algorithm, iterations=iterations),
        imagination=None,
        evaluation=replace(experiment.evaluation, validate_every=0),
    )


def control_steps(run: Path) -> int:
    """Real control steps that PPO took."""
    return int(sum(record["control_steps"] for record in read_metrics(run)))


def learned(summaries: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """Success in the simulator on the held-out starts, per task."""
    return [
        figure(f"success, {name}, {task}", one["success"], "1") | {"interval": one["interval"]}
        for name, summary in summaries.items()
        for task, one in [("all", summary), *summary["per_task"].items()]
    ]


def evaluation_rows(whole: dict[str, Any], last: int) -> list[dict[str, Any]]:
    """The evaluation of the world model of the ``last`` round in rows, and the processor time of its fit."""
    report = whole["stages"][f"evaluate_model_{last}"]
    rows = [
        figure(f"{name} after {h} chunks", value, unit, against=copy)
        for name, unit in (("psnr", "dB"), ("object_error_m", "m"))
        for h, value, copy in zip(report["horizons"], report[name], report[f"copy_{name}"], strict=True)
    ]
    rates = ("success_auc", "frozen_picture_auc", "false_success", "missed_success", "delta_success")
    rows += [figure(f"{name}, recorded actions", report[name], "1") for name in rates]
    rows += [
        figure("outcome AUC, length-matched", report["length_matched_auc"], "1")
        | {"interval": report["length_matched_auc_interval"]},
        figure("hallucinated success", report["hallucinated_success"], "1")
        | {"interval": report.get("hallucinated_success_interval")},
        figure("frozen picture", report["frozen_picture_hallucinated_success"], "1"),
        figure("no action", report["no_action_hallucinated_success"], "1"),
    ]
    latest = latest_checkpoint(whole["dir"] / "imagination" / f"round_{last}" / "dynamics" / "checkpoints")
    assert latest is not None
    return [*rows, figure("processor time of the fit of the dynamics", load_tree(latest)["cpu_s"], "s")]


def compared(experiment: Experiment, work: Path, runs: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Imagined and real success of all seeds' policies from the same held-out starts; the first seed's world model."""
    assert experiment.imagination is not None
    rounds = [
        work / f"seed_{runs[0]['seed']}" / "imagined" / "imagination" / f"round_{number}"
        for number in range(experiment.imagination.rounds)
    ]
    env = make_env(experiment.sim)
    bundles = {f"{name}, seed {run['seed']}": bundle for run in runs for name, bundle in run["bundles"].items()}
    try:
        found = compare_success(
            experiment.imagination.model,
            rounds[-1],
            [one / "episodes" for one in rounds],
            env=env,
            bundles=list(bundles.values()),
            count=COMPARED,
            seed=runs[0]["seed"],
        )
    finally:
        env.close()
    rows = [
        figure(f"imagined success of the policy {name}", policy["imagined"], "1", against=policy["real"])
        for name, policy in zip(bundles, found["policies"], strict=True)
    ]
    rows.append(figure("delta_success of the policies", found["delta_success"], "1"))
    rows.append(figure("correlation over the policies", found["correlation"], "1"))
    return [row | {"seeds": [runs[0]["seed"]]} for row in rows]


def figure(name: str, value: float | None, unit: str, *, against: float | None = None) -> dict[str, Any]:
    ratio = value / against if value is not None and against else None
    return {"name": name, "value": value, "unit": unit, "against": against, "ratio": ratio}


if __name__ == "__main__":
    main()
