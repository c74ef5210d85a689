"""Write what LeRobot reads beside the weights into a bundle's folder: ``config.json`` and its processors.

python -m lerobot_policy_vla_rl BUNDLE [--robot FILE]
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from lerobot.configs.types import FeatureType, PolicyFeature
from lerobot.utils.constants import ACTION, OBS_IMAGES, OBS_STATE

from lerobot_policy_vla_rl.arm_values import ArmValues
from lerobot_policy_vla_rl.configuration_vla_rl import VlaRlConfig
from lerobot_policy_vla_rl.processor_vla_rl import make_vla_rl_pre_post_processors
from policies.policy import PolicySpec
from real_robot.ros.commands import policy_spec
from sims.errors import UserError


def prepare(bundle: Path, robot_file: Path | None = None) -> VlaRlConfig:
    """BundleError or RobotError if they cannot be used."""
    spec = policy_spec(bundle)
    config = _config(spec, robot_file)
    config.save_pretrained(bundle)
    for processor in make_vla_rl_pre_post_processors(config):
        processor.save_pretrained(bundle)
    return config


def _config(spec: PolicySpec, robot_file: Path | None) -> VlaRlConfig:
    robot = spec.robot
    cameras, sizes = {camera: camera for camera in robot.cameras}, (robot.state_dim, robot.action_dim)
    if robot_file is not None:
        arm = ArmValues(robot_file, spec)
        cameras, sizes = {camera: arm.cameras[camera] for camera in robot.cameras}, (arm.dim, arm.dim)
    images = {
        f"{OBS_IMAGES}.{name}": PolicyFeature(FeatureType.VISUAL, (3, *robot.image_size)) for name in cameras.values()
    }
    return VlaRlConfig(
        input_features={OBS_STATE: PolicyFeature(FeatureType.STATE, (sizes[0],)), **images},
        output_features={ACTION: PolicyFeature(FeatureType.ACTION, (sizes[1],))},
        robot_file=str(robot_file.resolve()) if robot_file is not None else "",
        push_to_hub=False,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--robot", type=Path, help="a robot file with a section lerobot; without: a simulator")
    options = parser.parse_args()
    try:
        prepare(options.bundle, options.robot)
    except UserError as error:
        sys.exit(str(error))
    print(f"--policy.path={options.bundle}")


if __name__ == "__main__":
    main()
