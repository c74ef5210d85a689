"""Episodes of a robot in this process, with a fake arm and a policy server in others: what an error leaves behind."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest

from episodes.store import EpisodeStore
from tests.ros.cell import ROOT, Cell, started_arm

pytestmark = [
    pytest.mark.skipif(
        find_spec("rclpy") is None, reason="this Python has no rclpy; make test-ros runs these in one that has"
    ),
    pytest.mark.filterwarnings("ignore:module 'sre_:DeprecationWarning"),  # of a parser that rclpy imports
]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Cell, Any, int]]:
    """A cell, an episode runner in this process, and the port of the policy server."""
    with started_arm(tmp_path_factory.mktemp("cell"), domain=20 + (os.getpid() + 50) % 80) as cell:
        import rclpy

        from real_robot.ros.episode_runner import Connections, EpisodeRunner

        port = cell.start_server()
        context = rclpy.Context()
        rclpy.init(context=context)
        node = rclpy.create_node("runner", context=context)
        connections = Connections(
            robot_file=ROOT / "configs/robots/fake_arm.yaml",
            policy_url=f"ws://127.0.0.1:{port}",
            token_file=cell.folder / "token",
            store=cell.store,
        )
        runner = EpisodeRunner(node, connections, on_tick=lambda: None)
        yield cell, runner, port
        runner.brake()
        runner.close()
        node.destroy_node()
        rclpy.shutdown(context=context)


def activated(runner: Any) -> bool:
    from real_robot.ros.episode_runner import EpisodeRequest

    try:
        runner.activate(EpisodeRequest(instruction="pick up the red block", task="pick", seed=0))
    except ValueError:  # no joints, images or server yet
        return False
    return True


def reported(port: int) -> int:
    """Episodes whose end the server was told."""
    with urlopen(f"http://127.0.0.1:{port}/metrics") as page:
        lines = page.read().decode().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("policy_episodes_total"))


@pytest.mark.parametrize("end", [lambda runner: runner.end_episode("success"), lambda runner: runner.brake()])
def test_an_episode_whose_control_thread_failed_is_closed_and_another_one_begins(
    served: tuple[Cell, Any, int], monkeypatch: pytest.MonkeyPatch, end: Callable[[Any], None]
) -> None:
    cell, runner, port = served
    recorded, told = recorded_in(cell.store), reported(port)
    cell.wait(lambda: activated(runner), 60, "activation")
    cell.wait(lambda: int(str(runner.values()["actions"])) > 20, 30, "actions")

    def no_measurement() -> None:
        raise RuntimeError("no such joint")

    with monkeypatch.context() as broken:
        broken.setattr(runner._joints, "measure", no_measurement)
        cell.wait(lambda: not runner.values()["active"], 10, "the end of control")
    assert "the control thread failed: RuntimeError: no such joint" in runner.problems()
    end(runner)
    assert not runner.in_episode
    cell.wait(lambda: recorded_in(cell.store) == recorded + 1, 20, "the record")
    cell.wait(lambda: reported(port) == told + 1, 20, "the report")
    cell.wait(lambda: activated(runner), 30, "the next activation")
    runner.brake()


def test_a_begin_that_the_arm_refuses_does_not_keep_to_its_policy(
    served: tuple[Cell, Any, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    cell, runner, port = served
    cell.wait(lambda: activated(runner), 60, "activation")
    runner.brake()
    measured = runner._joints.measure()
    with monkeypatch.context() as moved:
        moved.setattr(runner._joints, "measure", lambda: measured._replace(positions=[9.0] * 8))
        assert not activated(runner)
    cell.kill("server")
    cell.start_server("--port", str(port), "--seed", "1")
    cell.wait(lambda: activated(runner), 60, "activation with the other policy")
    assert runner.values()["policy"] == "untrained-1"
    runner.brake()


def test_an_episode_is_recorded_with_the_delay_of_its_policy(served: tuple[Cell, Any, int]) -> None:
    cell, runner, port = served
    cell.kill("server")
    cell.start_server("--port", str(port), "--action-delay", "3")
    cell.wait(lambda: runner._client.hello is not None and runner._client.hello.action_delay == 3, 60, "the policy")
    recorded = recorded_in(cell.store)
    cell.wait(lambda: activated(runner), 60, "activation")
    cell.wait(lambda: int(str(runner.values()["actions"])) > 10, 30, "actions")
    runner.brake()
    cell.wait(lambda: recorded_in(cell.store) == recorded + 1, 20, "the record")
    with EpisodeStore(cell.store) as store:
        assert store.read(store.select()[-1].id).action_delay == 3
    cell.kill("server")
    cell.start_server("--port", str(port))
    cell.wait(lambda: runner._client.hello is not None and runner._client.hello.action_delay == 0, 60, "the policy")


def test_a_policy_that_does_not_fit_is_a_problem_for_as_long_as_the_server_offers_it(
    served: tuple[Cell, Any, int],
) -> None:
    cell, runner, port = served
    cell.wait(lambda: activated(runner), 60, "activation")
    runner.brake()
    cell.kill("server")
    cell.start_server("--port", str(port), "--action-dim", "6")
    cell.wait(lambda: runner._client.hello is not None and runner._client.hello.action_dim == 6, 60, "the policy")
    assert not activated(runner)
    refusal = "policy untrained-0: the policy has action_dim 6, this robot's embodiment has 7"
    assert sum(problem.startswith(refusal) for problem in runner.problems()) == 1
    cell.kill("server")
    cell.start_server("--port", str(port))
    cell.wait(lambda: runner._client.hello is not None and runner._client.hello.action_dim == 7, 60, "the policy")
    assert not any(problem.startswith(refusal) for problem in runner.problems())
    cell.wait(lambda: activated(runner), 60, "activation")
    runner.brake()


def test_a_release_between_two_steps_of_the_control_thread_leaves_nothing_stopped(
    served: tuple[Cell, Any, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    import rclpy
    from rclpy.lifecycle import TransitionCallbackReturn
    from rclpy.parameter import Parameter
    from std_srvs.srv import Trigger

    from real_robot.ros.node import PolicyNode
    from real_robot.safety.filter import SafetyFilter

    cell, _, port = served
    rclpy.init(args=[])
    node = PolicyNode()
    try:
        given = {"robot_file": ROOT / "configs/robots/fake_arm.yaml", "policy_url": f"ws://127.0.0.1:{port}"}
        given |= {"token_file": cell.folder / "token", "instruction": "pick up the red block"}
        node.set_parameters([Parameter(name, value=str(value)) for name, value in given.items()])
        assert node.trigger_configure() is TransitionCallbackReturn.SUCCESS
        cell.wait(lambda: node.trigger_activate() is TransitionCallbackReturn.SUCCESS, 60, "activation")
        assert node._runner is not None
        control = node._runner._control
        assert control is not None
        node._on_stop(Trigger.Request(), Trigger.Response())
        cell.wait(lambda: not control.loop.live, 30, "rest")
        answer, stopped = Trigger.Response(), SafetyFilter.stopped
        release = threading.Thread(target=lambda: node._on_release(Trigger.Request(), answer))

        def released_after_reading(filter: SafetyFilter) -> str | None:
            reason = stopped.fget(filter)  # type: ignore[attr-defined]
            in_tick = control.lock.locked() or threading.current_thread().name != "control"
            if not in_tick and release.ident is None:
                release.start()
                release.join(0.5)
            return reason

        monkeypatch.setattr(SafetyFilter, "stopped", property(released_after_reading))
        cell.wait(lambda: release.ident is not None and not release.is_alive(), 10, "the release")
        time.sleep(0.1)  # some control steps
        assert answer.success
        node._refuse_while_stopped()
        assert node._published_stop is False
    finally:
        node.brake()
        node.disconnect()
        node.destroy_node()
        rclpy.shutdown()


def recorded_in(store: Path) -> int:
    return len(EpisodeStore(store).select()) if store.exists() else 0
