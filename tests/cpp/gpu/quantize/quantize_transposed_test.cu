// Compares the kernel that quantizes the rows of groups, transposed, with loops over numbers, bit
// by bit, on the current GPU.
//
//   quantize_transposed_test [MODE]
//
//   check   every check
//   small   small checks, each buffer an allocation of its own: for compute-sanitizer
//   time    GB/s beside a copy of as many bytes
//   both    with the rows as they are: times beside the two kernels, whose bits are compared, too
//   all     check, then time (the default)
#include <string_view>
#include <vector>

#include "tests/cpp/gpu/quantize/quantize_transposed_runner.h"

namespace harness {
namespace {

struct Shape {
  int64_t rows, columns;
  std::vector<int32_t> sizes;
};

void Check(const std::vector<Shape>& shapes) {
  CaseCount count, with_rows;
  for (ElementType type : {kBF16, kF16, kF32, kF8E4M3}) {
    for (const auto& [rows, columns, sizes] : shapes) {
      for (bool per_column : {false, true}) {
        TransposedCase c{type, per_column, false, false, rows, columns, sizes};
        count.Add(c.Name(), TransposedRunner(c).Run());
        c.power_of_two_scales = c.zero_tail = true;
        c.scale_block = 128;
        count.Add(c.Name(), TransposedRunner(c).Run());
        c.offset = 1;
        count.Add(c.Name(), TransposedRunner(c).Run());
        if (type == kF8E4M3) continue;
        c.with_rows = true;
        with_rows.Add(c.Name(), TransposedRunner(c).Run());
        c.power_of_two_scales = c.zero_tail = false;
        c.offset = 0;
        with_rows.Add(c.Name(), TransposedRunner(c).Run());
      }
    }
  }
  count.Finish("quantize_transposed");
  with_rows.Finish("quantize_transposed with rows");
}

}  // namespace
}  // namespace harness

#ifndef JAX_EP_EMULATION  // a CPU's times say nothing
#include "tests/cpp/gpu/quantize/quantize_both_timing.h"
#include "tests/cpp/gpu/quantize/quantize_transposed_timing.h"
#endif

int main(int argc, char** argv) {
  using namespace harness;
  const std::string_view mode = argc > 1 ? argv[1] : "all";
  if (mode == "small") {
    GuardedBuffer::exact = true;
    // Aligned and unaligned rows, partial blocks of both axes, groups that are empty or end early.
    Check({{300, 256, {130, 0, 128, 1}}, {200, 136, {-3, 90, 500}}, {40, 7, {20, 9}}});
  } else if (mode != "time" && mode != "both") {
    Check({{1, 1, {1}},
           {128, 128, {128}},
           {700, 520, {128, 256, 0, 130, 1, 100}},
           {515, 640, {-7, 300, 0, 400, 20}},
           {260, 1000, {3, 0, 0, 2}},
           {300, 999, {100, 100, 100}},
           {5, 264, {1, 1, 1, 1, 1, 1, 1, 1}},
           {2000, 2048, {500, 700, 300}}});
  }
#ifndef JAX_EP_EMULATION
  if (mode == "time" || mode == "all") TimeAll();
  if (mode == "both" || mode == "all") TimeBoth();
#endif
  return failures == 0 ? 0 : 1;
}
