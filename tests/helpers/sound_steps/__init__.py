"""Sound float16 training steps, as users write them.

Each module has the steps of one kind, by their names, as functions that return
a step and the arguments of a call. The step trains: it returns its parameters
and its optimizer state, in the order of its first arguments, or updates them in
place. ``check_step`` must find no problem in any of them.
"""

from helpers.sound_steps import (
  devices,
  libraries,
  models,
  optimizers,
  results,
  several_updates,
)

STEPS = {
  name: make
  for module in (
    libraries,
    optimizers,
    several_updates,
    results,
    models,
    devices,
  )
  for name, make in module.STEPS.items()
}
