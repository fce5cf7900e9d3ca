// tests/cpp/gpu/transfer/transfer_test.cu on a CPU: emulator.h runs the unchanged kernels.
//
//   transfer_test [--resident N] [the options of tests/cpp/gpu/transfer/transfer_test.cu]
//
//   --resident N   blocks of a kernel that run at the same time; default 3
#include <cstdlib>
#include <string_view>

#include "tests/cpp/emulation/transfer/register_kernels.h"

#define main main_of_transfer_test
#include "tests/cpp/gpu/transfer/transfer_test.cu"
#undef main

int main(int argc, char** argv) {
  RegisterKernels();
  emulation::Register(reinterpret_cast<const void*>(harness::ReadArrivals), harness::ReadArrivals);
  for (int i = 1; i + 1 < argc; ++i) {
    const std::string_view name = argv[i];
    if (name == "--resident") emulation::settings.resident_blocks = std::atoi(argv[i + 1]);
    if (name == "--seed") emulation::settings.seed = std::strtoull(argv[i + 1], nullptr, 10);
  }
  return main_of_transfer_test(argc, argv);
}
