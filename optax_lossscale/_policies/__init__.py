"""The policies: rules that move the loss scale after each step."""

from optax_lossscale._policies._headroom import (
  HeadroomLossScale,
  HeadroomPolicyState,
)
from optax_lossscale._policies._plain import (
  DynamicLossScale,
  DynamicPolicyState,
  FixedLossScale,
  get_lowest_scale,
  get_scale_bounds,
  LossScalePolicy,
)
from optax_lossscale._policies._policy_like import (
  as_policy,
  check_no_policy_kwargs,
  PolicyLike,
)
from optax_lossscale._policies._powers_of_two import log2
