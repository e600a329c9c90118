"""Tables of the results."""

from typing import Any

from shared.tables import markdown, tabulate

# CPU time is that of all threads.
COLUMNS = {
  "variant": "{name}",
  "time": lambda f: _spread(f["time"]),
  "CPU time": lambda f: _spread(f["cpu_time"]),
  "skip / step": lambda f: _spread(f["skipped_time"]),
  "same, CPU": lambda f: _spread(f["skipped_cpu_time"]),
  "bytes": "{bytes:.2f} ({bytes_ratio:.2f}x)",
  "flops": "{flops:.1f}",
  "temporary": "{temporary_bytes:.2f}",
  "aliased": "{aliased_bytes:.2f}",
  "equations": "{equations}",
  "instructions": "{instructions}",
  "trace": "{trace_seconds:.2f} s",
  "compile": "{compile_seconds:.2f} s",
  "both": "{trace_and_compile_ratio:.2f}x",
}


def table(results: dict[str, dict[str, Any]]) -> str:
  """Return one workload as a Markdown table."""
  return tabulate(COLUMNS, [{"name": n} | f for n, f in results.items()])


# The first table of the page: workload, and its name there.
SUMMARY = {
  "adam": "Adam alone",
  "mlp": "a step of the MLP",
  "transformer": "a step of the transformer",
}
# The same of variants; Keras is compared with Keras.
COMPARED = {
  "bare": "none",
  "ours": "ours",
  "Flax DynamicScale": "Flax",
  "jmp": "jmp",
  "apply_if_finite": "`apply_if_finite`",
  "Keras LossScaleOptimizer": "Keras",
}
FIGURES = {
  "time": lambda f: f["time"][1],
  "bytes moved": lambda f: f["bytes_ratio"],
  "trace and compile": lambda f: f["trace_and_compile_ratio"],
}


def summary(results: dict[str, dict[str, Any]]) -> str:
  """Return the main figures of three workloads, in a table that fits a page."""
  rows = [["", "relative to none", *COMPARED.values()]]
  for workload, name in SUMMARY.items():
    for i, (figure, value) in enumerate(FIGURES.items()):
      cells = [f"{value(results[workload][v]):.2f}" for v in COMPARED]
      rows.append([name if i == 0 else "", figure, *cells])
  return markdown(rows, right_from=2)


def folded(name: str, variants: dict[str, Any]) -> str:
  """The table of one workload, below a line that opens it.

  A heading inside would end the fold in the pages that Sphinx makes.
  """
  return (
    f"<details>\n<summary>{name}</summary>\n\n{table(variants)}\n\n</details>"
  )


def _spread(quartiles):
  low, middle, high = quartiles
  return f"{middle:.2f} [{low:.2f}, {high:.2f}]"
