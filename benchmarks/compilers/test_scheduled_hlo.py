"""The benchmarks' reader of compiled programs, on programs made by hand."""

from helpers.benchmark import load_benchmark
import pytest

pytestmark = pytest.mark.slow

scheduled_hlo = load_benchmark("compilers/scheduled_hlo")

PROGRAM = """
HloModule jit_step, is_scheduled=true

%fused (p.0: f32[4,8], p.1: f32[]) -> f32[4,8] {
  %p.0 = f32[4,8]{1,0} parameter(0)
  ROOT %m = f32[4,8]{1,0} multiply(%p.0, %p.0)
}

%body (arg: (s32[], f16[10])) -> (s32[], f16[10]) {
  %arg = (s32[], f16[10]{0}) parameter(0)
  %x = f16[10]{0} get-tuple-element(%arg), index=1
  %y = f16[10]{0} negate(%x)
  ROOT %t = (s32[], f16[10]{0}) tuple(%x, %y)
}

ENTRY %main (a: f32[4,8], b: f32[]) -> f32[4,8] {
  %a = f32[4,8]{1,0:T(8,128)} parameter(0), metadata={op_name="a"}
  %b = f32[]{:T(128)} parameter(1)
  BODY
}
"""
CASES = {
  "a kernel reads its operands and writes its result": (
    "ROOT %k = f32[4,8]{1,0:T(8,128)} fusion(%a, %b), calls=%fused",
    (128 + 4 + 128, 1),
  ),
  "an operand that is passed twice is read once": (
    "ROOT %k = f32[4,8]{1,0} add(%a, %a)",
    (256, 1),
  ),
  "a kernel may write several results": (
    "ROOT %k = (f32[4,8]{1,0}, pred[3]{0}) fusion(%b), calls=%fused",
    (128 + 3 + 4, 1),
  ),
  "fast memory costs nothing": (
    "ROOT %k = f32[4,8]{1,0:T(8,128)S(1)} fusion(%a, %b), calls=%fused",
    (132, 1),
  ),
  "names for parts of memory cost nothing": (
    "%t = (f32[4,8]{1,0}, f32[]) tuple(%a, %b)\n"
    "  ROOT %g = f32[4,8]{1,0} get-tuple-element(%t), index=0",
    (0, 0),
  ),
  "what starts and is waited for is one kernel": (
    "%s = (f32[4,8]{1,0}, f32[4,8]{1,0}, u32[]) copy-start(%a)\n"
    "  ROOT %d = f32[4,8]{1,0} copy-done(%s)",
    (256, 1),
  ),
  "a loop counts as often as it runs": (
    "%t = (s32[], f16[10]{0}) tuple(%b, %a)\n"
    "  ROOT %w = (s32[], f16[10]{0}) while(%t), condition=%c, body=%body,"
    ' backend_config={"known_trip_count":{"n":"5"}}',
    (5 * 40, 5),
  ),
  "what is called counts": (
    "ROOT %c = (s32[], f16[10]{0}) call(%a), to_apply=%body",
    (40, 1),
  ),
  "of branches the dearest counts": (
    "ROOT %c = (s32[], f16[10]{0}) conditional(%b, %a, %a),"
    " branch_computations={%body, %fused}",
    (256, 1),
  ),
  "the memory that a library works in does not count": (
    "ROOT %c = (f16[10]{0}, s8[4096]{0}, u8[64]{0}) custom-call(%a),"
    ' custom_call_target="__cublas$gemm"',
    (148, 1),
  ),
}


@pytest.mark.parametrize("case", CASES)
def test_bytes_of_instructions_are_counted(case):
  lines, expected = CASES[case]
  assert scheduled_hlo.parse(PROGRAM.replace("BODY", lines)) == expected


def test_collectives_are_listed_with_the_values_that_they_send():
  lines = (
    "%r = f32[4,8]{1,0} all-reduce(%a), to_apply=%fused\n"
    "  %s = (f32[]{:T(128)}, f32[4,8]{1,0}) all-reduce-start(%b, %a),"
    " to_apply=%fused\n"
    "  ROOT %d = (f32[], f32[4,8]{1,0}) all-reduce-done(%s)"
  )
  assert scheduled_hlo.collectives(PROGRAM.replace("BODY", lines)) == [
    ("all-reduce", "f32[4,8]"),
    ("all-reduce", "f32[], f32[4,8]"),
  ]


def test_matmuls_are_counted_by_library_and_dtype():
  call = "(f16[4,8]{1,0}, s8[64]{0}) custom-call(%h, %a), custom_call_target="
  lines = (
    "%h = f16[4,8]{1,0} convert(%a)\n"
    f'  %p = {call}"__cublas$lt$matmul"\n'
    f'  %q = {call}"__cublas$lt$matmul"\n'
    '  %r = f32[4,8]{1,0} custom-call(%a), custom_call_target="__cublas$gemm"\n'
    f'  %s = {call}"__cudnn$convForward"\n'
    '  %t = f16[4]{0} custom-call(%h), custom_call_target="Sharding"\n'
    "  ROOT %d = f32[4,4]{1,0} dot(%a, %a), lhs_contracting_dims={1}"
  )
  assert scheduled_hlo.count_matmuls(PROGRAM.replace("BODY", lines)) == {
    "__cublas$gemm": {"f32": 1},
    "__cublas$lt$matmul": {"f16": 2},
    "__cudnn$convForward": {"f16": 1},
    "dot": {"f32": 1},
  }


def test_library_calls_are_printed_by_library_and_dtype():
  products = {
    "__cublas$gemm": {"f32": 1},
    "__cublas$lt$matmul": {"f16": 40},
    "__cudnn$convBackwardFilter": {"f16": 1},
    "__cudnn$convForward": {"f16": 2, "f32": 1},
    "dot": {"f32": 3},
  }
  assert scheduled_hlo.format_matmuls(products) == (
    "XLA: 3 f32; cuBLAS: 1 f32; cuBLASLt: 40 f16; cuDNN: 3 f16, 1 f32"
  )
