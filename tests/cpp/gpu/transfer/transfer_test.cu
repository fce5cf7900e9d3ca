// Runs the transfer kernels on N GPUs, or on N ranks that share one, against loops on the host.
//
//   transfer_test [--ranks N] [--shared] [--tiny] [--seconds S] [--seed X] [--only NAME]
//                 [--domain-size N] [--rail-slots N] [--general] [--arrivals]
//                 [--format NAME] [--shape T,H,E,K,SMS]...
//
//   --ranks N     default: all GPUs
//   --shared      all ranks on GPU 0, with few blocks each so that they all fit
//   --tiny        few small calls, for compute-sanitizer (with more than one rank the tool must not
//                 serialize kernels)
//   --seconds S   duration of the random calls; default 30
//   --only NAME   random, quantized, arrivals, graph, faults, many or timing
//   --general     times without the low-latency kernels
//   --arrivals    times dispatches that count arrivals
//   --format NAME times quantized rows: block128, row, mxfp8, mxfp8_e5m2, mxfp4 or nvfp4
//   --domain-size N   ranks per NVLink domain, of several. Times one level, too
//   --network         joins domains by a slow network, on which messages overtake each other
//   --rail-slots N    bounds the rings of rails, by a power of two
//   --shape T,H,E,K,SMS   times this shape on so many SMs (0: all); may be given again
#include <cstdio>
#include <cstdlib>
#include <string_view>

#include "tests/cpp/gpu/transfer/transfer_arrivals.h"
#include "tests/cpp/gpu/transfer/transfer_faults.h"
#include "tests/cpp/gpu/transfer/transfer_many_tokens.h"
#include "tests/cpp/gpu/transfer/transfer_random.h"
#include "tests/cpp/gpu/transfer/transfer_timing.h"

namespace harness {
namespace {

const QuantizedFormat* FormatNamed(std::string_view name) {
  for (const QuantizedFormat& format : kQuantizedFormats) {
    if (name == format.name) return &format;
  }
  std::printf("FAIL --format %s: expected one of\n", std::string(name).c_str());
  for (const QuantizedFormat& format : kQuantizedFormats) std::printf("  %s\n", format.name);
  std::exit(1);
}

Options Parse(int argc, char** argv) {
  Options options;
  for (int i = 1; i < argc; ++i) {
    const std::string_view name = argv[i];
    const auto value = [&] { return i + 1 < argc ? argv[++i] : ""; };
    if (name == "--ranks") options.ranks = std::atoi(value());
    if (name == "--domain-size") options.domain_size = std::atoi(value());
    if (name == "--rail-slots") options.rail_slots = std::atoi(value());
    if (name == "--network") options.network = true;
    if (name == "--shared") options.shared = true;
    if (name == "--tiny") options.tiny = true;
    if (name == "--general") options.allow_low_latency = false;
    if (name == "--arrivals") options.counts_arrivals = true;
    if (name == "--format") options.format = FormatNamed(value());
    if (name == "--seconds") options.seconds = std::atof(value());
    if (name == "--seed") options.seed = std::strtoull(value(), nullptr, 10);
    if (name == "--only") options.only = value();
    if (name == "--shape") {
      TimedShape shape = {};
      const int read = std::sscanf(value(), "%d,%d,%d,%d,%d", &shape.tokens, &shape.hidden,
                                   &shape.experts, &shape.top_k, &shape.num_sms);
      if (read != 5) {
        std::printf("FAIL --shape %s: expected T,H,E,K,SMS, as 4096,7168,256,8,0\n", argv[i]);
        std::exit(1);
      }
      options.shapes.push_back(shape);
    }
  }
  if (options.shapes.empty()) {
    options.shapes = {{4096, 7168, 256, 8, 0}, {4096, 7168, 256, 8, 24}, {4096, 2048, 128, 8, 0},
                      {4096, 4096, 8, 2, 0},   {128, 7168, 256, 8, 0},   {1, 7168, 256, 8, 0}};
  }
  return options;
}

int Main(int argc, char** argv) {
  // One hardware queue per stream: streams that share one wait for each other. Kernels are loaded
  // eagerly: loading one at its launch waits for the device.
  setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", 1);
  setenv("CUDA_MODULE_LOADING", "EAGER", 1);
  Options options = Parse(argc, argv);
  int devices = 0;
  CUDA_OK(cudaGetDeviceCount(&devices));
  if (options.ranks == 0) options.ranks = options.shared ? 4 : devices;
  if (!options.shared && options.ranks > devices) {
    std::printf("FAIL %d ranks need as many GPUs; there are %d\n", options.ranks, devices);
    return 1;
  }
  const int domain_size = options.domain_size;
  if (domain_size != 0 &&
      (domain_size < 0 || domain_size >= options.ranks || options.ranks % domain_size != 0)) {
    std::printf("FAIL --domain-size %d: expected a divisor of %d ranks, and less than them\n",
                domain_size, options.ranks);
    return 1;
  }
  if (options.network && domain_size == 0) {
    std::printf("FAIL --network: expected a --domain-size, too\n");
    return 1;
  }
  const auto wanted = [&](std::string_view name) {
    return options.only.empty() || options.only == name;
  };
  if (wanted("random") || wanted("quantized") || wanted("arrivals") || wanted("graph") ||
      wanted("faults")) {
    Group group(options.ranks, options.shared,
                (size_t{options.tiny ? 32u : 64u} << 20) + RailBytes(options),
                size_t{options.tiny ? 64u : 512u} << 20,
                options.network ? std::make_unique<Rails>(options) : nullptr);
    if (wanted("random")) {
      TestCapacity(&group, options);
      TestRandom(&group, options);
      TestBackToBack(&group, options);
    }
    if (wanted("quantized")) TestQuantizedRows(&group, options);
    if (wanted("arrivals") && domain_size == 0) TestArrivals(&group, options);
    if (wanted("graph")) TestGraph(&group, options);
    if (wanted("faults")) {
      for (const bool allow_low_latency : {false, true}) {
        TestPoisonedPlan(&group, options, allow_low_latency);
        TestMissingPeer(&group, options, allow_low_latency);
        TestMismatch(&group, options, allow_low_latency);
        TestNoWorkspace(&group, options, allow_low_latency);
      }
      TestTimeouts(&group, options);
    }
  }
  if (wanted("many") && !options.tiny) TestManyTokens(options);
  if (wanted("timing") && !options.tiny) Timing(options);
  std::printf("%s transfer_test: %d ranks%s", failures == 0 ? "PASS" : "FAIL", options.ranks,
              options.shared ? " on one GPU" : "");
  if (domain_size > 0) std::printf(", in domains of %d", domain_size);
  if (options.network) std::printf(", over a network");
  std::printf("\n");
  return failures == 0 ? 0 : 1;
}

}  // namespace
}  // namespace harness

int main(int argc, char** argv) { return harness::Main(argc, argv); }
