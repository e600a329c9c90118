"""Settings that all tests share."""

import hypothesis
import jax

# Eight virtual devices, whatever the machine has; tests of one device are not
# touched by the other seven.
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)

hypothesis.settings.register_profile(
  "ci", deadline=None, derandomize=True, max_examples=100
)
hypothesis.settings.register_profile(
  "nightly", deadline=None, max_examples=10_000, print_blob=True
)
hypothesis.settings.load_profile("ci")
