"""Measures loss scaling on a GPU, from a checkout, with what is installed.

  python3 benchmarks/gpu.py --out results/

Nothing has to be installed beside JAX for the device, and Optax. torch, Flax,
jmp and Matplotlib are used if they are there. It writes into --out alone, and
takes eight minutes at most. benchmarks/on_gpu/README.md says what is measured.

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
