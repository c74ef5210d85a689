"""The tabletop suite: layouts from seeds, physics, experts, images, snapshots."""

import ctypes
import dataclasses
import math
import os
import subprocess
import sys

import mujoco
import numpy as np
import pytest
import torch

from sims.errors import UserError
from sims.tabletop import TabletopConfig, TabletopEnv
from sims.tabletop.layout import CAMERA_OFFSET, PEG_QPOS, Layout, sample_layout
from sims.tabletop.placement import AREA, CABINET_AREA, inside
from sims.tabletop.render import choose_gl
from sims.tabletop.scene import HOLE_HEIGHT, MOCAP, PEG_HALF
from sims.tabletop.scene_state import of_candidate
from sims.tabletop.task import HOLD_STEPS, SPLITS, check_task
from sims.tabletop.tasks.registry import TASKS
from sims.vector_env import DemonstratedEnv, StartState, decode_instructions

ALL = tuple(TASKS)


def make(num_envs, *, tasks=ALL, cameras=(), **settings):
    return TabletopEnv(TabletopConfig(tasks=tasks, num_envs=num_envs, cameras=cameras, **settings))


def starts(n, tasks=ALL, first_seed=0):
    return [StartState(task=i % len(tasks), seed=first_seed + i) for i in range(n)]


def drive(env, expert, steps):
    for _ in range(steps):
        step = env.step(expert.act())
        if bool(step.done.all()):
            break
    return step


@pytest.fixture
def random_actions():
    generator = torch.Generator().manual_seed(0)
    return lambda n, steps: torch.rand(steps, n, 7, generator=generator) * 2 - 1


# Episodes


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("name", ALL)
def test_layout_is_a_function_of_task_and_seed(name, split):
    first, again = (sample_layout(name, 11, split=split, appearance=1.0) for _ in range(2))
    other = sample_layout(name, 12, split=split, appearance=1.0)
    assert first.instruction == again.instruction
    assert np.array_equal(first.qpos, again.qpos)
    assert np.array_equal(first.fixtures, again.fixtures)
    assert np.array_equal(first.appearance.camera_offset, again.appearance.camera_offset)
    assert not np.array_equal(first.qpos, other.qpos)


@pytest.mark.parametrize("name", ALL)
def test_instruction_names_exactly_one_candidate(name):
    task = TASKS[name]
    for seed in range(100):
        layout = sample_layout(name, seed, split="train", appearance=1.0)
        assert len(set(layout.colors)) == len(layout.colors) == task.num_colors
        sentences = {
            phrase.format(*(layout.colors[s] for s in slots)) for slots in task.candidates for phrase in task.phrasings
        }
        assert len(sentences) == len(task.candidates) * len(task.phrasings)
        assert len(layout.instruction.encode()) <= 96


@pytest.mark.parametrize("name", ALL)
def test_splits_do_not_overlap(name):
    task = TASKS[name]

    def episodes(split):
        return [sample_layout(name, seed, split=split, appearance=1.0) for seed in range(150)]

    def combinations(split):
        return {tuple(e.colors[s] for s in task.candidates[e.candidate]) for e in episodes(split)}

    assert combinations("ood_combination") == task.held_out
    assert not combinations("train") & task.held_out
    assert not set(task.phrasings) & set(task.ood_phrasings)
    words = {e.instruction for split in ("train", "ood_position") for e in episodes(split)}
    assert not words & {e.instruction for e in episodes("ood_phrasing")}
    train, other = (episodes(split) for split in ("train", "ood_appearance"))
    darkest_train = np.min([e.appearance.background.mean(1) for e in train], axis=0)
    assert (np.max([e.appearance.background.mean(1) for e in other], axis=0) < darkest_train).all()
    furthest = np.max([np.abs(e.appearance.camera_offset) for e in train], axis=0)
    assert (np.min([np.abs(e.appearance.camera_offset) for e in other], axis=0) > furthest).all()
    shown = [{i for e in some for i in np.flatnonzero(e.appearance.distractors[:, 0] < 1)} for some in (train, other)]
    assert shown == [{0, 1}, {2, 3}]
    assert len(task.phrasings) >= 8


def test_a_goal_of_sort_is_held_out_whichever_clause_comes_first():
    def goals(split):
        episodes = [sample_layout("sort", seed, split=split, appearance=1.0) for seed in range(400)]
        named = [[e.colors[slot] for slot in e.task.candidates[e.candidate]] for e in episodes]
        return {frozenset({(first, its_mat), (second, other_mat)}) for first, its_mat, second, other_mat in named}

    held_out = goals("ood_combination")
    assert len(held_out) == 6
    assert not goals("train") & held_out


@pytest.mark.parametrize("appearance", [0.0, 0.3])
def test_ood_appearance_is_beyond_the_training_range_also_where_that_is_scaled_down(appearance):
    for seed in range(20):
        scaled, full = (
            sample_layout("pick", seed, split="ood_appearance", appearance=amount).appearance
            for amount in (appearance, 1.0)
        )
        assert (np.abs(scaled.camera_offset) >= CAMERA_OFFSET).all()
        assert all(np.array_equal(value, vars(full)[name]) for name, value in vars(scaled).items())
    assert (sample_layout("pick", 0, split="train", appearance=0.0).appearance.camera_offset == 0).all()


def places(layout: Layout):
    """(x, y) of all objects on the table beside the cabinet, and of the cabinet."""
    free = layout.qpos[9:37].reshape(4, 7)[~layout.parked, :2]
    cabinet = MOCAP.index("cabinet")
    fixtures = np.delete(layout.fixtures, cabinet, axis=0)[:, :2]
    fixtures, cabinets = (xy[xy[:, 0] < 1] for xy in (fixtures, layout.fixtures[[cabinet], :2]))
    return np.concatenate([free, fixtures]), cabinets


@pytest.mark.parametrize("name", ALL)
def test_positions_are_in_the_training_areas_and_those_of_ood_position_outside(name):
    for seed in range(40):
        for split in SPLITS:
            layout = sample_layout(name, seed, split=split, appearance=1.0)
            others, cabinets = places(layout)
            assert len(others) + len(cabinets) > 0
            expected = split != "ood_position"
            assert (inside(others, AREA) == expected).all()
            assert (inside(cabinets, CABINET_AREA) == expected).all()


@pytest.mark.parametrize("split", SPLITS)
def test_no_candidate_is_achieved_at_the_start(split):
    n = 40 * len(ALL)
    env = make(n, split=split)
    env.reset(start=starts(n))
    assert all(not TASKS[name].achieved(env.scene[rows]).any() for name, rows in env.task_envs)
    still = torch.zeros(n, 7)
    still[:, 6] = -1
    for _ in range(HOLD_STEPS + 1):
        step = env.step(still)
    assert not step.terminated.any()
    env.close()


# Experts and words


@pytest.mark.parametrize("name", ALL)
def test_expert_succeeds(name):
    env = make(40, tasks=(name,))
    assert isinstance(env, DemonstratedEnv)
    env.reset(start=starts(40, (name,), first_seed=1000))
    step = drive(env, env.expert(noise=0.0, seed=0), env.spec.max_steps)
    assert step.success.all()
    assert env.elapsed[step.success].max() < 0.9 * env.spec.max_steps
    env.close()


@pytest.mark.parametrize(("demonstrator", "noises"), [("biased", (0.0, 1.0, 1.3)), ("human", (0.0, 1.0, 1.5))])
def test_noise_makes_the_expert_worse(demonstrator, noises):
    rates = []
    for noise in noises:
        env = make(48, tasks=("pick",), demonstrator=demonstrator)
        env.reset(start=starts(48, ("pick",)))
        rates.append(drive(env, env.expert(noise=noise, seed=0), 64).success.float().mean().item())
        env.close()
    assert rates[0] > rates[1] > rates[2]
    assert rates[1] > 0.2


def end_effectors(demonstrator, noise, name="reach"):
    """Of 48 episodes after 24 control steps."""
    env = make(48, tasks=(name,), demonstrator=demonstrator)
    env.reset(start=starts(48, (name,)))
    drive(env, env.expert(noise=noise, seed=0), 24)
    positions = env.scene.end_effector.clone()
    env.close()
    return positions


def test_errors_are_the_same_in_every_episode_of_one_demonstrator_and_differ_in_those_of_the_other():
    exact = end_effectors("biased", 0.0)
    assert torch.equal(exact, end_effectors("human", 0.0))
    biased, human = (end_effectors(name, 1.0)[:, 1] - exact[:, 1] for name in ("biased", "human"))
    assert biased.mean().abs() > 0.012 > 2 * biased.std()
    assert human.std() > 0.008 > 2 * human.mean().abs()


@pytest.mark.parametrize("name", ALL)
def test_the_biased_demonstrator_errs_sideways_in_every_task_but_push(name):
    aside = (end_effectors("biased", 1.0, name) - end_effectors("biased", 0.0, name))[:, 1].median()
    assert (aside < -0.015) == (name != "push")
    assert aside < 0.003


class OtherCandidate:
    """An environment whose expert is told another candidate than the instruction names."""

    def __init__(self, env):
        self._env = env

    def __getattr__(self, name):
        return getattr(self._env, name)

    @property
    def candidate(self):
        other = self._env.candidate.clone()
        for name, rows in self._env.task_envs:
            other[rows] = (other[rows] + 1) % len(TASKS[name].candidates)
        return other


def test_achieving_another_candidate_ends_the_episode_without_success():
    n = 8 * len(ALL)
    env = make(n)
    env.reset(start=starts(n))
    expert = type(env.expert(noise=0.0, seed=0))(OtherCandidate(env), noise=0.0, seed=0)
    step = drive(env, expert, env.spec.max_steps)
    assert not step.success.any()
    assert step.terminated.float().mean() > 0.9
    env.close()


# Success means the named thing, held, and released where it is put down


def place_drawers(env, opening):
    """The end effector at the named handle, whose drawer is open; ``opening``: of the other."""
    scene = env.scene
    drawers = torch.full_like(scene.drawers, opening)
    drawers[torch.arange(len(drawers)), env.candidate] = 0.1
    opened = dataclasses.replace(scene, drawers=drawers)
    return dataclasses.replace(opened, end_effector=of_candidate(opened.handles, env.candidate))


def test_both_drawers_open_is_not_success():
    env = make(8, tasks=("open_drawer",))
    env.reset(start=starts(8, ("open_drawer",)))
    task = TASKS["open_drawer"]
    assert check_task(task, place_drawers(env, 0.0), env.candidate)[0].all()
    assert not check_task(task, place_drawers(env, 0.1), env.candidate)[0].any()
    untouched = dataclasses.replace(place_drawers(env, 0.0), end_effector=env.scene.end_effector + 0.3)
    assert not check_task(task, untouched, env.candidate)[0].any()
    env.close()


def test_pressing_straight_down_opens_no_drawer():
    n = 48
    env = make(n, tasks=("open_drawer",))
    for gripper in (-1.0, 1.0):
        env.reset(start=starts(n, ("open_drawer",)))
        down = torch.tensor([0.0, 0.0, -1.0, 0.0, 0.0, 0.0, gripper]).expand(n, 7)
        for _ in range(40):
            step = env.step(down)
        assert not step.terminated.any()
    env.close()


def test_every_task_has_its_own_time_limit():
    env = make(2, tasks=("reach", "push"))
    env.reset(start=starts(2, ("reach", "push")))
    truncated = torch.stack([env.step(torch.zeros(2, 7)).truncated for _ in range(env.spec.max_steps)])
    assert dict(zip(env.spec.tasks, (1 + (~truncated).sum(0)).tolist(), strict=True)) == env.spec.limits
    assert env.spec.limits == {"reach": 64, "push": 80}
    with pytest.raises(ValueError, match=r"task_limits must be one for each of 1 tasks and at most max_steps"):
        dataclasses.replace(env.spec, tasks=("reach",))
    env.close()


def test_success_comes_after_the_goal_has_held_for_several_steps():
    n = len(ALL)
    env = make(n)
    env.reset(start=starts(n))
    expert, achieved, done = env.expert(noise=0.0, seed=0), torch.zeros(n, dtype=torch.int64), torch.zeros(n)
    for _ in range(env.spec.max_steps):
        running = done == 0
        step = env.step(expert.act())
        for i, (name, rows) in enumerate(env.task_envs):
            now = check_task(TASKS[name], env.scene[rows], env.candidate[rows])[0]
            achieved[i] = torch.where(running[i], (achieved[i] + 1) * now[0], achieved[i])
        done = step.success.float()
    assert achieved.tolist() == [HOLD_STEPS] * n
    env.close()


@pytest.mark.parametrize("name", ["push", "stack", "insert_peg"])
def test_what_is_put_somewhere_must_be_let_go(name):
    """Success of the final scene of an expert, and none with hand and fingers where they were before."""
    env = make(4, tasks=(name,))
    env.reset(start=starts(4, (name,)))
    drive(env, env.expert(noise=0.0, seed=0), env.spec.max_steps)
    scene = env.scene
    assert check_task(TASKS[name], scene, env.candidate)[0].all()
    gripping = dataclasses.replace(scene, fingers=torch.full_like(scene.fingers, PEG_HALF[0]))
    if name == "push":
        behind = of_candidate(scene.blocks, env.candidate // 2)[:, :3] - torch.tensor([0.035, 0.0, 0.0])
        gripping = dataclasses.replace(scene, end_effector=behind)
    assert not check_task(TASKS[name], gripping, env.candidate)[0].any()
    env.close()


def test_a_peg_that_lies_on_its_hole_is_not_in_it():
    env = make(4, tasks=("insert_peg",))
    env.reset(start=starts(4, ("insert_peg",)))
    hole = of_candidate(env.scene.fixtures[:, 3:5], env.candidate).numpy()
    half = hole[:, 3] / 2
    lying = np.stack([np.cos(half), -np.sin(half), np.cos(half), np.sin(half)], axis=1) / math.sqrt(2)
    captured = env.capture()
    for i, state in enumerate(captured):
        state.snapshot[1:][PEG_QPOS] = [*hole[i, :2], HOLE_HEIGHT + PEG_HALF[0], *lying[i]]
    env.reset(start=captured)
    for _ in range(2 * HOLD_STEPS):
        step = env.step(torch.tensor([0.0] * 6 + [-1.0]).expand(4, 7))
    assert (env.scene.peg[:, 2] < PEG_HALF[2] + 0.005).all()  # its center is as low as that of a peg in the hole
    assert not step.terminated.any()
    env.close()


def test_the_arm_collides_with_what_it_meets():
    """The wrist, turned over, cannot be lowered into the cabinet."""
    env = make(1, tasks=("open_drawer",))
    model = env.backend._model
    data = mujoco.MjData(model)
    env.reset(start=starts(1, ("open_drawer",)))
    snapshot = env.capture()[0].snapshot
    data.qpos[:] = snapshot[1 : 1 + model.nq]
    for body in ("link5", "link6", "link7"):
        mujoco.mj_forward(model, data)
        data.mocap_pos[MOCAP.index("cabinet")] = data.xpos[model.body(body).id] - [0, 0, 0.06]
        mujoco.mj_forward(model, data)
        touching = {int(model.geom_bodyid[geom]) for geom in data.contact.geom.flatten()}
        assert model.body(body).id in touching
    env.close()


# Physics and bookkeeping


def test_result_does_not_depend_on_threads_or_other_environments(random_actions):
    n = 7
    actions = random_actions(n, 15)

    def run(env_rows, threads):
        env = make(len(env_rows), threads=threads)
        env.reset(start=[starts(n)[row] for row in env_rows])
        for action in actions:
            env.step(action[env_rows])
        snapshots = np.stack([state.snapshot for state in env.capture()])
        env.close()
        return snapshots

    together = run(list(range(n)), 1)
    assert np.array_equal(together, run(list(range(n)), 3))
    assert np.array_equal(together[[5]], run([5], 1))
    assert np.isfinite(together).all()


def test_snapshot_continues_bit_for_bit_in_another_instance(random_actions):
    n = len(ALL)
    env = make(n, cameras=("agent", "wrist"), split="ood_appearance")
    env.reset(start=starts(n))
    drive(env, env.expert(noise=0.1, seed=0), 8)
    middle = env.capture()
    actions = random_actions(n, 6)
    steps = [env.step(action) for action in actions]
    end, seen = env.capture(), env.observe()
    env.close()

    order = list(reversed(range(n)))
    other = make(n, cameras=("agent", "wrist"), split="ood_appearance", threads=1)
    other.reset(start=[middle[row] for row in order])
    for action, step in zip(actions, steps, strict=True):
        again = other.step(action[order])
        assert torch.equal(again.reward, step.reward[order])
        assert torch.equal(again.terminated, step.terminated[order])
    for row, state in zip(order, other.capture(), strict=True):
        assert np.array_equal(state.snapshot, end[row].snapshot)
    look = other.observe()
    assert torch.equal(look.images, seen.images[order])
    assert torch.equal(look.state, seen.state[order])
    assert torch.equal(look.instruction, seen.instruction[order])
    other.close()


def test_finished_environment_does_not_change_until_reset(random_actions):
    env = make(2, tasks=("reach",), max_steps=30)
    env.reset(start=starts(2, ("reach",)))
    expert = env.expert(noise=0.0, seed=0)
    for _ in range(20):
        action = expert.act()
        action[1] = 0.0
        step = env.step(action)
        if bool(step.terminated[0]):
            break
    assert step.success.tolist() == [True, False]
    assert step.reward.tolist() == [1.0, 0.0]
    before = env.capture([0])[0].snapshot
    for action in random_actions(2, 30):
        step = env.step(action)
    assert np.array_equal(env.capture([0])[0].snapshot, before)
    assert step.reward[0] == 0
    assert step.success.tolist() == [True, False]
    assert step.terminated[0]
    assert step.truncated[1]
    env.reset([0], start=[StartState(task=0, seed=5)])
    step = env.step(torch.zeros(2, 7))
    assert not step.terminated[0]
    assert step.truncated[1]
    env.close()


def test_joints_stay_within_limits_and_the_end_effector_near_its_target(random_actions):
    env = make(12)
    env.reset(start=starts(12))
    push = torch.ones(12, 7)
    for action in (*random_actions(12, 30), *(push,) * 10, *(-push,) * 20):
        env.step(action)
        q = env.backend.qpos[:, :7]
        assert (q > env._control.panda.low - 0.05).all()
        assert (q < env._control.panda.high + 0.05).all()
        assert (env.target[0] - env.scene.end_effector).norm(dim=1).max() < 0.3
    env.close()


def test_unit_action_moves_the_end_effector_5_cm():
    env = make(1, tasks=("open_drawer",))
    env.reset(start=[StartState(task=0, seed=0)])
    begin = env.scene.end_effector.clone()
    move = torch.tensor([[0.5, 0.0, 0.5, 0.0, 0.0, 0.0, -1.0]])
    for action in (move, move, 0 * move, 0 * move, 0 * move):
        env.step(action)
    assert (env.scene.end_effector - begin)[0].tolist() == pytest.approx([0.05, 0.0, 0.05], abs=2e-3)
    env.close()


def test_shaped_reward_adds_progress():
    env = make(4, tasks=("pick",), reward="shaped")
    env.reset(start=starts(4, ("pick",)))
    expert, total = env.expert(noise=0.0, seed=0), torch.zeros(4)
    for _ in range(env.spec.max_steps):
        step = env.step(expert.act())
        total += step.reward
    assert step.success.all()
    assert (total > 1.3).all()
    assert (total < 2.0).all()
    env.close()


# Images and words


def test_observation_of_some_environments():
    env = make(6, cameras=("wrist", "agent"), image_size=(32, 48))
    env.reset(start=starts(6))
    everything, some = env.observe(), env.observe([4, 1])
    assert everything.images.shape == (6, 2, 32, 48, 3)
    assert everything.state.shape == (6, 8)
    assert torch.equal(some.images, everything.images[[4, 1]])
    assert torch.equal(some.instruction, everything.instruction[[4, 1]])
    assert (
        decode_instructions(some.instruction)[1] == sample_layout(ALL[1], 1, split="train", appearance=1.0).instruction
    )
    assert everything.state[0, 6:].tolist() == pytest.approx([0.04, -0.04], abs=1e-3)
    env.close()


def test_named_color_is_in_the_image():
    """Every block of a pick episode covers several pixels of its own hue in the 64x64 agent view."""
    env = make(1, tasks=("pick",), cameras=("agent",), appearance=0.0)
    channels = {"red": (0, (1, 2)), "green": (1, (0, 2)), "blue": (2, (0, 1))}
    found = 0
    for seed in range(12):
        env.reset(start=[StartState(task=0, seed=seed)])
        image = env.observe().images[0, 0].float()
        for color in set(sample_layout("pick", seed, split="train", appearance=0.0).colors) & set(channels):
            strong, weak = channels[color]
            mask = (image[..., strong] > 90) & (image[..., weak[0]] < 90) & (image[..., weak[1]] < 90)
            found += 1
            assert mask.sum() >= 12, (seed, color)
    assert found >= 10
    env.close()


def test_shadows_darken_the_table_and_nothing_else_changes():
    images = []
    for shadows in (False, True):
        env = make(1, tasks=("pick",), cameras=("agent",), shadows=shadows)
        env.reset(start=starts(1, ("pick",)))
        images.append(env.observe().images[0, 0].int())
        env.close()
    plain, shaded = images
    darker = ((plain - shaded).sum(-1) > 40).float().mean()
    assert 0.01 < darker < 0.4
    assert (shaded - plain).sum(-1).float().clamp(min=0).mean() < 5


def test_low_detail_changes_little():
    images = []
    for detail in ("full", "low"):
        env = make(4, tasks=("pick",), cameras=("agent", "wrist"), detail=detail)
        env.reset(start=starts(4, ("pick",)))
        images.append(env.observe().images.float())
        env.close()
    difference = (images[0] - images[1]).abs()
    assert 0 < difference.mean() < 3
    assert (difference > 30).float().mean() < 0.02


def test_without_cameras_no_rendering_library_is_loaded():
    code = """
import sys, torch
from sims.tabletop import TabletopConfig, TabletopEnv
from sims.vector_env import StartState
env = TabletopEnv(TabletopConfig(num_envs=1, cameras=()))
env.reset(start=[StartState(task=0, seed=0)])
env.step(torch.zeros(1, 7))
assert env.observe().images.shape == (1, 0, 64, 64, 3)
maps = open("/proc/self/maps").read()
assert "libEGL" not in maps and "libOSMesa" not in maps, "GL was loaded"
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_osmesa_draws_the_same_scene_as_egl():
    for library in ("libOSMesa.so.8", "libEGL.so.1"):
        try:
            ctypes.CDLL(library)
        except OSError:
            pytest.skip(f"{library} is not installed")
    code = """
import sys
import numpy as np
from sims.tabletop import TabletopConfig, TabletopEnv
from sims.vector_env import StartState
env = TabletopEnv(TabletopConfig(num_envs=1, renderer=sys.argv[1]))
env.reset(start=[StartState(task=0, seed=0)])
sys.stdout.buffer.write(env.observe().images.numpy().tobytes())
env.close()
"""
    egl, osmesa = (
        np.frombuffer(
            subprocess.run([sys.executable, "-c", code, gl], check=True, capture_output=True).stdout, np.uint8
        ).astype(int)
        for gl in ("egl", "osmesa")
    )
    assert egl.std() > 20
    assert np.abs(egl - osmesa).mean() < 1.0


def test_error_of_missing_rendering_libraries(monkeypatch):
    monkeypatch.setattr("sims.tabletop.render._LIBRARIES", {"egl": "libno-such-egl.so", "osmesa": "libno-such.so"})
    with pytest.raises(UserError, match=r"apt-get install -y libegl1 .*libosmesa6"):
        choose_gl("auto")


@pytest.mark.parametrize(
    ("variable", "renderers", "expected"),
    [
        ("egl", ("osmesa",), "MUJOCO_GL=egl chose egl for this process. Unset it, or set sim.renderer: egl"),
        ("", ("egl", "osmesa"), "This process renders with egl already. Set sim.renderer: egl"),
    ],
)
def test_error_of_a_second_rendering_platform_names_what_chose_the_first(variable, renderers, expected):
    try:
        ctypes.CDLL("libEGL.so.1")
    except OSError:
        pytest.skip("libEGL.so.1 is not installed")
    code = """
import sys
from sims.errors import UserError
from sims.tabletop.render import Renderer
try:
    opened = [Renderer(gl=gl, cameras=("agent",), image_size=(8, 8)) for gl in sys.argv[1:]]
except UserError as error:
    print(error)
"""
    others = {name: value for name, value in os.environ.items() if name != "PYOPENGL_PLATFORM"}
    command, env = [sys.executable, "-c", code, *renderers], others | {"MUJOCO_GL": variable}
    done = subprocess.run(command, check=True, capture_output=True, text=True, env=env)
    assert done.stdout.endswith(f"{expected}\n")
    assert "apt-get" not in done.stdout


def test_reset_of_no_environment_changes_nothing():
    env = make(2, reward="shaped")
    env.reset(start=starts(2))
    before = env.observe()
    env.reset([], start=[])
    after = env.observe()
    assert torch.equal(after.state, before.state)
    assert torch.equal(after.instruction, before.instruction)
    env.close()


def test_environment_that_was_never_reset_is_finished(random_actions):
    alone, beside = make(1), make(3)
    alone.reset(start=starts(1))
    beside.reset([1], start=starts(1))
    for action in random_actions(3, 12):
        expected, step = alone.step(action[1:2]), beside.step(action)
    assert step.terminated.tolist() == [True, bool(expected.terminated), True]
    assert step.reward.tolist() == [0, expected.reward.item(), 0]
    assert torch.equal(beside.observe([1]).state, alone.observe().state)
    alone.close()
    beside.close()


def test_errors_of_wrong_settings_name_the_field_and_the_allowed_values():
    with pytest.raises(ValueError, match=r"^tasks: got 'pik', allowed are reach, pick.*; did you mean 'pick'\?$"):
        TabletopConfig(tasks=("pik",))
    env = make(2)
    with pytest.raises(ValueError, match="task 9"):
        env.reset([0], start=[StartState(task=9, seed=0)])
    env.close()
