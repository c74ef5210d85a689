"""A policy server's policy drives an arm that a LeRobot driver moves, for one episode.

python -m real_robot.lerobot my_arm.yaml --url ws://127.0.0.1:8720 --instruction "pick up the block"

The robot file has a section ``lerobot`` (``real_robot.lerobot.arm``).
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path

from real_robot.control.loop import ControlLoop
from real_robot.lerobot.arm import LeRobotArm, LeRobotConnection
from real_robot.lerobot.devices import make_driver
from real_robot.robot_file import Robot, RobotError, read_robot
from real_robot.serving.client import PolicyClient
from real_robot.serving.commands import token_path
from real_robot.serving.remote_policy import RemotePolicy
from real_robot.waiting import wait_until_ready
from sims.errors import UserError
from sims.subproc.termination import Terminated, terminable

READY_S = 10.0
SAID_S = 1.0  # between two problems that are printed


def run_episode(arm: LeRobotArm, robot: Robot, client: PolicyClient, *, instruction: str, seconds: float) -> str:
    """One episode of the server's policy; returns why the arm stopped, or what the policy lacked at the end, or "".

    What the policy lacks is printed while it does. RobotError if the server or the joints do not
    answer, ValueError if the policy is for another robot.
    """
    wait_until_ready(
        lambda: client.hello is not None and arm.fresh(robot.limits.max_measurement_age_s),
        lambda: client.problem or arm.problem or "the policy server does not answer",
        within_s=READY_S,
        what="the policy server or the arm",
    )
    hello = client.hello
    assert hello is not None
    robot.check_cameras(hello.cameras)
    embodiment = robot.embodiment()
    policy = RemotePolicy(
        hello,
        robot.chunking_for(
            action_horizon=hello.action_horizon,
            action_delay=hello.action_delay,
            max_prefix=hello.max_prefix,
            control_hz=hello.control_hz,
        ),
        embodiment=embodiment,
        client=client,
        cameras=arm,
        max_image_age_s=robot.control.max_image_age_s,
    )
    loop = robot.control_loop(policy, embodiment, control_hz=hello.control_hz)
    control = LeRobotConnection(arm, after_tick=policy.request_chunk).connect(loop)
    client.bind(hello.fingerprint)
    policy.begin_episode(instruction)
    control.start()
    try:
        problem = _watch(loop, lambda: client.problem or policy.problem, seconds=seconds)
    finally:
        control.brake()
        client.end_episode("unknown")
    return loop.filter.stopped or (f"the episode is over; at its end: {problem}" if problem else "")


def _watch(loop: ControlLoop, problem: Callable[[], str], *, seconds: float) -> str:
    """Wait for the time, or the stop of the arm; returns the last problem. New ones are printed, one a second."""
    now_s = time.monotonic()
    end_s, said, said_s = now_s + seconds, "", now_s - SAID_S
    while now_s < end_s and not loop.filter.stopped:
        time.sleep(0.02)
        now_s, last = time.monotonic(), problem()
        if last not in ("", said) and now_s - said_s >= SAID_S:
            print(last, file=sys.stderr)
            said, said_s = last, now_s
    return problem()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--url", default="ws://127.0.0.1:8720")
    parser.add_argument("--token-file", type=Path, default=token_path())
    parser.add_argument("--instruction", required=True)
    parser.add_argument("--seconds", type=float, default=30.0)
    options = parser.parse_args()
    try:
        with terminable():
            print(_run(options) or "the episode is over; the arm is at rest")
    except UserError as error:
        print(f"vla-rl: {error}", file=sys.stderr)
        sys.exit(2)
    except Terminated as ended:
        sys.exit(ended.exit_code)


def _run(options: argparse.Namespace) -> str:
    """As ``run_episode``."""
    robot = read_robot(options.file)
    if robot.lerobot is None:
        raise RobotError(f"{options.file}: no 'lerobot' section")
    try:
        token = options.token_file.expanduser().read_text().strip()
    except (OSError, ValueError) as error:
        raise UserError(f"--token-file {options.token_file}: {error}; vla-rl serve writes it") from error
    try:
        client = PolicyClient(options.url, token=token, timeout_s=robot.control.server_timeout_s)
    except ValueError as error:
        raise UserError(f"--url {options.url}: {error}") from error
    try:
        with LeRobotArm(make_driver(robot.lerobot), robot) as arm:
            return run_episode(arm, robot, client, instruction=options.instruction, seconds=options.seconds)
    except (ValueError, OSError) as error:  # of the driver, the server's policy or the arm's position
        raise UserError(str(error)) from error
    finally:
        client.close()


if __name__ == "__main__":
    main()
