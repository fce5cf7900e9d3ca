// Tests calls over 2 to 8 NVLink domains of 1 to 8 ranks, with rings so small that they wrap often:
// routes that no random call has, and ranks that stop.
//
//   domains_test [--only NAME] [--seed X] [--all] [--topology D N]
//
//   --all            tests each case in all topologies; default: in two small ones. Over a network,
//                    and with loads and stores between domains; default: one of both
//   --topology D N   tests D domains of N ranks
#include <chrono>
#include <cstdlib>
#include <functional>
#include <iterator>
#include <string_view>
#include <thread>
#include <vector>

#include "ffi/runtime/calls/workspace.h"
#include "tests/cpp/emulation/cases.h"
#include "tests/cpp/emulation/transfer/register_kernels.h"
#include "tests/cpp/gpu/transfer/transfer_faults.h"

namespace harness {
namespace {

using Ids = std::vector<std::vector<int32_t>>;

struct Topology {
  int domains, size;
  int ranks() const { return domains * size; }
};

constexpr Topology kLarge[] = {{8, 1}, {4, 2}, {5, 2}, {2, 4}, {3, 3}, {2, 8}};
std::vector<Topology> topologies = {{2, 1}, {2, 2}, {5, 1}, {3, 1}, {2, 3}, {3, 2}};
size_t stride = 3;  // a case is tested in every third topology
uint64_t seed = 1;

Options OptionsOf(const Topology& topology) {
  Options options;
  options.ranks = topology.ranks();
  options.domain_size = topology.size;
  options.tiny = true;
  options.seed = seed;
  return options;
}

// Runs a test in a group. With two slots per rail no call is a low-latency one.
void RunInGroup(const Topology& topology, bool network,
                const std::function<void(Group*, const Options&)>& test, int rail_slots = 2) {
  Options options = OptionsOf(topology);
  options.network = network;
  options.rail_slots = rail_slots;
  jax_ep::WorkspaceLayout layout;  // has room for the largest calls
  STATUS_OK(jax_ep::PlanWorkspace({.num_tokens = 1100,
                                   .hidden = 64,
                                   .top_k = 4,
                                   .num_experts = 4 * topology.ranks(),
                                   .num_ranks = topology.ranks(),
                                   .domain_size = topology.size,
                                   .format = jax_ep::kFloat32Rows},
                                  &layout));
  Group group(topology.ranks(), false, layout.bytes, size_t{16} << 20,
              network ? std::make_unique<Rails>(options) : nullptr);
  const int before = failures;
  test(&group, options);
  if (failures == before) return;
  std::printf("FAIL with %d domains of %d%s\n", topology.domains, topology.size,
              network ? " over a network" : "");
  CHECK(!"all was right");
}

// Runs a test in a group of each topology.
void ForEachTopology(const std::function<void(Group*, const Options&)>& test) {
  static uint64_t num_cases = 0;
  for (size_t i = (seed + num_cases++) % stride; i < topologies.size(); i += stride) {
    for (const bool network : {false, true}) {
      if (stride == 1 || network == ((i / stride + num_cases) % 2 == 0)) {
        RunInGroup(topologies[i], network, test);
      }
    }
  }
}

constexpr int kTokens = 44;  // four chunks

Shape ShapeOf(const Options& options, int tokens) {
  Shape shape;
  shape.routing = {.tokens = tokens,
                   .top_k = 3,
                   .experts = 2 * options.ranks,
                   .ranks = options.ranks,
                   .rows = tokens * 3 * options.ranks,
                   .align = 1,
                   .domain_size = options.domain_size,
                   .ids = {}};
  shape.hidden = 24;
  shape.num_sms = options.ranks > 4 ? 1 : 2;  // blocks are threads of this machine
  shape.ring_chunks = 1;
  shape.rail_slots = options.rail_slots;
  return shape;
}

// Draws ids from the experts for which is_wanted(source, destination).
template <typename IsWanted>
Ids IdsWhere(Random& random, const Routing& routing, const IsWanted& is_wanted) {
  Ids ids(routing.ranks);
  for (int r = 0; r < routing.ranks; ++r) {
    std::vector<int32_t> wanted;
    for (int id = 0; id < routing.experts; ++id) {
      if (is_wanted(r, id / routing.local())) wanted.push_back(id);
    }
    for (int i = 0; i < routing.tokens * routing.top_k; ++i) {
      ids[r].push_back(wanted.empty() ? -1 : wanted[random() % wanted.size()]);
    }
  }
  return ids;
}

// Runs dispatches, combines and redispatches, twice without a host in between.
void RunCalls(Group* group, const Options& options, const Shape& shape,
              const decltype(Sequence::make_ids)& make_ids) {
  Random random(options.seed);
  group->ResetArenas(0xff);
  Sequence calls(group, &random);
  calls.make_ids = make_ids;
  const auto dispatched = calls.AddDispatch(shape);
  calls.AddCombine(dispatched, shape);
  calls.AddRedispatch(dispatched, shape);
  calls.Fill();
  calls.LaunchAll();
  calls.LaunchRankByRank();
  calls.Check();
}

// Every token goes to one domain, or to one rank.
void TestHotDomain() {
  ForEachTopology([](Group* group, const Options& options) {
    const Shape shape = ShapeOf(options, kTokens);
    const int hot_domain = shape.routing.num_domains() - 1;
    RunCalls(group, options, shape, [=](Random& random, const Routing& routing) {
      return IdsWhere(random, routing,
                      [&](int, int to) { return to / routing.domain_size == hot_domain; });
    });
    const int hot_rank = options.ranks / 2;
    RunCalls(group, options, shape, [=](Random& random, const Routing& routing) {
      return IdsWhere(random, routing, [&](int, int to) { return to == hot_rank; });
    });
  });
}

// Every token goes to all domains but its own, or to its own only.
void TestOtherDomains() {
  ForEachTopology([](Group* group, const Options& options) {
    for (const bool own : {false, true}) {
      RunCalls(group, options, ShapeOf(options, kTokens),
               [=](Random& random, const Routing& routing) {
                 return IdsWhere(random, routing, [&](int from, int to) {
                   return (from / routing.domain_size == to / routing.domain_size) == own;
                 });
               });
    }
  });
}

// One domain neither sends nor receives.
void TestEmptyDomain() {
  ForEachTopology([](Group* group, const Options& options) {
    RunCalls(group, options, ShapeOf(options, kTokens), [](Random& random, const Routing& routing) {
      const int empty = routing.num_domains() - 1;
      return IdsWhere(random, routing, [&](int from, int to) {
        return from / routing.domain_size != empty && to / routing.domain_size != empty;
      });
    });
  });
}

// There is room for no row, for few, or no token has an expert.
void TestDrops() {
  ForEachTopology([](Group* group, const Options& options) {
    for (const int rows : {0, 7}) {
      Shape shape = ShapeOf(options, kTokens);
      shape.routing.rows = rows;
      RunCalls(group, options, shape, RandomIds);
    }
    RunCalls(group, options, ShapeOf(options, kTokens), [](Random& random, const Routing& routing) {
      return IdsWhere(random, routing, [](int, int) { return false; });
    });
  });
}

void TestFewTokens() {
  ForEachTopology([](Group* group, const Options& options) {
    for (const int tokens : {0, 1, 2}) {
      RunCalls(group, options, ShapeOf(options, tokens), RandomIds);
    }
  });
}

// More chunks than rings have slots, many times over. Calls of other sizes follow, which go on
// where the rails' rings are.
void TestManyWraps() {
  ForEachTopology([](Group* group, const Options& options) {
    for (const int tokens : {200, 1, 390}) {
      if (tokens > 200 && stride > 1) break;
      Shape shape = ShapeOf(options, tokens);
      shape.hidden = 8;
      RunCalls(group, options, shape, RandomIds);
    }
  });
}

// More messages of metadata than a rail's ring has slots, which one block takes, or some. Several
// blocks count the assignments, and none may go on before all have.
void TestManyMetadata() {
  const auto test = [](Group* group, const Options& options) {
    Shape shape = ShapeOf(options, 1050);
    shape.hidden = 8;
    jax_ep::HierarchicalLayout layout;
    STATUS_OK(
        jax_ep::PlanHierarchicalLayout(shape.transfer_shape(), shape.rail_slots, 0, 0, &layout));
    CHECK(layout.num_metadata > layout.rail_slots);
    for (const int num_sms : {1, 3}) {
      shape.num_sms = num_sms;
      RunCalls(group, options, shape, RandomIds);
    }
  };
  RunInGroup(seed % 2 == 0 ? Topology{2, 2} : Topology{3, 1}, seed % 4 < 2, test);
}

// A rank makes no more calls. All others end, and the group works again.
void TestARankStops() {
  ForEachTopology([](Group* group, const Options& options) {
    for (const int missing : {options.ranks / 2, 0, options.ranks - 1}) {
      TestMissingPeer(group, options, false, missing);
      if (stride > 1) break;
    }
  });
}

// A rank stalls for longer than its peers wait, wherever it may: each of their results is whole or
// safe, and who misses a rank names another one.
void TestARankStalls() {
  ForEachTopology([](Group* group, const Options& options) {
    Random random(options.seed);
    int safe = 0;
    for (int round = 0; round < 6; ++round) {
      group->ResetArenas(0x11);
      group->progress_deadline_ns = uint64_t{1'000'000} << round;
      group->entry_deadline_ns = round % 2 == 0 ? 20'000'000'000 : group->progress_deadline_ns;
      group->NewGeneration();
      const int stalled = Uniform(random, 0, options.ranks - 1);
      const uint64_t delay = 200'000'000;
      group->Refill(stalled, &group->ranks[stalled].control->max_delay_ns,
                    std::vector<uint64_t>{delay});
      Sequence calls(group, &random);
      Shape shape = ShapeOf(options, kTokens);
      const auto dispatched = calls.AddDispatch(shape);
      calls.AddCombine(dispatched, shape);
      calls.AddRedispatch(dispatched, shape);
      calls.Fill();
      calls.LaunchAll();
      group->Synchronize();
      for (int r = 0; r < options.ranks; ++r) {
        const int status = group->Download<int32_t>(r, dispatched->calls[r].plan.status, 1)[0];
        if (status == 0) {
          CheckDispatch(group, *dispatched, r);
        } else {
          ExpectSafe(group, *dispatched, r, 1);
        }
        const bool is_combined = calls.combined[0](r), is_sent = calls.is_whole_of[0](r);
        safe += (status != 0) + !is_combined + !is_sent;
        const jax_ep::AbortRecord& record = *group->ranks[r].record;
        if (record.posted) ExpectReport(*group, r, record.peer, jax_ep::Outcome::kTimeout);
        if (record.posted && record.peer == r) Fail("a rank waited for itself");
      }
    }
    if (safe == 0) Fail("no wait timed out");
    group->entry_deadline_ns = group->progress_deadline_ns = 20'000'000'000;
    group->NewGeneration();
    RunCalls(group, options, ShapeOf(options, 5), RandomIds);
  });
}

// A rank comes later than its peers may go without progress. They wait for it by the deadline of
// entry, also those that hear of it through others, and all is right.
void TestARankComesLate() {
  const auto test = [](Group* group, const Options& options) {
    constexpr uint64_t kProgress = 700'000'000;
    constexpr auto kLate = std::chrono::milliseconds(1500);
    Random random(options.seed);
    group->ResetArenas(0x11);
    group->progress_deadline_ns = kProgress;
    group->NewGeneration();
    Sequence calls(group, &random);
    const Shape shape = ShapeOf(options, 5);
    const auto dispatched = calls.AddDispatch(shape);
    calls.AddRedispatch(dispatched, shape);
    calls.AddCombine(dispatched, shape);
    calls.Fill();
    const int late = Uniform(random, 0, options.ranks - 1);
    for (int call = 0; call < calls.size(); ++call) {
      for (int r = 0; r < options.ranks; ++r) {
        if (r != late) calls.Launch(call, r);
      }
      std::this_thread::sleep_for(kLate);
      calls.Launch(call, late);
      group->Synchronize();
    }
    calls.Check();
    group->progress_deadline_ns = 20'000'000'000;
    group->NewGeneration();
  };
  constexpr int kGeneral = 2, kLowLatency = 16;
  for (const int slots : {kGeneral, kLowLatency}) RunInGroup({2, 2}, seed % 2 == 0, test, slots);
}

// A rank asks the network for two puts per message: the message and its credit. All that is not
// rows takes one message to each rail partner.
void TestPuts() {
  for (const Topology& topology : {Topology{2, 2}, Topology{3, 1}}) {
    RunInGroup(topology, true, [](Group* group, const Options& options) {
      const Shape shape = ShapeOf(options, 1);  // one chunk
      const uint64_t before = group->rails()->num_puts();
      RunCalls(group, options, shape, RandomIds);
      constexpr uint64_t kCalls = 3 * 2, kMessages = 2, kPutsPerMessage = 2;
      const uint64_t rails = options.ranks / options.domain_size - 1;
      // The last credits may come after the calls.
      group->NewGeneration();
      const uint64_t leaves = options.ranks * rails;
      const uint64_t expected =
          options.ranks * rails * kCalls * kMessages * kPutsPerMessage + leaves;
      const uint64_t puts = group->rails()->num_puts() - before;
      if (puts != expected) Fail(jax_ep::Concatenate(puts, " puts; expected ", expected));
    });
  }
}

// A call uses all slots that its workspace has: with fewer, ranks wait for each other's credits.
void TestSlots() {
  jax_ep::TransferCall call;
  call.shape = {.num_tokens = 4096,
                .hidden = 7168,
                .top_k = 8,
                .num_experts = 256,
                .num_ranks = 4,
                .num_rows = 4096 * 8,
                .domain_size = 2,
                .format = jax_ep::kBFloat16Rows};
  jax_ep::HierarchicalLayout layout;
  STATUS_OK(jax_ep::PlanHierarchicalLayout(call.shape, 0, 0, 0, &layout));
  jax_ep::PreparedCombine combine;
  STATUS_OK(jax_ep::PrepareCombine(call, &combine));
  CHECK(layout.domain_slots > 1 && combine.layout.domain_slots == layout.domain_slots);
  call.ring_chunks = 1;
  STATUS_OK(jax_ep::PrepareCombine(call, &combine));
  CHECK(combine.layout.domain_slots == 1);
}

}  // namespace
}  // namespace harness

int main(int argc, char** argv) {
  using namespace harness;
  RegisterKernels();
  for (int i = 1; i < argc; ++i) {
    const std::string_view name = argv[i];
    if (name == "--all") {
      stride = 1;
      topologies.insert(topologies.end(), std::begin(kLarge), std::end(kLarge));
    }
    if (name == "--seed" && i + 1 < argc) seed = std::strtoull(argv[i + 1], nullptr, 10);
    if (name == "--topology" && i + 2 < argc) {
      topologies = {{std::atoi(argv[i + 1]), std::atoi(argv[i + 2])}};
      stride = 1;
    }
  }
  emulation::settings.seed = seed;
  return jax_ep::testing::RunCases({{"hot domain", TestHotDomain},
                                    {"other domains", TestOtherDomains},
                                    {"empty domain", TestEmptyDomain},
                                    {"drops", TestDrops},
                                    {"few tokens", TestFewTokens},
                                    {"many wraps", TestManyWraps},
                                    {"many messages of metadata", TestManyMetadata},
                                    {"puts", TestPuts},
                                    {"slots", TestSlots},
                                    {"a rank stops", TestARankStops},
                                    {"a rank stalls", TestARankStalls},
                                    {"a rank comes late", TestARankComesLate}},
                                   argc, argv);
}
