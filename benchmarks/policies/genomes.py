"""Sequences of gradients as short lists of numbers, which can be mutated.

A genome has a lowest gradient, a width, and segments that are repeated one
after the other. Each segment has a level and a wave, spikes, zeros and NaNs,
each with a period. All gradients of a genome lie within its width, which with
what is hidden leaves 16 of the 40 binades of float16: one scale holds them all.
"""

from typing import NamedTuple

import numpy as np

STEPS = 6_000
SPARE, BINADES = 16, 40
LONGEST_PERIOD = 1_000


class Segment(NamedTuple):
  """Some steps of a sequence; heights are shares of the width."""

  steps: int
  level: float
  wave: float
  wave_period: int
  spike: float
  spike_period: int
  zero_period: int  # no zeros if it is 0
  nan_period: int
  grads_period: int  # what lies between is zeros, or NaNs
  by_chance: bool  # periods are those of a mean


class Genome(NamedTuple):
  """A sequence of STEPS steps."""

  lowest: float  # a binary logarithm
  width: float  # in binades
  hidden: float  # by how many binades values on the way are larger
  seed: int
  segments: list


class Category(NamedTuple):
  """The ranges of the genomes of a category."""

  has_singles: bool = False  # zeros and NaNs alone
  fill: float | None = None  # what lies between gradients
  longest_gap: int = 1  # from gradients to gradients
  most_hidden: float = 0


CATEGORIES = {
  "dense": Category(),
  "dense with single zeros or NaNs": Category(has_singles=True),
  "sparse": Category(True, fill=-np.inf, longest_gap=LONGEST_PERIOD),
  "mostly NaN": Category(True, fill=np.nan, longest_gap=100),
  "hidden binades": Category(has_singles=True, most_hidden=16),
}


def from_json(numbers):
  """Return a genome from its lists of numbers in JSON."""
  *others, segments = numbers
  return Genome(*others, [Segment(*x) for x in segments])


def draw(rng, category):
  """A random genome."""
  hidden = rng.uniform(0, category.most_hidden)
  return Genome(
    lowest=rng.uniform(-80, 0),
    width=rng.uniform(0, BINADES - SPARE - hidden),
    hidden=hidden,
    seed=int(rng.integers(2**31)),
    segments=[draw_segment(rng, category) for _ in range(rng.integers(1, 5))],
  )


def draw_segment(rng, category):
  sometimes = lambda x: x if rng.random() < 0.5 else 0
  single = lambda: sometimes(draw_period(rng)) if category.has_singles else 0
  return Segment(
    steps=draw_period(rng, 1, 3 * LONGEST_PERIOD),
    level=rng.random(),
    wave=sometimes(rng.random()),
    wave_period=draw_period(rng),
    spike=sometimes(rng.uniform(-1, 1)),
    spike_period=draw_period(rng),
    zero_period=single(),
    nan_period=single(),
    grads_period=draw_period(rng, 1, category.longest_gap),
    by_chance=bool(rng.random() < 0.3),
  )


def draw_period(rng, low=2, high=LONGEST_PERIOD):
  """As likely short as long."""
  return round(np.exp(rng.uniform(np.log(low), np.log(high))))


def mutate(rng, genome, category):
  """A genome with one to three of its numbers changed."""
  for _ in range(rng.integers(1, 4)):
    genome = change(rng, genome, category)
  return genome


def change(rng, genome, category):
  """A genome with one change: of a segment, most often."""
  other = draw(rng, category)
  position = int(rng.integers(len(genome.segments)))
  before, after = genome.segments[:position], genome.segments[position + 1 :]
  what = rng.random()
  if what < 0.1:
    name = str(rng.choice(["lowest", "seed"]))
    return genome._replace(**{name: getattr(other, name)})
  if what < 0.2:
    return genome._replace(width=other.width, hidden=other.hidden)
  if what < 0.25:
    return genome._replace(segments=other.segments[:1] + genome.segments)
  if what < 0.3 and len(genome.segments) > 1:
    return genome._replace(segments=before + after)
  changed = change_segment(
    rng, genome.segments[position], other.segments[0], category
  )
  return genome._replace(segments=[*before, changed, *after])


def change_segment(rng, segment, other, category):
  """Redraw one number, or change a count a little."""
  name = str(rng.choice(Segment._fields))
  old = getattr(segment, name)
  is_count = name not in ("level", "wave", "spike", "by_chance") and old > 1
  if not is_count or rng.random() < 0.4:
    return segment._replace(**{name: getattr(other, name)})
  most = 3 * LONGEST_PERIOD if name == "steps" else LONGEST_PERIOD
  if name == "grads_period":
    most = category.longest_gap
  by = rng.choice([-1, 1, -2, 2, -old // 2, old, old // 4, -old // 4])
  return segment._replace(**{name: int(np.clip(old + by, 1, most))})


def render(genome, category):
  """Binary logarithms of the largest gradients, shape (step,)."""
  rng = np.random.default_rng(genome.seed)
  parts = [render_segment(rng, x, category.fill) for x in genome.segments]
  shares = np.concatenate(parts)
  shares = np.resize(shares, STEPS)  # repeats them
  run = genome.lowest + genome.width * np.clip(shares, 0, 1)
  run = np.where(np.isneginf(shares), -np.inf, run)
  if category.fill is None:
    # Zeros and NaNs are alone.
    is_second = ~np.isfinite(shares)
    is_second[1:] &= ~np.isfinite(shares[:-1])
    is_second[0] = False
    run = np.where(is_second, genome.lowest, run)
  return run.astype(np.float32)


def render_segment(rng, segment, fill):
  """Shares of the width; -inf where all gradients are zero."""
  at = np.arange(segment.steps)

  def occurs(period):
    if segment.by_chance:
      return rng.random(at.size) < 1 / period
    return at % period == period - 1

  phase = at % segment.wave_period / segment.wave_period
  x = segment.level + segment.wave * (2 * abs(phase - 0.5) - 0.5)
  x = np.where(occurs(segment.spike_period), x + segment.spike, x)
  if fill is not None:
    x = np.where(occurs(segment.grads_period), np.clip(x, 0, 1), fill)
  if segment.zero_period:
    x = np.where(occurs(segment.zero_period), -np.inf, x)
  if segment.nan_period:
    x = np.where(occurs(segment.nan_period), np.nan, x)
  return x
