"""The exported graph gives the bundle's actions, and a graph that does not belong to the bundle is refused."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from policies.bundle import MANIFEST, BundleError, load_bundle, save_bundle
from policies.residual.best_of import best_of
from policies.residual.ensemble import EnsembleConfig
from real_robot.serving.backends import ChunkBackend, PolicyBackend
from real_robot.serving.onnx.backend import OnnxBackend
from real_robot.serving.onnx.export import TOLERANCE, export_onnx
from real_robot.serving.onnx.graph import GRAPH, SPEC
from real_robot.serving.protocol import ActRequest
from tests.real_robot.small_policies import other_robot, small_policy

ROBOT = other_robot(cameras=("agent", "wrist"))


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    policy = small_policy(robot=ROBOT, action_patch=2, max_prefix=3)
    for parameter in policy.parameters():  # layers that start at zero would hide a wrong graph
        parameter.data += 0.1 * torch.randn_like(parameter)
    policy.normalizer.fit(torch.randn(50, 5) * 3 + 1, torch.rand(50, 4) * 0.5)
    path = tmp_path_factory.mktemp("export") / "bundle"
    save_bundle(policy, path)
    export_onnx(path)
    return path


@pytest.fixture
def copy(bundle: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(bundle, tmp_path / "bundle"))


def actions_of(backend: ChunkBackend, asked: ActRequest) -> np.ndarray:
    return backend.act(asked, backend.initial_state())[0]


def make_request(seed: int, method: str, delay: int, instruction: str) -> ActRequest:
    rng = np.random.default_rng(seed)
    return ActRequest(
        id=seed,
        images={camera: rng.integers(0, 256, (48, 64, 3), dtype=np.uint8) for camera in ROBOT.cameras},
        state=rng.normal(size=5).astype(np.float32),
        instruction=instruction,
        method=method,
        leftover=rng.uniform(-1, 1, (delay + 1, 4)).astype(np.float32),
        delay=delay,
        execute_steps=4,
    )


def test_both_runtimes_give_the_same_chunks(bundle: Path) -> None:
    eager = PolicyBackend(load_bundle(bundle), fingerprint=json.loads((bundle / SPEC).read_text())["bundle"], seed=3)
    onnx = OnnxBackend(bundle, seed=3)
    assert onnx.hello == replace(eager.hello, methods=onnx.hello.methods)
    moved = 0.0
    for seed, (method, delay, instruction) in enumerate(
        [("replace", 0, ""), ("prefix", 0, "reach"), ("prefix", 2, "pick up the red block"), ("prefix", 3, "a b c"),
         ("replace", 3, "open the drawer"), ("ensemble", 1, "reach")]
    ):  # fmt: skip
        asked = make_request(seed, method, delay, instruction)
        ours, theirs = actions_of(eager, asked), actions_of(onnx, asked)
        np.testing.assert_allclose(theirs, ours, rtol=0, atol=TOLERANCE)
        if method == "prefix":
            np.testing.assert_array_equal(theirs[:delay], asked.leftover[:delay])
        moved = max(moved, float(np.ptp(ours, axis=0).max()))
    assert moved > 0.05  # the chunks are not constant


def test_unsupported_methods_and_wrong_states_are_refused(bundle: Path) -> None:
    onnx = OnnxBackend(bundle)
    with pytest.raises(ValueError, match=r"does not offer 'guided'; use one of prefix, replace, ensemble"):
        actions_of(onnx, make_request(0, "guided", 2, "reach"))
    with pytest.raises(ValueError, match=r"a state of 3 was sent, this policy has 5"):
        actions_of(onnx, replace(make_request(0, "prefix", 2, "reach"), state=np.zeros(3, np.float32)))


def test_a_bundle_without_a_graph_gives_the_export_command(copy: Path) -> None:
    (copy / SPEC).unlink()
    with pytest.raises(BundleError, match=rf"has no {SPEC}. Run: vla-rl export .* --to onnx"):
        OnnxBackend(copy)


def test_a_graph_of_other_weights_is_refused(copy: Path) -> None:
    policy = load_bundle(copy)
    policy.normalizer.action_center += 1.0
    save_bundle(policy, copy)
    with pytest.raises(BundleError, match="was made from weights"):
        OnnxBackend(copy)


def test_a_graph_of_other_settings_is_refused(copy: Path) -> None:
    """As of fewer denoising steps, which may be written into bundle.json."""
    manifest = json.loads((copy / MANIFEST).read_text())
    manifest["config"]["act"]["steps"] = 1
    (copy / MANIFEST).write_text(json.dumps(manifest))
    with pytest.raises(BundleError, match=r"made from other settings than those in bundle.json. Run: vla-rl export"):
        OnnxBackend(copy)


def test_the_best_of_several_samples_is_exported(tmp_path: Path) -> None:
    """Its noise is that of all samples."""
    policy = best_of(small_policy(robot=ROBOT), samples=3, critic=EnsembleConfig(hidden=(16,), members=2))
    for parameter in policy.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    save_bundle(policy, tmp_path / "bundle")
    export_onnx(tmp_path / "bundle")
    eager, onnx = PolicyBackend(policy, fingerprint="any", seed=3), OnnxBackend(tmp_path / "bundle", seed=3)
    for seed in range(4):
        asked = make_request(seed, "replace", 0, "reach")
        np.testing.assert_allclose(actions_of(onnx, asked), actions_of(eager, asked), rtol=0, atol=TOLERANCE)


def test_a_damaged_graph_is_refused(copy: Path) -> None:
    graph = bytearray((copy / GRAPH).read_bytes())
    graph[len(graph) // 2] ^= 1
    (copy / GRAPH).write_bytes(graph)
    with pytest.raises(BundleError, match=f"{GRAPH} is truncated or was changed"):
        OnnxBackend(copy)


def test_a_spec_of_another_format_is_refused(copy: Path) -> None:
    spec = json.loads((copy / SPEC).read_text())
    (copy / SPEC).write_text(json.dumps(spec | {"format": 99}))
    with pytest.raises(BundleError, match="has format 99"):
        OnnxBackend(copy)
    (copy / SPEC).write_text("{}")
    with pytest.raises(BundleError, match="Field required"):
        OnnxBackend(copy)


def test_a_folder_without_a_bundle_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BundleError, match="is not a bundle"):
        export_onnx(tmp_path)
    assert not list(tmp_path.iterdir())
