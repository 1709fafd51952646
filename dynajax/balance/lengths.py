"""How long documents are: shipped histograms, a log-normal, a file; and seeded batches of them.

A batch is drawn until it has a given number of tokens, as the published runs fix tokens, not
sequences. The draw depends on the seed and the number of the iteration alone.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from dynajax.balance.profiles import DATA
from dynajax.data.packing import Overlong, cut
from dynajax.errors import BalanceError
from dynajax.types import Ints

SHIPPED = ("wikipedia", "stdlib")


@dataclass(frozen=True)
class Lengths:
    """A distribution of document lengths as a histogram.

    Attributes:
        name: what it is called.
        edges: tokens, increasing; bin i holds lengths in [edges[i], edges[i + 1]).
        counts: documents of each bin.
    """

    name: str
    edges: tuple[int, ...]
    counts: tuple[float, ...]

    def __post_init__(self) -> None:
        ordered = all(low < high for low, high in zip(self.edges, self.edges[1:], strict=False))
        if len(self.edges) != len(self.counts) + 1 or not ordered or self.edges[0] < 1:
            raise BalanceError(
                f"lengths {self.name}: {len(self.edges)} edges and {len(self.counts)} counts; expected "
                "increasing edges of at least 1 token, one more than counts"
            )
        if min(self.counts) < 0 or sum(self.counts) <= 0:
            raise BalanceError(f"lengths {self.name}: counts must be 0 or more, and not all 0")

    def documents(self, count: int, rng: np.random.Generator) -> Ints:
        """Lengths of ``count`` documents, int64."""
        weights = np.asarray(self.counts, np.float64)
        edges = np.asarray(self.edges, np.int64)
        bins = rng.choice(weights.size, size=count, p=weights / weights.sum())
        return rng.integers(edges[bins], edges[bins + 1])


@dataclass(frozen=True, eq=False)
class LengthBatch:
    """The lengths of a batch.

    Attributes:
        tokens: int64 (sequences,), in the order of the draw.
        cut_documents: documents that were longer than allowed.
        dropped_tokens: tokens that were cut off and not kept.
    """

    tokens: Ints
    cut_documents: int
    dropped_tokens: int


@dataclass(frozen=True)
class LengthBatches:
    """Batches of lengths drawn from a distribution, numbered from 0.

    Attributes:
        lengths: the distribution.
        tokens: tokens of a batch; its last sequence is shortened to fit.
        longest: most tokens of a sequence.
        overlong: what becomes of longer documents.
        seed: of the draw.
    """

    lengths: Lengths
    tokens: int
    longest: int
    overlong: Overlong = Overlong.TRUNCATE
    seed: int = 0

    def __post_init__(self) -> None:
        if min(self.tokens, self.longest) < 1 or self.seed < 0:
            raise BalanceError(
                f"batches of {self.tokens} tokens, longest {self.longest}, seed {self.seed}: "
                "tokens must be 1 or more, the seed 0 or more"
            )

    def batch(self, iteration: int) -> LengthBatch:
        """The batch of ``iteration``.

        Raises:
            DataError: a document is longer than ``longest`` and the policy is to refuse it.
        """
        rng = np.random.default_rng((self.seed, iteration))
        documents = np.empty(0, np.int64)
        while (pieces := cut(documents, self.longest, self.overlong)).length.sum() < self.tokens:
            documents = np.concatenate([documents, self.lengths.documents(256, rng)])
        ends = pieces.length.cumsum()
        count = int(np.searchsorted(ends, self.tokens)) + 1
        kept = pieces.length[:count].copy()
        kept[-1] -= ends[count - 1] - self.tokens
        used = cut(documents[: pieces.document[count - 1] + 1], self.longest, self.overlong)
        return LengthBatch(kept, used.cut_documents, used.dropped_tokens)


def shipped_lengths(name: str) -> Lengths:
    """``wikipedia`` (web-like) or ``stdlib`` (code-like)."""
    return _histogram(name, json.loads((DATA / f"lengths_{name}.json").read_text()))


def lognormal(median: float, sigma: float, bins: int = 256) -> Lengths:
    """A log-normal distribution, cut at four sigmas.

    Args:
        median: tokens.
        sigma: standard deviation of the logarithm; the tail grows with it.
        bins: of the histogram.
    """
    if median < 1 or sigma <= 0:
        raise BalanceError(f"log-normal lengths with median {median} and sigma {sigma}: give 1 or more and above 0")
    positions = np.linspace(-4, 4, bins + 1)
    edges = np.unique(np.maximum(np.round(median * np.exp(sigma * positions)), 1).astype(np.int64))
    middle = np.log(np.sqrt(edges[:-1] * edges[1:]) / median) / sigma
    mass = np.exp(-(middle**2) / 2) * np.diff(np.log(edges))
    return Lengths(f"lognormal:{median:g}:{sigma:g}", tuple(edges.tolist()), tuple(mass.tolist()))


def read_lengths(text: str) -> Lengths:
    """A distribution by name, as ``lognormal:MEDIAN:SIGMA``, or from a file.

    A file holds a histogram like the shipped ones (JSON with ``edges`` and ``counts``), a JSON list of
    lengths, or one length a line.

    Raises:
        BalanceError: it is none of these.
    """
    if text in SHIPPED:
        return shipped_lengths(text)
    if text.startswith("lognormal:"):
        try:
            median, sigma = (float(part) for part in text.split(":")[1:])
        except ValueError:
            raise BalanceError(f"lengths {text!r}: expected lognormal:MEDIAN:SIGMA, like lognormal:800:1.2") from None
        return lognormal(median, sigma)
    if not Path(text).is_file():
        raise BalanceError(f"lengths {text!r} is neither a file nor {', '.join(SHIPPED)} or lognormal:MEDIAN:SIGMA")
    return _from_file(Path(text))


def _from_file(path: Path) -> Lengths:
    content = path.read_text()
    try:
        held = json.loads(content) if content.lstrip()[:1] in ("{", "[") else [int(line) for line in content.split()]
        return _histogram(path.name, held) if isinstance(held, dict) else _observed(path.name, held)
    except (ValueError, KeyError, TypeError) as error:
        if isinstance(error, BalanceError):
            raise
        raise BalanceError(
            f"{path}: expected a JSON histogram with edges and counts, a JSON list of lengths, or one length a line; "
            f"got {error!r}"
        ) from error


def _histogram(name: str, held: dict[str, list[int]]) -> Lengths:
    return Lengths(name, tuple(int(edge) for edge in held["edges"]), tuple(float(count) for count in held["counts"]))


def _observed(name: str, lengths: list[int]) -> Lengths:
    """The histogram of observed lengths: a bin of width 1 for each length that occurs."""
    if not lengths or min(lengths) < 1:
        raise BalanceError(f"lengths {name}: expected one length or more, each of 1 token or more")
    values, counts = np.unique(np.asarray(lengths, np.int64), return_counts=True)
    edges = np.unique(np.concatenate([values, values + 1]))
    of = dict(zip(values.tolist(), counts.tolist(), strict=True))
    return Lengths(name, tuple(edges.tolist()), tuple(float(of.get(edge, 0)) for edge in edges[:-1].tolist()))
