"""The helpers that other tests rely on."""

from helpers import markdown
from helpers.bits import assert_same_bits, has_same_bits
import jax
import jax.numpy as jnp
import numpy as np
import pytest

DIFFERENT = {
  "the sign of a zero": (0.0, -0.0),
  "one bit": (1.0, 1 + 2**-52),
  "the dtype": (jnp.float32(1), jnp.float16(1)),
  "the shape": (jnp.ones(1), jnp.ones(())),
  "a key": (jax.random.key(0), jax.random.key(1)),
  "a key and a number": (jax.random.key(0), 0),
  "the structure": ((1, None), (1, 2)),
  "a leaf that is missing": ((1, 2), (1,)),
}


@pytest.mark.parametrize("a, b", DIFFERENT.values(), ids=DIFFERENT)
def test_trees_that_differ_in_any_way_do_not_have_the_same_bits(a, b):
  assert has_same_bits({"x": a}, {"x": a})
  assert not has_same_bits({"x": a}, {"x": b})


def test_equal_leaves_with_nans_or_without_bytes_have_the_same_bits():
  float0 = np.zeros(2, jax.dtypes.float0)
  assert has_same_bits((float0, jnp.zeros((0, 3))), (float0, jnp.zeros((0, 3))))
  assert not has_same_bits(float0, float0[:1])
  assert has_same_bits(jnp.array([jnp.nan, 1]), np.float32([np.nan, 1]))


def test_the_message_names_the_leaf_that_differs():
  with pytest.raises(AssertionError, match=r"\['w'\]\[1\]: 2 is not 3"):
    assert_same_bits({"w": (1, 2)}, {"w": (1, 3)})


PAGE = """
```python
x = 2
```
```python
>>> x + 2
5
```
"""


def test_a_page_that_prints_something_else_fails(tmp_path, capsys):
  path = tmp_path / "page.md"
  path.write_text(PAGE)
  with pytest.raises(AssertionError, match=r"page\.md"):
    markdown.run_page(path)
  assert "Expected:" in capsys.readouterr().out
