"""What every registered policy must do: the contract of policies.policy.Policy."""

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from episodes.sampler import Targets
from policies.audit import audit_log_prob
from policies.bundle import load_bundle, save_bundle
from policies.denoising.chunk_policy import DenoisedChunks
from policies.policy import Policy, RobotSpec, copy_trained, set_frozen, trained_parameters
from policies.registry import BUILT_IN, POLICIES, build_policy
from sims.errors import UserError
from sims.vector_env import Observation, encode_instructions
from tests.policies.encoding import encode
from tests.policies.protocols import check_protocols
from tests.policies.small_configs import CONFIGS

ROBOT = RobotSpec(action_dim=3, state_dim=5, cameras=("front",), image_size=(32, 32), control_hz=20.0)


def test_every_registered_policy_is_tested() -> None:
    assert {type(config) for config in CONFIGS.values()} == set(POLICIES)


@pytest.fixture(params=CONFIGS)
def policy(request: pytest.FixtureRequest) -> Policy[Any, Any]:
    torch.manual_seed(0)
    made = build_policy(CONFIGS[request.param], ROBOT)
    made.fit_normalizer(torch.randn(50, 5), torch.rand(50, 3) - 0.4)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    return made


def observe(batch: int, seed: int = 0) -> Observation:
    generator = torch.Generator().manual_seed(seed)
    return Observation(
        images=torch.randint(0, 256, (batch, 1, 32, 32, 3), generator=generator, dtype=torch.uint8),
        state=torch.randn(batch, 5, generator=generator),
        instruction=encode_instructions(
            [("push the red block", "pick up the blue cube " * 20)[i % 2] for i in range(batch)]
        ),
    )


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_a_sample_scores_as_it_was_drawn(policy: Policy[Any, Any]) -> None:
    context = encode(policy, observe(6))
    sample = policy.sample(context, generator())
    assert sample.action.shape == (6, 8, 3)
    assert sample.action.abs().max() <= 1
    assert sample.log_prob.dtype == torch.float32
    audit_log_prob(policy, context, sample, tolerance=1e-4)
    entropy = policy.entropy(context, sample.trace)
    assert entropy.shape == sample.log_prob.shape and entropy.requires_grad == policy.learns_spread
    assert policy.value_features(context).shape == (6, policy.spec.value_dim)
    assert not policy.value_features(context).requires_grad


def test_the_critic_sees_the_robot_s_state(policy: Policy[Any, Any]) -> None:
    """Also of pi0 and OpenVLA, whose prefixes do not hold it; from a kept record too."""
    set_frozen(policy, tuple(policy.parameter_groups())[1:])
    obs = observe(2)
    moved = dataclasses.replace(obs, state=obs.state + 1.0)
    records = [policy.store(encode(policy, one)) for one in (obs, moved)]
    features, others = (policy.value_features(policy.restore(record)) for record in records)
    assert (others - features).abs().max() > 0.01


def test_a_stored_record_gives_the_same_log_prob_in_any_order(policy: Policy[Any, Any]) -> None:
    """Also of the third observation of an episode, when a policy with memory has some."""
    for frozen in ((), tuple(policy.parameter_groups())[1:]):
        set_frozen(policy, frozen)
        state = policy.initial_state(6)
        for seed in (1, 2):
            _, state = policy.encode(observe(6, seed), state)
        context, _ = policy.encode(observe(6), state)
        sample = policy.sample(context, generator())
        order = torch.tensor([4, 1, 5])
        record = policy.store(context)[order]
        log_prob = policy.log_prob(policy.restore(record), sample.trace[order])
        torch.testing.assert_close(log_prob, sample.log_prob[order], atol=3e-4, rtol=1e-4)


def test_a_stored_record_is_read_with_the_present_weights(policy: Policy[Any, Any]) -> None:
    set_frozen(policy, ())
    context = encode(policy, observe(6))
    sample, record = policy.sample(context, generator()), policy.store(context)
    with torch.no_grad():
        for parameter in trained_parameters(policy):
            parameter.add_(0.02 * torch.randn_like(parameter))
    log_prob = policy.log_prob(policy.restore(record), sample.trace)
    expected = policy.log_prob(encode(policy, observe(6)), sample.trace)
    torch.testing.assert_close(log_prob, expected, atol=3e-4, rtol=1e-4)
    assert not torch.allclose(log_prob, sample.log_prob, atol=1e-2)


def test_steps_that_are_not_trained_keep_the_weights_that_exploration_begins_with(policy: Policy[Any, Any]) -> None:
    """DPPO: before exploration the copy is as cloned, whatever it was made of; then it does not follow the training."""
    if not isinstance(policy, DenoisedChunks) or not policy.explore_kernel.needs_frozen_copy:
        return
    obs = observe(3)
    x_t, t = torch.randn(3, 1, *policy.spec.noise_shape), torch.full((3, 1), 0.5)

    def predicted() -> tuple[torch.Tensor, torch.Tensor]:
        context = encode(policy, obs)
        frozen = policy.frozen_predict(context)
        assert frozen is not None
        return policy.predict(context)(x_t, t).target.detach(), frozen(x_t, t).target

    policy.prepare_to_explore()
    present, early = predicted()
    torch.testing.assert_close(early, present)
    with torch.no_grad():
        for parameter in trained_parameters(policy):
            parameter.add_(0.05 * torch.randn_like(parameter))
    present, after = predicted()
    torch.testing.assert_close(after, early)
    assert not torch.allclose(present, early, atol=1e-2)


def test_the_same_weights_act_alike_in_other_units(policy: Policy[Any, Any]) -> None:
    """States and actions of the demonstrations, and what is observed, in units of another size and origin."""
    state, action, obs = torch.randn(50, 5), torch.rand(50, 3) - 0.4, observe(4)
    policy.fit_normalizer(state, action)
    one = policy.act(encode(policy, obs), generator())
    policy.fit_normalizer(10 * state + 3, 0.5 * action + 0.1)
    other = policy.act(encode(policy, dataclasses.replace(obs, state=10 * obs.state + 3)), generator())
    inside = one.abs() < 1
    assert inside.any()
    torch.testing.assert_close(other[inside], (0.5 * one + 0.1)[inside], atol=1e-4, rtol=1e-4)


def test_every_trained_parameter_gets_a_gradient_and_no_frozen_one(policy: Policy[Any, Any]) -> None:
    first = next(iter(policy.parameter_groups()))
    set_frozen(policy, (first,))
    context = policy.restore(policy.store(encode(policy, observe(6))))
    sample = policy.sample(context, generator())
    targets = Targets(
        action=sample.action, mask=torch.ones(6, 8), future=torch.randn(6, len(policy.spec.future_steps) + 1, 5)
    )
    loss = policy.bc_loss(context, targets, generator()) + policy.log_prob(context, sample.trace).mean()
    loss.backward()
    for name, parameters in policy.parameter_groups().items():
        for parameter in parameters:
            assert (parameter.grad is not None) == (name != first), name
    assert len(trained_parameters(policy)) == sum(
        len(list(p)) for n, p in policy.parameter_groups().items() if n != first
    )


def test_protocols_see_the_same_of_it_in_every_python(policy: Policy[Any, Any]) -> None:
    check_protocols(policy)


def test_an_unknown_parameter_group_is_named(policy: Policy[Any, Any]) -> None:
    with pytest.raises(UserError, match=r"no parameter group 'backbone'; it has \w+"):
        set_frozen(policy, ("backbone",))


def test_a_copy_shares_what_is_frozen(policy: Policy[Any, Any]) -> None:
    first = next(iter(policy.parameter_groups()))
    set_frozen(policy, (first,))
    copied = copy_trained(policy)
    for (name, parameter), other in zip(policy.named_parameters(), copied.parameters(), strict=True):
        assert (parameter is other) == (not parameter.requires_grad), name
    assert all(one is other for one, other in zip(policy.buffers(), copied.buffers(), strict=True))


def test_padding_changes_no_loss(policy: Policy[Any, Any]) -> None:
    context = encode(policy, observe(4))
    mask = torch.ones(4, 8)
    mask[:, 5:] = 0
    action = torch.rand(4, 8, 3) - 0.5
    other = torch.where(mask[..., None] > 0, action, 0.3)
    one, two = (policy.bc_loss(context, Targets(action=a, mask=mask), generator()) for a in (action, other))
    if policy.config.name in ("categorical", "gaussian", "openvla"):  # a denoising chunk attends to its padding
        torch.testing.assert_close(one, two)
    assert policy.bc_loss(context, Targets(action=action, mask=torch.zeros(4, 8)), generator()).item() == 0


def test_a_bundle_brings_it_back(policy: Policy[Any, Any], tmp_path: Path) -> None:
    save_bundle(policy, tmp_path)
    loaded = load_bundle(tmp_path, robot=ROBOT)
    assert loaded.config == policy.config and loaded.spec == policy.spec
    obs = observe(3)
    assert torch.equal(loaded.act(encode(loaded, obs), generator()), policy.act(encode(policy, obs), generator()))


def test_a_prefix_longer_than_trained_is_refused(policy: Policy[Any, Any]) -> None:
    with pytest.raises(ValueError, match="max_prefix 0"):
        policy.act(encode(policy, observe(2)), generator(), torch.zeros(2, 1, 3))


def test_heads_that_do_not_divide_the_width_are_refused() -> None:
    with pytest.raises(ValueError, match="multiple of heads"):
        dataclasses.replace(CONFIGS["categorical"], heads=5)


def test_temperature_flattens_exploration_alone() -> None:
    """Of one policy at two temperatures: the same deployed action, higher entropy at the higher temperature."""
    policies = []
    for temperature in (0.5, 2.0):
        torch.manual_seed(0)
        config = dataclasses.replace(CONFIGS["categorical"], temperature=temperature)
        policies.append(build_policy(config, ROBOT))
    contexts = [encode(policy, observe(4)) for policy in policies]
    acted = [policy.act(context, generator()) for policy, context in zip(policies, contexts, strict=True)]
    assert torch.equal(*acted)
    entropy = [
        policy.entropy(context, policy.sample(context, generator()).trace).mean()
        for policy, context in zip(policies, contexts, strict=True)
    ]
    assert entropy[0] < entropy[1]


PACKAGES = ("sims", "episodes", "policies", "world_models", "real_robot", "vla_rl")
ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("config_class", BUILT_IN, ids=lambda config_class: config_class.__name__)
def test_a_policy_is_known_to_its_file_and_the_registry_alone(config_class: type) -> None:
    """No source file of the packages but these names its class, its configuration or its module.

    A family of published models has a folder of its own.
    """
    constructor: Any = BUILT_IN[config_class]
    module = config_class.__module__.replace(".", r"\.")
    pattern = re.compile(rf"\b({constructor.__name__}|{config_class.__name__}|{module})\b")
    named = {
        path.relative_to(ROOT).as_posix()
        for package in PACKAGES
        for path in (ROOT / package).rglob("*.py")
        if pattern.search(path.read_text())
    }
    own = config_class.__module__.replace(".", "/") + ".py"
    folder = own.rpartition("/")[0] + "/" if own.startswith("policies/pretrained/") else own
    assert own in named and "policies/registry.py" in named
    assert [name for name in named if not name.startswith(folder) and name != "policies/registry.py"] == []
