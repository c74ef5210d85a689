"""Windows of the replay against exact values and a naive computation; recorded episodes; exact resume; memory."""

import dataclasses
import multiprocessing
import resource
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
from torch import Tensor

from episodes.formats.importer import import_episodes
from episodes.formats.recording import ImportMapping
from episodes.formats.success import SuccessRule
from episodes.recorder import RecordedEnv
from episodes.schema import HUMAN, POLICY, new_ulid
from episodes.store import EpisodeStore
from policies.gaussian import GaussianPolicy, GaussianPolicyConfig, StateContext
from policies.policy import RobotSpec
from policies.registry import build_policy
from policies.residual.ensemble import EnsembleConfig
from policies.residual.on_base import context_of_zeros
from policies.residual.policy import ResidualConfig, ResidualPolicy, residual_on
from sims.chunk import step_chunk
from sims.errors import UserError
from sims.tensor_dataclass import TensorDataclass
from sims.vector_env import StartState
from tests.episodes.episode_examples import make_episode
from tests.policies.small_configs import CONFIGS, ENCODER
from tests.reach_env import CorrectedReach, ReachEnv
from tests.worlds import ChainEnv, PointEnv
from vla_rl.algorithms.off_policy import OffPolicy
from vla_rl.algorithms.off_policy_settings import OffPolicyConfig
from vla_rl.replay.augmentation import shift_images
from vla_rl.replay.demonstrations import _observe, chunk_sequences, recorded_chunk_sequences, replay_of
from vla_rl.replay.replay import Entries, Replay
from vla_rl.rollouts.collector import Collector
from vla_rl.runs.checkpoint import load_tree, save_tree

GAMMA = 0.9
SMALL = EnsembleConfig(hidden=(8,), members=2)


def entries(count: int, executed: list[int], terminated: list[int], reward: list[float], first: float = 0) -> Entries:
    """Where no chunk follows, time ran out."""
    return Entries(
        inputs=StateContext(state=first + torch.arange(count, dtype=torch.float32)[:, None]),
        action=torch.zeros(count, 4, 1),
        reward=torch.tensor(reward),
        num_executed=torch.tensor(executed),
        terminated=torch.tensor(terminated, dtype=torch.bool),
        policy_version=torch.zeros(count, dtype=torch.int64),
        timed_out=torch.tensor(executed) == 0,
        actor=torch.full((count,), POLICY),
        num_cloned=torch.tensor(executed),
    )


def replay(example: Entries, *, capacity: int, streams: int = 1) -> Replay:
    return Replay(
        example.inputs, (4, 1), streams=streams, capacity=capacity, gamma=GAMMA, seed=0, device=torch.device("cpu")
    )


def test_windows_by_hand() -> None:
    """The episodes that the module's docstring draws."""
    given = entries(7, [4, 4, 2, 4, 4, 3, 0], [0, 0, 1, 0, 0, 0, 0], [0.5, 0.0, 1.0, 0.0, 2.0, 3.0, 0.0])
    held = replay(given, capacity=7)
    held.extend(given)
    windows = held.windows(np.array([0, 1, 2, 3, 4, 5]), chunks=3)
    g4, g2 = GAMMA**4, GAMMA**2
    reward = [0.5 + g4 * g4, g4, 1.0, g4 * 2 + g4 * g4 * 3, 2 + g4 * 3, 3.0]
    discount = [0.0, 0.0, 0.0, g4 * g4 * GAMMA**3, g4 * GAMMA**3, GAMMA**3]
    np.testing.assert_allclose(windows.reward, reward, rtol=1e-6)
    np.testing.assert_allclose(windows.discount, discount, rtol=1e-6)
    assert windows.next_inputs.state[3:, 0].tolist() == [6, 6, 6]
    assert held.windows(np.array([0]), chunks=2).discount.item() == pytest.approx(g4 * g4)
    assert len(held) == 6 and g2 > 0


def test_a_full_ring_forgets_the_oldest_and_no_window_crosses_its_seam() -> None:
    given = entries(1, [4], [0], [1.0])
    held = replay(given, capacity=5)
    for step in range(8):
        held.append([0], entries(1, [4], [0], [1.0], first=step))
    assert len(held) == 4  # the newest has no known successor
    for start in held._starts:
        window = held.windows(np.array([start]), chunks=10)
        begin, end = window.inputs.state.item(), window.next_inputs.state.item()
        assert 3 <= begin < end == 7
        assert window.discount.item() == pytest.approx(GAMMA ** (4 * (end - begin)), rel=1e-6)


# -- the chain, whose exact value is known ----------------------------------------------------------------------------


def chain_policy(horizon: int, env: ChainEnv) -> ResidualPolicy:
    """Always walks right."""
    torch.manual_seed(0)
    base = GaussianPolicy(GaussianPolicyConfig(action_horizon=4), RobotSpec.of(env.spec))
    with torch.no_grad():
        base.mean[-2].weight.zero_()
        base.mean[-2].bias.fill_(1.0)
    return residual_on(base, ResidualConfig(action_horizon=horizon, hidden=(8,)))


@pytest.mark.parametrize("horizon", [1, 2, 4])
@pytest.mark.parametrize("max_steps", [5, 11])
def test_targets_are_the_exact_values_of_a_chain(max_steps: int, horizon: int) -> None:
    """V(cell) = gamma ** (steps to the last cell - 1), whatever ended the episode: success within a chunk, or time."""
    env = ChainEnv(num_envs=4, length=9, max_steps=max_steps)
    config = OffPolicyConfig(gamma=GAMMA, demonstration_share=0.0, capacity=120, critic=SMALL)
    learner = OffPolicy(config, chain_policy(horizon, env), env, seed=0)
    for _ in range(24 // horizon):
        learner._act()
    held = learner.replay

    def value(inputs: Any) -> np.ndarray:
        return GAMMA ** (env.length - 2 - inputs.features[:, 0].double().numpy())

    discounts = []
    for chunks in (1, 2, 5):
        windows = held.windows(held._starts, chunks=chunks)
        target = windows.reward.double().numpy() + windows.discount.double().numpy() * value(windows.next_inputs)
        np.testing.assert_allclose(target, value(windows.inputs), rtol=1e-6)
        discounts.append(windows.discount)
    assert (torch.cat(discounts) == 0).any() and (torch.cat(discounts) > 0).any()
    executed, ended = held.entries().num_executed, held.entries().terminated
    if horizon == 4:
        assert (executed[ended] < 4).any()  # success inside a chunk
    if max_steps == 5:
        last_chunk = executed[:-1] == (5 % horizon or horizon)  # time ran out inside it
        assert (last_chunk & (executed[1:] == 0)).any()


def test_returns_agree_with_a_sum_over_control_steps() -> None:
    """Random episodes, rewards of each control step, every window length."""
    rng = np.random.default_rng(0)
    given: list[tuple[int, bool, np.ndarray]] = []  # executed, terminated, rewards of the steps
    for _ in range(30):
        chunks, terminated = int(rng.integers(1, 5)), bool(rng.integers(2))
        for k in range(chunks):
            last = k == chunks - 1
            given.append((int(rng.integers(1, 5)) if last else 4, last and terminated, rng.normal(size=4)))
        if not terminated:
            given.append((0, False, np.zeros(4)))
    reward = [float((r[:n] * GAMMA ** np.arange(n)).sum()) for n, _, r in given]
    made = entries(len(given), [n for n, _, _ in given], [t for _, t, _ in given], reward)
    held = replay(made, capacity=len(given))
    held.extend(made)
    for chunks in (1, 2, 3, 7):
        for start in held._starts.tolist():
            total, step, at = 0.0, 0, start
            for _ in range(chunks):
                executed, terminated, rewards = given[at]
                total += sum(GAMMA ** (step + i) * rewards[i] for i in range(executed))
                step, at = step + executed, at + 1
                if terminated or at == len(given) or given[at][0] == 0:
                    break
            window = held.windows(np.array([start]), chunks=chunks)
            assert window.reward.item() == pytest.approx(total, rel=1e-5, abs=1e-6)
            assert window.discount.item() == pytest.approx(0.0 if terminated else GAMMA**step, rel=1e-6)
            assert terminated or window.next_inputs.state.item() == at


# -- recorded episodes ------------------------------------------------------------------------------------------------


@torch.no_grad()
def record(policy: ResidualPolicy, store: EpisodeStore, *, max_steps: int = 9) -> None:
    """Five episodes of ``policy`` without exploration, each observed when it acts."""
    env = RecordedEnv(ReachEnv(num_envs=1, max_steps=max_steps), store, source="policy", split="train")
    for seed in range(5):
        env.reset(start=[StartState(task=seed % 3, seed=seed)])
        state, done = policy.initial_state(1), False
        while not done:
            context, state = policy.encode(env.observe(), state)
            chunk = step_chunk(env, policy.act_from_noise(context, context.center), GAMMA)
            done = bool(chunk.done.all())
        env.observe()


def recorded_replay(policy: ResidualPolicy, path: Path) -> Replay:
    env = ReachEnv(num_envs=1)
    env.reset(start=[StartState(task=0, seed=0)])
    example = policy.store(policy.encode(env.observe(), policy.initial_state(1))[0])
    found = recorded_chunk_sequences([path], action_horizon=policy.spec.action_horizon, gamma=GAMMA)
    return replay_of(found, policy, example, gamma=GAMMA, seed=0)


@pytest.mark.parametrize("horizon", [1, 2, 4])
def test_recorded_episodes_are_the_experience_that_acting_would_have_stored(tmp_path: Path, horizon: int) -> None:
    torch.manual_seed(0)
    base = GaussianPolicy(GaussianPolicyConfig(action_horizon=4), RobotSpec.of(ReachEnv(num_envs=1).spec))
    policy = residual_on(base, ResidualConfig(action_horizon=horizon, hidden=(8,)))
    store = EpisodeStore(tmp_path / "store", create=True)
    record(policy, store)
    held = recorded_replay(policy, store.path)
    at = 0
    for entry in store.select():
        episode = store.read(entry.id)
        state = policy.initial_state(1)
        for k, step in enumerate(episode.observation_steps.tolist()):
            obs = ReachEnv(num_envs=1).observe()
            obs = dataclasses.replace(obs, state=torch.from_numpy(np.array(episode.state[k : k + 1])))
            context, state = policy.encode(obs, state)
            kept = held.entries()[at]
            if step == episode.num_steps and episode.terminated[-1]:
                continue
            torch.testing.assert_close(kept.inputs.features[None], context.features)
            torch.testing.assert_close(kept.inputs.center[None], context.center)
            executed = min(horizon, episode.num_steps - step)
            assert kept.num_executed == executed
            assert torch.equal(
                kept.action[:executed], torch.from_numpy(np.array(episode.action[step : step + executed]))
            )
            at += 1
    assert at == len(held.entries())


def corrected_residual(robot: RobotSpec) -> ResidualPolicy:
    """Two actions at a time of the eight of its base."""
    torch.manual_seed(0)
    return residual_on(build_policy(CONFIGS["gaussian"], robot), ResidualConfig(action_horizon=2, hidden=(16,)))


def test_where_a_person_has_acted_the_base_plans_anew() -> None:
    env = CorrectedReach(person=[0, 1])
    policy = corrected_residual(RobotSpec.of(env.spec))
    collector = Collector(env, policy, critic=None, gamma=GAMMA, failure_weight=0.0, seed=0)
    collector.act()
    env.person[:] = 0  # the person lets go
    obs = env.observe()
    fresh = policy.encode(obs, policy.initial_state(2))[0].center
    going_on = policy.encode(obs, collector._state)[0].center
    assert torch.equal(going_on[1], fresh[1])
    assert not torch.allclose(going_on[0], fresh[0])


def test_where_the_policy_drives_again_in_an_episode_the_base_plans_anew(tmp_path: Path) -> None:
    actor = np.array([POLICY] * 4 + [HUMAN] * 2 + [POLICY] * 6, dtype=np.uint8)
    episode = dataclasses.replace(make_episode(steps=12, every=2), actor=actor)
    policy = corrected_residual(RobotSpec.recorded(episode, ("front",)))
    (found,) = chunk_sequences(episode, action_horizon=2, gamma=GAMMA)
    with torch.no_grad():
        example = policy.store(context_of_zeros(policy))
        fresh = [policy.encode(_observe(policy, [(episode, i)]), policy.initial_state(1))[0].center for i in range(6)]
    held = replay_of([found], policy, example, gamma=GAMMA, seed=0).entries().inputs.center[:6]
    anew = [torch.allclose(center, one[0], atol=1e-6) for center, one in zip(held, fresh, strict=True)]
    assert anew == [True, False, False, True, False, False]


def test_every_observation_of_an_episode_is_used(tmp_path: Path) -> None:
    """Observed at every step, with an action horizon of four: four sequences."""
    env = ReachEnv(num_envs=1, max_steps=9)
    store = EpisodeStore(tmp_path / "store", create=True)
    recorder = RecordedEnv(env, store, source="expert", split="train")
    recorder.reset(start=[StartState(task=0, seed=0)])
    recorder.observe()
    for _ in range(9):
        recorder.step(torch.zeros(1, 2))
        recorder.observe()
    episode = store.read(store.select()[0].id)
    found = list(chunk_sequences(episode, action_horizon=4, gamma=GAMMA))
    observed = sorted(int(i) for chunks in found for i in chunks.observation)
    assert observed == [*range(9), 9, 9, 9, 9]  # the last ends all
    assert sorted(map(len, found)) == [3, 3, 3, 4]
    assert all(chunks.num_executed[-1] == 0 for chunks in found)  # the time limit: the last observation has no chunk
    policy = residual_on(
        GaussianPolicy(GaussianPolicyConfig(action_horizon=4), RobotSpec.of(env.spec)), ResidualConfig(action_horizon=4)
    )
    assert len(recorded_replay(policy, store.path)) == 9


def test_a_store_that_was_observed_too_rarely_is_refused(tmp_path: Path) -> None:
    """At steps 0, 4 and 8, for a policy that observes at every step."""
    torch.manual_seed(0)
    policy = residual_on(
        GaussianPolicy(GaussianPolicyConfig(action_horizon=4), RobotSpec.of(ReachEnv(num_envs=1).spec)),
        ResidualConfig(action_horizon=4, hidden=(8,)),
    )
    store = EpisodeStore(tmp_path / "store", create=True)
    record(policy, store, max_steps=8)
    assert {step for entry in store.select() for step in store.read(entry.id).observation_steps} == {0, 4, 8}
    shorter = residual_on(policy.base, ResidualConfig(action_horizon=1, hidden=(8,)))
    with pytest.raises(UserError, match=r"followed by one 1 control steps later.*observe_every that divides 1"):
        recorded_replay(shorter, store.path)


def test_an_episode_of_another_robot_behind_the_first_is_named(tmp_path: Path) -> None:
    policy = residual_that_reaches()
    store = EpisodeStore(tmp_path / "store", create=True)
    record(policy, store)
    one = store.read(store.select()[0].id)
    wider = np.concatenate([one.state, one.state], axis=1)
    other = store.add(dataclasses.replace(one, id=new_ulid(), state=wider, seed=99))
    with pytest.raises(UserError, match=rf"episode {other}: .*state_dim 8, not 4.*give stores of one robot"):
        recorded_replay(policy, store.path)


def residual_that_reaches() -> ResidualPolicy:
    """Acts one control step at a time."""
    torch.manual_seed(0)
    base = GaussianPolicy(GaussianPolicyConfig(action_horizon=1), RobotSpec.of(ReachEnv(num_envs=1).spec))
    return residual_on(base, ResidualConfig(action_horizon=1, hidden=(8,)))


def import_unrewarded(folder: Path, *, success: SuccessRule) -> EpisodeStore:
    """One demonstration of 5 actions, in a robomimic file without rewards."""
    rng = np.random.default_rng(0)
    with h5py.File(folder / "demos.hdf5", "w") as file:
        demo = file.create_group("data/demo_0")
        demo["actions"], demo["obs/state"] = rng.uniform(-1, 1, (5, 2)), rng.normal(size=(5, 4))
    store = EpisodeStore(folder / "store", create=True)
    mapping = ImportMapping(state=("state",), instruction="reach", control_hz=10.0, success=success)
    import_episodes(folder / "demos.hdf5", store, mapping)
    return store


def test_an_imported_demonstration_without_rewards_is_paid_for_its_success(tmp_path: Path) -> None:
    store = import_unrewarded(tmp_path, success="recorded")
    held = recorded_replay(residual_that_reaches(), store.path).entries()
    assert held.reward.tolist() == [0.0, 0.0, 0.0, 1.0]
    assert held.terminated.tolist() == [False, False, False, True]


def test_imported_episodes_of_which_nothing_tells_the_outcome_are_refused_until_they_are_labelled(
    tmp_path: Path,
) -> None:
    store = import_unrewarded(tmp_path, success="none")
    with pytest.raises(UserError, match=r"no rewards and no success.*label them"):
        recorded_replay(residual_that_reaches(), store.path)
    store.label(store.select()[0].id, "success", True, author="me")
    assert recorded_replay(residual_that_reaches(), store.path).entries().reward.tolist() == [0.0, 0.0, 0.0, 1.0]


def test_a_labelled_episode_is_rewarded_by_its_label(tmp_path: Path) -> None:
    """Of two recorded successes, each with reward 1 at its end, one is labelled a failure."""
    env, store = ReachEnv(num_envs=2), EpisodeStore(tmp_path, create=True)
    recorder = RecordedEnv(env, store, source="expert", split="train")
    expert = env.expert(noise=0.0, seed=0)
    recorder.reset(start=[StartState(task=0, seed=0), StartState(task=1, seed=1)])
    for _ in range(40):
        recorder.observe()
        recorder.step(expert.act())
    recorder.commit()
    first, second = store.select()
    assert first.success and second.success
    rewards = [[0.0] * (entry.steps - 1) + [1.0] for entry in (first, second)]
    assert recorded_replay(residual_that_reaches(), tmp_path).entries().reward.tolist() == rewards[0] + rewards[1]
    store.label(first.id, "success", False, author="me")
    assert (
        recorded_replay(residual_that_reaches(), tmp_path).entries().reward.tolist() == [0.0] * first.steps + rewards[1]
    )


# -- memory and state -------------------------------------------------------------------------------------------------


def test_images_are_held_once_as_bytes_and_not_at_all_where_the_encoder_is_frozen() -> None:
    env = PointEnv(num_envs=2)
    base_config = CONFIGS["denoising"]
    sizes = {}
    for name, encoder in (("features", None), ("frames", ENCODER)):
        policy = residual_on(
            build_policy(base_config, RobotSpec.of(env.spec)), ResidualConfig(action_horizon=8, encoder=encoder)
        )
        config = OffPolicyConfig(demonstration_share=0.0, capacity=100, critic=SMALL)
        learner = OffPolicy(config, policy, env, seed=0)
        tensors = list(learner.replay.entries().inputs.tensors())
        images = [tensor for tensor in tensors if tensor.dtype == torch.uint8 and tensor.ndim == 5]
        assert len(images) == (encoder is not None)
        sizes[name] = learner.replay.nbytes / 100
    frame = 32 * 32 * 3
    assert frame < sizes["frames"] < frame + 700
    assert sizes["features"] < 4 * (32 * 3 + 2 * 16) + 200


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stored(TensorDataclass):
    x: Tensor


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float32])
def test_memory_is_taken_as_entries_are_written(dtype: torch.dtype) -> None:
    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()

    before = resident()
    replay = empty_replay(Stored(x=torch.zeros(1, 2**20, dtype=dtype)), capacity=1_000)
    assert replay.nbytes >= 1_000 * 2**20 * dtype.itemsize and resident() - before < 100 * 2**20
    assert not replay.entries().inputs[[0, 999]].x.any()  # type: ignore[attr-defined]


def test_a_replay_that_the_machine_cannot_hold_is_refused() -> None:
    with pytest.raises(
        UserError, match=r"a replay of 1,000,000,000 entries takes \d+\.\d GB.*lower algorithm.capacity"
    ):
        empty_replay(Stored(x=torch.zeros(1, 10_000)), capacity=10**9)


def empty_replay(example: TensorDataclass, *, capacity: int) -> Replay:
    return Replay(example, (1, 1), streams=1, capacity=capacity, gamma=0.9, seed=0, device=torch.device("cpu"))


def test_longer_instructions_widen_what_is_held() -> None:
    env = PointEnv(num_envs=1)
    env.reset(start=[StartState(task=0, seed=0)])
    obs = env.observe()
    example = Entries(
        inputs=obs,
        action=torch.zeros(1, 4, 1),
        reward=torch.zeros(1),
        num_executed=torch.tensor([4]),
        terminated=torch.tensor([False]),
        policy_version=torch.tensor([0]),
        timed_out=torch.tensor([False]),
        actor=torch.tensor([POLICY]),
        num_cloned=torch.tensor([4]),
    )
    held = replay(example, capacity=4)
    wide = dataclasses.replace(obs, instruction=torch.full((1, 128), 7, dtype=torch.uint8))
    held.append([0], example)
    held.append([0], dataclasses.replace(example, inputs=wide))
    held.append([0], example)
    kept = held.entries().inputs.instruction
    assert torch.equal(kept[0, :96], obs.instruction[0]) and torch.equal(kept[2, :96], obs.instruction[0])
    assert (kept[1] == 7).all() and (kept[[0, 2], 96:] == 0).all() and len(kept) == 4


def test_a_resumed_replay_draws_the_same_windows(tmp_path: Path) -> None:
    given = entries(1, [4], [0], [1.0])
    whole, resumed = replay(given, capacity=6, streams=2), replay(given, capacity=6, streams=2)
    for step in range(5):
        whole.append([0], entries(1, [4], [0], [1.0], first=step))
        whole.append([0, 1], entries(2, [4, 4], [0, 0], [1.0, 2.0], first=10 * step))
    whole.sample(4, chunks=2)
    save_tree(tmp_path / "state.safetensors", whole.state_dict())
    resumed.load_state_dict(load_tree(tmp_path / "state.safetensors"))
    for _ in range(3):
        one, two = whole.sample(8, chunks=2), resumed.sample(8, chunks=2)
        assert all(torch.equal(a, b) for a, b in zip(one.tensors(), two.tensors(), strict=True))
        for held in (whole, resumed):
            held.append([1], given)
    with pytest.raises(UserError, match="had 2 environments, now there are 3"):
        replay(given, capacity=6, streams=3).load_state_dict(whole.state_dict())


def test_images_are_shifted_with_their_border_repeated() -> None:
    env = PointEnv(num_envs=64)
    env.reset(start=[StartState(task=0, seed=seed) for seed in range(64)])
    obs = env.observe()
    moved = shift_images(obs, 3, torch.Generator().manual_seed(0))
    assert torch.equal(moved.state, obs.state)
    found = set()
    for before, after in zip(obs.images[:, 0], moved.images[:, 0], strict=True):
        shifts = [
            (y, x)
            for y in range(-3, 4)
            for x in range(-3, 4)
            if torch.equal(after, before[(torch.arange(32) + y).clamp(0, 31)][:, (torch.arange(32) + x).clamp(0, 31)])
        ]
        assert shifts
        found.update(shifts)
    assert len(found) > 20


def test_all_images_of_a_policy_s_memory_are_shifted_alike() -> None:
    """Diffusion Policy stores those of several decisions."""
    env = PointEnv(num_envs=16)
    policy = build_policy(CONFIGS["diffusion_policy"], RobotSpec.of(env.spec))
    env.reset(start=[StartState(task=0, seed=seed) for seed in range(16)])
    obs = env.observe()
    with torch.no_grad():
        record = policy.store(policy.encode(obs, policy.remember(obs, policy.initial_state(16)))[0])
    moved = shift_images(record, 3, torch.Generator().manual_seed(0))
    alone = shift_images(obs, 3, torch.Generator().manual_seed(0))
    assert not torch.equal(moved.images, record.images) and torch.equal(moved.state, record.state)
    for frame in range(moved.images.shape[1]):
        assert torch.equal(moved.images[:, frame], alone.images)


def test_returns_to_go_by_hand() -> None:
    """The episodes that the module's docstring draws, then one that goes on: its return is not known."""
    given = entries(
        9, [4, 4, 2, 4, 4, 3, 0, 4, 4], [0, 0, 1, 0, 0, 0, 0, 0, 0], [0.5, 0.0, 1.0, 0.0, 2.0, 3.0, 0.0, 1.0, 1.0]
    )
    held = replay(given, capacity=9)
    held.extend(given)
    found = held.windows(np.array([0, 2, 3, 5, 7]), chunks=1, returns=True).return_to_go
    g4 = GAMMA**4
    assert found is not None
    np.testing.assert_allclose(found, [0.5 + g4 * g4, 1.0, g4 * 2 + g4 * g4 * 3, 3.0, -np.inf], rtol=1e-6)
    assert held.windows(np.array([0]), chunks=1).return_to_go is None


def test_actions_after_a_chunk_are_those_of_the_next_chunks() -> None:
    """As long as the episode goes on and the same one acts; then the last one is repeated, and not cloned."""
    given = entries(6, [4, 4, 3, 4, 4, 0], [0, 0, 1, 0, 0, 0], [0.0] * 6)
    numbers = 10.0 * torch.arange(6)[:, None, None] + torch.arange(4)[:, None]
    given = dataclasses.replace(given, action=numbers)
    expected = [
        ([10, 11, 12, 13, 20, 21], 10),
        ([20, 21, 22, 23, 23, 23], 7),
        ([23] * 6, 3),
        ([40, 41, 42, 43, 43, 43], 8),
        ([43] * 6, 4),
    ]
    for actor, first in ((POLICY, expected[0]), (HUMAN, ([3] * 6, 4))):
        held = replay(given, capacity=6)
        held.extend(dataclasses.replace(given, actor=torch.where(torch.arange(6) == 1, actor, POLICY)))
        windows = held.windows(np.arange(5), chunks=2, further=6)
        targets = windows.targets
        assert torch.equal(targets.action[:, :4], numbers[:5])
        found = list(zip(targets.action[:, 4:, 0].tolist(), targets.mask.sum(1).tolist(), strict=True))
        assert [found[0], *found[2:]] == [first, *expected[2:]]
        assert found[1] == (expected[1] if actor == POLICY else ([13] * 6, 4))
        assert torch.equal(windows.num_executed, given.num_executed[:5])
    held.cut_off([0])
    assert held.windows(np.array([0]), chunks=1).targets.action.shape == (1, 4, 1)


@pytest.mark.parametrize("penalty", [0.0, -1.0])
def test_the_return_behind_a_time_limit_is_not_known_where_rewards_are_negative(penalty: float) -> None:
    """-1 a step goes on for ever: the sum until the limit is more than the value, which Cal-QL would calibrate by.

    One episode succeeds after two chunks, the next one times out after two.
    """
    given = entries(5, [4, 4, 4, 4, 0], [0, 1, 0, 0, 0], [penalty, 1.0, penalty, penalty, 0.0])
    held = replay(given, capacity=5)
    held.extend(given)
    g4 = GAMMA**4
    known = [penalty + g4, 1.0, penalty * (1 + g4), penalty]
    expected = {True: known, False: known if penalty == 0 else [*known[:2], -np.inf, -np.inf]}
    for ends in (False, True, False):
        windows = held.windows(np.arange(4), chunks=1, returns=True, time_limit_ends=ends)
        assert windows.return_to_go is not None
        np.testing.assert_allclose(windows.return_to_go, expected[ends], rtol=1e-6)
        np.testing.assert_allclose(windows.discount, [g4, 0, g4, 0 if ends else g4], rtol=1e-6)
    found = held.return_range()
    assert found is not None
    np.testing.assert_allclose(found, (min(known), 1.0), rtol=1e-6)


def test_a_return_is_known_once_its_episode_has_ended() -> None:
    held = replay(entries(1, [4], [0], [0.0]), capacity=4)
    held.extend(entries(3, [4, 4, 4], [0, 0, 0], [0.5, 1.0, 0.0]))
    for end, expected in ((False, [-np.inf, -np.inf]), (True, [0.5 + GAMMA**4 + 2 * GAMMA**12, 1 + 2 * GAMMA**8])):
        if end:
            held.extend(entries(1, [4], [1], [2.0]))
        for _ in range(2):
            found = held.windows(np.array([0, 1]), chunks=1, returns=True).return_to_go
            assert found is not None
            np.testing.assert_allclose(found, expected, rtol=1e-6)


def write_reaches(path: Path, first: int, stop: Any) -> None:
    """A collector's process: episodes of the expert, one after another, until it is told to stop."""
    torch.set_num_threads(1)
    env = ReachEnv(num_envs=1)
    recorder = RecordedEnv(env, EpisodeStore(path, create=True), source="expert", split="train")
    expert, seed = env.expert(noise=0.3, seed=first), first
    while not stop.is_set():
        recorder.reset(start=[StartState(task=seed % 3, seed=seed)])
        for _ in range(40):
            recorder.observe()
            if bool(recorder.step(expert.act()).done):
                break
        recorder.commit()
        seed += 1


@pytest.mark.slow
def test_a_learner_reads_while_four_processes_write(tmp_path: Path) -> None:
    """What it reads is whole episodes, never fewer than before, and in the end all of them."""
    context, path = multiprocessing.get_context("spawn"), tmp_path / "store"
    EpisodeStore(path, create=True)
    stop = context.Event()
    writers = [context.Process(target=write_reaches, args=(path, 1000 * index, stop)) for index in range(4)]
    for writer in writers:
        writer.start()
    env = ReachEnv(num_envs=1)
    policy = residual_on(build_policy(CONFIGS["gaussian"], RobotSpec.of(env.spec)), ResidualConfig(hidden=(8,)))
    counts = list[int]()
    while len(counts) < 4 or counts[-1] < 40:
        with EpisodeStore(path) as store:
            known = len(store.entries())
        if known:
            held = recorded_replay(policy, path)
            counts.append(int((held.entries().terminated | (held.entries().num_executed == 0)).sum()))
            assert counts[-1] >= known and torch.isfinite(held.sample(64, chunks=3).reward).all()
    stop.set()
    for writer in writers:
        writer.join()
        assert writer.exitcode == 0
    assert counts == sorted(counts)
    with EpisodeStore(path) as store:
        episodes = [store.read(entry.id) for entry in store.select()]
        assert not store.corrupt
    held = recorded_replay(policy, path)
    whole = sum(episode.num_steps + (not episode.terminated[-1]) for episode in episodes)
    assert int(held.count.sum()) == whole
    assert {episode.seed // 1000 for episode in episodes} == {0, 1, 2, 3}
