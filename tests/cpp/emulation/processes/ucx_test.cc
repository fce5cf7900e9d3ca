// Tests the network by UCX between two processes, which put into each other's host memory.
//
//   ucx_test FOLDER                 the tests, with libucp.so.0 of this folder
//   ucx_test FOLDER --measure       bandwidth and latency here
//   ucx_test FOLDER --rank=R --read=PIPE --write=PIPE
//                                   one of two processes, which may be on two hosts; the pipes are
//                                   files
#include <fcntl.h>
#include <signal.h>

#include <cstring>
#include <functional>
#include <random>
#include <vector>

#include "tests/cpp/emulation/cases.h"
#include "tests/cpp/emulation/processes/forks.h"
#include "tests/cpp/emulation/processes/network_measurement.h"
#include "tests/cpp/emulation/processes/network_side.h"

namespace jax_ep::testing {
namespace {

std::string folder;

UcxOptions Options(const std::string& transports, double deadline_seconds = 30) {
  UcxOptions options;
  options.folder = folder;
  options.settings = {{"TLS", transports}};
  options.deadline_seconds = deadline_seconds;
  return options;
}

// Runs `child` in two processes that have loaded no UCX yet.
void InTwo(const std::function<void(Pipes& pipes, int rank)>& child, int killed = -1,
           double seconds = 30) {
  Pipes::Pair pipes = Pipes::Make();
  Forks forks(2, [&](int rank) { child(pipes.side[rank], rank); });
  forks.Await(seconds, killed);
}

void InOne(const std::function<void()>& child) {
  Forks forks(1, [&](int) { child(); });
  forks.Await(30);
}

void TestExchange(const std::string& transports, UcxWay way = UcxWay::kDefault) {
  InTwo([&](Pipes& pipes, int rank) {
    UcxOptions options = Options(transports);
    options.way = way;
    NetworkSide side(&pipes, rank, options);
    if (!side.is_connected()) return;
    CHECK(Contains(side.network().Describe(0), "UCX 1."));
    CHECK(Contains(side.network().Describe(0), transports.substr(0, transports.find(','))));
    for (int count : {1, 200}) CHECK_OK(side.Exchange(count));
    side.Meet();
  });
}

// The partner dies with puts in flight or without. The error comes in seconds, and names it. Rank 0
// dies, as its parent waits for it first: shared memory takes a process for alive until then.
void TestDeath(const std::string& transports, bool has_puts) {
  InTwo(
      [&](Pipes& pipes, int rank) {
        NetworkSide side(&pipes, rank, Options(transports), true);
        if (!side.is_connected()) return;
        CHECK_OK(side.Exchange(20));
        side.Meet();
        if (rank == 0) {
          usleep(50'000);  // the partner makes no progress any more
          raise(SIGKILL);
        }
        Status status;
        const double seconds = Seconds([&] {
          for (int i = 0; status.ok() && i < 100'000; ++i) {
            status = side.network().Progress();
            if (status.ok() && has_puts && i < 1000) {
              status = side.PutWords(side.Flag(0), i, i % 2 * side.kSlotBytes);
            }
            if (i >= 1000) usleep(100);
          }
        });
        CHECK_FAILS(status, "the connection to partner 1 by UCX");
        CHECK_FAILS(side.network().Progress(), "has failed");
        CHECK_FAILS(side.PutWords(side.Flag(0), 1), "has failed");
        CHECK(!side.network().IsIdle() || !has_puts);
        CHECK(seconds < 10);
      },
      0);
}

// The partner is killed at a random moment of an exchange that never ends.
void TestDeathInTraffic(const std::string& transports, int num_rounds) {
  std::mt19937 random(std::random_device{}());
  for (int round = 0; round < num_rounds; ++round) {
    Pipes::Pair pipes = Pipes::Make();
    Pipes::Pair started = Pipes::Make();
    Forks forks(2, [&](int rank) {
      NetworkSide side(&pipes.side[rank], rank, Options(transports));
      if (!side.is_connected()) return;
      Status status = side.Exchange(20);
      CHECK_OK(status);
      if (rank == 0) started.side[0].Send("started");
      while (status.ok()) status = side.Exchange(1000, 100);
      CHECK_FAILS(status, "the connection to partner 0 by UCX");
    });
    started.side[1].Receive();
    usleep(random() % 100'000);
    forks.Kill(0);
    forks.Await(20, 0);
  }
}

// The partner lives, and does nothing: puts in flight end by the deadline, and so does the network.
void TestDeadline() {
  InTwo([&](Pipes& pipes, int rank) {
    NetworkSide side(&pipes, rank, Options("tcp,self", 0.5));
    if (!side.is_connected()) return;
    CHECK_OK(side.Exchange(20));
    side.Meet();
    if (rank == 1) {
      pipes.Receive();
      return;
    }
    Status status;
    for (int i = 0; i < 100 && status.ok(); ++i) {
      status = side.PutWords(side.Flag(0), i, side.kSlotBytes);
    }
    const double seconds = Seconds([&] {
      while (status.ok()) status = side.network().Progress();
    });
    CHECK_FAILS(status, "none has arrived for 0.5 s");
    CHECK(0.4 < seconds && seconds < 3);
    pipes.Send("over");
  });
}

void TestMissingLibrary() {
  InOne([] {
    std::unique_ptr<Network> network;
    UcxOptions options = Options("self");
    options.folder = "/nowhere";
    CHECK_FAILS(MakeUcxNetwork(options, &network), "libucx-cu13");
    CHECK_FAILS(MakeUcxNetwork(options, &network), "/nowhere/libucp.so.0");
    options = Options("no_such_transport");
    CHECK_FAILS(MakeUcxNetwork(options, &network), "UCX_TLS");
    options.settings = {{"NO_SUCH_SETTING", "1"}};
    CHECK_FAILS(MakeUcxNetwork(options, &network), "NO_SUCH_SETTING=1");
    CHECK(network == nullptr);
  });
}

void TestMalformed() {
  InOne([] {
    std::unique_ptr<Network> network;
    CHECK_OK(MakeUcxNetwork(Options("tcp,self"), &network));
    std::vector<uint64_t> memory(64);
    std::string address, key;
    int number = -1;
    CHECK_OK(network->Address(&address));
    CHECK_OK(network->Register(memory.data(), 512, &key));
    CHECK_FAILS(network->Register(memory.data(), 512, &key), "not registered yet");
    for (const std::string& bad : {std::string(), std::string("garbage"), std::string(4000, 'x'),
                                   address.substr(0, address.size() - 1), address + "x"}) {
      CHECK_FAILS(network->Connect(bad, &number), "expected");
    }
    CHECK_FAILS(network->Connect(key, &number), "expected a UCX address");
    CHECK_FAILS(network->Open(0, key, &number), "no connection 0");
    CHECK_OK(network->Connect(address, &number));
    for (size_t i = 0; i < key.size(); ++i) {
      std::string bad = key;
      bad[i] ^= 1;
      CHECK(!network->Open(0, bad, &number).ok());
    }
    CHECK_FAILS(network->Open(0, address, &number), "expected a UCX memory key");
    CHECK_OK(network->Open(0, key, &number));
    const auto begin = reinterpret_cast<uint64_t>(memory.data());
    const char other[8] = {};
    CHECK_FAILS(network->Start({number + 1, other, begin, 8, begin, 1}), "not open");
    CHECK_FAILS(network->Start({number, other, begin, 8, begin, 1}), "expected registered memory");
    const void* const from = memory.data();
    CHECK_FAILS(network->Start({number, from, begin + 505, 8, begin, 1}), "expected addresses");
    CHECK_FAILS(network->Start({number, from, begin, 8, begin + 512, 1}), "expected addresses");
    CHECK_FAILS(network->Start({number, from, begin, 8, begin + 4, 1}), "an aligned flag");
    CHECK_FAILS(network->Start({number, from, begin, ~size_t{0}, begin, 1}), "expected");
    network->Close(number);
    CHECK_FAILS(network->Start({number, from, begin, 8, begin, 1}), "not open");
    CHECK_OK(network->Unregister(memory.data()));
    CHECK_FAILS(network->Unregister(memory.data()), "no memory");
  });
}

struct NoMemory final : UcxDeviceMemory {
  Status Copy(void*, const void*, size_t) override { return {}; }
  Status WriteFlags(const std::vector<UcxFlag>&) override { return {}; }
  Status AwaitFlags() override { return {}; }
};

// UCX takes what should be GPU memory for the host's: an error, before anything writes there.
void TestMistakenMemory() {
  InOne([] {
    UcxOptions options = Options("self");
    options.device_memory = std::make_shared<NoMemory>();
    std::unique_ptr<Network> network;
    CHECK_OK(MakeUcxNetwork(options, &network));
    std::vector<uint64_t> memory(64);
    std::string key;
    for (int i = 0; i < 2; ++i) {
      CHECK_FAILS(network->Register(memory.data(), 512, &key), "UCX_MEMTYPE_CACHE=n");
    }
  });
}

// One of two processes that Python starts: exchanges messages, once or until an error.
int RunRank(int rank, Pipes pipes, bool until_error) {
  NetworkSide side(&pipes, rank, Options("tcp,self", 3));
  if (!side.is_connected()) return Finish();
  std::printf("%s\n", side.network().Describe(0).c_str());
  Status status = side.Exchange(300);
  CHECK_OK(status);
  if (!until_error) {
    side.Meet();
    return Finish();
  }
  std::printf("exchanged\n");
  std::fflush(stdout);
  while (status.ok()) status = side.Exchange(300, 300);
  std::printf("error: %s\n", status.message.c_str());
  return Finish();
}

}  // namespace
}  // namespace jax_ep::testing

int main(int argc, char** argv) {
  using namespace jax_ep::testing;
  const char* read = nullptr;
  const char* write = nullptr;
  int rank = -1;
  bool until_error = false, measures = false;
  if (argc > 1) folder = argv[1];
  for (int i = 2; i < argc; ++i) {
    const std::string_view option = argv[i];
    const char* const value = std::strchr(argv[i], '=');
    if (option.starts_with("--rank=")) rank = std::atoi(value + 1);
    if (option.starts_with("--read=")) read = value + 1;
    if (option.starts_with("--write=")) write = value + 1;
    if (option == "--until-error") until_error = true;
    if (option == "--measure") measures = true;
  }
  if (rank >= 0) {
    // Each end waits for the other one: both ranks open the pipe that rank 0 writes first.
    int ends[2] = {};
    for (bool writes : {rank == 0, rank != 0}) {
      ends[writes] = open(writes ? write : read, writes ? O_WRONLY : O_RDONLY);
    }
    return RunRank(rank, Pipes(ends[0], ends[1]), until_error);
  }
  if (measures) {
    for (const char* transports : {"tcp,self", "posix,self"}) {
      const auto measure = [&](Pipes& pipes, int index) {
        NetworkSide side(&pipes, index, Options(transports));
        if (side.is_connected()) Measure(side, index);
      };
      InTwo(measure, -1, 300);
    }
    return Finish();
  }
  return RunCases({{"missing library", TestMissingLibrary},
                   {"malformed", TestMalformed},
                   {"mistaken memory", TestMistakenMemory},
                   {"exchange over tcp", [] { TestExchange("tcp,self"); }},
                   {"exchange over posix", [] { TestExchange("posix,self"); }},
                   {"exchange by puts", [] { TestExchange("posix,self", jax_ep::UcxWay::kPuts); }},
                   {"exchange by puts and messages",
                    [] { TestExchange("posix,self", jax_ep::UcxWay::kPutsWithFlagsInMessages); }},
                   {"death over tcp", [] { TestDeath("tcp,self", false); }},
                   {"death over tcp with puts", [] { TestDeath("tcp,self", true); }},
                   {"death over posix", [] { TestDeath("posix,self", false); }},
                   {"death in traffic over tcp", [] { TestDeathInTraffic("tcp,self", 3); }},
                   {"death in traffic over posix", [] { TestDeathInTraffic("posix,self", 1); }},
                   {"deadline", TestDeadline}},
                  argc, argv);
}
