"""The figures of whole training steps as tables."""

from typing import Any

from shared.tables import markdown


def table(by_variant: dict[str, dict[str, Any]]) -> str:
  """The figures of one model on one device, as Markdown.

  Args:
    by_variant: the results of :func:`training`, by variant.

  Returns:
    The table.
  """
  head = ["", "GB moved", "GB needed", "kernels", "largest batch"]
  head += ["ms at least, memory", "products", "library calls"]
  rows = [head]
  for variant, found in by_variant.items():
    seconds = found["seconds"]
    rows.append(
      [
        variant,
        f"{found['bytes'] / 1e9:.1f}",
        f"{found['needed'] / 1e9:.1f}",
        f"{found['kernels']:,}",
        str(found["largest_batch"] or ""),
        f"{1e3 * seconds['memory']:.0f}",
        f"{1e3 * seconds['products']:.0f}",
        calls(found["products"]),
      ]
    )
  return markdown(rows)


def calls(matmuls: dict[str, dict[str, int]]) -> str:
  """Return the libraries of matmuls: "cuBLASLt: 40 f16; cuDNN: 14 f16"."""
  by_library: dict[str, dict[str, int]] = {}
  for target, by_dtype in matmuls.items():
    counts = by_library.setdefault(_library(target), {})
    for dtype, n in by_dtype.items():
      counts[dtype] = counts.get(dtype, 0) + n
  return "; ".join(
    f"{library}: " + ", ".join(f"{n} {dtype}" for dtype, n in counts.items())
    for library, counts in sorted(by_library.items())
  )


def _library(target: str) -> str:
  for prefix, name in {
    "__cublas$lt": "cuBLASLt",
    "__cublas$gemm": "cuBLAS",
    "__cudnn$": "cuDNN",
  }.items():
    if target.startswith(prefix):
      return name
  return "XLA" if target in ("dot", "convolution") else target
