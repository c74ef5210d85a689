"""An independent check of the ROS topics: another vendor's DDS (CycloneDDS), no rclpy, no code of this project.

Usage: python witness.py watch SECONDS | inject JOINT DELTA_RAD | publish SECONDS
Prints one JSON object. ``watch`` records every command and what each endpoint announces about itself; ``inject`` sends
one trajectory and reports how far the joint moved.
"""
# no "from __future__ import annotations" here: cyclonedds reads the annotations as types

import json
import os
import sys
import time
from dataclasses import dataclass

from cyclonedds.builtin import BuiltinDataReader, BuiltinTopicDcpsPublication, BuiltinTopicDcpsSubscription
from cyclonedds.core import Policy, Qos
from cyclonedds.domain import DomainParticipant
from cyclonedds.idl import IdlStruct
from cyclonedds.idl.types import float64, int32, sequence, uint32
from cyclonedds.pub import DataWriter
from cyclonedds.sub import DataReader
from cyclonedds.topic import Topic
from cyclonedds.util import duration
from rosbags.typesys import Stores, get_typestore

STORE = get_typestore(Stores.ROS2_JAZZY)
COMMAND = "rt/joint_trajectory_controller/joint_trajectory"
STATES = "rt/joint_states"


@dataclass
class Time(IdlStruct, typename="builtin_interfaces::msg::dds_::Time_"):
    sec: int32
    nanosec: uint32


@dataclass
class Duration(IdlStruct, typename="builtin_interfaces::msg::dds_::Duration_"):
    sec: int32
    nanosec: uint32


@dataclass
class Header(IdlStruct, typename="std_msgs::msg::dds_::Header_"):
    stamp: Time
    frame_id: str


@dataclass
class JointState(IdlStruct, typename="sensor_msgs::msg::dds_::JointState_"):
    header: Header
    name: sequence[str]
    position: sequence[float64]
    velocity: sequence[float64]
    effort: sequence[float64]


@dataclass
class Point(IdlStruct, typename="trajectory_msgs::msg::dds_::JointTrajectoryPoint_"):
    positions: sequence[float64]
    velocities: sequence[float64]
    accelerations: sequence[float64]
    effort: sequence[float64]
    time_from_start: Duration


@dataclass
class JointTrajectory(IdlStruct, typename="trajectory_msgs::msg::dds_::JointTrajectory_"):
    header: Header
    joint_names: sequence[str]
    points: sequence[Point]


def endpoints(participant: DomainParticipant) -> list[dict]:
    """What every endpoint on our topics announces: type, the ROS type hash in its user data, reliability."""
    found = []
    for kind, builtin in (("writer", BuiltinTopicDcpsPublication), ("reader", BuiltinTopicDcpsSubscription)):
        reader = BuiltinDataReader(participant, builtin)
        for sample in reader.take(1000):
            if getattr(sample, "topic_name", "").startswith("rt/") and sample.participant_key != participant.guid:
                reliable = any(isinstance(p, Policy.Reliability.Reliable) for p in sample.qos)
                data = [bytes(p.data).decode(errors="replace") for p in sample.qos if isinstance(p, Policy.Userdata)]
                found.append(
                    {"kind": kind, "topic": sample.topic_name, "type": sample.type_name, "reliable": reliable,
                     "user_data": "".join(data), "expected_hash": expected_hash(sample.type_name)}
                )  # fmt: skip
    return found


def expected_hash(dds_type: str) -> str:
    """The RIHS01 hash of a DDS type's ROS definition, computed by rosbags from its own copy of the definitions."""
    name = dds_type.replace("::", "/").replace("/dds_/", "/").removesuffix("_")
    try:
        return str(STORE.hash_rihs01(name))
    except KeyError:
        return ""


def watch(seconds: float) -> dict:
    participant = DomainParticipant(int(os.environ["ROS_DOMAIN_ID"]))
    reliable = Qos(Policy.Reliability.Reliable(duration(seconds=1)), Policy.History.KeepLast(200))
    commands = DataReader(participant, Topic(participant, COMMAND, JointTrajectory), qos=reliable)
    states = DataReader(participant, Topic(participant, STATES, JointState), qos=Qos(Policy.Reliability.BestEffort))
    record, heard = [], 0
    until = time.monotonic() + seconds + 5.0
    while time.monotonic() < until:
        for sample in commands.take(200):
            first = sample.points[0]
            times = [p.time_from_start.sec + 1e-9 * p.time_from_start.nanosec for p in sample.points]
            stamp = sample.header.stamp.sec + 1e-9 * sample.header.stamp.nanosec
            record.append(
                {"at": time.monotonic(), "received": time.time(), "stamp": stamp,
                 "names": list(sample.joint_names), "first": list(first.positions),
                 "last_speeds": list(sample.points[-1].velocities), "times": times}
            )  # fmt: skip
            until = min(until, record[0]["at"] + seconds)  # finding the writer takes its time
        heard += len(states.take(500))
        time.sleep(0.001)
    return {"commands": record, "states": heard, "endpoints": endpoints(participant)}


def inject(joint: str, delta: float) -> dict:
    participant = DomainParticipant(int(os.environ["ROS_DOMAIN_ID"]))
    states = DataReader(participant, Topic(participant, STATES, JointState), qos=Qos(Policy.Reliability.BestEffort))
    reliable = Qos(Policy.Reliability.Reliable(duration(seconds=1)))
    writer = DataWriter(participant, Topic(participant, COMMAND, JointTrajectory), qos=reliable)
    before = newest(states, 5.0)
    deadline = time.monotonic() + 5.0
    while not writer.get_matched_subscriptions() and time.monotonic() < deadline:
        time.sleep(0.01)
    i = list(before.name).index(joint)
    goal = list(before.position)
    goal[i] += delta
    point = Point(goal, [0.0] * len(goal), [], [], Duration(1, 0))
    writer.write(JointTrajectory(Header(Time(0, 0), ""), list(before.name), [point]))
    moved, deadline = 0.0, time.monotonic() + 10.0
    while abs(moved - delta) > 0.005 and time.monotonic() < deadline:
        after = newest(states, 5.0)
        moved = after.position[list(after.name).index(joint)] - before.position[i]
    return {"moved": moved}


def publish(seconds: float) -> dict:
    """Announce a writer of commands, without sending any."""
    participant = DomainParticipant(int(os.environ["ROS_DOMAIN_ID"]))
    reliable = Qos(Policy.Reliability.Reliable(duration(seconds=1)))
    writer = DataWriter(participant, Topic(participant, COMMAND, JointTrajectory), qos=reliable)
    time.sleep(seconds)
    return {"readers": len(writer.get_matched_subscriptions())}


def newest(states: DataReader, seconds: float) -> JointState:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if samples := states.take(500):
            return samples[-1]
        time.sleep(0.005)
    raise TimeoutError("no joint states were heard")


if __name__ == "__main__":
    if sys.argv[1] == "inject":
        result = inject(sys.argv[2], float(sys.argv[3]))
    else:
        result = {"watch": watch, "publish": publish}[sys.argv[1]](float(sys.argv[2]))
    print(json.dumps(result))
