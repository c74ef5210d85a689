"""A published bundle on its way from the hub to a robot."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pydantic import TypeAdapter

from policies.bundle import MANIFEST, manifest_version, tensors_name
from policies.policy import RobotSpec
from real_robot.fleet.client import HubClient, HubRefused


@dataclass(frozen=True)
class _Manifest:
    """What of it says whether the rest is fetched, and which."""

    sha256: str
    config: dict[str, Any]
    robot: RobotSpec


_MANIFEST = TypeAdapter(_Manifest)


class BundleFetch:
    """One version at a time, with what came of it so far: a connection that breaks loses none of it.

    A version that was begun is finished although a newer one is there; over a slow link none would ever be whole.
    """

    def __init__(self, hub: HubClient) -> None:
        self._hub = hub
        self.forget()

    def forget(self) -> None:
        self.version, self._manifest, self._tensors = "", b"", bytearray()  # "": none was begun

    def begin(self, version: str) -> RobotSpec:
        """The robot that the version was made for. Raises what ``HubClient`` raises, ValueError for no manifest."""
        if version != self.version:
            self.forget()
        if not self._manifest:
            manifest = self._hub.bundle_file(version, MANIFEST)
            _MANIFEST.validate_json(manifest)
            if manifest_version(manifest) != version:
                raise HubRefused(f"what the hub keeps as version {version[:12]} was changed there; publish it again")
            self._manifest = manifest
        self.version = version
        return self._read().robot

    def go_on(self, version: str, until_s: float) -> tuple[bytes, bytes] | None:
        """Manifest and weights of the bundle, None where they are not all there before ``until_s`` (monotonic).

        Raises what ``HubClient`` raises; HubRefused where the hub does not keep the version any more.
        """
        try:
            self.begin(version)
            if not self._hub.add_bundle_file(version, tensors_name(self._read().sha256), self._tensors, until_s):
                return None
        except HubRefused:
            self.forget()
            raise
        fetched = self._manifest, bytes(self._tensors)
        self.forget()
        return fetched

    def _read(self) -> _Manifest:
        return _MANIFEST.validate_json(self._manifest)
