from __future__ import annotations

import errno
import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

import pytest
from safetensors import SafetensorError

from episodes.schema import StoreFull
from policies.bundle import save_bundle
from policies.gaussian import GaussianPolicy, GaussianPolicyConfig
from sims.errors import UserError
from sims.numbers.finite import NotFinite
from sims.subproc.termination import Terminated
from tests.vla_rl.run_folder import make_run
from vla_rl.bench.example import EXAMPLE_ROBOT
from vla_rl.bench.program import robot_rows
from vla_rl.cli import main as cli
from vla_rl.cli.result import Result, show
from vla_rl.cli.reward import FitClassifier

ROOT = Path(__file__).parents[2]


def vla_rl(*arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "vla_rl.cli", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, env=os.environ | environment)


def exit_code(*arguments: str) -> int:
    with pytest.raises(SystemExit) as stopped:
        cli.main(arguments)
    return stopped.value.code


@pytest.mark.parametrize("command", [*cli.GROUPS, *cli.COMMANDS])
def test_every_command_has_help(capsys: pytest.CaptureFixture[str], command: str):
    assert exit_code(*command.split(), "--help") == 0
    assert capsys.readouterr().out.startswith(f"usage: vla-rl {command}".rstrip() + " [-h]")


def test_help_imports_nothing_heavy():
    program = (
        "import sys; from vla_rl.cli.main import main\n"
        "try: main(['--help'])\n"
        "except SystemExit: print({'torch', 'mujoco', 'zarr', 'pydantic'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "set()"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "Missing subcommand"),
        (("trian", "quickstart"), "no command 'trian'; did you mean 'train'?"),
        (("config", "--help"), "no command 'config'; there are: init, train"),
        (
            ("train", "quickstart", "--run-dir", "/dev/null/x"),
            "/dev/null/x cannot be created or written (not a directory)",
        ),
        (("train",), "CONFIG"),
        (("data", "show", "x"), "no command 'data show'; there are: info, verify, rebuild, merge, compact"),
        (("data", "infos", "x"), "no command 'data infos'; did you mean 'info'?"),
        (("data", "--json", "info", "x"), "Missing subcommand after: vla-rl data; there are: info, verify"),
        (("data", "info", "x", "other"), "data info takes no other"),
        (("sims", "install", "robosuit"), "unknown simulator 'robosuit'; known are robosuite"),
        (("eval", "runs/x", "--episodes", "many"), "--episodes must be an integer from 1 to 10^9 or null, got 'many'"),
        (("eval", "runs/x", "--episodes", "0"), "--episodes must be an integer from 1 to 10^9 or null, got 0"),
        (
            ("collect", "a.yaml", "--out", "x", "--episodes", "-1"),
            "--episodes must be an integer from 1 to 10^9",
        ),
        (("serve", "x", "--port", "99999"), "--port must be an integer from 0 to 65535, got 99999"),
        (("train", "a.yaml", "--seed", "--run-dir", "x"), "--seed needs a value"),
        (("train", "a.yaml", "--run-dri", "x"), "unknown option --run-dri; did you mean --run-dir?"),
        (("correct", "x", "--resume"), "correct takes no --resume: it always continues what is in its folder"),
        (("fleet", "x", "--resume", "--port", "0"), "fleet takes no --resume: it always continues"),
        (("train", "quickstart", "--device", "gpu"), "device 'gpu' cannot be used here; there are: auto, cpu"),
        (("bench", "quickness"), "there are: sim, policy"),
        (("bench", "policy", "--policy", "mlp"), "no policy 'mlp'; there are: denoising"),
        (("bench", "policy", "--sim", "pusht"), "bench policy takes no --sim; it is an option of bench sim"),
        (("bench", "sim", "--num-envs", "2"), "these options need --sim NAME"),
        (("bench", "peers", "--rounds", "0"), "--rounds must be an integer from 1 to 10^9, got 0"),
        (("eval", "runs/x", "--words", "blank"), "--words"),
        (("init", "torch"), "an installed package is called torch, which this one would hide; choose another name"),
        (("report", "nothing-here"), "nothing-here is not the folder of a run: there is no such folder"),
        (("eval", "nothing-here"), "nothing-here does not exist; it should be a run folder or a bundle"),
        (("serve", "README.md"), "README.md is not a bundle: it is a file"),
        (("train", "quickstart", "--distillation.steps", "5"), "did you mean 'distillation.fit.steps'?"),
        (("sweep", "quickstart_short"), "no sweep quickstart_short comes with vla-rl; name a file that says which"),
        (("compare", "nothing-here"), "compare needs two or more run folders"),
        (("compare", "a", "b", "./a"), "compare needs each run once; given again: a"),
        (("train", "."), ". is a folder; name a YAML file"),
        (("train", "/"), "/ is a folder; name a YAML file"),
        (("train", ""), "train got an empty argument"),
        (("train", "quickstart", "--run-dir", ""), "--run-dir needs a path, got ''"),
        (("train", "quickstart", "--run-dir="), "--run-dir needs a path, got ''"),
        (("doctor", "--run", ""), "--run needs a path, got ''"),
        (("reward", "evaluate", "x", "--stores", "a", ""), "--stores needs a path, got ''"),
    ],
)
def test_wrong_input_is_one_message_and_code_2(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], message: str
):
    assert exit_code(*arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert message in captured.err
    assert captured.err.count("\n") == 1
    assert "Traceback" not in captured.err


RECORDING = """
import argparse, json, pathlib
parser = argparse.ArgumentParser()
parser.add_argument("bundle")
parser.add_argument("--out", type=pathlib.Path, default="benchmarks/results")
folder = parser.parse_args().out
(folder / "robot.json").write_text(json.dumps({"rows": [{"name": "filter_us"}]}))
"""


def test_bench_peers_says_what_it_needs(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    if find_spec("stable_baselines3") is None:
        assert exit_code("bench", "peers", "--toy") == 2
        assert (
            "no peer is available. Install stable-baselines3, or give checkouts: --cleanrl" in capsys.readouterr().err
        )
    monkeypatch.setattr("vla_rl.bench.program.CHECKOUT", tmp_path)  # as from a wheel
    assert exit_code("bench", "peers") == 2
    assert "bench peers is a program of the repository: clone it" in capsys.readouterr().err


def test_bench_robot_leaves_the_committed_record(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """With a program of that name that writes where it is told to, and nothing on a second call."""
    save_bundle(GaussianPolicy(GaussianPolicyConfig(action_horizon=4, hidden=(8,)), EXAMPLE_ROBOT), tmp_path / "bundle")
    record, program = tmp_path / "benchmarks/results/robot.json", tmp_path / "benchmarks/robot.py"
    record.parent.mkdir(parents=True)
    record.write_text('{"rows": []}')
    program.write_text(RECORDING)
    python = tmp_path / ".venv-ros/bin/python"
    monkeypatch.setattr("vla_rl.bench.program.CHECKOUT", tmp_path)
    if find_spec("rclpy") is None:
        with pytest.raises(UserError, match="bench robot needs ROS"):
            robot_rows(tmp_path / "bundle")
    python.parent.mkdir(parents=True)
    python.symlink_to(sys.executable)
    assert robot_rows(tmp_path / "bundle") == [{"name": "filter_us"}]
    assert record.read_text() == '{"rows": []}'
    program.write_text("raise SystemExit(3)")
    with pytest.raises(RuntimeError, match="ended with exit code 3"):
        robot_rows(tmp_path / "bundle")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("data info STORE --to mcap --source x", "data info takes no --to; it is an option of data export"),
        ("data info STORE --source x", "data info takes no --source; it is an option of data merge, data import"),
        ("data compact STORE --out somewhere", "data compact takes no --out"),
        ("robot status --leader /topic --store s --success", "robot status takes no --leader"),
        ("robot record f --live --store s --instruction i", "robot record takes no --live"),
        ("robot record f --success --store s --instruction i", "robot record takes no --success"),
        ("robot teleop f --json", "robot teleop takes no --json"),
        ("world-model fit imagined_reach --keys aab", "world-model fit takes no --keys"),
        ("world-model fit imagined_reach --held 3", "world-model fit takes no --held"),
        ("world-model fit imagined_reach --starts 9", "world-model fit takes no --starts"),
        ("world-model fit imagined_reach --episode 4", "world-model fit takes no --episode;"),
        ("world-model evaluate imagined_reach --port 0", "world-model evaluate takes no --port"),
        ("reward fit STORE --stores other", "reward fit takes no --stores; it is an option of reward evaluate"),
        ("reward fit STORE --sim quickstart --policy b", "reward fit takes no --sim"),
        ("reward fit STORE --explore --episodes 3", "reward fit takes no --explore"),
        ("reward evaluate FOLDER --out there", "reward evaluate takes no --out"),
        (
            "reward evaluate FOLDER --stores s --sim c --policy b --episodes 3 --explore --seed 0",
            "--sim, --policy, --episodes, --explore, --seed are of a simulator; with --stores leave them out",
        ),
        ("sims list robosuite", "sims list takes no robosuite"),
        ("bench store --device cpu", "bench store takes no --device; it is an option of bench train"),
    ],
)
def test_an_option_of_another_verb_is_refused(capsys: pytest.CaptureFixture[str], arguments: str, message: str):
    assert exit_code(*arguments.split()) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert message in captured.err
    assert captured.err.count("\n") == 1


@pytest.mark.parametrize("shell", ["bash", "zsh"])
def test_completion_knows_every_command(capsys: pytest.CaptureFixture[str], shell: str):
    with pytest.raises(SystemExit) as end:
        cli.main(["--tyro-print-completion", shell])
    assert not end.value.code
    printed = capsys.readouterr().out
    for command in cli.COMMANDS:
        for word in command.split():
            assert word in printed


def test_a_command_prints_its_result_as_text_or_as_one_object(capsys: pytest.CaptureFixture[str]):
    result = Result({"episodes": 2, "corrupt": ["a"]}, failed=True)
    show(result, as_json=False)
    assert capsys.readouterr().out == "episodes: 2\ncorrupt: ['a']\n"
    show(result, as_json=True)
    assert json.loads(capsys.readouterr().out) == result.value
    show(Result({}, "below", table=lambda: print("a table")), as_json=False)
    assert capsys.readouterr().out == "a table\nbelow\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("robot check FOLDER", "{} is a folder; name a YAML file in it: arm.yaml"),
        ("train FOLDER", "{} is a folder; name a YAML file in it: arm.yaml"),
        ("sweep quickstart FOLDER", "{} is a folder; name a YAML file in it: arm.yaml"),
        ("learn FOLDER --config FOLDER", "{} is a folder; name a YAML file in it: arm.yaml"),
        ("train FOLDER/arm.yaml", "arm.yaml: 'extends': {}/calibration is a folder; name a YAML file"),
        ("robot check FOLDER/robot.yaml", "{}/calibration: cannot be read as YAML: is a directory"),
        ("robot check FOLDER/none.yaml", "{}/none.yaml: cannot be read as YAML: no such file or directory"),
        ("serve FOLDER --token-file FOLDER", "--token-file {} is a folder; name a file"),
        ("correct FOLDER --certificate FOLDER --key FOLDER", "--certificate {} is a folder; name a file"),
        ("data info FOLDER/arm.yaml", "{}/arm.yaml is a file; an episode store is a folder"),
    ],
)
def test_a_folder_in_place_of_a_file_is_one_message_that_says_what_to_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: str, message: str
):
    (tmp_path / "calibration").mkdir()
    (tmp_path / "arm.yaml").write_text("extends: calibration\n")
    (tmp_path / "robot.yaml").write_text(
        (ROOT / "configs/robots/fake_arm.yaml").read_text().replace("\nros:\n", "\nros:\n  calibration: calibration\n")
    )
    assert exit_code(*arguments.replace("FOLDER", str(tmp_path)).split()) == 2
    said = capsys.readouterr().err
    assert message.format(tmp_path) in said
    assert said.count("\n") == 1


@pytest.mark.parametrize(
    ("error", "expected", "message"),
    [
        (UserError("runs/a: no such thing"), 2, "vla-rl: runs/a: no such thing\n"),
        (FileNotFoundError(2, "No such file or directory", "runs/b"), 2, "vla-rl: runs/b: no such file or directory\n"),
        (OSError(30, "Read-only file system", "/mnt/run"), 2, "vla-rl: /mnt/run: read-only file system\n"),
        (FileExistsError(17, "File exists", "runs/c"), 2, "vla-rl: runs/c: file exists\n"),
        (FileNotFoundError("no file of round 3"), 2, "vla-rl: no file of round 3\n"),
        (KeyboardInterrupt(), 130, "vla-rl: interrupted\n"),
        (Terminated(signal.SIGINT), 130, "vla-rl: interrupted\n"),
        (Terminated(signal.SIGTERM), 143, "vla-rl: terminated\n"),
        (NotFinite("kl", math.inf, where="minibatch 3"), 1, "kl is inf (minibatch 3); allowed are finite numbers"),
        (StoreFull("runs/store: no space left"), 1, "vla-rl: runs/store: no space left\n"),
        (OSError(errno.ENOSPC, "No space left on device", "x.mp4"), 1, "vla-rl: disk full ([Errno 28] No space left"),
        (
            SafetensorError("I/O error: (os error 28)"),
            1,
            "what was written completely is intact. Free some",
        ),
    ],
)
def test_exit_codes(monkeypatch, capsys: pytest.CaptureFixture[str], error: BaseException, expected: int, message: str):
    def fail(_: object) -> None:
        raise error

    monkeypatch.setattr(cli.Report, "run", fail)
    assert exit_code("report", "x") == expected
    (line,) = capsys.readouterr().err.splitlines(keepends=True)
    assert message in line


def test_a_closed_pipe_is_one_message_and_code_2():
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-u", "-m", "vla_rl.cli", "sims", "list", "--json"]
    done = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, text=True)
    os.close(write)
    assert (done.returncode, done.stderr) == (2, "vla-rl: nobody reads the output any longer\n")


def test_an_unexpected_exception_is_code_1_and_its_traceback_is_in_a_file(tmp_path: Path):
    run = make_run(tmp_path / "run", videos=False)
    lines = ('{"iteration": 0, "success": "high"}', '{"iteration": 1, "success": "low"}')  # what is never written
    (run / "metrics.jsonl").write_text("".join(f"{line}\n" for line in lines))
    done = vla_rl("report", run, TMPDIR=str(tmp_path))
    assert done.returncode == 1
    message, where = done.stderr.splitlines()
    assert message.startswith("vla-rl: TypeError: unsupported operand type(s)")
    log = Path(where.removeprefix("The full traceback is in "))
    assert log.parent == tmp_path
    assert log.read_text().startswith("Traceback")


def test_interrupted_training_prints_how_to_resume(monkeypatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    def interrupt(_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli.Train, "run", interrupt)
    monkeypatch.chdir(tmp_path)
    assert exit_code("train", "quickstart") == 130
    assert capsys.readouterr().err == "vla-rl: interrupted\n"  # before there is anything to resume
    run = tmp_path / "runs" / "quick start"
    run.mkdir(parents=True)
    (run / "command.txt").write_text("vla-rl train ...\n")
    assert exit_code("train", "configs/quick start.yaml", "--seed", "3", "--algorithm.name=grpo") == 130
    assert capsys.readouterr().err == (
        "vla-rl: interrupted; resume with: vla-rl train 'configs/quick start.yaml' --seed 3 --algorithm.name=grpo "
        "--run-dir 'runs/quick start' --resume\n"
    )


def test_an_interrupt_of_a_real_process_is_code_130(tmp_path: Path):
    """A FIFO without a writer blocks the command until the interrupt."""
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
        _, message = process.communicate(timeout=30)
    assert process.returncode == 130
    assert message == "vla-rl: interrupted\n"


def _waiting_for(pid: int) -> str:
    """What the process is blocked on: opening a FIFO shows as this kernel function."""
    where = Path(f"/proc/{pid}/wchan").read_text()
    return "metrics.jsonl" if "fifo" in where or "wait_for_partner" in where else ""


@pytest.mark.parametrize(
    ("arguments", "overrides"),
    [
        ("train c.yaml --a.b 1 --resume --c=2", ("--a.b", "1", "--c=2")),
        ("train --a.b 1 c.yaml --run-dir d", ("--a.b", "1")),
        ("train c.yaml --a.b -0.5", ("--a.b", "-0.5")),
        ("collect c.yaml --episodes 3 --sim.num_envs 4 --out s", ("--sim.num_envs", "4")),
    ],
)
def test_settings_are_separated_from_options(arguments: str, overrides: tuple[str, ...]):
    command = cli.parse(arguments.split())
    assert isinstance(command, cli.Train | cli.Collect)
    assert command.overrides == overrides
    assert command.config == Path("c.yaml")


@pytest.mark.parametrize("command", ["learn folder", "correct bundle", "reward fit store"])
def test_a_configuration_that_is_an_option_is_no_setting(command: str):
    parsed = cli.parse([*command.split(), "--config", "mine.yaml", "--seed=3" if command[0] == "l" else "--a.b=3"])
    assert isinstance(parsed, cli.Learn | cli.Correct | FitClassifier)
    assert parsed.config == Path("mine.yaml")
    assert len(parsed.overrides) == 1


def test_the_run_folder_is_named_after_the_configuration():
    command = cli.parse(["train", "configs/pick.yaml"])
    assert isinstance(command, cli.Train)
    assert command.run_folder() == Path("runs/pick")


def test_a_journey_lacks_what_is_not_ok():
    from vla_rl.doctor.journeys import check_journeys

    names = ("torch", "video", "disk", "memory", "mujoco", "render-egl", "ros2")
    checks = [{"name": name, "status": "ok", "detail": "", "fix": ""} for name in names]
    checks[-1]["status"] = "failed"
    found = {check["name"]: (check["status"], check["detail"]) for check in check_journeys(checks)}
    assert found["train in a simulator"] == ("ok", "has all that it needs")
    assert found["from bundle to arm"] == ("missing", "lacks onnx, ros2")


def test_doctor_lists_the_packages_when_no_renderer_works(monkeypatch, capsys: pytest.CaptureFixture[str]):
    from vla_rl.doctor import checks as doctor

    monkeypatch.setattr(doctor, "RENDER", "raise ImportError('no OpenGL here')")
    checks = doctor.check_renderers()
    assert [check["status"] for check in checks] == ["failed", "failed"]
    doctor.print_checks(checks)
    out = re.sub(r"\s+", " ", capsys.readouterr().out)
    assert "ImportError: no OpenGL here" in out
    assert "sudo apt-get install libosmesa6" in out


def test_a_crash_of_the_renderer_is_a_failed_check(monkeypatch):
    from vla_rl.doctor import checks as doctor

    monkeypatch.setattr(doctor, "RENDER", "import os; os.kill(os.getpid(), 11)")
    assert all("killed by signal 11" in check["detail"] for check in doctor.check_renderers())
