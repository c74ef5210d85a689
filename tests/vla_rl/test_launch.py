"""The recipes in launch/: files that parse, whose commands and settings exist."""

import os
import re
import shlex
import subprocess
from importlib.util import find_spec
from pathlib import Path

import pytest
import yaml

from vla_rl.cli.arguments import load_experiment
from vla_rl.cli.main import parse
from vla_rl.cli.training import Train
from vla_rl.config.experiment import Experiment

LAUNCH = Path(__file__).parents[2] / "launch"

# Fields of the manifest and their types: KubeRay's API reference for ray.io/v1, and Kubernetes' for the pods.
Fields = dict[str, object]
STRINGS: Fields = {"*": str}
POD: Fields = {
    "spec": {
        "terminationGracePeriodSeconds": int,
        "containers": [{
            "name": str,
            "image": str,
            "env": [{"name": str, "value": str}],
            "resources": {"requests": STRINGS, "limits": STRINGS},
            "volumeMounts": [{"name": str, "mountPath": str}],
        }],
        "volumes": [{"name": str, "persistentVolumeClaim": {"claimName": str}}],
    }
}  # fmt: skip
HEAD: Fields = {"serviceType": str, "enableIngress": bool, "rayStartParams": STRINGS, "template": POD}
WORKERS: Fields = {
    "groupName": str, "replicas": int, "minReplicas": int, "maxReplicas": int, "numOfHosts": int,
    "idleTimeoutSeconds": int, "rayStartParams": STRINGS, "template": POD,
}  # fmt: skip
CLUSTER: Fields = {
    "rayVersion": str, "enableInTreeAutoscaling": bool, "suspend": bool, "headGroupSpec": HEAD,
    "workerGroupSpecs": [WORKERS],
}  # fmt: skip
JOB: Fields = {
    "entrypoint": str, "backoffLimit": int, "activeDeadlineSeconds": int, "shutdownAfterJobFinishes": bool,
    "ttlSecondsAfterFinished": int, "submissionMode": str, "entrypointNumCpus": float, "runtimeEnvYAML": str,
    "suspend": bool, "jobId": str, "rayClusterSpec": CLUSTER,
}  # fmt: skip


def unknown(node: object, fields: object, where: str) -> list[str]:
    """Paths of ``node`` that ``fields`` does not have, or with another type."""
    if isinstance(fields, dict):
        if not isinstance(node, dict):
            return [where]
        wanted = {name: fields.get(name, fields.get("*")) for name in node}
        return [path for name, value in node.items() for path in unknown(value, wanted[name], f"{where}.{name}")]
    if isinstance(fields, list):
        return [path for one in node for path in unknown(one, fields[0], where)] if isinstance(node, list) else [where]
    return [] if isinstance(fields, type) and type(node) is fields else [where]


def train_command(text: str) -> Train:
    """The ``vla-rl train`` of a shell text, without what the shell fills in."""
    words = shlex.split(re.sub(r"\$\(.*?\)|\"?\$\{?[\w@\[\]]+\}?\"?", "", text.replace("\\\n", " ")))
    command = parse(words[words.index("train") :])
    assert isinstance(command, Train)
    return command


def kuberay() -> tuple[dict, Experiment]:
    job = yaml.safe_load((LAUNCH / "kuberay.yaml").read_text())
    entrypoint = job["spec"]["entrypoint"]
    script = shlex.split(re.sub(r"\$\(.*?\)", "", entrypoint).replace("$run", "/runs/quickstart"))[-1]
    command = train_command(script.partition(";")[2])
    return job, load_experiment(command.config, command.settings())


def test_the_kubernetes_job_has_only_fields_of_the_schema() -> None:
    job, _ = kuberay()
    spec = job["spec"]
    assert unknown(spec, JOB, "spec") == []
    spec["rayClusterSpec"]["headGroupSpec"]["rayStartParams"]["num-cpus"] = 4  # KubeRay takes text alone
    spec["rayClusterSpec"]["workerGroupSpecs"][0]["replica"] = 2
    assert unknown(spec, JOB, "spec") == [
        "spec.rayClusterSpec.headGroupSpec.rayStartParams.num-cpus", "spec.rayClusterSpec.workerGroupSpecs.replica"
    ]  # fmt: skip


def test_the_kubernetes_job_asks_for_what_its_collectors_need() -> None:
    job, experiment = kuberay()
    assert (job["apiVersion"], job["kind"]) == ("ray.io/v1", "RayJob")
    assert experiment.cluster is not None and experiment.cluster.placement == "spread"
    spec = job["spec"]["rayClusterSpec"]
    groups = [spec["headGroupSpec"], *spec["workerGroupSpecs"]]
    cpus = 0.0
    for group in groups:
        pod = group["template"]["spec"]
        (container,) = pod["containers"]
        assert container["resources"]["requests"] == container["resources"]["limits"]
        assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}
        assert pod["terminationGracePeriodSeconds"] >= 30
        cpus += group.get("replicas", 1) * float(container["resources"]["requests"]["cpu"])
    collectors = experiment.cluster.collectors or experiment.algorithm.rollout_shards
    assert cpus >= collectors * experiment.cluster.cpus + 1
    assert len({group["template"]["spec"]["containers"][0]["image"] for group in groups}) == 1
    (mounted,) = groups[0]["template"]["spec"]["containers"][0]["volumeMounts"]
    assert mounted["mountPath"] == "/runs"


@pytest.mark.parametrize("name", ["slurm.sbatch"])
def test_the_batch_script_is_bash_and_its_command_exists(name: str) -> None:
    script = LAUNCH / name
    subprocess.run(["bash", "-n", str(script)], check=True)
    (example,) = re.findall(r"#\s+sbatch (launch/.*)", script.read_text())
    words = shlex.split(example)
    command = parse(["train", words[1], "--run-dir", words[2], "--cluster", "127.0.0.1:6379", *words[3:]])
    assert isinstance(command, Train)
    experiment = load_experiment(command.config, command.settings())
    assert experiment.cluster is not None and experiment.cluster.address == "127.0.0.1:6379"
    assert experiment.algorithm.rollout_shards == 8


def test_every_srun_of_the_batch_script_has_the_cores_of_its_node(tmp_path: Path) -> None:
    """Slurm since 22.05 gives each step one core unless it is told; here ``srun`` writes down what it would give."""
    told = tmp_path / "told"
    commands = {
        "srun": f'echo "${{SRUN_CPUS_PER_TASK:-1}} $*" >> {told}\n[[ $* == *hostname* ]] && echo 10.0.0.1 || true',
        "scontrol": "echo node-1",
        "openssl": "echo token",
        "sleep": "true",
        "vla-rl": "true",
    }
    for name, body in commands.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{body}\n")
        (tmp_path / name).chmod(0o755)
    job = {"SLURM_JOB_NODELIST": "node-[1-2]", "SLURM_JOB_NUM_NODES": "2", "SLURM_CPUS_PER_TASK": "16"}
    environment = {**os.environ, **job, "SLURM_JOB_ID": "7", "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    script = ["bash", str(LAUNCH / "slurm.sbatch"), "quickstart", str(tmp_path / "run")]
    subprocess.run(script, env=environment, check=True, timeout=60, capture_output=True)  # until all steps end
    started = [line for line in told.read_text().splitlines() if "ray start" in line]
    assert len(started) == 2
    assert all(line.startswith("16 ") and "--num-cpus=16" in line for line in started)


@pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed: pip install 'vla-rl[ray]'")
def test_ray_s_cluster_launcher_takes_the_file_and_its_commands_exist() -> None:
    """As ``ray up`` reads it, with Ray's own schema."""
    import click
    from jsonschema import ValidationError
    from ray.autoscaler._private.util import prepare_config, validate_config
    from ray.scripts.scripts import cli

    text = (LAUNCH / "ray_cluster.yaml").read_text()
    config = prepare_config(yaml.safe_load(text))
    validate_config(config)
    (node,) = config["available_node_types"].values()
    assert (node["min_workers"], node["max_workers"]) == (2, 2)
    with pytest.raises(ValidationError, match="setup_command"):
        validate_config(config | {"setup_command": []})
    shown = re.findall(r"#   ray (.*)", text)
    started = [*config["head_start_ray_commands"], *config["worker_start_ray_commands"]]
    assert len(shown) == 4
    for line in [*shown, *(one.partition("ray ")[2] for one in started)]:
        name, *words = shlex.split(line, comments=True)
        command = cli.commands[name]
        with click.Context(command, info_name=name) as context:
            command.parse_args(context, words)  # click.UsageError for what there is not
    (job,) = (shlex.split(line)[2] for line in shown if line.startswith("exec"))
    command = train_command(job)
    experiment = load_experiment(command.config, command.settings())
    assert experiment.cluster is not None and experiment.cluster.placement == "spread"
    assert command.run_dir is not None and command.run_dir.is_relative_to("/shared")
