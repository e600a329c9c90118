"""Reads the kernels of a compiled program and their bytes from its HLO text.

The text is the result of ``as_text`` of a compiled function.
"""

from collections import Counter
from collections.abc import Iterator
import re
from typing import Any, NamedTuple

# Instructions that move no bytes: they name memory, or wait for others.
FREE = {
  "after-all",
  "async-update",
  "bitcast",
  "constant",
  "get-tuple-element",
  "opt-barrier",
  "parameter",
  "partition-id",
  "replica-id",
  "tuple",
}
COLLECTIVES = (
  "all-gather",
  "all-reduce",
  "all-to-all",
  "collective-permute",
  "reduce-scatter",
)
# By the prefix of a call, or by the operation of XLA itself.
LIBRARIES = (
  ("__cublas$lt", "cuBLASLt"),
  ("__cublas$gemm", "cuBLAS"),
  ("__cudnn$", "cuDNN"),
  ("dot", "XLA"),
  ("convolution", "XLA"),
)
BITS = {"pred": 8, "token": 0}
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%([\w.\-]+) = (.*)$")
_COMPUTATION = re.compile(r"^(ENTRY )?%([\w.\-]+) \(.*\{$")
_ARRAY = re.compile(r"\b([a-z]+\d*\w*)\[([\d,]*)\](\{[^}]*\})?")


class Moved(NamedTuple):
  """The bytes that a part of a program moves, and the number of its kernels."""

  bytes: int
  kernels: int


class Instruction(NamedTuple):
  """An instruction: its name, the type of its result, operation, operands."""

  name: str
  type: str
  opcode: str
  operands: list[str]
  rest: str


def parse(text: str) -> Moved:
  """Sum the bytes that the kernels of a scheduled program move.

  A kernel reads its operands and writes its results. Arrays in the fast memory
  of a TPU do not count. The body of a loop counts once per iteration if the
  compiler knows the trip count.
  """
  computations, entry = _parse_computations(text)
  return _moved(computations, entry)


def read_memory(compiled: Any) -> dict[str, int]:
  """Return the bytes of memory that a compiled function needs, by kind."""
  memory = compiled.memory_analysis()
  aliased, temporary = memory.alias_size_in_bytes, memory.temp_size_in_bytes
  needed = (
    memory.argument_size_in_bytes
    + memory.output_size_in_bytes
    + temporary
    - aliased
  )
  return {
    "temporary": temporary,
    "peak": getattr(memory, "peak_memory_in_bytes", 0) or needed,
    "aliased": aliased,
    "needed": needed,
  }


def collectives(text: str) -> list[tuple[str, str]]:
  """The collectives of a program: operation, and types of the operands."""
  results = []
  for instructions in _parse_computations(text)[0].values():
    types = {i.name: i.type for i in instructions}
    for i in instructions:
      opcode = i.opcode.removesuffix("-start")
      if opcode in COLLECTIVES:
        operands = [_drop_layout(types[name]) for name in i.operands]
        results.append((opcode, ", ".join(operands)))
  return sorted(results)


def count_matmuls(text: str) -> dict[str, dict[str, int]]:
  """Count the matmuls and convolutions of a program for NVIDIA's GPUs.

  Returns:
    The number of matmuls, by implementation and by the dtype of the first
    operand: ``{"__cublas$lt$matmul": {"f16": 40}}``. The implementation is a
    call of an NVIDIA library, or XLA itself (``"dot"``, ``"convolution"``).
    The body of a loop counts once.
  """
  results: dict[str, Counter] = {}
  for instructions in _parse_computations(text)[0].values():
    types = {i.name: i.type for i in instructions}
    for i in instructions:
      call = re.search(r'custom_call_target="(__cu[^"]+)"', i.rest)
      name = call[1] if call else i.opcode
      if call or name in ("dot", "convolution"):
        dtype = _ARRAY.search(types[i.operands[0]])[1]
        results.setdefault(name, Counter())[dtype] += 1
  return {name: dict(results[name]) for name in sorted(results)}


def format_matmuls(matmuls: dict[str, dict[str, int]]) -> str:
  """Return the counts by library: "cuBLASLt: 40 f16; cuDNN: 14 f16"."""
  by_library: dict[str, Counter] = {}
  for target, counts in matmuls.items():
    library = next(
      (lib for p, lib in LIBRARIES if target.startswith(p)), target
    )
    by_library.setdefault(library, Counter()).update(counts)
  return "; ".join(
    f"{library}: " + ", ".join(f"{n} {dtype}" for dtype, n in counts.items())
    for library, counts in sorted(by_library.items())
  )


def _parse_computations(text):
  computations: dict[str, list[Instruction]] = {}
  entry = ""
  current: list[Instruction] = []
  for line in text.splitlines():
    if head := _COMPUTATION.match(line):
      current = computations.setdefault(head[2], [])
      entry = head[2] if head[1] else entry
    elif match := _INSTRUCTION.match(line):
      current.append(_parse_instruction(*match.groups()))
  return computations, entry


def _parse_instruction(name: str, text: str) -> Instruction:
  if text.startswith("("):  # A tuple; layouts may hold parentheses.
    end = _closing(text, 0) + 1
  else:
    end = text.index(" ")
  opcode, attributes = text[end + 1 :].split("(", 1)
  end_of_operands = _closing("(" + attributes, 0) - 1
  operands = re.findall(r"%([\w.\-]+)", attributes[:end_of_operands])
  return Instruction(
    name, text[:end], opcode, operands, attributes[end_of_operands:]
  )


def _closing(text: str, start: int) -> int:
  depth = 0
  for i in range(start, len(text)):
    depth += {"(": 1, ")": -1}.get(text[i], 0)
    if not depth:
      return i
  raise ValueError(f"no closing parenthesis in {text!r}")


def _moved(computations, name) -> Moved:
  instructions = computations[name]
  types = {i.name: i.type for i in instructions}
  traffic = [_instruction_traffic(i, types, computations) for i in instructions]
  return Moved(sum(m.bytes for m in traffic), sum(m.kernels for m in traffic))


def _instruction_traffic(i: Instruction, types, computations) -> Moved:
  if i.opcode in FREE:
    return Moved(0, 0)
  called = list(_called(i))
  if i.opcode == "while":
    times = re.search(r'"known_trip_count":\{"n":"(\d+)"', i.rest)
    n = int(times[1]) if times else 1
    (body,) = (_moved(computations, name) for name in called)
    return Moved(n * body.bytes, n * body.kernels)
  if i.opcode in ("call", "conditional"):
    return max(_moved(computations, name) for name in called)
  read = sum(_bytes(types[name]) for name in set(i.operands))
  if i.opcode.endswith("-start"):
    return Moved(read, 1)
  if i.opcode.endswith("-done"):
    return Moved(_bytes(i.type), 0)
  return Moved(read + _bytes(_drop_workspace(i)), 1)


def _called(i: Instruction) -> Iterator[str]:
  for key in ("to_apply", "body", "true_computation", "false_computation"):
    if i.opcode in ("call", "conditional", "while"):
      yield from re.findall(rf"\b{key}=%([\w.\-]+)", i.rest)
  for branches in re.findall(r"branch_computations=\{([^}]*)\}", i.rest):
    yield from re.findall(r"%([\w.\-]+)", branches)


def _drop_workspace(i: Instruction) -> str:
  """Return the type of the result, without the workspace of a library."""
  if i.opcode == "custom-call" and "__cu" in i.rest:
    return re.sub(r"\b([su]8)\[\d+\]", r"\1[0]", i.type)
  return i.type


def _drop_layout(type_: str) -> str:
  return re.sub(r"\{[^}]*\}", "", type_)


def _bytes(type_: str) -> int:
  total = 0
  for dtype, shape, layout in _ARRAY.findall(type_):
    if "S(" in layout:  # Not in the main memory.
      continue
    size = 1
    for n in filter(None, shape.split(",")):
      size *= int(n)
    total += size * _bits(dtype) // 8
  return total


def _bits(dtype: str) -> int:
  if dtype in BITS:
    return BITS[dtype]
  return int(re.search(r"\d+", dtype)[0])
