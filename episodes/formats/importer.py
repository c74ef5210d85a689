"""Imports demonstrations that other projects recorded into an episode store (``vla-rl data import``)."""

from __future__ import annotations

import contextlib
import hashlib
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float, Float32, UInt8

from episodes.catalog import Entry
from episodes.formats.images import fit_image
from episodes.formats.recording import Found, ImportMapping, Recording
from episodes.formats.registry import find_recordings
from episodes.formats.success import are_flags, successes
from episodes.layout import Layout, episode_layout, layout_of, store_layout
from episodes.packing import recording_digest
from episodes.schema import ACTORS, HUMAN, CorruptEpisode, Episode, EpisodeError, validate
from episodes.store import EpisodeStore
from sims.errors import reason

ACTION_TOLERANCE = 1e-3  # recordings exceed their own limits by rounding; the excess is clipped

# Of the fingerprint of what is imported: the digest of the actions before they are scaled, and what it was converted by
_ACTIONS, _STATE, _LIMITS = "recorded actions", "state", "action limits"


def import_episodes(
    source: Path, store: EpisodeStore, mapping: ImportMapping, *, skip_bad: bool = False
) -> dict[str, Any]:
    """Every episode of ``source``, in one of ``registry.FORMATS``; returns {episodes, successes, present, skipped}.

    ``present``: how many were in ``store`` already, with the same states and actions as recorded, also where they have
    been cut or deleted since; they are not added again.
    Raises EpisodeError that names the file, the episode and what is missing, or has another layout than the episodes
    that are there, or is there with other images, state, action limits, instruction, task or success; what was imported
    before stays.
    With ``skip_bad`` such episodes are left out: ``skipped`` has {episode, reason} of each, and EpisodeError is raised
    only if no other is left.
    """
    importing = _Import(store=store, mapping=mapping, skip_bad=skip_bad)
    written = store.add_all(importing.episodes(source))
    if not written and not importing.present:
        if skipped := importing.skipped:
            raise EpisodeError(f"{source}: none of {len(skipped)} episodes can be imported: {skipped[0]['reason']}")
        raise EpisodeError(f"{source}: there is no episode in it")
    counts = {"episodes": len(written), "successes": importing.succeeded, "present": importing.present}
    return counts | {"skipped": importing.skipped}


@dataclass(kw_only=True)
class _Import:
    """``succeeded``: of the new episodes. ``present``, ``skipped``: see ``import_episodes``."""

    store: EpisodeStore
    mapping: ImportMapping
    skip_bad: bool
    succeeded: int = 0
    present: int = 0
    skipped: list[dict[str, str]] = field(default_factory=list)

    def episodes(self, source: Path) -> Iterator[Episode]:
        """Those that are not in the store yet."""
        known = _recorded(self.store)
        here, good = store_layout(self.store), 0
        # Seeds tell episodes apart, also where several recordings are imported into one store.
        unused = 1 + max((entry.seed for entry in self.store.entries()), default=-1)
        for number, found in enumerate(find_recordings(source), start=unused):
            try:
                episode = self._episode(found, here, known, number=number)
            except EpisodeError as error:
                if not self.skip_bad:
                    hint = "; to import the others without it, give --skip-bad" if good else ""
                    raise type(error)(f"{error}{hint}") from error
                self.skipped.append({"episode": found.name, "reason": str(error)})
                continue
            good += 1
            if episode is None:
                self.present += 1
                continue
            here = here or episode_layout(episode)
            self.succeeded += int(episode.succeeded)
            yield episode

    def _episode(
        self, found: Found, here: Layout | None, known: Mapping[bytes, list[Entry]], *, number: int
    ) -> Episode | None:
        """None where the store has it. EpisodeError where it cannot be imported."""
        try:
            episode = to_episode(found.load(), self.mapping, number=number)
        except OSError as error:  # of a damaged part of the file
            raise EpisodeError(f"{found.name} cannot be read: {reason(error)}") from error
        if self._is_present(episode, known, found.name):
            return None
        layout = episode_layout(episode)
        if here is not None and layout != here:
            raise EpisodeError(
                f"{found.name} has {layout}, but the other episodes in {self.store.path} have {here}: give the "
                "options that they were imported with, or import it into a store of its own"
            )
        validate(episode)
        return episode

    def _is_present(self, episode: Episode, known: Mapping[bytes, list[Entry]], name: str) -> bool:
        """Whether the store has it just so. EpisodeError where it was imported with other options."""
        if same := known.get(recording_digest({"state": episode.state, "action": episode.action})):
            differing = [_differences(self.store, entry, episode) for entry in same]
            if not all(differing):
                return True
        else:
            same = known.get(bytes.fromhex(episode.fingerprint[_ACTIONS]), [])
            differing = [other for entry in same if (other := _other_conversion(self.store, entry, episode))]
        if differing:
            raise EpisodeError(
                f"{name} is in {self.store.path} already, with {'; '.join(differing[0])}: give the options that "
                "it was imported with, or import it into a store of its own"
            )
        return False


def _recorded(store: EpisodeStore) -> Mapping[bytes, list[Entry]]:
    """Episodes of people's, as they were recorded, by the digest of their states and actions, and by ``_ACTIONS``."""
    entries, found = store.entries(), defaultdict[bytes, list[Entry]](list)
    digests = store.recordings(entries)
    for entry in entries:
        if entry.id in digests:
            found[digests[entry.id]].append(entry)
            with contextlib.suppress(CorruptEpisode, KeyError):  # KeyError: of an earlier version, or not imported
                found[bytes.fromhex(store.fingerprint(entry)[_ACTIONS])].append(entry)
    return found


def _other_conversion(store: EpisodeStore, entry: Entry, episode: Episode) -> list[str]:
    """Which keys and limits made the stored episode of the same file's actions, where they are others than this one's.

    Nothing where its states show that it is another recording.
    """
    there, now = store.fingerprint(entry), episode.fingerprint
    if there[_STATE] == now[_STATE] and not np.array_equal(store.map(entry)["state"], episode.state):
        return []
    return [f"{name} {there[name]}, now {now[name]}" for name in (_STATE, _LIMITS) if there[name] != now[name]]


def _differences(store: EpisodeStore, entry: Entry, episode: Episode) -> list[str]:
    """What the stored episode has otherwise than this one of the same states and actions, for a message."""
    images = episode.fingerprint["images"]
    compared = {
        "": (layout_of(store, entry), episode_layout(episode)),
        "images ": (repr(store.fingerprint(entry).get("images", images)), repr(images)),
        "instruction ": (repr(entry.instruction), repr(episode.instruction)),
        "task ": (repr(entry.task), repr(episode.task)),
    }
    found = [f"{name}{there}, now {now}" for name, (there, now) in compared.items() if there != now]
    same = np.array_equal(store.map(entry)["success"], episode.success)
    return found if same else [*found, "another success"]


def to_episode(recording: Recording, mapping: ImportMapping, *, number: int) -> Episode:
    """The recording as an episode with seed ``number``. Raises EpisodeError where something is missing.

    An episode ends with an observation. Where the file has none after the last action, the last one that it has is kept
    as that, without the action chosen there; its reward and success count for the step before.
    """
    rows = len(recording.action)
    steps = rows if recording.final is not None else rows - 1
    if steps < 1:
        raise EpisodeError(f"{recording.name} has one action and no observation after it, so nothing can be learned")
    instruction, control_hz = _instruction(recording, mapping), _control_hz(recording, mapping)
    low, high = _limits(recording, mapping)
    success = successes(recording, mapping.success)
    success = np.append(success[: steps - 1], success[-1])
    last = np.arange(steps) == steps - 1
    terminated = success[-1] if recording.terminated is None else recording.terminated
    return Episode(
        state=_state(recording, mapping),
        images={camera: _images(recording, key, mapping) for camera, key in mapping.cameras.items()},
        observation_steps=np.arange(steps + 1, dtype=np.int32),
        action=_scale_actions(recording, low, high)[:steps],
        reward=_reward(recording, mapping, steps),
        terminated=last & terminated,
        truncated=last & (not terminated),
        success=success,
        actor=np.full(steps, HUMAN, dtype=np.uint8),
        instruction=instruction,
        task=mapping.task or instruction,
        split="train",
        seed=number,
        source=ACTORS[HUMAN],
        control_hz=control_hz,
        fingerprint={"imported": recording.name, **_provenance(recording, mapping, low, high)},
    )


def _provenance(
    recording: Recording,
    mapping: ImportMapping,
    low: Float[np.ndarray, " action_dim"],
    high: Float[np.ndarray, " action_dim"],
) -> dict[str, str]:
    """Which images are which camera's and how they were turned, the keys of the state, the limits of the actions
    (``_limits``), and the digest of these as the file has them."""
    return {
        "images": ", ".join(f"{camera}={key} {mapping.orientation}" for camera, key in sorted(mapping.cameras.items())),
        _STATE: " ".join(mapping.state),
        _LIMITS: ", ".join(f"{limits[0]} to {limits[1]}" for limits in zip(low, high, strict=True)),
        _ACTIONS: hashlib.sha256(recording.action.tobytes()).hexdigest(),
    }


def _instruction(recording: Recording, mapping: ImportMapping) -> str:
    if mapping.instruction:
        return mapping.instruction
    found = recording.instructions
    if len(found) > 1:
        raise EpisodeError(
            f"{recording.name} has {len(found)} instructions ({', '.join(map(repr, found[:3]))}), and an episode has "
            "one: give --instruction, or import its parts as episodes of their own"
        )
    if not found or not found[0]:
        raise EpisodeError(f"{recording.name} does not say its instruction: give --instruction")
    return found[0]


def _control_hz(recording: Recording, mapping: ImportMapping) -> float:
    control_hz = mapping.control_hz or recording.control_hz
    if not control_hz:
        raise EpisodeError(f"{recording.name} does not say its control rate: give --control-hz")
    return float(control_hz)


def _reward(recording: Recording, mapping: ImportMapping, steps: int) -> Float32[np.ndarray, " steps"]:
    """As recorded; the last action that is kept gets what the ones after it were rewarded with. 0 without rewards.

    Also 0 where the recording's rewards are its successes, and a rule says otherwise what succeeds, or a success is not
    at the end alone: ``rewarded`` pays the first one, and ends the episode there.
    """
    if recording.reward is None:
        return np.zeros(steps, dtype=np.float32)
    of_success = recording.terminated is None and are_flags(recording.reward)
    if of_success and (mapping.success != "recorded" or recording.reward[: steps - 1].any()):
        return np.zeros(steps, dtype=np.float32)
    rest = recording.reward[steps - 1 :]
    return np.append(recording.reward[: steps - 1], rest.max() if of_success else rest.sum()).astype(np.float32)


def _state(recording: Recording, mapping: ImportMapping) -> Float32[np.ndarray, "L state_dim"]:
    if not mapping.state:
        raise EpisodeError(f"{recording.name}: name the keys of the state: --state, of {', '.join(recording.keys)}")
    observed = [_observed(recording, key) for key in mapping.state]
    for key, values in zip(mapping.state, observed, strict=True):
        if values.dtype.kind not in "biuf":
            raise EpisodeError(f"{recording.name}: {key!r} is {values.dtype}; --state needs keys of numbers")
    return np.concatenate([values.reshape(len(values), -1) for values in observed], axis=1).astype(np.float32)


def _observed(recording: Recording, key: str) -> np.ndarray:
    """[L, ...], with the observation after the last action where the file has it."""
    array = recording.column(key)
    return array if recording.final is None else np.concatenate([array, recording.final(key)[None]])


def _images(recording: Recording, key: str, mapping: ImportMapping) -> UInt8[np.ndarray, "L height width 3"]:
    images, orientation = _observed(recording, key), mapping.orientation
    if images.dtype != np.uint8 or images.ndim != 4 or images.shape[3] != 3:
        raise EpisodeError(
            f"{recording.name}: {key!r} is {images.dtype} {list(recording.column(key).shape)}; --camera needs images "
            "of uint8 [T, height, width, 3], 0 to 255, with the colors last: name another key, or convert the file"
        )
    upright = images if orientation == "as_recorded" else images[:, ::-1]
    turned = np.ascontiguousarray(upright[:, :, ::-1] if orientation == "half_turn" else upright)
    return turned if mapping.image_size is None else resize(turned, mapping.image_size)


def resize(
    images: UInt8[np.ndarray, "L height width 3"], size: tuple[int, int]
) -> UInt8[np.ndarray, "L new_height new_width 3"]:
    """As an arm's images are before a policy sees them: the largest crop in the middle that has the proportions of
    ``size`` (height, width), scaled."""
    if images.shape[1:3] == size:
        return images
    return np.stack([fit_image(image, size).numpy() for image in images])


def _limits(
    recording: Recording, mapping: ImportMapping
) -> tuple[Float[np.ndarray, " action_dim"], Float[np.ndarray, " action_dim"]]:
    """What becomes -1 and 1 in each dimension of the action. EpisodeError where they are no such range."""
    dims = recording.action.shape[-1]
    for option, limits in (("--action-low", mapping.action_low), ("--action-high", mapping.action_high)):
        if len(limits) not in (1, dims):
            said = f"{option} has {len(limits)} numbers for {dims} action dimensions: give one, or {dims}"
            raise EpisodeError(f"{recording.name}: {said}")
    low, high = (
        np.broadcast_to(np.asarray(limits, dtype=np.float64), dims)
        for limits in (mapping.action_low, mapping.action_high)
    )
    if not ((high > low) & np.isfinite(high - low)).all():
        lowest, highest = (", ".join(f"{limit:g}" for limit in limits) for limits in (low, high))
        raise EpisodeError(
            f"{recording.name}: --action-high [{highest}] must be above --action-low [{lowest}] in every dimension, "
            "and both finite: give the limits of the recording's actions"
        )
    return low, high


def _scale_actions(
    recording: Recording, low: Float[np.ndarray, " action_dim"], high: Float[np.ndarray, " action_dim"]
) -> Float32[np.ndarray, "T action_dim"]:
    """Actions in [-1, 1]."""
    action = 2.0 * (recording.action - low) / (high - low) - 1.0
    largest = np.abs(action).max()
    if largest > 1.0 + ACTION_TOLERANCE:
        raise EpisodeError(
            f"{recording.name}: actions reach {np.abs(recording.action).max():g}, which is {largest:g} times the range "
            "of --action-low and --action-high; give the limits of the recording's actions"
        )
    return np.clip(action, -1.0, 1.0).astype(np.float32)
