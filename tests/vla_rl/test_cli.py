from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from sims.errors import UserError
from tests.vla_rl.run_folder import make_run
from vla_rl.cli import main as cli


def vla_rl(*words: object, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "vla_rl.cli", *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, env=os.environ | environment)


def code(*words: str) -> int:
    with pytest.raises(SystemExit) as stopped:
        cli.main(words)
    return stopped.value.code


@pytest.mark.parametrize(
    "command", ["", "train", "eval", "collect", "report", "compare", "doctor", "bench", "data", "sims"]
)
def test_every_command_has_help(capsys: pytest.CaptureFixture[str], command: str):
    assert code(*command.split(), "--help") == 0
    assert capsys.readouterr().out.startswith(f"usage: vla-rl {command}")


def test_help_imports_nothing_heavy():
    program = (
        "import sys; from vla_rl.cli.main import main\n"
        "try: main(['--help'])\n"
        "except SystemExit: print({'torch', 'mujoco', 'zarr', 'pydantic'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "set()"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), "Missing subcommand"),
        (("trian",), "Unrecognized options: trian"),
        (("train",), "CONFIG"),
        (("data", "look", "x"), "'info', 'verify'"),
        (("sims", "install", "robosuit"), "needs one of"),
        (("eval", "runs/x", "--episodes", "many"), "episodes"),
        (("train", "a.yaml", "--run-dri", "x"), "unknown option --run-dri; did you mean --run-dir?"),
        (("report", "nothing-here"), "nothing-here is not the folder of a run"),
        (("compare", "nothing-here"), "compare needs two or more run folders"),
    ],
)
def test_wrong_input_is_one_message_and_code_2(capsys: pytest.CaptureFixture[str], words: tuple[str, ...], said: str):
    assert code(*words) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert said in captured.err
    assert "Traceback" not in captured.err


@pytest.mark.parametrize(
    ("error", "expected", "said"),
    [
        (UserError("runs/a: no such thing"), 2, "vla-rl: runs/a: no such thing\n"),
        (FileNotFoundError(2, "No such file or directory", "runs/b"), 2, "vla-rl: runs/b: no such file or directory\n"),
        (KeyboardInterrupt(), 130, "vla-rl: interrupted\n"),
    ],
)
def test_exit_codes(monkeypatch, capsys: pytest.CaptureFixture[str], error: BaseException, expected: int, said: str):
    def fail(_: object) -> None:
        raise error

    monkeypatch.setattr(cli.Report, "run", fail)
    assert code("report", "x") == expected
    assert capsys.readouterr().err == said


def test_a_fault_of_the_program_is_code_1_and_leaves_its_traceback(tmp_path: Path):
    run = make_run(tmp_path / "run", videos=False)
    (run / "result.json").write_text('{"bc": {"success": 1}}')  # a shape this program never writes
    done = vla_rl("report", run, TMPDIR=str(tmp_path))
    assert done.returncode == 1
    message, where = done.stderr.splitlines()
    assert message == "vla-rl: KeyError: 'interval'"
    log = Path(where.removeprefix("The full traceback is in "))
    assert log.parent == tmp_path
    assert log.read_text().startswith("Traceback")


def test_interrupted_training_says_how_to_go_on(monkeypatch, capsys: pytest.CaptureFixture[str]):
    def interrupt(_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli.Train, "run", interrupt)
    assert code("train", "configs/quick start.yaml", "--seed", "3", "--algorithm.name=grpo") == 130
    assert capsys.readouterr().err == (
        "vla-rl: interrupted; resume with: vla-rl train 'configs/quick start.yaml' --seed 3 --algorithm.name=grpo "
        "--run-dir 'runs/quick start' --resume\n"
    )


def test_control_c_in_a_real_process_is_code_130(tmp_path: Path):
    """A FIFO that nobody writes keeps the command waiting until the interrupt comes."""
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.yaml").write_text("seed: 1\n")
    os.mkfifo(run / "metrics.jsonl")
    command = [sys.executable, "-m", "vla_rl.cli", "report", str(run)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        deadline = time.monotonic() + 60
        while "metrics.jsonl" not in _waiting_for(process.pid) and time.monotonic() < deadline:
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=30)
    assert process.returncode == 130
    assert said == "vla-rl: interrupted\n"


def _waiting_for(pid: int) -> str:
    """What the process is blocked on: opening a FIFO shows as this kernel function."""
    where = Path(f"/proc/{pid}/wchan").read_text()
    return "metrics.jsonl" if "fifo" in where or "wait_for_partner" in where else ""


@pytest.mark.parametrize(
    ("words", "overrides"),
    [
        ("train c.yaml --a.b 1 --resume --c=2", ("--a.b", "1", "--c=2")),
        ("train --a.b 1 c.yaml --run-dir d", ("--a.b", "1")),
        ("train c.yaml --a.b -0.5", ("--a.b", "-0.5")),
        ("collect c.yaml --episodes 3 --sim.num_envs 4 --out s", ("--sim.num_envs", "4")),
    ],
)
def test_settings_are_told_from_options(words: str, overrides: tuple[str, ...]):
    command = cli.parse(words.split())
    assert isinstance(command, cli.Train | cli.Collect)
    assert command.overrides == overrides
    assert command.config == Path("c.yaml")


def test_the_run_folder_is_named_after_the_configuration():
    command = cli.parse(["train", "configs/pick.yaml"])
    assert isinstance(command, cli.Train)
    assert command.place() == Path("runs/pick")


def test_doctor_as_json_really_checks_this_machine():
    done = vla_rl("doctor", "--json")
    checks = {check.pop("name"): check for check in json.loads(done.stdout)["checks"]}
    assert done.returncode == (1 if any(check["status"] == "failed" for check in checks.values()) else 0)
    assert {"python", "torch", "cuda", "mujoco", "render-egl", "render-osmesa", "video", "disk"} <= set(checks)
    for name in ("torch", "mujoco", "video"):
        assert checks[name]["status"] == "ok", checks[name]
    for check in checks.values():
        assert set(check) == {"status", "detail", "fix"}
        assert check["status"] in ("ok", "missing", "failed")
        assert check["status"] == "ok" or check["fix"]


def test_doctor_names_the_packages_when_nothing_renders(monkeypatch, capsys: pytest.CaptureFixture[str]):
    from vla_rl import doctor

    monkeypatch.setattr(doctor, "RENDER", "raise ImportError('no OpenGL here')")
    checks = doctor.check_renderers()
    assert [check["status"] for check in checks] == ["failed", "failed"]
    doctor.print_checks(checks)
    out = re.sub(r"\s+", " ", capsys.readouterr().out)
    assert "ImportError: no OpenGL here" in out
    assert "sudo apt-get install libosmesa6" in out


def test_doctor_survives_a_crash_of_the_renderer(monkeypatch):
    from vla_rl import doctor

    monkeypatch.setattr(doctor, "RENDER", "import os; os.kill(os.getpid(), 11)")
    assert all("killed by signal 11" in check["detail"] for check in doctor.check_renderers())
