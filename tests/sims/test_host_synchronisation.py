"""How often a control step makes the host wait for the device, in the environments that run on a GPU."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from sims.adapters.isaaclab import IsaacLabConfig, IsaacLabEnv
from sims.chunk import step_chunk
from sims.tabletop import TabletopConfig, TabletopEnv
from sims.vector_env import StartState, VectorEnv
from tests.sims import isaaclab_double
from tests.worlds import PointEnv

WAITS = {
    Tensor.item: "item", Tensor.cpu: "cpu", Tensor.tolist: "tolist", Tensor.numpy: "numpy", Tensor.__bool__: "bool",
    Tensor.__int__: "int", Tensor.__float__: "float", Tensor.nonzero: "nonzero", torch.nonzero: "nonzero",
}  # fmt: skip


class HostWaits(TorchFunctionMode):
    """Counts calls that would wait for a GPU, whatever device the tensors are on."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in WAITS:
            self.counts[WAITS[func]] += 1
        return func(*args, **(kwargs or {}))


def waits_of_a_step(env: VectorEnv) -> Counter[str]:
    num_envs = env.spec.num_envs
    env.reset(start=[StartState(task=0, seed=i) for i in range(num_envs)])
    action = torch.zeros(num_envs, env.spec.action_dim, device=env.spec.device)
    env.step(action)
    with HostWaits() as waits:
        env.step(action)
    return waits.counts


def test_the_counter_counts() -> None:
    with HostWaits() as waits:
        numbers = torch.ones(2)
        assert numbers.sum().item() == 2
        assert bool(numbers.any())
        numbers.nonzero()
    assert waits.counts == {"item": 1, "bool": 1, "nonzero": 1}


def test_isaac_lab_adds_no_wait_to_its_own_resets() -> None:
    """``nonzero`` is the simulator's own, to find what to reset."""
    isaaclab_double.install()
    config = IsaacLabConfig(
        task=isaaclab_double.TASK, cameras=("table_cam",), state=("policy.eef_pos",), num_envs=3, device="cpu"
    )
    assert waits_of_a_step(IsaacLabEnv(config)) == {"nonzero": 1}


def test_maniskill_waits_once() -> None:
    pytest.importorskip("mani_skill", reason="pip install mani_skill into the trainer's own interpreter")
    from tests.sims.test_maniskill_gpu import CONFIG, ManiSkillGPU

    env = ManiSkillGPU(CONFIG)
    assert waits_of_a_step(env)["bool"] >= 1  # and whatever ManiSkill itself does
    env.close()


@pytest.mark.slow
@pytest.mark.timeout(1200)  # the first run on a machine compiles the kernels
def test_the_tabletop_suite_on_warp_never_waits() -> None:
    pytest.importorskip("mujoco_warp", reason="the warp extra is not installed: pip install 'vla-rl[warp]'")
    env = TabletopEnv(TabletopConfig(tasks=("pick", "push"), num_envs=4, image_size=(32, 32), backend="warp"))
    assert waits_of_a_step(env) == {}
    with HostWaits() as waits:
        env.observe()
    assert waits.counts == {}
    env.close()


def test_a_chunk_does_not_ask_whether_all_have_ended_where_that_would_wait() -> None:
    """On the host the question is cheap and saves steps; on a GPU it would wait for every step."""
    asked = []
    for device in ("cpu", "meta"):
        env = PointEnv(num_envs=2, device=torch.device(device))
        env.finished, env.squares = torch.zeros_like(env.finished), env.squares + 5.0  # nothing ends
        with HostWaits() as waits:
            step_chunk(env, torch.zeros(2, 5, 2, device=device), 1.0)
        asked.append(waits.counts["bool"])
    assert asked == [5, 0]
