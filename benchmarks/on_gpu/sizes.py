"""How large all is: for an H100, for a smaller GPU, and to try it out."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Size:
  """One choice of --size."""

  copied: int = 2**28  # float32 numbers, to measure the bandwidth
  large: tuple[int, int] = (8192, 8192)  # of each of the 4 large leaves
  steps_in_a_row: int = 4  # of an optimizer, timed together
  rounds: int = 20  # at most
  first_steps: int = 20  # of a training; the last one's loss is shown
  rows: int | None = None  # of a training; None for all
  width: int = 1024  # of the transformer, as up to `length`
  depth: int = 12
  heads: int = 16
  vocabulary: int = 16384  # tokens
  sequences: int = 8
  length: int = 1024  # tokens of a sequence
  # In each stage of the residual network.
  blocks: tuple[int, ...] = (3, 4, 6, 3)
  channels: int = 64  # of the blocks of the first stage
  images: int = 128  # in a batch
  pixels: int = 224  # height and width
  classes: int = 1000


SIZES = {
  "full": Size(),
  "small": Size(
    copied=2**26,
    large=(4096, 4096),
    width=512,
    depth=6,
    heads=8,
    vocabulary=8192,
    length=512,
    images=32,
  ),
  "tiny": Size(
    copied=2**16,
    large=(64, 64),
    steps_in_a_row=2,
    rounds=3,
    first_steps=3,
    rows=4,
    width=32,
    depth=1,
    heads=2,
    vocabulary=64,
    sequences=2,
    length=16,
    blocks=(1,),
    channels=4,
    images=4,
    pixels=16,
    classes=10,
  ),
}
