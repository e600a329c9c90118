"""Loss scale policies: how the loss scale changes after each training step."""

from optax_lossscale._policies._dynamic import (
  DynamicLossScale,
  DynamicPolicyState,
)
from optax_lossscale._policies._headroom import (
  HeadroomLossScale,
  HeadroomPolicyState,
)
from optax_lossscale._policies._log2_scales import log2
from optax_lossscale._policies._policy import (
  as_policy,
  FixedLossScale,
  get_scale_bounds,
  LossScalePolicy,
  PolicyLike,
  uses_grads_amax,
)
