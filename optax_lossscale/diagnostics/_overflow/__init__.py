"""Who made the inf: runs a function one operation at a time, and follows it."""

from optax_lossscale.diagnostics._overflow._finding import find_overflow
from optax_lossscale.diagnostics._overflow._report import Operand, Overflow
