"""What the processes of a move tell each other: that they mean the same move, and what they found in their shards.

All of it goes by one small program over the devices of the move, the same for every move between them. A move inside
one process has nobody to tell, and compiles nothing for it.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Self

import jax
import numpy as np
from jax.sharding import PartitionSpec

from dynajax import errors
from dynajax.arrays import _jax_private as private
from dynajax.arrays.spmd import AXIS, Devices, blocks_of, mesh_of, of_this_process, over, rows
from dynajax.errors import AgreementError, DeadlineError, DynajaxError

_WORDS = 1024
"""Words that a device says in a call."""
_MOVING = (
    "make different moves; call with the same tree, targets, budget, plan and settings everywhere, an array at two "
    "places of the tree being one object in every process"
)


class Processes:
    """The processes that a move is between.

    Args:
        devices: all devices of the source and the target, in the order of their ids.
    """

    def __init__(self, devices: Devices) -> None:
        self._devices, self._here = devices, of_this_process(devices)
        self._first: dict[int, int] = {}
        for row, device in enumerate(devices):
            self._first.setdefault(device.process_index, row)

    @staticmethod
    def of(devices: Iterable[jax.Device]) -> Processes:
        """The processes of some devices in any order."""
        return Processes(tuple(sorted(set(devices), key=lambda d: d.id)))

    @property
    def numbers(self) -> list[int]:
        """Their numbers, in the order of their devices."""
        return list(self._first)

    @property
    def talk(self) -> bool:
        """True if there are several, and this is one of them."""
        return len(self._first) > 1 and bool(self._here)

    def prepare(self) -> None:
        """Compile what ``gather`` needs."""
        if self.talk:
            _gather(self._devices)

    def gather(self, said: np.ndarray) -> np.ndarray:
        """What every process says, shape (processes, n), told to all; this one alone is heard if nobody else is there.

        Args:
            said: of shape (n,) and dtype uint32; n is the same in all processes.

        Raises:
            DeadlineError: a process did not come.
        """
        if not self.talk:
            return said[None]
        program, devices = _gather(self._devices), len(self._devices)
        heard: list[np.ndarray] = []
        for start in range(0, len(said), _WORDS):
            part = said[start : start + _WORDS]
            table = np.tile(np.pad(part, (0, _WORDS - len(part))), (len(self._here), 1))
            with self.waiting():
                heard_here = private.run_compiled(program, [rows(self._devices, table)])[0]
                all_of_it = blocks_of(heard_here, self._devices)[self._here[0]]
                heard.append(np.asarray(all_of_it).reshape(devices, _WORDS)[list(self._first.values()), : len(part)])
        return np.concatenate(heard, axis=1) if heard else np.zeros((len(self._first), 0), np.uint32)

    def known_to_any(self, numbers: np.ndarray) -> np.ndarray:
        """Numbers of which each process knows some, and has 0 for the others, put together.

        Args:
            numbers: shape (n,), uint64; where several processes know one, they know the same.
        """
        return self.gather(numbers.view(np.uint32)).view(np.uint64).max(axis=0, initial=0)

    @contextmanager
    def waiting(self, what: str = "the move") -> Iterator[None]:
        """A wait for the others: one that did not come, or died, is an error that says so.

        How long it lasts is up to XLA (see docs/engine.md).

        Args:
            what: they come to.

        Raises:
            DeadlineError: naming what XLA says.
        """
        try:
            yield
        except jax.errors.JaxRuntimeError as error:
            if not self.talk or str(error).startswith("RESOURCE_EXHAUSTED"):
                raise
            raise DeadlineError(
                f"another process of {what} did not come, or died; all that have devices in it must call alike, in the "
                f"same order ({str(error).splitlines()[0]})"
            ) from error


class Consensus:
    """On leaving it, all processes raise alike if one of them raised, or if what they are about to do differs.

    Args:
        processes: those that have to agree.
        doing: what they would otherwise do, and how to mend it.
    """

    def __init__(self, processes: Processes, doing: str = _MOVING) -> None:
        self._processes, self._doing = processes, doing
        self._facts: Callable[[], Any] = tuple

    def on(self, facts: Callable[[], Any]) -> None:
        """Say what this process is about to do, in values that have one ``repr`` each; asked for only if needed."""
        self._facts = facts

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if not self._processes.talk or not isinstance(error, Exception | None) or isinstance(error, DeadlineError):
            return
        said = np.zeros(_WORDS, np.uint32)
        if error is None:
            said[:8] = np.frombuffer(hashlib.sha256(repr(self._facts()).encode()).digest(), np.uint32)
        else:
            text = f"{type(error).__name__}\n{error}".encode()[: said[8:].nbytes]
            said[8:].view(np.uint8)[: len(text)] = np.frombuffer(text, np.uint8)
        heard = self._processes.gather(said)
        if error is None:
            self._raise_what_others_raised(heard[:, 8:])
            self._require_equal(heard[:, :8])

    def _raise_what_others_raised(self, texts: np.ndarray) -> None:
        for number, words in zip(self._processes.numbers, texts, strict=True):
            name, _, text = words.tobytes().rstrip(b"\0").decode(errors="replace").partition("\n")
            if name:
                known = getattr(errors, name, None)
                raise known(f"process {number}: {text}") if known else DynajaxError(f"process {number}: {name}: {text}")

    def _require_equal(self, digests: np.ndarray) -> None:
        alike: dict[bytes, list[int]] = {}
        for number, digest in zip(self._processes.numbers, digests, strict=True):
            alike.setdefault(digest.tobytes(), []).append(number)
        if len(alike) > 1:
            groups = " and ".join(f"processes {numbers}" for numbers in alike.values())
            raise AgreementError(f"{groups} are about to {self._doing}")


@functools.lru_cache(maxsize=64)
def _gather(devices: Devices) -> jax.stages.Compiled:
    """``(said) -> heard``: the words of every device, told to all of them."""

    def dynajax_gather(said: jax.Array) -> list[jax.Array]:
        return [jax.lax.all_gather(said, AXIS, tiled=True)]

    mesh, spec = mesh_of(devices), PartitionSpec(AXIS)
    mapped = jax.shard_map(dynajax_gather, mesh=mesh, in_specs=spec, out_specs=[spec], check_vma=False)
    with private.own_settings():
        return jax.jit(mapped).lower(over(devices, (_WORDS,), np.uint32)).compile()
