"""What a rewriter found on its way through a program."""

from collections.abc import Iterable
import itertools
from typing import NamedTuple

from jax.extend import core

from optax_lossscale._autocast import _kept


class Found(NamedTuple):
  """What was found on the way, in the order of the program.

  Attributes:
    has_products: whether there are products that run in half, or are kept.
    decisions: which of them are kept; none, if the user named none.
    missed: the equations that hold products and could not be entered, each with
      the jaxpr that it stands in.
    has_unseen: whether there are products whose names cannot be known.
  """

  has_products: bool = False
  decisions: tuple[_kept.Decision, ...] = ()
  missed: tuple[tuple[core.JaxprEqn, core.Jaxpr], ...] = ()
  has_unseen: bool = False


def together(founds: Iterable[Found]) -> Found:
  """What was found at several places."""
  all_founds = list(founds)
  chained = itertools.chain.from_iterable
  return Found(
    any(x.has_products for x in all_founds),
    tuple(chained(x.decisions for x in all_founds)),
    tuple(chained(x.missed for x in all_founds)),
    any(x.has_unseen for x in all_founds),
  )
