"""Bundles: bit-exact round trips, every corruption refused, and a kill in mid-save survived."""

import dataclasses
import json
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from policies.bundle import BundleError, Provenance, copy_bundle, load_bundle, read_bundle_info, save_bundle
from policies.compact_encoder import CompactEncoderConfig
from policies.denoising.action_expert import ActionExpertConfig
from policies.denoising.kernels import DDIMConfig, DDPMConfig, FlowNoiseConfig
from policies.denoising.objectives import DiffusionConfig
from policies.denoising.policy import DenoisingPolicy, DenoisingPolicyConfig
from policies.policy import RobotSpec
from sims.vector_env import Observation, encode_instructions
from tests.policies.encoding import encode

ROBOT = RobotSpec(action_dim=3, state_dim=5, cameras=("front", "wrist"), image_size=(32, 32), control_hz=20.0)
SMALL = {
    "encoder": CompactEncoderConfig(image_widths=(16,), width=32, text_width=16),
    "expert": ActionExpertConfig(time_width=16, depth=1),
}
CONFIGS = {
    "flow_sde": DenoisingPolicyConfig(**SMALL),
    "noise_head": DenoisingPolicyConfig(**SMALL, explore=FlowNoiseConfig()),
    "frozen_copy": DenoisingPolicyConfig(
        **SMALL,
        objective=DiffusionConfig(levels=20),
        act=DDIMConfig(),
        explore=DDPMConfig(steps=10, train_last=4),
    ),
}


def build(config=CONFIGS["flow_sde"]):
    torch.manual_seed(0)
    policy = DenoisingPolicy(config, ROBOT)
    policy.normalizer.fit(torch.randn(50, 5), torch.rand(50, 3))
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter += 0.05 * torch.randn_like(parameter)
    return policy


def observe():
    generator = torch.Generator().manual_seed(0)
    return Observation(
        images=torch.randint(0, 256, (3, 2, 32, 32, 3), generator=generator, dtype=torch.uint8),
        state=torch.randn(3, 5, generator=generator),
        instruction=encode_instructions(["pick", "push the red block", ""]),
    )


def test_a_bundle_that_is_nearby_is_named(tmp_path):
    run = tmp_path / "run"
    cloned = save_bundle(build(), run / "imitation" / "bundle", provenance=Provenance())
    for given, named in (
        (run / "bundle", run / "imitation" / "bundle"),
        (run / "imitation", run / "imitation" / "bundle"),
        (run / "imitation" / "bundle" / "bundle.json", run / "imitation" / "bundle"),
    ):
        with pytest.raises(BundleError, match=rf"name {re.escape(str(named))}$"):
            read_bundle_info(given)
    assert read_bundle_info(run / "imitation" / "bundle") == cloned


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_round_trip_is_bit_exact(tmp_path, config):
    policy = build(config)
    given = Provenance(git_revision="abc", parent="0" * 64, metrics={"success": 0.5})
    saved = save_bundle(policy, tmp_path / "a" / "bundle", provenance=given)
    loaded = load_bundle(tmp_path / "a" / "bundle", robot=ROBOT)
    assert loaded.config == policy.config
    assert loaded.spec.robot == ROBOT
    assert not loaded.training
    assert all(
        torch.equal(a, b) for a, b in zip(policy.state_dict().values(), loaded.state_dict().values(), strict=True)
    )
    samples = [p.sample(encode(p, observe()), torch.Generator().manual_seed(1)) for p in (policy, loaded)]
    assert torch.equal(samples[0].action, samples[1].action)
    assert torch.equal(samples[0].log_prob, samples[1].log_prob)
    info = read_bundle_info(tmp_path / "a" / "bundle")
    assert info == saved
    assert info.provenance.metrics == {"success": 0.5}
    assert info.provenance.versions["torch"] == torch.__version__


def test_saving_again_replaces_the_bundle(tmp_path):
    first, second = build(), build(CONFIGS["noise_head"])
    save_bundle(first, tmp_path)
    info = save_bundle(second, tmp_path)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["bundle.json", info.tensors]
    assert load_bundle(tmp_path).config == second.config


def test_settings_that_leave_the_weights_as_they_are_may_be_changed_in_the_manifest(tmp_path):
    """docs/pretrained.md says so."""
    save_bundle(build(), tmp_path)
    manifest = json.loads((tmp_path / "bundle.json").read_text())
    manifest["config"]["act"]["steps"] = 2
    (tmp_path / "bundle.json").write_text(json.dumps(manifest))
    assert load_bundle(tmp_path).act_kernel.config.steps == 2
    manifest["config"]["act"]["step"] = 2
    (tmp_path / "bundle.json").write_text(json.dumps(manifest))
    with pytest.raises(BundleError, match="step"):
        load_bundle(tmp_path)


@pytest.mark.parametrize("copied", [False, True])
def test_a_bundle_that_is_replaced_between_its_two_files(tmp_path, monkeypatch, copied):
    """A validation ships a new best while something reads the last one: what is read is the new one."""
    save_bundle(build(), tmp_path / "bundle")
    read = Path.read_bytes

    def replaced_first(path: Path) -> bytes:
        monkeypatch.undo()
        save_bundle(build(CONFIGS["noise_head"]), tmp_path / "bundle")
        return read(path)

    monkeypatch.setattr(Path, "read_bytes", replaced_first)
    if copied:
        copy_bundle(tmp_path / "bundle", tmp_path / "copy")
    policy = load_bundle(tmp_path / ("copy" if copied else "bundle"))
    assert policy.config == CONFIGS["noise_head"]


def test_saving_leaves_files_that_are_not_its_own(tmp_path):
    foreign = ("policy-model.safetensors", ".download.partial", "policy-0123456789abcdef.safetensors")
    old = "policy-0123456789ab.safetensors"
    for name in (*foreign, old, f".{old}.7.partial", ".bundle.json.7.partial"):
        (tmp_path / name).write_bytes(b"")
    info = save_bundle(build(), tmp_path)
    assert {file.name for file in tmp_path.iterdir()} == {"bundle.json", info.tensors, *foreign}


def edit(path, **changes):
    manifest = json.loads((path / "bundle.json").read_text())
    manifest.update(changes)
    (path / "bundle.json").write_text(json.dumps(manifest))


def flip_a_byte(path):
    file = next(path.glob("policy-*"))
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


def truncate(path):
    file = next(path.glob("policy-*"))
    file.write_bytes(file.read_bytes()[:-100])


def wider(path):
    edit(
        path,
        config=json.loads(
            json.dumps(dataclasses.asdict(DenoisingPolicyConfig(**(SMALL | {"expert": ActionExpertConfig(depth=2)}))))
        ),
    )


DAMAGE = {
    "empty folder": (lambda path: [file.unlink() for file in path.iterdir()], "not a bundle"),
    "no tensors": (lambda path: next(path.glob("policy-*")).unlink(), "not a whole bundle"),
    "tampered": (flip_a_byte, "truncated or was changed"),
    "truncated": (truncate, "truncated or was changed"),
    "manifest cut": (lambda path: (path / "bundle.json").write_text('{"format": 1,'), "is damaged"),
    "other format": (lambda path: edit(path, format=99), "format 99"),
    "a list": (lambda path: (path / "bundle.json").write_text("[]"), "format None"),
    "unknown key": (lambda path: edit(path, extra=1), "extra: unknown key"),
    "unknown key inside": (
        lambda path: edit(path, config={"name": "denoising", "expert": {"hedas": 2}}),
        "config.denoising.expert.hedas: unknown key",
    ),
    "wrong type": (lambda path: edit(path, robot={"action_dim": "seven"}), r"robot\.action_dim"),
    "bad value": (lambda path: edit(path, config={"name": "denoising", "expert": {"action_patch": 3}}), "action_patch"),
    "other shapes": (wider, "do not fit"),
}


@pytest.mark.parametrize(("damage", "message"), DAMAGE.values(), ids=DAMAGE)
def test_damage_is_one_clear_error(tmp_path, damage, message):
    save_bundle(build(), tmp_path)
    damage(tmp_path)
    with pytest.raises(BundleError, match=message):
        load_bundle(tmp_path)


def test_missing_path_and_plain_file(tmp_path):
    (tmp_path / "file").write_text("x")
    for path in (tmp_path / "nowhere", tmp_path / "file"):
        with pytest.raises(BundleError, match="not a bundle"):
            load_bundle(path)


def test_a_run_s_folder_names_the_bundle_in_it(tmp_path):
    policy = build()
    save_bundle(policy, tmp_path / "bundle", provenance=Provenance())
    with pytest.raises(BundleError, match=f"name {tmp_path / 'bundle'}"):
        load_bundle(tmp_path)
    assert load_bundle(str(tmp_path / "bundle")).spec == policy.spec


@pytest.mark.parametrize(
    ("robot", "message"),
    [
        ({"action_dim": 7}, "action_dim 3, not 7"),
        ({"cameras": ("wrist", "front")}, r"cameras \('front', 'wrist'\), not \('wrist', 'front'\)"),
        ({"image_size": (64, 64)}, r"image_size \(32, 32\), not \(64, 64\)"),
        ({"state_dim": 9, "control_hz": 10.0}, r"state_dim 5, not 9; control_hz 20.0, not 10.0"),
    ],
)
def test_another_robot_is_refused(tmp_path, robot, message):
    save_bundle(build(), tmp_path)
    with pytest.raises(BundleError, match=message):
        load_bundle(tmp_path, robot=dataclasses.replace(ROBOT, **robot))


SAVER = """
import sys
from pathlib import Path
import torch
torch.set_num_threads(1)
from policies.bundle import load_bundle, save_bundle
path = Path(sys.argv[1])
policy = load_bundle(path)
print("ready", flush=True)
while True:
    with torch.no_grad():
        policy.normalizer.state_mean += 1
    save_bundle(policy, path)
"""


def test_killed_in_mid_save_the_old_or_the_new_is_there(tmp_path):
    policy = build()
    save_bundle(policy, tmp_path)
    for delay in (0.01, 0.03, 0.08):
        process = subprocess.Popen([sys.executable, "-c", SAVER, str(tmp_path)], stdout=subprocess.PIPE, cwd=Path.cwd())
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        time.sleep(delay)
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stdout.close()
        shift = load_bundle(tmp_path).normalizer.state_mean - policy.normalizer.state_mean
        assert torch.allclose(shift, shift.round(), atol=1e-4)
