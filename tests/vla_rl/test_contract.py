"""The interface to other programs: commands, exit codes and JSON keys; bad input is a one-line message."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from websockets.sync.client import connect

from policies.bundle import load_bundle, save_bundle
from policies.compact_encoder import CompactEncoderConfig
from policies.denoising.action_expert import ActionExpertConfig
from policies.denoising.chunk_policy import DenoisedChunks
from policies.denoising.policy import DenoisingPolicyConfig
from policies.gaussian import GaussianPolicy, GaussianPolicyConfig
from policies.registry import build_policy
from policies.residual.policy import residual_on
from real_robot.serving.protocol import Hello, unpack
from sims.registry import splits
from sims.tabletop import TabletopConfig
from tests.vla_rl.command import answer, vla_rl
from vla_rl.bench.example import EXAMPLE_ROBOT
from vla_rl.bench.policy import learning
from vla_rl.bench.serving import latency_rows
from vla_rl.bench.store import STEPS, store_rows
from vla_rl.bench.world_model import world_model_rows
from vla_rl.config.controls import CONTROLS
from vla_rl.config.experiment import Experiment, FromBundle
from vla_rl.config.loader import load_config, save_config
from vla_rl.config.packaged import find_config
from vla_rl.doctor.check import Check
from vla_rl.doctor.checks import check_log_probs

TINY = Path(__file__).parents[1] / "data" / "tiny.yaml"
RATE = {"success", "interval", "episodes"}


def printed_by_process(*arguments: str) -> str:
    done = subprocess.run([sys.executable, "-m", "vla_rl.cli", *arguments], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("contract") / "run"
    settings = ["--algorithm.iterations", "2", "--evaluation.control_episodes", "2"]
    done = vla_rl("train", TINY, "--run-dir", folder, *settings)
    assert done.returncode == 0, done.stderr
    return folder


def test_eval(run_dir: Path) -> None:
    for path in (run_dir, run_dir / "bundle", run_dir / "imitation" / "bundle"):
        result = answer("eval", path, "--episodes", 4, "--seed", 1, "--split", "ood_phrasing", "--json")
        assert {*RATE, "seed", "split", "per_task", "stochastic", "fingerprint"} <= set(result)
        assert (result["episodes"], result["seed"], result["split"]) == (4, 1, "ood_phrasing")
        assert set(result["per_task"]) == {"reach", "push"}
        assert all(set(row) >= RATE for row in result["per_task"].values())
        assert {"success", "interval"} <= set(result["stochastic"])
        assert result["fingerprint"]["mujoco"]


def test_eval_of_a_bundle_from_anywhere_in_a_named_simulator(run_dir: Path, tmp_path: Path) -> None:
    bundle = tmp_path / "elsewhere"
    shutil.copytree(run_dir / "bundle", bundle)
    refused = vla_rl("eval", bundle)
    assert refused.returncode == 2
    assert "give --sim CONFIG" in refused.stderr
    result = answer("eval", bundle, "--sim", TINY, "--episodes", 4, "--seed", 1, "--json")
    own = printed_by_process("eval", str(run_dir), "--episodes", "4", "--seed", "1", "--json")
    assert json.loads(own) == result
    other = tmp_path / "other.yaml"
    other.write_text("sim: {name: tabletop, cameras: [agent]}")
    wrong = vla_rl("eval", bundle, "--sim", other, "--episodes", 4)
    assert wrong.returncode == 2
    assert "cameras" in wrong.stderr


def test_imitation_from_a_store_needs_no_simulator(run_dir: Path, tmp_path: Path) -> None:
    """Its bundle is the one that the run with this simulator cloned."""
    store = tmp_path / "store"
    shutil.copytree(run_dir / "demonstrations", store)
    config = tmp_path / "config.yaml"
    config.write_text(
        TINY.read_text().replace("name: tabletop", "name: metaworld").replace("[reach, push]", "[reach-v3]")
    )
    done = vla_rl("imitate", config, "--out", tmp_path / "out", "--store", store, "--sim.max_steps", 24)
    assert done.returncode == 0, done.stderr
    cloned = {
        bundle: next((bundle / "bundle").glob("*.safetensors")).name
        for bundle in (tmp_path / "out", run_dir / "imitation")
    }
    assert len(set(cloned.values())) == 1
    missing = vla_rl("imitate", TINY, "--out", tmp_path / "none")
    assert missing.returncode == 2
    assert "give --store STORE" in missing.stderr


@pytest.mark.parametrize("part", ["", "imitation"])
def test_imitation_leaves_the_folder_of_a_run_as_it_is(run_dir: Path, tmp_path: Path, part: str) -> None:
    copy = shutil.copytree(run_dir, tmp_path / "run")
    before = {path: path.stat().st_mtime_ns for path in copy.rglob("*")}
    done = vla_rl(
        "imitate", TINY, "--start.bc.learning_rate", 0.01, "--store", run_dir / "demonstrations", "--out", copy / part
    )
    assert done.returncode == 2
    assert "choose a new or an empty folder" in done.stderr
    assert {path: path.stat().st_mtime_ns for path in copy.rglob("*")} == before


def test_runs(run_dir: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(run_dir, tmp_path / "run")
    result = json.loads((copy / "result.json").read_text())
    result["rl"]["success"] = 0.375
    (copy / "result.json").write_text(json.dumps(result))
    (found,) = answer("runs", tmp_path, "--json")["runs"]
    assert (found["path"], found["state"], found["iterations"]) == (str(copy), "finished", 2)
    assert found["success"] == 0.375
    assert found["bytes"] > 100_000
    assert found["age_s"] < 600


def test_result_of_a_run(run_dir: Path) -> None:
    result = json.loads((run_dir / "result.json").read_text())
    assert {"bc", "rl", "stochastic", "seed", "episodes", "wall_s", "command"} <= set(result)
    assert {"install", "collect", "bc", "rl", "eval"} <= set(result["wall_s"])
    stages = json.loads((run_dir / "stages.json").read_text())
    assert "evaluate_controls" in stages
    taken = sum(seconds or 0.0 for seconds in result["wall_s"].values())
    assert taken == pytest.approx(sum(stage["wall_s"] for stage in stages.values()), abs=0.05)
    for kind in ("bc", "rl", "stochastic"):
        assert set(result[kind]) >= RATE
        assert set(result[kind]["per_task"]) == {"reach", "push"}
    assert result["command"].startswith("vla-rl train ")
    assert set(result["controls"]) == set(CONTROLS)
    assert set(result["splits"]) == set(splits(TabletopConfig())) - {"train"}
    assert all(set(row) >= RATE for key in ("controls", "splits") for row in result[key].values())
    assert result["not_applicable"] == {}
    page = (run_dir / "report.html").read_text()
    assert "What the policy depends on" in page and "ood phrasing" in page


def test_a_control_that_does_not_apply_is_no_result(tmp_path: Path) -> None:
    run = tmp_path / "run"
    one_camera = ("--sim.cameras", "[agent]", "--algorithm.iterations", 2, "--evaluation.control_episodes", 2)
    assert vla_rl("train", TINY, *one_camera, "--run-dir", run).returncode == 0
    result = json.loads((run / "result.json").read_text())
    assert set(result["controls"]) == set(CONTROLS)
    assert result["controls"]["swapped_cameras"] is None
    assert result["not_applicable"] == {"swapped_cameras": "one camera"}
    assert "does not apply: one camera" in (run / "report.html").read_text()
    done = vla_rl("eval", run, "--control", "swapped_cameras", "--episodes", 2)
    assert (done.returncode, done.stderr.splitlines()[-1]) == (
        2,
        "vla-rl: --control swapped_cameras does not apply: one camera",
    )


def test_data(run_dir: Path, tmp_path: Path) -> None:
    store = tmp_path / "store"
    shutil.copytree(run_dir / "demonstrations", store)
    info = answer("data", "info", store, "--json")
    assert {"episodes", "steps", "bytes", "corrupt"} <= set(info)
    assert info["episodes"] == 4
    assert info["corrupt"] == []
    episode = next(store.glob("*.zarr.zip"))
    content = bytearray(episode.read_bytes())
    content[len(content) // 2] ^= 1
    episode.write_bytes(content)
    found = vla_rl("data", "verify", store, "--json")
    assert found.returncode == 1
    assert episode.name in str(json.loads(found.stdout)["corrupt"])


def test_doctor_checks_this_machine_and_audits_a_run(
    run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLA_RL_SIMS", str(tmp_path))  # no other simulator is found
    found = json.loads(printed_by_process("doctor", "--run", str(run_dir), "--json"))["checks"]
    checks = {check.pop("name"): check for check in found}
    assert len(checks) == len(found)
    assert {"python", "torch", "cuda", "mujoco", "render-egl", "render-osmesa", "video", "disk"} <= set(checks)
    assert {"ros2", "browser", "ray", "transformers", "memory"} <= set(checks)
    assert {"train in a simulator", "from bundle to arm"} <= set(checks)
    for name in ("torch", "mujoco", "video", "memory", "log-prob"):
        assert checks[name]["status"] == "ok", checks[name]
    found_by_audit = checks["log-prob"]["detail"]
    assert re.fullmatch(r"recomputed .* by at most \d\.\de[+-]\d\d nats", found_by_audit), found_by_audit
    for check in checks.values():
        assert set(check) == {"status", "detail", "fix"}
        assert check["status"] in ("ok", "missing")  # with a failed one the exit code is 1
        assert check["status"] == "ok" or check["fix"]


def test_doctor_refuses_what_is_not_a_run_with_a_policy(run_dir: Path, tmp_path: Path) -> None:
    begun = tmp_path / "begun"
    begun.mkdir()
    shutil.copy(run_dir / "config.yaml", begun)
    for path, message in ((tmp_path / "nope", "is not the folder of a run"), (begun, "has no bundle yet; go on with")):
        done = vla_rl("doctor", "--run", path, "--json")
        assert (done.returncode, done.stdout) == (2, "")
        assert message in done.stderr


def test_doctor_tells_a_fault_of_the_policy_from_other_errors(
    run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def checked(name: str, *changes: str) -> Check:
        run = tmp_path / name
        shutil.copytree(run_dir / "bundle", run / "bundle")
        save_config(load_config(Experiment, run_dir / "config.yaml", changes), run / "config.yaml")
        return check_log_probs(run)

    scored = DenoisedChunks.log_prob
    with monkeypatch.context() as planted:
        planted.setattr(DenoisedChunks, "log_prob", lambda *given: scored(*given) + 0.01)
        differing = checked("differing")
    assert (differing["status"], "do not continue training" in differing["fix"]) == ("failed", True)
    assert "recomputed log-prob differs" in differing["detail"]
    unlike = checked("unlike", "--sim.cameras=[agent]")
    assert (unlike["status"], "do not continue training" in unlike["fix"]) == ("failed", False)
    assert "cameras" in unlike["detail"]
    none = ("--algorithm.name=off_policy", "--start.name=bundle", f"--start.path={run_dir / 'bundle'}")
    settings = ("--start.residual={}", "--algorithm.warmup=16", "--algorithm.batch_size=4")
    config = load_config(Experiment, TINY, [*none, *settings, "--algorithm.demonstration_share=0"])
    assert isinstance(config.start, FromBundle)
    assert config.start.residual is not None
    residual = residual_on(load_bundle(run_dir / "bundle"), config.start.residual)
    save_bundle(residual, tmp_path / "off_policy" / "bundle")
    save_config(config, tmp_path / "off_policy" / "config.yaml")
    skipped = check_log_probs(tmp_path / "off_policy")
    assert skipped["status"] == "missing"
    assert "no importance ratios" in skipped["detail"]
    (tmp_path / "logs").mkdir()
    save_config(load_config(Experiment, find_config(Path("imagined_logs"))), tmp_path / "logs" / "config.yaml")
    from_logs = check_log_probs(tmp_path / "logs")
    assert from_logs["status"] == "missing"
    assert "without a simulator" in from_logs["detail"]


def test_bench() -> None:
    result = answer("bench", "policy", "--policy", "gaussian", "--json")
    assert {"bench", "machine", "rows"} <= set(result)
    assert all({"name", "value", "unit", "ratio", "against"} <= set(row) for row in result["rows"])


def test_bench_measures_a_store_in_the_present_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    rows = {row["name"]: row for row in store_rows(2, repeats=1)}
    frames = len(EXAMPLE_ROBOT.cameras) * (STEPS + 1) * 64 * 64 * 3
    assert frames < rows["bytes of an episode"]["value"] < 1.1 * frames
    for name in ("written", "checked", "windows"):
        assert rows[name]["value"] > 0
        assert rows[name]["ratio"] > 0
    assert rows["opened, 4 episodes"]["value"] > 0
    assert not list(tmp_path.iterdir())


def test_bench_leaves_out_a_frozen_encoder() -> None:
    encoder = CompactEncoderConfig(width=16, text_width=16, image_widths=(8,))
    config = DenoisingPolicyConfig(encoder=encoder, expert=ActionExpertConfig(depth=1))
    policy = build_policy(config, EXAMPLE_ROBOT)
    work = learning(policy, batch=2)
    encoding = set(policy.parameter_groups()["encoder"])
    for name, encoder_learns in (("PPO, frozen encoder", False), ("PPO forward + backward", True)):
        policy.zero_grad()
        work[name]()
        learned = {parameter for parameter in policy.parameters() if parameter.grad is not None}
        assert learned - encoding
        assert bool(learned & encoding) == encoder_learns


def test_bench_compares_the_world_model_with_the_simulator() -> None:
    rows = world_model_rows(batches=(1, 2), steps=(2,), seconds=0.05)
    assert [row["name"] for row in rows if "bfloat16" not in row["name"]] == [
        "simulated",
        *(f"imagined, float32, batch {batch}, steps {steps}" for batch, steps in ((1, 1), (2, 1), (2, 2))),
    ]
    assert all(row["value"] > 0 for row in rows)
    assert all(row["ratio"] == pytest.approx(row["value"] / rows[0]["value"]) for row in rows[1:])


def test_export_and_latency_rows(tmp_path: Path) -> None:
    bundle = tmp_path / "bundle"
    save_bundle(GaussianPolicy(GaussianPolicyConfig(action_horizon=4, hidden=(256, 256)), EXAMPLE_ROBOT), bundle)
    refused = vla_rl("serve", bundle, "--runtime", "onnx", "--port", 0)
    assert refused.returncode == 2
    assert f"vla-rl export {bundle} --to onnx" in refused.stderr
    done = vla_rl("export", bundle, "--to", "onnx")
    assert done.returncode == 0, done.stderr
    assert done.stderr.startswith("tracing the policy")
    assert Path(done.stdout.strip()).stat().st_size > 100_000
    # Not through the command line: torch.compile runs the C++ compiler for minutes on two cores.
    rows = {row["name"]: row for row in latency_rows(bundle, ("eager", "onnx"))}
    assert set(rows) == {"eager p50", "eager p99", "onnx p50", "onnx p99"}
    assert all({"name", "value", "unit", "ratio", "against"} <= set(row) for row in rows.values())
    assert all(row["value"] > 0 and row["unit"] == "ms" for row in rows.values())


def test_serve_answers_until_it_is_interrupted(run_dir: Path, tmp_path: Path) -> None:
    environment = {**os.environ, "XDG_CONFIG_HOME": str(tmp_path)}
    command = [sys.executable, "-m", "vla_rl.cli", "serve", str(run_dir / "bundle"), "--port", "0"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment) as server:
        assert server.stderr is not None
        message = server.stderr.readline() + server.stderr.readline()
        url = re.search(r"ws://127\.0\.0\.1:\d+", message)
        token = tmp_path / "vla-rl" / "token"
        assert url, message + server.stderr.read()
        assert str(token) in message
        assert token.stat().st_mode & 0o077 == 0
        with connect(url[0], additional_headers={"Authorization": f"Bearer {token.read_text().strip()}"}) as connection:
            hello = unpack(connection.recv(timeout=60))
        assert isinstance(hello, Hello)
        assert hello.action_dim == 7
        server.send_signal(signal.SIGINT)
        assert server.wait(30) == 130


@pytest.mark.skipif(find_spec("rclpy") is not None, reason="this Python has ROS; the wire tests drive these commands")
def test_without_ros_the_robot_commands_say_what_to_install(run_dir: Path) -> None:
    for arguments in (("deploy", run_dir / "bundle", "--robot", "configs/robots/fake_arm.yaml"), ("fake-arm",)):
        done = vla_rl(*arguments)
        assert done.returncode == 2
        assert done.stderr.startswith("vla-rl: this Python has no rclpy. On a ROS 2 machine: source ")
        assert len(done.stderr.splitlines()) == 1


def test_sims_list() -> None:
    found = {row["name"]: row["status"] for row in answer("sims", "list", "--json")["simulators"]}
    assert {"robosuite", "metaworld", "maniskill", "libero"} <= set(found)
    assert set(found.values()) <= {"ok", "missing", "outdated"}


def test_collect_adds_to_a_store(tmp_path: Path) -> None:
    for total in (2, 4):
        assert vla_rl("collect", TINY, "--episodes", 2, "--out", tmp_path / "store").returncode == 0
        assert answer("data", "info", tmp_path / "store", "--json")["episodes"] == total
    other = ("--sim.image_size", "[48, 40]")
    done = vla_rl("collect", TINY, "--episodes", 2, "--out", tmp_path / "store", *other)
    assert done.returncode == 2
    assert "48x40" in done.stderr
    assert "nothing was recorded; give another --out" in done.stderr
    assert answer("data", "info", tmp_path / "store", "--json")["episodes"] == 4


def test_bad_input_is_one_line_and_exit_code_2(run_dir: Path, tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    broken = tmp_path / "bundle"
    shutil.copytree(run_dir / "bundle", broken)
    weights = next(broken.glob("*.safetensors"))
    weights.write_bytes(weights.read_bytes()[:-100])
    torn = tmp_path / "torn"
    shutil.copytree(run_dir / "demonstrations", torn)
    episode = next(torn.glob("*.zarr.zip"))
    episode.write_bytes(episode.read_bytes()[:-1000])
    new = tmp_path / "new"
    cases = {
        "did you mean 'chunks'": ("train", TINY, "--algorithm.chunk", 3, "--run-dir", new),
        "no such file": ("train", tmp_path / "missing.yaml", "--run-dir", new),
        "must be": ("train", TINY, "--algorithm.chunks", "many", "--run-dir", new),
        "multiple of micro_batch": ("train", TINY, "--algorithm.update.micro_batch", 3, "--run-dir", new),
        "neither a run folder nor a bundle": ("eval", empty),
        "no such episode store": ("data", "info", tmp_path / "nothing"),
        "there are: ": ("bench", "quickness"),
        "bench robot needs BUNDLE": ("bench", "robot"),
        f"bench sim takes no {run_dir / 'bundle'}": ("bench", "sim", run_dir / "bundle"),
        "is not a bundle": ("serve", empty),
        "missing: no such file": ("serve", run_dir / "bundle", "--token-file", tmp_path / "missing"),
        "without TLS": ("serve", run_dir / "bundle", "--host", "0.0.0.0", "--token-file", TINY),
        "it has no bundle.json": ("export", empty, "--to", "onnx"),
        "cameras": (
            *("train", TINY, "--run-dir", tmp_path / "cameras", "--start.name", "bundle"),
            *("--start.path", run_dir / "bundle", "--sim.cameras", "[agent]"),
        ),
        weights.name: (
            *("train", TINY, "--run-dir", tmp_path / "truncated"),
            *("--start.name", "bundle", "--start.path", broken),
        ),
        episode.name: ("train", TINY, "--run-dir", tmp_path / "corrupt", "--start.store", torn),
        "no group with success": (
            *("train", TINY, "--run-dir", tmp_path / "grpo", "--start.name", "bundle"),
            *("--start.path", run_dir / "bundle", "--algorithm.name", "grpo", "--algorithm.group_size", 2),
            *("--algorithm.groups", 2, "--algorithm.max_rounds", 1),
        ),
    }
    for expected, arguments in cases.items():
        done = vla_rl(*arguments)
        assert done.returncode == 2, (arguments, done.stderr)
        assert expected in done.stderr.strip().splitlines()[-1], (arguments, done.stderr)
        assert "Traceback" not in done.stderr
    assert not new.exists()
