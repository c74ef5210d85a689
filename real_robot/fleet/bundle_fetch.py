"""A published bundle on its way from the hub to a robot."""

from __future__ import annotations

from dataclasses import dataclass

from pydantic import TypeAdapter

from policies.bundle import MANIFEST, tensors_name
from policies.policy import RobotSpec
from real_robot.fleet.client import HubClient, HubRefused


@dataclass(frozen=True)
class _Manifest:
    """What of it decides whether the rest is fetched."""

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
        self._manifest = self._manifest or self._hub.bundle_file(version, MANIFEST)
        self.version = version
        return _MANIFEST.validate_json(self._manifest).robot

    def go_on(self, version: str, until_s: float) -> tuple[bytes, bytes] | None:
        """Manifest and weights of the bundle, None where they are not all there before ``until_s`` (monotonic).

        Raises what ``HubClient`` raises; HubRefused where the hub does not keep the version any more.
        """
        try:
            self.begin(version)
            if not self._hub.add_bundle_file(version, tensors_name(version), self._tensors, until_s):
                return None
        except HubRefused:
            self.forget()
            raise
        fetched = self._manifest, bytes(self._tensors)
        self.forget()
        return fetched
