"""Measures loss scaling on a GPU, from a checkout, without an installation.

  python3 benchmarks/gpu.py --out results/

It needs JAX for the device, and Optax. Flax and jmp are used if they are
installed. It writes only to --out, and takes eight minutes.
benchmarks/on_gpu/README.md describes the measurements.

  python3 benchmarks/gpu.py --out results/ --size tiny   # tries it out, on CPU
"""

import pathlib
import sys

sys.dont_write_bytecode = True  # The checkout may be read-only.
HERE = pathlib.Path(__file__).resolve().parent
# This checkout comes before a package that is installed.
sys.path[:0] = [str(HERE.parent), str(HERE)]

from on_gpu import command  # noqa: E402

if __name__ == "__main__":
  command.main(__doc__)
