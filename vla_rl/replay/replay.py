"""Experience in the host's memory, as one entry per observation, from which windows of several chunks are drawn.

An entry is what the policy stored of one observation (features, or a uint8 frame: each observation once) and the
action chunk that followed. Entries of one stream (an environment, or the recorded episodes one after another) lie in
order in a ring; the true successor of a chunk is the next entry. An entry with ``num_executed`` 0 is an observation
that no known chunk followed: where time ran out (``timed_out``), the simulator failed, others acted than are learned
from, or an environment that cannot be captured began a new episode. Beyond the latter three an episode's return is not
known.

    entry          0   1   2   3   4   5   6      chunks of 4 steps, two episodes
    num_executed   4   4   2   4   4   3   0      the first succeeds at its step 10, the second times out after 11 steps
    terminated             x                      window (start 1, 3 chunks): rewards of 6 steps, no bootstrap
                                                  window (start 4, 3 chunks): rewards of 7 steps, bootstrap at entry 6
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Float64, Int, Int64
from torch import Tensor
from torch.nn import functional

from episodes.sampler import Targets
from policies.policy import executed_mask
from sims.devices.crossing import crossing
from sims.errors import UserError
from sims.tensor_dataclass import TensorDataclass
from vla_rl.memory import host_memory

SEVERAL = -1


@dataclass(frozen=True, kw_only=True)
class Entries(TensorDataclass):
    """``action``: as executed. ``reward``: discounted within the chunk, whose own discount is gamma ** num_executed.

    ``policy_version``: of the weights that acted, -1 where the policy did not.
    ``timed_out``: the last observation of an episode whose time ran out. ``actor``: who chose all of its
    actions, an index into ``episodes.schema.ACTORS``; SEVERAL: not one of them alone. ``num_cloned``: of the executed
    actions, how many from the first on may be cloned.
    """

    inputs: TensorDataclass
    action: Float[Tensor, "*B H A"]
    reward: Float[Tensor, "*B"]
    num_executed: Int[Tensor, "*B"]
    terminated: Bool[Tensor, "*B"]
    policy_version: Int[Tensor, "*B"]
    timed_out: Bool[Tensor, "*B"]
    actor: Int[Tensor, "*B"]
    num_cloned: Int[Tensor, "*B"]


@dataclass(frozen=True, kw_only=True)
class Windows(TensorDataclass):
    """``reward``: the discounted sum over the window; ``discount``: of the value at its end, 0 where the task ended.

    ``action``, ``num_executed`` and ``actor`` are of its first chunk. ``return_to_go``: the discounted sum from its
    start to the episode's end, -inf where that is not known; None where it was not asked for.
    ``further``: actions after those of the first chunk, where a policy predicts more than it executes; ``num_cloned``:
    of all these from the first on, how many may be cloned. Those behind repeat the last one.
    """

    inputs: TensorDataclass
    action: Float[Tensor, "B H A"]
    num_executed: Int[Tensor, " B"]
    num_cloned: Int[Tensor, " B"]
    actor: Int[Tensor, " B"]
    reward: Float[Tensor, " B"]
    discount: Float[Tensor, " B"]
    next_inputs: TensorDataclass
    return_to_go: Float[Tensor, " B"] | None = None
    further: Float[Tensor, "B more A"] | None = None

    @property
    def targets(self) -> Targets:
        """Of cloning."""
        action = self.action if self.further is None else torch.cat([self.action, self.further], dim=1)
        return Targets(action=action, mask=executed_mask(self.num_cloned, action.shape[1]).float())

    def scaled(self, scale: float) -> Windows:
        """With rewards and returns multiplied."""
        returns = None if self.return_to_go is None else scale * self.return_to_go
        return replace(self, reward=scale * self.reward, return_to_go=returns)


class Replay:
    """``streams`` rings that hold ``capacity`` entries together.

    ``example``: a stored record of any number of observations, for the shapes. ``device``: of the windows that are
    drawn. ``state_dict`` holds the entries and the generator: after a resume the same windows are drawn. Memory is
    taken as entries are written; UserError where the machine has too little for all of them.
    """

    def __init__(
        self,
        example: TensorDataclass,
        action_shape: tuple[int, int],
        *,
        streams: int,
        capacity: int,
        gamma: float,
        seed: int,
        device: torch.device,
    ) -> None:
        self.streams, self.length, self.gamma, self.device = streams, -(-capacity // streams), gamma, device
        self.count = np.zeros(streams, dtype=np.int64)  # entries ever written to each stream
        self.rng = np.random.default_rng(seed)
        total = streams * self.length
        _check_memory(example, total)
        self._entries = Entries(
            inputs=example.map(lambda tensor: _zeros((total, *tensor.shape[1:]), tensor.dtype)),
            action=torch.zeros(total, *action_shape),
            reward=torch.zeros(total),
            num_executed=torch.zeros(total, dtype=torch.int64),
            terminated=torch.zeros(total, dtype=torch.bool),
            policy_version=torch.zeros(total, dtype=torch.int64),
            timed_out=torch.zeros(total, dtype=torch.bool),
            actor=torch.full((total,), SEVERAL),
            num_cloned=torch.zeros(total, dtype=torch.int64),
        )
        self._index()

    def __len__(self) -> int:
        """Windows that can be drawn."""
        return len(self._starts)

    @property
    def nbytes(self) -> int:
        """Memory of all entries, written or not."""
        return sum(tensor.nbytes for tensor in self._entries.tensors())

    def mean_age(self, version: int) -> float:
        """By how many updates the weights that acted are older than ``version``, over what the policy acted; NaN if
        nothing."""
        entries = self._entries
        acted = (entries.num_executed > 0) & (entries.policy_version >= 0)
        return float((version - entries.policy_version[acted]).float().mean())

    # -- writing ------------------------------------------------------------------------------------------------------

    def append(self, streams: Sequence[int], entries: Entries) -> None:
        """One entry to each of these streams; a full ring loses its oldest one."""
        index = np.asarray(streams, dtype=np.int64)
        self._write(index * self.length + self.count[index] % self.length, entries)
        self.count[index] += 1
        self._index()

    def extend(self, entries: Entries) -> None:
        """Entries in order of time to the only stream."""
        (before,) = self.count
        self._write((before + np.arange(len(entries))) % self.length, entries)
        self.count += len(entries)
        self._index()

    def cut_off(self, streams: Sequence[int]) -> None:
        """Nothing will follow the newest entry of these streams: where its task had not ended, how it went on is not
        known."""
        if not streams:  # as after nearly every chunk
            return
        index = np.asarray(streams, dtype=np.int64)
        index = index[self.count[index] > 0]
        newest = torch.from_numpy(index * self.length + (self.count[index] - 1) % self.length)
        self._entries.num_executed[newest] *= self._entries.terminated[newest]
        self._index()

    def _write(self, at: Int64[np.ndarray, " n"], entries: Entries) -> None:
        with crossing("replay"):
            given = entries.to("cpu")
        index = torch.from_numpy(at)
        pairs = list(zip(self._entries.tensors(), given.tensors(), strict=True))
        if any(own.ndim > 1 and new.shape[-1] > own.shape[-1] for own, new in pairs):  # the longest instruction so far
            self._entries = Entries.cat([self._entries, given[:1]])[: len(self._entries)]
        for own, new in zip(self._entries.tensors(), given.tensors(), strict=True):
            if own.ndim == 1 or new.shape[-1] == own.shape[-1]:
                own[index] = new
            else:
                own[index] = functional.pad(new, (0, own.shape[-1] - new.shape[-1]))

    def entries(self) -> Entries:
        """All of them, in the order of the rings; those not yet written are zeros."""
        return self._entries

    # -- drawing ------------------------------------------------------------------------------------------------------

    def sample(
        self, count: int, *, chunks: int, returns: bool = False, time_limit_ends: bool = False, further: int = 0
    ) -> Windows:
        """``count`` windows of up to ``chunks`` chunks, uniformly with replacement. UserError where there is none."""
        if not len(self):
            raise UserError("the replay holds no transition yet; raise algorithm.warmup")
        start = self._starts[self.rng.integers(len(self), size=count)]
        return self.windows(start, chunks=chunks, returns=returns, time_limit_ends=time_limit_ends, further=further)

    def windows(
        self, start: Int64[np.ndarray, " B"], *, chunks: int, returns: bool = False, time_limit_ends: bool = False,
        further: int = 0,
    ) -> Windows:  # fmt: skip
        """The windows of up to ``chunks`` chunks that begin at these entries; with ``return_to_go`` if ``returns``.

        A window ends early where its episode ends, and at the newest entry, whose successor is not known yet.
        ``time_limit_ends``: no value follows a time limit, as after a task's end. Else the sum until then counts as a
        return where no reward here is negative, being at most what it would have been; it is not known otherwise.
        ``further``: how many actions after the first chunk's.
        """
        reward, discount, end = self._n_step(start, chunks)
        if time_limit_ends:
            discount = np.where(self._entries.timed_out.numpy()[end], 0.0, discount)
        entries, first, last = self._entries, torch.from_numpy(start), torch.from_numpy(end)
        num_cloned, after = entries.num_cloned[first], None
        if further:
            num_cloned, after = self._further(start, further)
        windows = Windows(
            inputs=entries.inputs[first],
            action=entries.action[first],
            num_executed=entries.num_executed[first],
            num_cloned=num_cloned,
            actor=entries.actor[first],
            reward=torch.from_numpy(reward).float(),
            discount=torch.from_numpy(discount).float(),
            next_inputs=entries.inputs[last],
            return_to_go=torch.from_numpy(self._return_to_go(start, time_limit_ends)).float() if returns else None,
            further=after,
        )
        with crossing("batches"):
            return windows.to(self.device)

    def return_range(self) -> tuple[float, float] | None:
        """The least and the largest return that is known; None where none is."""
        returns = self._return_to_go(self._starts, time_limit_ends=True)
        known = returns[np.isfinite(returns)]
        return (float(known.min()), float(known.max())) if len(known) else None

    def _n_step(
        self, start: Int64[np.ndarray, " B"], chunks: int
    ) -> tuple[Float64[np.ndarray, " B"], Float64[np.ndarray, " B"], Int64[np.ndarray, " B"]]:
        """Reward sums, discounts of what follows (0 after a task's end), and the entries that follow."""
        usable, rewards = self._usable, self._entries.reward.numpy()
        executed, terminated = self._entries.num_executed.numpy(), self._entries.terminated.numpy()
        reward, discount, at = np.zeros(len(start)), np.ones(len(start)), start.copy()
        running = np.ones(len(start), dtype=bool)
        for _ in range(chunks):
            if not running.any():
                break
            reward += np.where(running, discount * rewards[at], 0.0)
            discount = np.where(running, discount * self.gamma ** executed[at] * ~terminated[at], discount)
            ended = terminated[at]
            at = np.where(running, self._next(at), at)
            running = running & ~ended & usable[at]
        return reward, discount, at

    def _further(
        self, start: Int64[np.ndarray, " B"], count: int
    ) -> tuple[Int[Tensor, " B"], Float[Tensor, "B more A"]]:
        """How many may be cloned of a chunk and the ``count`` actions after it, and these: of the next chunks, as long
        as the same one acted and each of them may be cloned to its end."""
        entries, horizon = self._entries, self._entries.action.shape[1]
        whole = entries.num_cloned.numpy() == horizon
        goes_on = self._usable & ~entries.terminated.numpy() & whole
        executed, actor, at = entries.num_executed.numpy() > 0, entries.actor.numpy(), start
        first = torch.from_numpy(start)
        num_cloned, last, parts = entries.num_cloned[first], entries.action[first, -1:], list[Tensor]()
        running = np.ones(len(start), dtype=bool)
        for _ in range(-(-count // horizon)):
            running, at = running & goes_on[at], self._next(at)
            running &= executed[at] & (actor[at] == actor[start])
            here, going = torch.from_numpy(at), torch.from_numpy(running)
            parts.append(torch.where(going[:, None, None], entries.action[here], last))
            num_cloned, last = num_cloned + torch.where(going, entries.num_cloned[here], 0), parts[-1][:, -1:]
        return num_cloned.clamp(max=horizon + count), torch.cat(parts, dim=1)[:, :count]

    def _return_to_go(self, start: Int64[np.ndarray, " B"], time_limit_ends: bool) -> Float64[np.ndarray, " B"]:
        """Each is computed once, until something is written."""
        new = start[np.isnan(self._returns[start])]
        reward, discount, end = self._n_step(new, self.length)
        timed_out = (discount > 0) & self._entries.timed_out.numpy()[end]
        self._returns[new] = np.where((discount == 0) | timed_out, reward, -np.inf)
        self._out_of_time[new] = timed_out
        if time_limit_ends or self._entries.reward.min() >= 0:
            return self._returns[start]
        return np.where(self._out_of_time[start], -np.inf, self._returns[start])

    def _next(self, at: Int64[np.ndarray, " B"]) -> Int64[np.ndarray, " B"]:
        return at // self.length * self.length + (at + 1) % self.length

    def _index(self) -> None:
        """Find the entries with a chunk whose outcome is known: the next observation, or that the task ended."""
        usable = self._entries.num_executed.numpy() > 0
        newest = (np.arange(self.streams) * self.length + (self.count - 1) % self.length)[self.count > 0]
        usable[newest] &= self._entries.terminated.numpy()[newest]
        self._usable: Bool[np.ndarray, " entries"] = usable
        self._starts: Int64[np.ndarray, " starts"] = np.flatnonzero(usable)
        self._returns: Float64[np.ndarray, " entries"] = np.full(len(usable), np.nan)  # not computed yet
        self._out_of_time: Bool[np.ndarray, " entries"] = np.zeros(len(usable), dtype=bool)  # where they are

    # -- exact state --------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Only what was written."""
        filled = int(min(self.count.max(initial=0), self.length))
        kept = [tensor.unflatten(0, (self.streams, -1))[:, :filled] for tensor in self._entries.tensors()]
        return {"count": self.count.copy(), "entries": kept, "generator": self.rng.bit_generator.state}

    def position(self) -> dict[str, Any]:
        """Without the entries, where these are read again: the generator, the number of entries and their digest."""
        return {"count": self.count.copy(), "digest": self._digest(), "generator": self.rng.bit_generator.state}

    def _digest(self) -> str:
        """Of what was done and paid; without the observations, which are large."""
        digest, entries = hashlib.sha256(), self._entries
        for told in (entries.action, entries.reward, entries.num_executed, entries.terminated, entries.timed_out,
                     entries.actor, entries.num_cloned):  # fmt: skip
            digest.update(told.numpy().tobytes())
        return digest.hexdigest()

    def go_on_from(self, state: dict[str, Any]) -> None:
        """From ``position``. UserError if there are other entries now."""
        if (state["count"] != self.count).any():
            raise UserError(
                f"the recorded episodes held {int(state['count'].sum())} observations, now {int(self.count.sum())}: a "
                "run resumes with the same stores"
            )
        if state["digest"] != self._digest():
            raise UserError(
                "the recorded episodes, their labels or cuts are others than those that the run learned from before: "
                "take the changes back, or start a new run"
            )
        self.rng.bit_generator.state = state["generator"]

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """UserError if the rings or the entries were others."""
        if len(state["entries"]) != len(list(self._entries.tensors())):
            raise UserError("the replay that was saved is of another policy: start a new run")
        if (got := len(state["entries"][0])) != self.streams:
            raise UserError(f"the replay had {got} environments, now there are {self.streams}: start a new run")

        def ring(given: Tensor) -> Tensor:
            rows = given.new_zeros(self.streams, self.length, *given.shape[2:])
            rows[:, : given.shape[1]] = given
            return rows.flatten(0, 1)

        self._entries = self._entries.with_tensors(map(ring, state["entries"]))
        self.count = np.asarray(state["count"]).copy()
        self._index()
        self.rng.bit_generator.state = state["generator"]


def _zeros(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Memory that the system provides where it is written (calloc); ``torch.zeros`` writes all of it."""
    numbers = np.zeros(math.prod(shape) * dtype.itemsize, dtype=np.uint8)
    return torch.from_numpy(numbers).view(dtype).view(*shape)


def _check_memory(example: TensorDataclass, entries: int) -> None:
    """Where the system tells what is free."""
    try:
        free, _ = host_memory()
    except FileNotFoundError:
        return
    needed = entries * sum(tensor[:1].nbytes for tensor in example.tensors())
    if needed > free:
        raise UserError(
            f"a replay of {entries:,} entries takes {needed / 1e9:.1f} GB when it is full, and {free / 1e9:.1f} GB of "
            "memory are free: lower algorithm.capacity"
        )
