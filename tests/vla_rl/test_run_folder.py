"""The folder of a run: checked before it is made; moved, renamed, copied, extended and resumed from anywhere."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from safetensors.numpy import load_file

from policies.bundle import load_bundle, read_bundle_info
from sims.errors import UserError
from vla_rl.cli.main import main
from vla_rl.runs import run_dir
from vla_rl.runs.listing import list_runs, summarize
from vla_rl.runs.metrics import read_metrics
from vla_rl.runs.run_dir import experiment_of, git_revision, locate, run_of

TINY = Path(__file__).parents[1] / "data" / "tiny.yaml"
FIRST, ALL = 2, 4  # iterations


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A configuration with a store beside it, and two runs: one of FIRST iterations and one of ALL."""
    folder = tmp_path_factory.mktemp("project")
    (folder / "mine.yaml").write_text(f"extends: {TINY}\nstart: {{store: demos}}\nevaluation: {{episodes: 2}}\n")
    main(["collect", str(TINY), "--episodes", "3", "--out", str(folder / "demos")])
    for name, iterations in (("short", FIRST), ("whole", ALL)):
        main(train(folder, name, f"--algorithm.iterations={iterations}"))
    return folder


def train(project: Path, name: str, *words: str) -> list[str]:
    return ["train", str(project / "mine.yaml"), "--run-dir", str(project / name), *words]


def copy(project: Path, tmp_path: Path, name: str = "short") -> Path:
    """A copy of the project at another place, whose runs may be changed."""
    shutil.copytree(project, tmp_path / "elsewhere")
    return tmp_path / "elsewhere" / name


def curve(run: Path) -> list[dict[str, float]]:
    """Metrics without times."""
    records = [{k: v for k, v in record.items() if "_s" not in k} for record in read_metrics(run)]
    return [{name: value for name, value in record.items() if not name.startswith("time/")} for record in records]


def interrupt(run: Path, *, after: str) -> None:
    """As if the run had been killed when the stage ``after`` was complete and one iteration was done."""
    stages = json.loads((run / "stages.json").read_text())
    kept = list(stages)[: list(stages).index(after) + 1]
    (run / "stages.json").write_text(json.dumps({name: stages[name] for name in kept}))
    for checkpoint in sorted((run / "checkpoints").iterdir())[1:]:
        checkpoint.unlink()
    for folder in ("bundle", "tensorboard"):
        shutil.rmtree(run / folder)
    (run / "result.json").unlink()


def refusal(capsys: pytest.CaptureFixture[str], words: list[str]) -> str:
    """The message of a command that exits with code 2: one line, the last; notices about settings stand before it."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as caught:
        main(words)
    assert caught.value.code == 2
    lines = capsys.readouterr().err.splitlines()
    assert [i for i, line in enumerate(lines) if line.startswith("vla-rl: ")] == [len(lines) - 1]
    return lines[-1]


def test_a_finished_run_is_extended_and_equals_a_whole_one(project: Path, tmp_path: Path) -> None:
    run = copy(project, tmp_path)
    main(train(run.parent, "short", "--resume", f"--algorithm.iterations={ALL}"))
    assert curve(run) == curve(project / "whole")
    assert len(curve(run)) == ALL
    mine, whole = (load_file(next((one / "bundle").glob("*.safetensors"))) for one in (run, project / "whole"))
    assert all((mine[name] == whole[name]).all() for name in whole)
    results = [json.loads((one / "result.json").read_text()) for one in (run, project / "whole")]
    assert results[0]["rl"] == results[1]["rl"]
    assert experiment_of(run).algorithm.iterations == ALL


def test_a_run_without_its_checkpoints_is_not_begun_again(
    project: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Extended, it would train from its first iteration on and replace the bundle."""
    run = copy(project, tmp_path)
    shutil.rmtree(run / "checkpoints")
    before = (run / "metrics.jsonl").read_bytes()
    words = train(run.parent, "short", "--resume", f"--algorithm.iterations={ALL}")
    assert f"has no checkpoint of its {FIRST} iterations any longer" in refusal(capsys, words)
    assert (run / "metrics.jsonl").read_bytes() == before
    main(train(run.parent, "short", "--resume", f"--algorithm.iterations={FIRST}"))  # nothing is repeated


def test_a_run_is_evaluated_elsewhere_with_its_own_seed(
    project: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = tmp_path / "other.yaml"
    other.write_text("seed: 7\nsim: {name: tabletop, tasks: [reach], num_envs: 1, max_steps: 8}\n")
    capsys.readouterr()
    main(["eval", str(project / "short"), "--sim", str(other), "--episodes=1", "--json"])
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert result["seed"] == experiment_of(project / "short").seed == 3
    assert list(result["per_task"]) == ["reach"]


def test_the_policy_of_a_run_that_has_begun_is_with_its_residual(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").touch()
    (tmp_path / "imitation" / "bundle").mkdir(parents=True)
    assert locate(tmp_path)[1] == tmp_path / "imitation" / "bundle"
    (tmp_path / "residual").mkdir()
    assert locate(tmp_path)[1] == tmp_path / "residual"
    (tmp_path / "bundle").mkdir()
    assert locate(tmp_path)[1] == tmp_path / "bundle"


def test_a_config_of_something_else_above_a_bundle_makes_no_run(project: Path, tmp_path: Path) -> None:
    bundle = shutil.copytree(project / "short" / "bundle", tmp_path / "models" / "arm")
    (tmp_path / "config.yaml").write_text("model: llama\n")
    with pytest.raises(UserError, match="is a bundle outside of a run: give --sim CONFIG, where it is to be evaluated"):
        locate(bundle)
    run = copy(project, tmp_path)
    (run / "imitation" / "config.yaml").write_text("model: llama\n")
    for inside in ("bundle", "imitation/bundle"):
        assert locate(run / inside) == (run, run / inside)
        assert run_of(run / inside / "bundle.json") == run
    assert str(run) in [found.path for found in list_runs(tmp_path)]
    assert run_of(bundle) is None


def test_an_evaluation_says_of_which_policy_it_is(
    project: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run that is not complete has only the policy of before its reinforcement."""
    run = copy(project, tmp_path)
    for name, notice in (("bundle", ""), ("imitation/bundle", f"{run} is not complete: this is its policy before ")):
        capsys.readouterr()
        main(["eval", str(run), "--episodes=1", "--json"])
        printed = capsys.readouterr()
        result = json.loads(printed.out.splitlines()[-1])
        assert result["weights"] == read_bundle_info(run / name).sha256
        assert (" is not complete" in printed.err) == bool(notice)
        assert notice in printed.err
        if not notice:
            interrupt(run, after="evaluate_before")


def test_an_extended_run_that_fails_has_no_result_of_before(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("the simulator is gone")

    run = copy(project, tmp_path)
    assert (summarize(run).state, summarize(run).success) == ("finished", 0.0)
    monkeypatch.setattr("vla_rl.runners.train.reinforce", fail)
    with pytest.raises(SystemExit):
        main(train(run.parent, "short", "--resume", f"--algorithm.iterations={ALL}"))
    assert (summarize(run).state, summarize(run).success) == ("failed", None)
    assert not (run / "result.json").exists() and not (run / "report.html").exists()


def test_a_moved_and_renamed_run_is_resumed_from_another_directory(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The store is beside the configuration; the run alone goes elsewhere."""
    run = copy(project, tmp_path, "whole")
    interrupt(run, after="evaluate_before")
    moved = tmp_path / "archive" / "renamed"
    moved.parent.mkdir()
    run.rename(moved)
    shutil.rmtree(run.parent / "demos")  # imitation is complete: nothing reads the store any longer
    monkeypatch.chdir(moved.parent)
    main(["train", "../elsewhere/mine.yaml", f"--algorithm.iterations={ALL}", "--run-dir", "renamed", "--resume"])
    assert curve(moved) == curve(project / "whole")
    assert (moved / "result.json").is_file()


def test_a_copied_run_imitates_from_the_store_where_it_is_now(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = copy(project, tmp_path)
    (run / "stages.json").unlink()
    shutil.rmtree(run / "imitation")
    monkeypatch.chdir(run.parent)
    main(["train", "mine.yaml", f"--algorithm.iterations={FIRST}", "--run-dir", "short", "--resume"])
    assert curve(run) == curve(project / "short")
    assert experiment_of(run).start.store == run.parent / "demos"


def test_a_run_keeps_the_bundle_that_it_starts_from(project: Path, tmp_path: Path) -> None:
    given, run = tmp_path / "given", tmp_path / "run"
    shutil.copytree(project / "short" / "bundle", given)
    config = tmp_path / "mine.yaml"
    config.write_text(
        f"extends: {TINY}\nstart: {{name: bundle, path: given}}\nalgorithm: {{iterations: 0}}\n"
        "evaluation: {episodes: 2}\n"
    )
    main(["train", str(config), "--run-dir", str(run)])
    shutil.rmtree(given)
    main(["train", str(config), "--run-dir", str(run), "--resume"])
    assert load_bundle(run / "imitation" / "bundle").spec == load_bundle(run / "bundle").spec


def test_a_run_clones_a_store_into_the_bundle_that_it_starts_from(
    project: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given, run = project / "short" / "bundle", tmp_path / "run"
    config = tmp_path / "mine.yaml"
    config.write_text(
        f"extends: {TINY}\nstart: {{name: bundle, path: {given}, store: {project / 'demos'}, "
        "bc: {steps: 4, batch_size: 8, frozen: [encoder]}}\nalgorithm: {iterations: 0}\nevaluation: {episodes: 2}\n"
    )
    wrong = ["train", str(config), "--run-dir", str(run)]
    assert "'start.bc'" in refusal(capsys, [*wrong, "--start.bc.frozen=[vision]"])
    assert "'start.store'" in refusal(capsys, [*wrong, "--start.store=nowhere"])
    assert not run.exists()
    main(["train", str(config), "--run-dir", str(run)])
    before, after = load_bundle(given).state_dict(), load_bundle(run / "imitation" / "bundle").state_dict()
    changed = {name.split(".")[0] for name in before if not torch.equal(before[name], after[name])}
    assert changed == {"expert"}
    assert read_bundle_info(run / "imitation" / "bundle").provenance.parent == read_bundle_info(given).sha256


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("algorithm.gamma=0.5", "algorithm.gamma was 0.99, is 0.5"),
        ("start.bc.steps=7", "start.bc.steps was 6, is 7"),
        ("algorithm.iterations=0", f"algorithm.iterations must be at least {FIRST}"),
    ],
)
def test_a_setting_that_must_not_change_is_named(
    project: Path, capsys: pytest.CaptureFixture[str], setting: str, message: str
) -> None:
    before = (project / "short" / "config.yaml").read_text()
    words = (f"--algorithm.iterations={FIRST}", f"--{setting}", "--resume")
    assert message in refusal(capsys, train(project, "short", *words))
    assert (project / "short" / "config.yaml").read_text() == before


@pytest.mark.parametrize(
    "setting",
    [
        "start.policy.explore.name=ddpm",
        "start.policy.encoder.forecast_dims=99",
        "algorithm.update.frozen=[vision]",
        "start.store=nowhere",
    ],
)
def test_a_contradiction_leaves_no_folder(project: Path, capsys: pytest.CaptureFixture[str], setting: str) -> None:
    refusal(capsys, train(project, "never", f"--{setting}"))
    assert not (project / "never").exists()


def test_the_folder_of_a_fit_is_no_folder_for_a_run(
    project: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The run would go on from the fit's checkpoints."""
    project = copy(project, tmp_path).parent
    main(["imitate", str(project / "mine.yaml"), "--out", str(project / "fit"), "--start.bc.steps=2"])
    before = sorted((path, path.stat().st_mtime_ns) for path in (project / "fit").rglob("*"))
    assert "is of something else; choose another --run-dir" in refusal(capsys, train(project, "fit"))
    assert sorted((path, path.stat().st_mtime_ns) for path in (project / "fit").rglob("*")) == before


@pytest.mark.parametrize("held", ["stages.json", "metrics.jsonl", "checkpoints", "bundle", "sweep.yaml"])
def test_a_folder_of_something_else_is_no_folder_for_a_run(
    project: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], held: str
) -> None:
    (tmp_path / "other" / held).mkdir(parents=True)
    line = refusal(capsys, ["train", str(project / "mine.yaml"), "--run-dir", str(tmp_path / "other")])
    assert f"holds {held} and no config.yaml" in line


@pytest.mark.parametrize("change", ["sim.image_size=[32, 32]", "sim.cameras=[agent]"])
def test_a_store_of_another_simulator_is_refused(
    project: Path, capsys: pytest.CaptureFixture[str], change: str
) -> None:
    words = train(project, "never", f"--{change}")
    if "cameras" in change:  # fewer cameras than were recorded are fine
        words += ["--start.name=bundle", f"--start.path={project / 'short' / 'bundle'}"]
    line = refusal(capsys, words)
    assert ("image_size (64, 64), not (32, 32)" in line) or ("cameras ('agent', 'wrist'), not ('agent',)" in line)
    assert not (project / "never").exists()


@pytest.mark.parametrize(
    ("file", "text", "message"),
    [
        ("stages.json", '{"imitate": {', "stages.json is damaged"),
        ("stages.json", "[1]", "does not hold stages by name"),
        ("config.yaml", "", "config.yaml is empty"),
    ],
)
def test_a_damaged_run_folder_is_a_clear_error(
    project: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], file: str, text: str, message: str
) -> None:
    run = copy(project, tmp_path)
    (run / file).write_text(text)
    assert message in refusal(capsys, train(run.parent, "short", "--resume"))


def test_training_ends_with_its_success(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(train(project, "short", "--resume", f"--algorithm.iterations={FIRST}"))
    success, report = capsys.readouterr().out.splitlines()
    assert success.startswith("success 0.0 % (0 to 66 %), before reinforcement 0.0 %")
    assert report == str(project / "short" / "report.html")


def test_without_git_no_revision_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    assert git_revision() is None


def test_the_revision_is_of_this_program_not_of_the_project_that_it_is_installed_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A virtual environment mostly lies in a project's checkout, which ignores it."""
    package = tmp_path / ".venv/site-packages/installed"
    package.mkdir(parents=True)
    shutil.copy(run_dir.__file__, package / "run_dir.py")
    (tmp_path / ".gitignore").write_text(".venv\n")
    git = ["git", "-C", str(tmp_path), "-c", "user.email=a@b", "-c", "user.name=a"]
    for command in (["init", "-q"], ["add", ".gitignore"], ["commit", "-qm", "a project of the user"]):
        subprocess.run([*git, *command], check=True)
    monkeypatch.setattr(run_dir, "__file__", str(package / "run_dir.py"))
    assert git_revision() is None
