"""The tables of README.md and docs/ that come from benchmarks/results.

    python -m benchmarks.tables            write them
    python -m benchmarks.tables --check    exit with 1 and name the files that are out of date

In a Markdown file ``<!-- table: NAME -->`` and ``<!-- end -->`` enclose the table of that name in ``TABLES``.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Any

from benchmarks.learning import mean_row
from vla_rl.bench.record import RESULTS, read_record

ROOT = Path(__file__).parents[1]
MARKED = re.compile(r"(<!-- table: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)
Record = Mapping[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    check = parser.parse_args().check
    stale = [
        path for path in pages() if (text := path.read_text()) != (new := filled(text)) and _update(path, new, check)
    ]
    if stale:
        names = ", ".join(str(path.relative_to(ROOT)) for path in stale)
        raise SystemExit(f"out of date: {names}; run: python -m benchmarks.tables")


def _update(path: Path, text: str, check: bool) -> bool:
    """Writes ``text``, or says that it would have to be written."""
    if not check:
        path.write_text(text)
    return check


def pages() -> list[Path]:
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def filled(text: str) -> str:
    """``text`` with every marked table made anew. KeyError for a table that does not exist, or was never measured."""
    return MARKED.sub(lambda match: f"{match[1]}\n{TABLES[match[2]]()}\n\n{match[3]}", text)


# -- the tables -----------------------------------------------------------------------------------------------------


def learned(name: str) -> str:
    """Success per task before and after a benchmark of benchmarks/learning.py, means over seeds."""
    record = read_record(name)
    tasks = list(record["runs"][0]["rl"]["per_task"])
    rows = [[task, *(share(named(record, f"{stage} success, {task}")) for stage in ("bc", "rl"))] for task in tasks]
    rows.append(["**all**", *(f"**{share(named(record, f'{stage} success'))}**" for stage in ("bc", "rl"))])
    note = over_seeds(name, record, named(record, "rl success"))
    return table(["success", "imitation", "after PPO"], rows) + f"\n\n{note}"


def controls() -> str:
    """The quick start's policies under changed observations and on starts unlike those of training."""
    record = read_record("learning_quickstart")
    first = record["runs"][0]
    names = [name for key in ("controls", "splits") for name, summary in first[key].items() if summary is not None]
    rows = [[f"`{name}`", share(named(record, f"rl success, {name}"))] for name in names]
    note = over_seeds("learning_quickstart", record, named(record, f"rl success, {names[0]}"))
    return table(["", "success after PPO"], rows) + f"\n\n{note}"


def baselines() -> str:
    """The time of reinforcement learning spent otherwise, and as it was."""
    record = read_record("baselines")
    names = {
        "imitation": "imitation",
        "more_imitation": "more imitation",
        "self_imitation": "self-imitation",
        "reinforcement": "PPO",
    }
    measured = {one["name"] for one in record["rows"]}
    tasks = list(record["runs"][0]["imitation"]["per_task"])
    rows = [
        [
            text,
            share(named(record, name)),
            *(mean_task(record["runs"], name, task) for task in tasks),
        ]
        for name, text in names.items()
        if name in measured
    ]
    minutes = record["runs"][0]["self_imitation"]["minutes"]
    note = over_seeds("baselines", record, named(record, "imitation"))
    return (
        table(["", "success", *tasks], rows)
        + f"\n\n{minutes:.0f} minutes of processor time for a baseline, as for PPO. {note}"
    )


def corrections() -> str:
    """Learning from corrections beside as many demonstrations, by task."""
    record = read_record("corrections")
    first = "success before"
    labels = {
        first: "before",
        "success with as many demonstrations": "30 demonstrations more",
        "success after": "30 corrected episodes, `hg_dagger`",
    }
    tasks = [one["name"].removeprefix(f"{first}, ") for one in record["rows"] if one["name"].startswith(f"{first}, ")]
    after = [one["name"] for one in record["rows"] if one["name"].startswith("success after, ")]
    recipes = dict.fromkeys(name.split(", ")[1] for name in after if name.count(", ") == 2)
    labels |= {f"success after, {recipe}": f"`{recipe}`" for recipe in recipes}
    rows = [
        [label, *(share(found(record, f"{name}, {task}")) for task in tasks), share(found(record, name))]
        for name, label in labels.items()
    ]
    return table(["", *tasks, "all"], rows) + f"\n\n{over_seeds('corrections', record, named(record, first))}"


def one_step() -> str:
    """Teacher and student of a distillation: success and time of a chunk."""
    record = read_record("one_step")
    rows = [
        [name, share(named(record, f"{name} success"))]
        + [f"{named(record, f'{name} {part}')['value']:.1f} ms" for part in ("encode_ms", "act_ms")]
        for name in ("teacher", "student")
    ]
    note = over_seeds("one_step", record, named(record, "student success"))
    return table(["", "success", "encode", "act"], rows) + f"\n\n{note}"


METHODS = {"learning_quickstart": "PPO", "learning_quickstart_grpo": "GRPO"}


def methods() -> str:
    """Algorithms from the same imitation policies, over the seeds that all of them ran."""
    records = {name: read_record(name) for name in METHODS}
    seeds = sorted(set.intersection(*({run["seed"] for run in record["runs"]} for record in records.values())))
    rows = []
    for name, record in records.items():
        runs = [run for run in record["runs"] if run["seed"] in seeds]
        tasks = (mean_task(runs, "rl", task) for task in runs[0]["rl"]["per_task"])
        rows.append(
            [METHODS[name], *(share(mean_row(stage, runs, stage)) for stage in ("bc", "rl", "stochastic")), *tasks]
        )
    head = ["", "imitation", "deployed", "exploring", *runs[0]["rl"]["per_task"]]
    note = (
        f"Seeds {', '.join(map(str, seeds))}, the same imitation policies and held-out starts. Files: the list below."
    )
    return f"{table(head, rows)}\n\n{note}"


def learning() -> str:
    """Every learning run: configuration, seed, before and after."""
    rows, sources = [], []
    for path in sorted(RESULTS.glob("learning_*.json")):
        record = read_record(path.stem)
        sources.append(source(path.stem, record))
        for run in record["runs"]:
            cells = [share({**run[stage], "value": run[stage]["success"]}) for stage in ("bc", "rl", "stochastic")]
            rows.append([f"`{path.stem.removeprefix('learning_')}`", str(run["seed"]), *cells])
    head = ["configuration", "seed", "imitation", "deployed after RL", "exploring after RL"]
    return table(head, rows) + "\n\n" + "\n".join(f"* {one}" for one in sources)


def imagination() -> str:
    """Policies improved in a world model, beside the same without it."""
    arms = {
        "imitation": "cloned",
        "self-imitation": "its successes cloned",
        "imagination": "imagination",
        "loop": "both",
        "simulator 1x": "PPO in the simulator, as many real steps",
        "simulator 2x": "twice as many",
        "simulator 4x": "four times as many",
    }
    tasks = {
        "world_model_drawer": "drawer",
        "world_model_drawer_offset": "drawer, demonstrators with one constant offset",
        "world_model_reach": "reach, demonstrators with one constant offset",
    }
    rows, sources = [], []
    for name, task in tasks.items():
        record = read_record(name)
        rows.append([task, *(share(found(record, arm)) for arm in arms)])
        sources.append(source(name, record))
    return table(["task", *arms.values()], rows) + "\n\n" + "\n".join(f"* {one}" for one in sources)


def imagined_logs() -> str:
    """Policies from recorded episodes alone, evaluated in the simulator that recorded them."""
    record = read_record("imagined_logs")
    names = [one["name"] for one in record["rows"]]
    seeds = record["rows"][0]["seeds"]
    rows = [
        [
            name.removeprefix("success, "),
            share(named(record, name)),
            *(f"{100 * value:.1f}" for value in named(record, name)["values"]),
        ]
        for name in names
    ]
    note = over_seeds("imagined_logs", record, named(record, names[0]))
    return table(["success in Meta-World", "mean", *(f"seed {seed}" for seed in seeds)], rows) + f"\n\n{note}"


def imagination_baselines() -> str:
    """What imagined training gains in the drawer, beside the same real control steps spent without a world model."""
    name = "imagination_baselines_drawer"
    record = read_record(name)
    rows = []
    for one in record["rows"]:
        steps = [run[one["name"]].get("control_steps") for run in record["runs"]]
        real = "-" if None in steps else f"{mean(steps):,.0f}"
        rows.append([one["name"], share(one), *(f"{100 * value:.1f}" for value in one["values"]), real])
    head = ["drawer", "success", *(f"seed {run['seed']}" for run in record["runs"]), "real control steps"]
    return f"{table(head, rows)}\n\n{over_seeds(name, record, record['rows'][0])}"


def off_policy() -> str:
    """A residual learned off-policy, and PPO of the same cloned policy, after about as many control steps."""
    record = read_record("off_policy_pick")
    rows = []
    for arm, name, text in (("full", "resfit", "residual, off-policy"), ("ppo", "ppo", "PPO")):
        seconds, steps = (
            mean(run["curve"][-1][key] for run in record["curves"][arm]) for key in ("cpu_s", "control_steps")
        )
        cells = (share(named(record, each)) for each in ("base", name))
        rows.append([text, *cells, f"{steps:,.0f}", f"{seconds:.0f}"])
    head = ["`pick`", "before", "after", "control steps", "processor time [s]"]
    note = over_seeds("off_policy_pick", record, named(record, "resfit"))
    return f"{table(head, rows)}\n\n{note}"


def off_policy_robosuite(task: str) -> str:
    """A residual learned off-policy in robosuite's ``task``, each seed."""
    name_of_record = f"off_policy_{task.lower()}"
    record = read_record(name_of_record)
    curves = record["curves"]["full"]
    rows = []
    for name, at in (("base", 0), ("resfit_lift", -1)):
        points = [run["curve"][at] for run in curves]
        values = [f"{100 * point['success']:.0f}" for point in points]
        text = "cloned" if name == "base" else "residual, off-policy"
        taken = [f"{mean(point[key] for point in points):,.0f}" if at else "-" for key in ("control_steps", "cpu_s")]
        rows.append([text, share(named(record, name)), *values, *taken])
    seeds = [f"seed {run['seed']}" for run in curves]
    head = [f"robosuite `{task}`", "success", *seeds, "control steps", "processor time [s]"]
    return f"{table(head, rows)}\n\n{over_seeds(name_of_record, record, named(record, 'resfit_lift'))}"


def off_policy_methods() -> str:
    """What demonstrations, chunks and a warm-up are worth on a small sparse task."""
    record = read_record("off_policy_methods")
    rows = []
    for name, runs in record["curves"].items():
        offline, dip = (found(record, f"{name}, {what}") for what in ("success offline", "deepest dip"))
        deepest = "-" if dip is None else f"{100 * dip['value']:.0f} points"
        costs = (mean(run["curve"][-1][cost] for run in runs) for cost in ("control_steps", "updates"))
        after = named(record, f"{name}, success after")
        spent = (f"{cost:,.0f}" for cost in costs)
        rows.append([name, listed(after["seeds"]), share(offline), *spent, share(after), deepest])
    head = ["comparison, arm", "seeds", "offline", "control steps", "updates", "after", "deepest dip"]
    return f"{table(head, rows)}\n\n{source('off_policy_methods', record)}"


def off_policy_two_sides() -> str:
    """A policy that succeeds by chance, and what is made of it."""
    record = read_record("off_policy_two_sides")
    rows = []
    for one in record["rows"]:
        name, _, what = one["name"].partition(", ")
        if what == "success":
            steps, seconds = (found(record, f"{name}, {more}") for more in ("control steps", "processor time"))
            costs = ["-" if cost is None else f"{cost['value']:,.0f}" for cost in (steps, seconds)]
            rows.append([name, share(one), *costs])
    note = over_seeds("off_policy_two_sides", record, named(record, "base, success"))
    return f"{table(['', 'success', 'control steps acted', 'processor time [s]'], rows)}\n\n{note}"


def off_policy_peers() -> str:
    """Our updates, and what is learned by them, beside those of other libraries."""
    record = read_record("off_policy_peers")
    versions, rows = record["peers"], []
    for one in record["rows"]:
        if one["unit"] == "ms":
            method = one["name"].partition(",")[0]
            learned = named(record, f"{method}, return")
            times = [f"{one['value']:.1f}", f"{one['theirs']:.1f}", f"{one['ratio']:.2f}"]
            operations = named(record, f"{method}, update, operations of matrix products")["ratio"]
            returns = [f"{learned[side]:.0f} ({learned[interval][0]:.0f} to {learned[interval][1]:.0f})"
                       for side, interval in (("value", "interval"), ("theirs", "their_interval"))]  # fmt: skip
            rows.append([method, *times, f"{operations:.2f}", *returns, f"{one['against']} {versions[one['against']]}"])
    head = ["", "update, ours [ms]", "theirs [ms]", "ratio", "operations, ratio", "return, ours", "theirs", "theirs is"]
    return f"{table(head, rows)}\n\n{source('off_policy_peers', record)}"


def blind_controls() -> str:
    """What controllers reach in the tabletop tasks that do not look or do not read."""
    record = read_record("blind_controls")
    values: dict[str, dict[str, float]] = {}
    for one in record["rows"]:
        task, _, control = one["name"].partition(", ")
        values.setdefault(control, {})[task] = one["value"]
    tasks = list(next(iter(values.values())))
    rows = [[control, *(f"{100 * of[task]:.1f} %" for task in tasks)] for control, of in values.items()]
    return f"{table(['', *(f'`{task}`' for task in tasks)], rows)}\n\n{source('blind_controls', record)}"


def other_simulators() -> str:
    """Before and after reinforcement learning in simulators that are not ours."""
    record = read_record("other_simulators")
    stages = ("imitation", "cloned four times as long", "after PPO", "after PPO, exploring", "after PPO, blank images")
    rows = []
    for case, runs in record["runs"].items():
        seeds = [run["seed"] for run in runs]
        cells = [share_of(found(record, f"{case}, {text}"), seeds) for text in stages]
        steps = named(record, f"{case}, control steps")["value"]
        rows.append([f"`{case}`", *cells, f"{steps / 1000:.0f}", listed(seeds)])
    head = ["task", "imitation", "four times as long", "after PPO", "exploring", "blank images", "1,000 steps", "seeds"]
    return f"{table(head, rows)}\n\n{source('other_simulators', record)}"


def families() -> str:
    """Policies that do not denoise."""
    record = read_record("policy_families")
    by_name = {row["name"]: row for row in record["rows"]}
    rows = [
        [family, *(share(by_name[f"{family} {stage} success"]) for stage in ("bc", "ppo", "grpo"))]
        for family in ("gaussian", "categorical")
    ]
    seeds = len(record["rows"][0]["seeds"])
    return table(["policy", "cloned", "PPO", "GRPO"], rows) + f"\n\n{seeds} seeds. {source('policy_families', record)}"


def robot() -> str:
    """The policy over ROS topics, and an hour of the node."""
    wire, hour = read_record("robot_wire"), read_record("robot_hour")
    rows = [[name, share(named(wire, name))] for name in ("success over the wire", "success in simulation")]
    rows += [[f"in an hour: {name}", quantity(named(hour, name))] for name in ("missed ticks", "holds", "filter p99")]
    return table(["", ""], rows) + f"\n\n* {source('robot_wire', wire)}\n* {source('robot_hour', hour)}"


def filter_costs() -> str:
    """Of one command, undisturbed and as measured in one run."""
    record = read_record("safety")
    streams = {
        "smooth": "smooth, nothing is limited",
        "saturated": "every joint at its limits",
        "near_the_walls": "large motions near the faces",
        "collisions_smooth": "smooth, with collisions",
        "collisions_near": "large motions near obstacles, with collisions",
    }
    kinds = ("undisturbed_p50", "undisturbed_p99", "p50", "p99")
    rows = [
        [text, *(f"{named(record, f'filter_{name}_{kind}')['value']:.0f}" for kind in kinds)]
        for name, text in streams.items()
    ]
    head = ["us per command of seven joints", "p50, undisturbed", "p99, undisturbed", "p50, one run", "p99, one run"]
    return f"{table(head, rows)}\n\n{source('safety', record)}"


def full_size() -> str:
    """Memory and processor time of pi0 at its published size."""
    record = read_record("policies_full_size")
    rows = []
    for one in record["rows"]:
        if one["name"].endswith("peak memory"):
            stage = one["name"].removesuffix(", peak memory")
            seconds = named(record, f"{stage}, processor time")["value"]
            predicted = (one["against"] or "").removeprefix("predicted ")
            rows.append([stage, f"{one['value']:.1f} GB", predicted, f"{seconds:.0f} s"])
    head = ["", "peak memory", "predicted", "processor time"]
    return f"{table(head, rows)}\n\n{source('policies_full_size', record)}"


def published_learning(name: str = "policies") -> str:
    """Published architectures at small width before and after PPO."""
    record = read_record(name)
    rows, gains = [], [one for one in record["rows"] if one["name"].startswith("rl gain, ")]
    for one in gains:
        policy = one["name"].removeprefix("rl gain, ")
        success = [f"{100 * named(record, f'{what}, {policy}')['value']:.1f} %" for what in ("cloned", "after PPO")]
        iterations = sorted({len(run["curve"]) for run in record["curves"][policy]})
        size = f"{one['parameters'] / 1e6:.2f} M"
        low, high = one["interval"]
        gain = f"{100 * one['value']:.1f} [{100 * low:.0f}, {100 * high:.0f}]"
        counts = [str(len(one["seeds"])), " to ".join(map(str, (iterations[0], iterations[-1])[: len(iterations)]))]
        rows.append([f"`{policy}`", size, *counts, *success, gain])
    head = ["", "parameters", "seeds", "iterations", "cloned", "after PPO", "gain"]
    return f"{table(head, rows)}\n\n{source(name, record, gains)}"


def references() -> str:
    """Published architectures beside their references, and the log-probs of rollout and update."""
    record, largest, log_prob = read_record("policies"), "max difference to reference, ", "log-prob difference, "
    policies = [one["name"].removeprefix(log_prob) for one in record["rows"] if one["name"].startswith(log_prob)]
    rows, shown = [], []
    for policy in policies:
        own = named(record, log_prob + policy)
        beside = [one for one in record["rows"] if f"{one['name']}, ".startswith(f"{largest}{policy}, ")]
        compared = [[difference(one), one["against"]] for one in beside] or [["-", "none"]]
        rows += [[f"`{policy}`", *cells, difference(own)] for cells in compared]
        shown += [*beside, own]
    head = ["", "largest difference", "to", "log-probs of rollout and update differ by [nat]"]
    return f"{table(head, rows)}\n\n{source('policies', record, shown)}"


def gpu_pretrained() -> str:
    """Published architectures at full size on a GPU."""
    record, rows = read_record("gpu"), []
    for part in (one["name"] for one in record["rows"] if one["name"].endswith(": parameters")):
        name = part.removesuffix(": parameters")
        if name.startswith("pretrained "):
            rows.append([name.removeprefix("pretrained "), *_gpu_pretrained_cells(record, name)])
    sizes = ["", "parameters", "weights", "kept of an observation"]
    rates = ["encoded/s", "updated/s", "peak of the update", "predicted"]
    head = [*sizes, *rates, "chunk, exploring", "deployed", "denoising as a graph"]
    return f"{table(head, rows)}\n\n{source('gpu', record)}"


def _gpu_pretrained_cells(record: Record, name: str) -> list[str]:
    batch = next(one["name"] for one in record["rows"] if one["name"].startswith(f"{name}: update, ")).split()[-1]
    peak = named(record, f"{name}: peak of the update, micro-batch {batch}")
    graph = found(record, f"{name}: a deployed chunk as a CUDA graph")
    milliseconds = [
        named(record, f"{name}: a chunk from an observation, as it {how}") for how in ("explores", "is deployed")
    ]
    return [
        f"{named(record, f'{name}: parameters')['value'] / 1e9:.2f} B",
        f"{named(record, f'{name}: weights')['value']:.1f} GB",
        f"{named(record, f'{name}: kept of an observation')['value']:.2g} MB",
        f"{named(record, f'{name}: encode, batch {batch}')['value']:.0f}",
        f"{named(record, f'{name}: update, micro-batch {batch}')['value']:.0f}",
        f"{peak['value']:.1f} GB (batch {batch})",
        f"{peak['value'] / peak['ratio']:.1f} GB",
        *(f"{one['value']:.0f} ms" for one in milliseconds),
        "" if graph is None else f"{graph['value']:.0f} ms",
    ]


def policies() -> str:
    """Which policy goes with what, and the reasons why not."""
    record = read_record("policy_table")
    cells: dict[str, dict[str, str]] = {}
    reasons: list[str] = []
    for one in record["rows"]:
        policy, _, path = one["name"].partition(", ")
        if one["against"] is not None and one["against"] not in reasons:
            reasons.append(one["against"])
        failed = "" if one["against"] is None else f"no ({reasons.index(one['against']) + 1})"
        cells.setdefault(policy, {})[path] = "yes" if one["value"] else failed
    paths = list(next(iter(cells.values())))
    rows = [[f"`{policy}`", *(found[path] for path in paths)] for policy, found in cells.items()]
    notes = "\n".join(f"{i}. {reason}" for i, reason in enumerate(reasons, 1))
    return table(["policy", *paths], rows) + f"\n\n{notes}\n\n{source('policy_table', record)}"


def peers() -> str:
    """One PPO iteration beside other libraries, equal work."""
    record = read_record("peers")
    by_name = {row["name"]: row for row in record["rows"]}
    rows = []
    for peer in dict.fromkeys(row["against"] for row in record["rows"]):
        for part in ("iteration", "rollout", "update"):
            wall, processor = (by_name[f"{peer}, {part}, {clock}"] for clock in ("wall time", "processor time"))
            seconds = f"{processor['value']:.2f} / {processor['theirs']:.2f} s"
            rows.append([peer, part, seconds, ratio(processor), ratio(wall)])
    rounds = listed(dict.fromkeys(len(row["ours_all"]) for row in record["rows"]))
    load = listed(dict.fromkeys(f"{row.get('measured', record)['machine']['load'][0]:.0f}" for row in record["rows"]))
    head = ["beside", "part", "processor time, ours / theirs", "ratio of processor time", "ratio of wall time"]
    note = f"Medians of {rounds} pairs (smallest and largest ratio), one thread; load of the machine {load}."
    return table(head, rows) + f"\n\n{note} {source('peers', record)}"


def success_classifier() -> str:
    """What classifiers declare, held out and in another policy's episodes, and PPO by their reward alone."""
    record = read_record("success_classifier")
    names = [row["name"].removeprefix("AUC, ") for row in record["rows"] if row["name"].startswith("AUC, ")]
    rates = [(rate, where) for where in ("held out", "without ends", "policy") for rate in ("precision", "recall")]
    rates.append(("false positive rate", "policy"))
    rows = [[name, *(share(named(record, f"{rate}, {name}, {where}")) for rate, where in rates)] for name in names]
    head = ["fitted to", "precision", "recall", "without ends: precision", "recall"]
    head += ["of the policy: precision", "recall", "declared in failed episodes"]
    trained = [row["name"].removeprefix("success before PPO by ") for row in record["rows"] if "before" in row["name"]]
    parts = ("success before PPO", "success after PPO")
    wrong = "reward false positives, {} quarter of PPO by {}"
    ppo = [
        [
            name,
            *(share(named(record, f"{part} by {name}")) for part in parts),
            *(share(found(record, wrong.format(when, name))) for when in ("first", "last")),
        ]
        for name in trained
    ]
    second = ["PPO by", "true success before", "after", "false among declared, first quarter", "last quarter"]
    note = f"One seed. {source('success_classifier', record)}"
    return f"{table(head, rows)}\n\n{table(second, ppo)}\n\n{note}"


TABLES: Mapping[str, Callable[[], str]] = {
    "quickstart": partial(learned, "learning_quickstart"),
    "tabletop_all": partial(learned, "learning_all"),
    "controls": controls,
    "baselines": baselines,
    "corrections": corrections,
    "one_step": one_step,
    "methods": methods,
    "learning": learning,
    "imagination": imagination,
    "imagined_logs": imagined_logs,
    "imagination_baselines": imagination_baselines,
    "off_policy": off_policy,
    "off_policy_lift": partial(off_policy_robosuite, "Lift"),
    "off_policy_door": partial(off_policy_robosuite, "Door"),
    "off_policy_methods": off_policy_methods,
    "off_policy_peers": off_policy_peers,
    "off_policy_two_sides": off_policy_two_sides,
    "families": families,
    "blind_controls": blind_controls,
    "other_simulators": other_simulators,
    "policies": policies,
    "full_size": full_size,
    "published_learning": published_learning,
    "references": references,
    "gpu_pretrained": gpu_pretrained,
    "published_learning_cuda": partial(published_learning, "policies_cuda"),
    "robot": robot,
    "filter_costs": filter_costs,
    "peers": peers,
    "success_classifier": success_classifier,
}

# -- cells ----------------------------------------------------------------------------------------------------------


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(cells) + " |" for cells in (head, *rows)]
    return "\n".join([lines[0], "|" + "---|" * len(head), *lines[1:]])


def named(record: Record, name: str) -> Record:
    return next(row for row in record["rows"] if row["name"] == name)


def found(record: Record, name: str) -> Record | None:
    return next((row for row in record["rows"] if row["name"] == name), None)


def over_seeds(name: str, record: Record, row: Record) -> str:
    """Seeds, episodes and where the table is from; ``row``: one of the table."""
    each = row["episodes"] // len(row["seeds"])
    seeds = f"Means over seeds {listed(row['seeds'])}, {each} held-out starts each"
    return f"{seeds}; 95 % intervals over seeds and episodes. {source(name, record)}"


def share(row: Record | None) -> str:
    """For example "92.0 % (87 to 95)"; a dash where there is no figure."""
    if row is None or row["value"] is None:
        return "-"
    text = f"{100 * row['value']:.1f} %"
    if row["interval"] is None:
        return text
    low, high = row["interval"]
    return f"{text} ({100 * low:.0f} to {100 * high:.0f})"


def share_of(row: Record | None, seeds: Sequence[int]) -> str:
    """As ``share``, with the seeds of the row where they are not those of its table's row."""
    text = share(row)
    if row is None or row["seeds"] == seeds:
        return text
    return f"{text}, {'seed' if len(row['seeds']) == 1 else 'seeds'} {listed(row['seeds'])}"


def mean_task(runs: Sequence[Record], stage: str, task: str) -> str:
    """Success at ``task``, mean over runs."""
    return f"{100 * mean(run[stage]['per_task'][task]['success'] for run in runs):.1f} %"


def ratio(row: Record) -> str:
    """For example "0.41 (0.39 to 0.44)"."""
    low, high = row["interval"]
    return f"{row['ratio']:.2f} ({low:.2f} to {high:.2f})"


def quantity(row: Record) -> str:
    return f"{row['value']:.3g}" + ("" if row["unit"] == "count" else f" {row['unit']}")


def difference(row: Record) -> str:
    """For example "1.2e-06"; "0" where all are equal to the last bit."""
    return f"{row['value']:.1e}" if row["value"] else "0"


def listed(values: Iterable[object]) -> str:
    texts = [str(value) for value in values]
    return texts[0] if len(texts) == 1 else f"{', '.join(texts[:-1])} and {texts[-1]}"


def source(name: str, record: Record, rows: Sequence[Record] | None = None) -> str:
    """The file and every call that measured one of ``rows`` (all rows of the file)."""
    rows = record["rows"] if rows is None else rows
    earlier = [row["measured"] for row in rows if "measured" in row]
    own = [record] if len(earlier) < len(rows) else []
    calls = dict.fromkeys(f"`{call['command'].strip()}`, {call['date']}" for call in (*earlier, *own))
    return f"`benchmarks/results/{name}.json`: {'; '.join(calls)}."


if __name__ == "__main__":
    main()
