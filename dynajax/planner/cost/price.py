"""The price of a plan in seconds, from a topology: what to expect before anything moves.

A stage packs, exchanges in rounds, and unpacks. A message takes the latency of its link and its bytes over the link's
speed; a device sends one and receives one at once. It goes through its rounds in order and begins the next when those
that it talks to there are free too; the next stage begins when all are done. A second figure, in lockstep, is for
devices that all wait for one another after every round: the difference is what devices gain that go on by themselves.
Packing, unpacking, sums and copies inside a device go at the speed of its memory. The floor is what the busiest link
needs if it is never idle.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from dynajax.errors import TopologyError
from dynajax.meshes import Topology
from dynajax.planner.cost.rounds import in_rounds
from dynajax.planner.plan import Plan
from dynajax.types import Ints
from dynajax.vps.tiling import segment_sum


@dataclass(frozen=True)
class Price:
    """What a plan costs on a topology; predicted, not measured.

    Attributes:
        seconds: from the first stage to the last.
        lockstep_s: the same if no device begins a round before all have ended the one before.
        floor_s: what the busiest link alone needs.
        memory_s: share of ``seconds`` that packing, unpacking and copies inside devices take.
        rounds: rounds of all stages together.
        bytes_by_tier: bytes over each kind of link, by its name; of the first, copies inside devices.
        assumptions: what the prediction rests on, line by line.
    """

    seconds: float
    lockstep_s: float
    floor_s: float
    memory_s: float
    rounds: int
    bytes_by_tier: Mapping[str, int]
    assumptions: tuple[str, ...]


def price_plan(plan: Plan, topology: Topology | None = None) -> Price:
    """The price of a plan.

    Args:
        plan: what to price.
        topology: the links; default: those that the plan was made for.

    Raises:
        TopologyError: no topology, or one that lacks a link.
    """
    links = topology or plan.topology
    if links is None:
        raise TopologyError("a plan made without a topology has no price; give one")
    messages = _Messages.of(plan, links)
    exchange = messages.exchange()
    memory = messages.memory_s()
    return Price(
        seconds=exchange.seconds + memory,
        lockstep_s=exchange.lockstep_s + memory,
        floor_s=messages.floor_s(),
        memory_s=memory,
        rounds=exchange.rounds,
        bytes_by_tier=messages.by_tier(),
        assumptions=_assumptions(links),
    )


def worth_it(cost: Price | float, saved_per_step_s: float, steps: int) -> bool:
    """Whether a switch pays: what it saves over the next ``steps`` steps is more than what it costs."""
    seconds = cost.seconds if isinstance(cost, Price) else cost
    return saved_per_step_s * steps > seconds


@dataclass(frozen=True)
class _Exchange:
    """What the rounds of all stages take, see ``Price``."""

    seconds: float
    lockstep_s: float
    rounds: int


@dataclass(frozen=True, eq=False)
class _Messages:
    """What devices send one another, coalesced by step and pair; a step is a stage, or the relays of a stage.

    Attributes:
        links: the topology.
        step, sender, receiver, nbytes: one row a message.
        seconds: on its link.
        tier: its link.
        handled: bytes that each device packs, unpacks or copies in each step, shape (steps, devices).
        local: bytes copied inside devices.
    """

    links: Topology
    step: Ints
    sender: Ints
    receiver: Ints
    nbytes: Ints
    seconds: np.ndarray
    tier: Ints
    handled: Ints
    local: int

    @staticmethod
    def of(plan: Plan, links: Topology) -> _Messages:
        """Coalesce the pieces of a plan."""
        n, steps = plan.num_devices, 2 * max(len(plan.stages), 1)
        keys, sizes = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
        for pieces, itemsize in _staged(plan):
            route, stage = pieces
            step = 2 * stage + route.relayed
            keys.append((step * n + route.sender) * n + route.receiver)
            sizes.append(route.volumes * itemsize)
        key, at = np.unique(np.concatenate(keys), return_inverse=True)
        nbytes = segment_sum(at.ravel(), np.concatenate(sizes), len(key))
        rest, receiver = np.divmod(key, n)
        step, sender = np.divmod(rest, n)
        handled = np.zeros((steps, n), np.int64)
        sent = sender != receiver
        np.add.at(handled, (step, receiver), nbytes)
        np.add.at(handled, (step[sent], sender[sent]), nbytes[sent])
        local = int(nbytes[~sent].sum())
        step, sender, receiver, nbytes = (a[sent] for a in (step, sender, receiver, nbytes))
        tier = links.between(sender, receiver)
        speed = np.array([t.bytes_per_second for t in links.tiers])
        latency = np.array([t.latency_s for t in links.tiers])
        return _Messages(
            links, step, sender, receiver, nbytes, latency[tier] + nbytes / speed[tier], tier, handled, local
        )

    def exchange(self) -> _Exchange:
        """All steps. A message begins when both ends are free; a step begins when all devices are."""
        done, lockstep, count = 0.0, 0.0, 0
        known: dict[tuple[bytes, ...], tuple[float, float, int]] = {}
        borders = np.flatnonzero(np.diff(self.step, prepend=-1)).tolist()
        for begin, end in itertools.pairwise([*borders, len(self.step)]):
            step = self.sender[begin:end], self.receiver[begin:end], self.seconds[begin:end]
            key = tuple(part.tobytes() for part in step)
            if key not in known:
                known[key] = _in_turn(*step, self.handled.shape[1])
            done, lockstep, count = (a + b for a, b in zip((done, lockstep, count), known[key], strict=True))
        return _Exchange(done, lockstep, int(count))

    def memory_s(self) -> float:
        """Seconds to pack, unpack and copy inside devices."""
        memory = self.links.tiers[0]
        busiest = self.handled.max(axis=1, initial=0)
        return float((busiest / memory.bytes_per_second + memory.latency_s * (busiest > 0)).sum())

    def floor_s(self) -> float:
        """Seconds of the busiest direction of the busiest link."""
        n, slowest = self.handled.shape[1], 0.0
        for k, tier in enumerate(self.links.tiers):
            mine = self.tier == k
            for end in (self.sender, self.receiver):
                most = segment_sum(end[mine], self.nbytes[mine], n).max(initial=0)
                slowest = max(slowest, float(most / tier.bytes_per_second))
        return slowest

    def by_tier(self) -> dict[str, int]:
        """Bytes over each kind of link."""
        total = segment_sum(self.tier, self.nbytes, len(self.links.tiers))
        total[0] += self.local
        return {tier.name: int(total[k]) for k, tier in enumerate(self.links.tiers)}


def _in_turn(sender: Ints, receiver: Ints, seconds: np.ndarray, devices: int) -> tuple[float, float, int]:
    """Seconds of the messages of a step, the same in lockstep, and in how many rounds they go."""
    number = in_rounds(sender, receiver, seconds)
    order = np.argsort(number, kind="stable")
    borders = np.flatnonzero(np.diff(number[order], prepend=-1))
    free = np.zeros(devices)
    for now in np.split(order, borders[1:]):
        s, r = sender[now], receiver[now]
        done = np.maximum(free[s], free[r]) + seconds[now]
        free[s] = np.maximum(free[s], done)
        free[r] = np.maximum(free[r], done)
    return float(free.max()), float(np.maximum.reduceat(seconds[order], borders).sum()), len(borders)


def _staged(plan: Plan) -> list[tuple[tuple, int]]:
    """Routes with the stage of each piece, and the bytes of an element over the tensors that have it."""
    where = {k: number for number, stage in enumerate(plan.stages) for k in stage}
    found: dict[tuple[int, int], list] = {}
    for k, move in enumerate(plan.moves):
        key = (id(move.route), where[k] if move.route.stage is None else -1)
        entry = found.setdefault(key, [move.route, key[1], 0])
        entry[2] += move.tensor.itemsize
    return [
        ((route, route.stages_of_pieces() if at < 0 else np.full(len(route.lo), at)), itemsize)
        for route, at, itemsize in found.values()
    ]


def _assumptions(links: Topology) -> tuple[str, ...]:
    speeds = ", ".join(
        f"{t.name} {t.bytes_per_second / 1e9:g} GB/s after {t.latency_s * 1e6:g} µs" for t in links.tiers
    )
    return (
        f"links of {links.name}, per device and direction: {speeds}",
        "in a round a device sends one message and receives one; it begins when those it talks to are free, a stage "
        "when all are; in lockstep: a round when all are",
        "messages are coalesced by pair; packing, unpacking, sums and copies inside a device run at memory speed",
        "no other traffic; programs are compiled and connections open",
    )
