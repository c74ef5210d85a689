"""Requests of clients that speak openpi's websocket protocol: observation maps without a ``type``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from real_robot.serving.protocol import ActRequest, Hello, WireError, message_of


def is_openpi(fields: Mapping[str, Any]) -> bool:
    """Whether a client's map is of openpi's protocol."""
    return "type" not in fields


def request_of_openpi(fields: Mapping[str, Any], hello: Hello) -> ActRequest:
    """An openpi observation: ``observation/state``, ``observation/<camera>`` for each camera, ``prompt``.

    Raises WireError that names what is missing or wrong.
    """
    needed = ["observation/state", *(f"observation/{camera}" for camera in hello.cameras), "prompt"]
    missing = [key for key in needed if key not in fields]
    if missing:
        raise WireError(f"the observation lacks {missing}; this policy needs {needed}")
    request = message_of(
        {
            "type": "act",
            "id": 0,
            "images": {camera: fields[f"observation/{camera}"] for camera in hello.cameras},
            "state": np.asarray(fields["observation/state"], dtype=np.float32),
            "instruction": fields["prompt"],
            "method": "replace",
            "leftover": np.zeros((0, hello.action_dim), dtype=np.float32),
            "delay": 0,
            "execute_steps": hello.action_horizon,
            "anew": False,
        }
    )
    assert isinstance(request, ActRequest)
    return request
