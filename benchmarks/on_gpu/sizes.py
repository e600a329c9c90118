"""How large all is: for an H100, for a smaller GPU, and to try it out."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Size:
  """One choice of --size.

  Attributes:
    copied: float32 numbers that are copied to measure the bandwidth.
    large: shape of each of the 4 large leaves.
    small: shape of each of the small leaves.
    small_leaves: how many of these there are, at most.
    few_small_leaves: how many are measured first, and at least.
    steps_in_a_row: steps of an optimizer that are timed together.
    rounds: how often each variant is timed, at most.
    first_steps: training steps before the timing, whose last loss is shown.
    rows: how many rows a training has at most; None for all.
    width: of the transformer.
    depth: its layers.
    heads: its attention heads.
    vocabulary: its tokens.
    sequences: in a batch.
    length: tokens of a sequence.
    blocks: bottleneck blocks in each stage of the residual network.
    channels: inner channels of the blocks of the first stage.
    images: in a batch.
    pixels: height and width of an image.
    classes: of images.
  """

  copied: int = 2**28
  large: tuple[int, int] = (8192, 8192)
  small: tuple[int, int] = (512, 512)
  small_leaves: int = 300
  few_small_leaves: int = 30
  steps_in_a_row: int = 4
  rounds: int = 20
  first_steps: int = 20
  rows: int | None = None
  width: int = 1024
  depth: int = 12
  heads: int = 16
  vocabulary: int = 16384
  sequences: int = 8
  length: int = 1024
  blocks: tuple[int, ...] = (3, 4, 6, 3)
  channels: int = 64
  images: int = 128
  pixels: int = 224
  classes: int = 1000


SIZES = {
  "full": Size(),
  "small": Size(
    copied=2**26,
    large=(4096, 4096),
    small=(256, 256),
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
    small=(8, 8),
    small_leaves=6,
    few_small_leaves=2,
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
