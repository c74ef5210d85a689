"""The Python example of README.md and docs/training.md; links and commands of the Markdown files."""

from __future__ import annotations

import re
import subprocess
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from policies.bundle import save_bundle
from policies.policy import RobotSpec
from policies.registry import build_policy
from tests.docs.pages import INCLUDED, ROOT, code
from vla_rl.api import load_experiment, make_env, roll_out

EXAMPLE = ROOT / "notebooks" / "example.py"
SYSTEM_COMMANDS = {"cd", "export", "mkdir", "make", "docker", "python", ".venv/bin/pre-commit"}
BROUGHT_BY = {
    "vla-rl": "vla_rl",
    "pip": "pip",
    "pytest": "pytest",
    "ray": "ray",
    "tensorboard": "tensorboard",
    "hf": "huggingface_hub",
}
LINK = re.compile(r"\]\(([^)\s]+)\)|src=\"([^\"]+)\"")


def markdown_files() -> list[Path]:
    listed = subprocess.run(["git", "ls-files", "*.md"], cwd=ROOT, capture_output=True, text=True, check=True)
    return [ROOT / name for name in listed.stdout.split() if not name.startswith("vla_rl/starter/")]


def test_documented_commands_exist() -> None:
    """The first word of every command in the documentation, where the distribution that brings it is installed."""
    blocks = [block.replace("\\\n", " ") for page in markdown_files() for block in code(page, "sh")]
    lines = [line for block in blocks for line in block.splitlines() if line and line[0] not in " #"]
    words = {line.split()[0] for line in lines} - SYSTEM_COMMANDS
    assert words <= set(BROUGHT_BY)
    for word in words:
        if find_spec(BROUGHT_BY[word]) is not None:
            assert entry_points(group="console_scripts", name=word), word


def test_the_readme_shows_the_example_that_is_tested() -> None:
    assert EXAMPLE.read_text() in code(ROOT / "README.md", "python")
    assert len(EXAMPLE.read_text().splitlines()) <= 26


def test_the_example_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    experiment = load_experiment("quickstart", "--sim.num_envs=2", "--sim.tasks=[reach]")
    env = make_env(experiment.sim)
    torch.manual_seed(0)
    save_bundle(build_policy(experiment.start.policy, RobotSpec.of(env.spec)), tmp_path / "runs/quickstart/bundle")
    env.close()
    exec(compile(EXAMPLE.read_text(), str(EXAMPLE), "exec"), {})
    assert re.search(r"success \d+%, 95 % interval \d+% to \d+%\n\d+ actions planned", capsys.readouterr().out)


def test_rolling_out_twice_gives_the_same_episodes() -> None:
    experiment = load_experiment("quickstart", "--sim.num_envs=2", "--sim.tasks=[reach]", "--sim.max_steps=8")
    env = make_env(experiment.sim)
    torch.manual_seed(0)
    policy = build_policy(experiment.start.policy, RobotSpec.of(env.spec)).eval()
    first, second = (roll_out(policy, env, episodes=3, seed=5, explore=True) for _ in range(2))
    env.close()
    assert len(first.steps) == 3
    assert torch.equal(first.steps, second.steps)
    assert torch.equal(first.success, second.success)


def test_every_included_file_exists() -> None:
    """In a block marked "python" the formatter changes such a line, and the page then shows the line itself."""
    lines = [line for page in markdown_files() for line in page.read_text().splitlines() if line.startswith("--8")]
    missing = [line for line in lines if not (found := INCLUDED.fullmatch(line)) or not (ROOT / found[1]).is_file()]
    assert lines
    assert missing == []


@pytest.mark.parametrize("page", markdown_files(), ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    targets = [first or second for first, second in LINK.findall(page.read_text())]
    local = [target for target in targets if not re.match(r"[a-z]+:|#", target)]
    missing = [target for target in local if not (page.parent / target.partition("#")[0]).exists()]
    assert missing == []
