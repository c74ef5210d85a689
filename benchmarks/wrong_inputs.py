"""Wrong settings, arguments, files and environments, thrown at the command line: every one must be refused.

Refused: exit code 2, one line on standard error that names the setting (or the file) and, for a setting, what is
allowed; no traceback, no folder of a run, no control step of a simulator. The wrong settings are grown from the
configuration's dataclasses, so a new setting is covered without a line here.

    python -m benchmarks.wrong_inputs --count 1000 --seed 0
"""

from __future__ import annotations

import argparse
import contextlib
import io
import itertools
import json
import random
import shutil
import tempfile
import typing
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from sims.numbers.ranges import Interval
from sims.tabletop import TabletopEnv
from vla_rl.bench.record import Row, row, write_record
from vla_rl.cli.main import COMMANDS, main
from vla_rl.config.allowed import allowed, interval
from vla_rl.config.experiment import Experiment
from vla_rl.config.schema import hints, plain, union, variants

TINY = Path(__file__).parents[1] / "tests" / "data" / "tiny.yaml"


@dataclass(frozen=True)
class Case:
    """``words``: the command line. ``must_say``: texts that the message has to contain. ``kind``: for the table."""

    kind: str
    words: tuple[str, ...]
    must_say: tuple[str, ...]


# -- settings, from the dataclasses ------------------------------------------------------------------------------


def setting_cases() -> Iterator[Case]:
    """Wrong values of every setting of every kind of every section."""
    for names, path, annotation in leaves(Experiment):
        for value, said in wrong_values(annotation):
            yield Case("setting", ("train", str(TINY), *choosing(names), f"--{path}={json.dumps(value)}"), (path, said))


def leaves(cls: type, path: str = "", names: tuple[tuple[str, str], ...] = ()) -> Iterator[tuple[Any, str, Any]]:
    """(names that select the kinds of the sections around it, dotted path, annotation) of every setting."""
    for name, annotation in hints(cls).items():
        members, own = variants(annotation), f"{path}{name}"
        if not members and name != "name":
            yield names, own, annotation
        for kind, member in members.items():
            chosen = ((own, str(kind)),) if len(members) > 1 else ()
            yield from leaves(member, f"{own}.", names + chosen)


def choosing(names: tuple[tuple[str, str], ...]) -> list[str]:
    """The words that select these kinds of sections."""
    return [word for section, name in names for word in (f"--{section}.name", name)]


def wrong_values(annotation: Any) -> Iterator[tuple[Any, str]]:
    """(value of a wrong type or outside the range, what the message has to say is allowed) for one setting."""
    base = plain(annotation)
    values: list[Any] = [7, "text"]
    if base in (int, float):
        values = [*outside(interval(annotation)), "many", True, [1], float("nan"), float("inf")]
    elif base is bool:
        values = ["yes", 1, [True]]
    elif typing.get_origin(base) is Literal:
        values = ["nonsense", 99, [*typing.get_args(base)]]
    elif typing.get_origin(base) is tuple:
        values = ["not a list", 7]
        inner = typing.get_args(base)[0]
        yield from (([wrong] * 2, said) for wrong, said in itertools.islice(wrong_values(inner), 3))
    elif base in (str, Path) or len(union(base)) > 1:
        values = [7, True, ["a", "list"]]
    yield from ((value, allowed(annotation)) for value in values)


def outside(limits: Interval) -> list[float]:
    """Numbers just outside and far outside the limits."""
    wrong: list[float] = []
    if limits.gt is not None:
        wrong += [limits.gt, limits.gt - 1]
    if limits.ge is not None:
        wrong += [limits.ge - 1, limits.ge - 10**12]
    if limits.lt is not None:
        wrong += [limits.lt, limits.lt + 1]
    if limits.le is not None:
        wrong += [limits.le + 1, limits.le + 10**30]
    return wrong


# -- unknown names -------------------------------------------------------------------------------------------------


def unknown_cases(rng: random.Random) -> Iterator[Case]:
    """Misspelled settings, sections, names of kinds, options and commands."""
    for names, path, _ in leaves(Experiment):
        if path.startswith(("start.policy", "algorithm", "evaluation")):
            section, dot, name = path.rpartition(".")
            at = rng.randrange(len(name))
            typo = section + dot + name[:at] + "qq" + name[at:]
            words = ("train", str(TINY), *choosing(names), f"--{typo}=1")
            yield Case("unknown setting", words, ("unknown key", typo))
    for section in ("sim", "start", "algorithm", "start.policy", "start.policy.explore", "start.policy.objective"):
        yield Case("unknown kind", ("train", str(TINY), f"--{section}.name=nonsense"), (f"{section}.name", "one of"))
    for command in COMMANDS:
        yield Case("unknown command", (*command.split()[:-1], command.split()[-1] + "q"), (command + "q",))
        yield Case("unknown option", (*command.split(), "--nonsense-option", "1"), ())


# -- options -------------------------------------------------------------------------------------------------------


def option_cases() -> Iterator[Case]:
    """Wrong values of the numbers that every command takes."""
    for command, cls in COMMANDS.items():
        for name, annotation in hints(cls).items():
            if plain(annotation) not in (int, float):
                continue
            option = "--" + name.replace("_", "-")
            for value in [*outside(interval(annotation)), "many"]:
                words = (*command.split(), *POSITIONAL.get(command, ()), option, str(value))
                yield Case("option", words, (option, allowed(annotation)))


POSITIONAL = {
    "eval": ("here",), "collect": (str(TINY), "--out", "there"), "serve": ("here",), "watch": ("here",),
    "data import": ("here", "--source", "there"), "robot teleop": ("here",),
    "robot record": ("here", "--store", "there", "--instruction", "reach"), "reward fit": ("here",),
    "reward fit-progress": ("here",), "reward fit-preferences": ("here",), "reward evaluate": ("here",),
    **{f"world-model {verb}": (str(TINY),) for verb in ("fit", "evaluate", "imagine", "drive")},
}  # fmt: skip


# -- contradictions --------------------------------------------------------------------------------------------------

CONTRADICTIONS: dict[str, tuple[str, ...]] = {
    "kernel ddpm": ("--start.policy.explore.name=ddpm",),
    "act must be deterministic": (
        "--start.policy.objective.name=diffusion", "--start.policy.act={name: ddim, eta: 1.0}",
        "--start.policy.explore={name: ddpm}",
    ),
    "max_prefix": ("--start.policy.max_prefix=8",),
    "action_patch": ("--start.policy.expert.action_patch=3",),
    "multiple of expert.heads": ("--start.policy.expert.heads=5",),
    "text_heads": ("--start.policy.encoder.text_heads=5",),
    "forecast_dims": ("--start.policy.encoder.forecast_dims=9",),
    "image_widths": ("--start.policy.encoder.image_widths=[32, 64]",),
    "train_last": (
        "--start.policy.objective={name: diffusion}", "--start.policy.act={name: ddim}",
        "--start.policy.explore={name: ddpm, steps: 5, train_last: 6}",
    ),
    "min_std": ("--start.policy.explore={name: flow_noise, min_std: 0.5, max_std: 0.1}",),
    "micro_batch": ("--algorithm.update.micro_batch=3",),
    "clip_first_step": ("--algorithm.update.clip_first_step=0.1",),
    "critic_warmup": ("--algorithm.critic_warmup=6",),
    "parameter group": ("--algorithm.update.frozen=[vision]",),
    "all parameter groups": ("--algorithm.update.frozen=[expert, encoder]",),
    "start.bc": ("--start.bc.frozen=[expert, encoder]",),
    "matrix_groups": ("--start.bc.matrix_groups=[vision]", "--start.bc.matrix_learning_rate=0.01"),
    "shards": ("--start.bc.shards=9",),
    "group_size": ("--algorithm.name=grpo", "--algorithm.group_size=3"),
    "min_success": ("--algorithm.name=grpo", "--algorithm.group_size=2", "--algorithm.min_success=0.95"),
    "start.episodes": ("--start.missing_tasks=error", "--start.equal_shares=true", "--start.episodes=1"),
    "every entry once": ("--sim.cameras=[agent, agent]",),
    "at least 1 entry": ("--sim.tasks=[]",),
    "sim.tasks": ("--sim.tasks=[reach, reach]",),
    "got 'fly'": ("--sim.tasks=[fly]",),
    "allowed are agent, wrist": ("--sim.cameras=[overhead]",),
    "start.backbone": ("--start.backbone=tabletop",),
    "is not a backbone": ("--start.backbone=nowhere.safetensors",),
    "imagination.stores": ("--imagination={stores: [nowhere]}",),
    "imagination.model.dynamics": ("--imagination={}", "--sim.image_size=[60, 60]"),
    "keyframes.before_end": ("--imagination={model: {keyframes: {before_end: [9, 3]}}}",),
    "distill.to": ("--imagination={model: {distill: {to: 2}}}",),
    "start.path": ("--start={name: bundle, path: nowhere}",),
    "start.store": ("--start.store=nowhere",),
}  # fmt: skip


def contradiction_cases() -> Iterator[Case]:
    for said, words in CONTRADICTIONS.items():
        yield Case("contradiction", ("train", str(TINY), *words), (said,))


# -- files and folders -----------------------------------------------------------------------------------------------


def file_cases(folder: Path) -> Iterator[Case]:
    """Broken configurations, stores, bundles and run folders below ``folder``."""
    texts = {
        "empty": ("", "is empty"),
        "list": ("- 1\n- 2\n", "expected sections"),
        "syntax": ("sim: [1\n", "not valid YAML"),
        "twice": ("seed: 1\nseed: 2\n", "given twice"),
        "circular": ("extends: circular.yaml\n", "circular"),
        "missing parent": ("extends: nowhere.yaml\n", "no such file"),
        "number for a section": ("sim: 3\n", "must be a section"),
        "binary": ("\x00\x01", "not valid YAML"),
    }
    for name, (text, said) in texts.items():
        path = folder / f"{name.split()[0]}.yaml"
        path.write_text(text)
        yield Case("file", ("train", str(path)), (path.name if said != "no such file" else "nowhere.yaml", said))
    for command in ("train", "pretrain", "collect", "world-model"):
        extra = {"pretrain": ("--out", "x"), "collect": ("--episodes", "1", "--out", "x")}.get(command, ())
        verb = ("fit",) if command == "world-model" else ()
        yield Case("file", (command, *verb, str(folder / "nowhere.yaml"), *extra), ("no such file",))
    nothing, somewhere = folder / "nothing", folder / "somewhere"
    somewhere.mkdir()
    for words, said in (
        (("eval", str(nothing)), "does not exist; it should be a run folder or a bundle"),
        (("eval", str(somewhere)), "neither a run folder nor a bundle"),
        (("report", str(somewhere)), "is not the folder of a run"),
        (("compare", str(somewhere), str(nothing)), "is not the folder of a run"),
        (("data", "info", str(nothing)), "no such episode store"),
        (("data", "verify", str(nothing)), "no such episode store"),
        (("data", "import", str(nothing)), "--source"),
        (("serve", str(somewhere)), "is not a bundle"),
        (("export", str(somewhere), "--to", "onnx"), "bundle.json"),
        (("train", str(TINY), "--run-dir", str(TINY)), "is a file"),
        (("train", str(TINY), "--run-dir", str(nothing), "--resume"), "holds no run"),
    ):
        yield Case("file", words, (said,))
    yield from run_folder_cases(folder)


def run_folder_cases(folder: Path) -> Iterator[Case]:
    """Damaged folders of runs, and settings that must not change on resume."""
    damaged = folder / "damaged"
    damaged.mkdir()
    (damaged / "config.yaml").write_text(f"extends: {TINY}\n")
    for name, text in (("stages.json", "{"), ("config.yaml", "")):
        run = folder / f"broken-{name}"
        shutil.copytree(damaged, run)
        (run / name).write_text(text)
        yield Case("file", ("train", str(TINY), "--run-dir", str(run), "--resume"), (name,))
    for change in ("seed=9", "algorithm.gamma=0.5", "sim.num_envs=8", "start.bc.steps=7", "start.noise=0.2"):
        words = ("train", str(TINY), f"--{change}", "--run-dir", str(damaged), "--resume")
        yield Case("resume", words, (change.partition("=")[0], "other settings"))
    yield Case("resume", ("train", str(TINY), "--run-dir", str(damaged)), ("--resume",))


# -- running -----------------------------------------------------------------------------------------------------------


def all_cases(folder: Path, *, seed: int) -> list[Case]:
    """Every case, in an order that ``seed`` determines: the rare kinds first, then settings."""
    rng = random.Random(seed)
    rare = [*contradiction_cases(), *file_cases(folder), *option_cases()]
    common = [*setting_cases(), *unknown_cases(rng)]
    rng.shuffle(common)
    return rare + common


def run_case(case: Case, folder: Path) -> str:
    """What is wrong with the answer; "" where the case was refused as it should be."""
    run_dir = folder / "run"
    words = [*case.words, *(["--run-dir", str(run_dir)] if needs_run_dir(case) else [])]
    printed, stepped = io.StringIO(), False
    with counted_steps() as steps, contextlib.redirect_stderr(printed), contextlib.redirect_stdout(io.StringIO()):
        try:
            main(words)
            code: Any = 0
        except SystemExit as end:
            code = end.code
    stepped = steps() > 0
    message = printed.getvalue().strip()
    lines = message.splitlines() or [""]
    missing = not any(all(text in line for text in case.must_say) for line in lines)
    problems = [
        f"exit code {code}" if code != 2 else "",
        "traceback" if "Traceback" in message else "",
        f"no line says {case.must_say}" if missing else "",
        "simulated before it was refused" if stepped else "",
        "made the run's folder" if run_dir.exists() else "",
    ]
    shutil.rmtree(run_dir, ignore_errors=True)
    found = "; ".join(problem for problem in problems if problem)
    return f"{' '.join(words)}\n    {found}: {message}" if found else ""


def needs_run_dir(case: Case) -> bool:
    return case.words[0] == "train" and "--run-dir" not in case.words


@contextlib.contextmanager
def counted_steps() -> Iterator[Callable[[], int]]:
    """Counts the control steps of the built-in simulator."""
    count, step = 0, TabletopEnv.step

    def counted(self: TabletopEnv, action: Any) -> Any:
        nonlocal count
        count += 1
        return step(self, action)

    TabletopEnv.step = counted  # type: ignore[method-assign]
    try:
        yield lambda: count
    finally:
        TabletopEnv.step = step  # type: ignore[method-assign]


def refuse_all(count: int | None, *, seed: int) -> dict[str, tuple[int, list[str]]]:
    """By kind: how many cases there were, and what went wrong."""
    totals: Counter[str] = Counter()
    wrong: dict[str, list[str]] = {}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        for case in all_cases(folder, seed=seed)[:count]:
            totals[case.kind] += 1
            if problem := run_case(case, folder):
                wrong.setdefault(case.kind, []).append(problem)
    return {kind: (total, wrong.get(kind, [])) for kind, total in totals.items()}


def rows_of(results: dict[str, tuple[int, list[str]]]) -> list[Row]:
    """How many inputs of each kind, and the share that was refused as it should be."""
    total, failed = sum(count for count, _ in results.values()), sum(len(wrong) for _, wrong in results.values())
    shares = [
        row(f"refused, {kind}", 1 - len(wrong) / count, "share", inputs=count)
        for kind, (count, wrong) in results.items()
    ]
    return [row("wrong inputs", total, "inputs"), row("refused", 1 - failed / total, "share", inputs=total), *shares]


def program() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=1000, help="rare kinds first, then settings in random order")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    results = refuse_all(options.count, seed=options.seed)
    for problem in (problem for _, wrong in results.values() for problem in wrong):
        print(problem)
    rows = rows_of(results)
    for one in rows:
        print(f"{one['name']:28} {one['value']:8.3f} {one['unit']}")
    command = f"python -m benchmarks.wrong_inputs --count {options.count} --seed {options.seed}"
    write_record("wrong_inputs", rows, command=command)


if __name__ == "__main__":
    program()
