// Tests NVSHMEM as a network on the host, with a fake of its library (tests/cpp/fakes).
//
//   nvshmem_test FOLDER PARTIAL
//
//   FOLDER    has the fake
//   PARTIAL   has one without most functions
#include <cstdlib>
#include <string>
#include <vector>

#include "ffi/runtime/network/nvshmem/nvshmem_network.h"
#include "tests/cpp/unit/check.h"

namespace jax_ep {
namespace {

std::string folder, partial;

void SetVersion(const char* version) { setenv("FAKE_NVSHMEM_VERSION", version, 1); }

void TestHeap() {
  NvshmemHeap heap(1 << 20, 1 << 16);
  CHECK(heap.Allocate(0) == 0);
  CHECK(heap.Allocate((1 << 16) + 1) == 0);
  const uint64_t first = heap.Allocate(1), second = heap.Allocate(2 * NvshmemHeap::kAlignment);
  CHECK(first == 1 << 20);
  CHECK(second == first + NvshmemHeap::kAlignment);
  CHECK(heap.used_bytes() == 3 * NvshmemHeap::kAlignment);
  const uint64_t rest = heap.Allocate((1 << 16) - 3 * NvshmemHeap::kAlignment);
  CHECK(rest != 0);
  CHECK(heap.Allocate(1) == 0);
  // The first gap that is large enough.
  heap.Free(second);
  CHECK(heap.Allocate(NvshmemHeap::kAlignment) == second);
  heap.Free(first);
  CHECK(heap.Allocate(2 * NvshmemHeap::kAlignment) == 0);
  CHECK(heap.Allocate(NvshmemHeap::kAlignment) == first);
  heap.Free(rest);
  CHECK(heap.Allocate((1 << 16) - 2 * NvshmemHeap::kAlignment) != 0);
}

void TestLibrary() {
  const NvshmemLibrary* library = nullptr;
  CHECK_FAILS(OpenNvshmem("/nowhere", &library), "NVSHMEM is not found (/nowhere/");
  CHECK_FAILS(OpenNvshmem("/nowhere", &library), "pip install nvidia-nvshmem-cu13");
  CHECK_FAILS(OpenNvshmem(partial, &library), "has no function ");
  for (const char* version : {"3.3.9", "2.11.0", "4.0.0"}) {
    SetVersion(version);
    CHECK_FAILS(OpenNvshmem(folder, &library), version);
    CHECK_FAILS(OpenNvshmem(folder, &library),
                "does not serve; expected 3.4 or a newer 3.x; install it: pip install");
  }
  SetVersion("3.8.0");
  CHECK_OK(OpenNvshmem(folder, &library));
  CHECK(library->version == "3.8.0");
  CHECK(library->path.starts_with(folder));
  CHECK(library->nvshmemx_init_status() == 0);
}

NvshmemOptions Options() {
  NvshmemOptions options;
  options.folder = folder;
  options.check = [](int /*device*/) { return Status{}; };
  options.on_device = [](int /*device*/, const auto& function) { return function(); };
  options.load_kernels = [](const NvshmemLibrary& library) {
    CHECK(library.nvshmemx_init_status() == kNvshmemIsInitialized);
    return Status{};
  };
  return options;
}

// A group of one process, or one whose other process does as this one.
NetworkMembers Members(size_t count, std::vector<int> devices = {0}) {
  NetworkMembers members;
  members.count = count;
  members.devices = std::move(devices);
  members.describe = [](size_t process) { return "process " + std::to_string(process); };
  members.gather = [count](const std::string& own, std::vector<std::string>* all) {
    all->assign(count, own);
    return Status{};
  };
  return members;
}

void TestWhatKeepsAWorldFromStarting() {
  NvshmemWorld world(Options());
  CHECK_FAILS(world.Join(Members(2), FailedPrecondition("no luck")),
              "process 0 cannot use NVSHMEM: no luck");
  CHECK_FAILS(world.Join(Members(2, {0, 1}), {}),
              "process 0 drives 2 GPUs, and NVSHMEM needs a process for each GPU");
  NvshmemOptions options = Options();
  options.check = [](int /*device*/) { return FailedPrecondition("it is too old"); };
  CHECK_FAILS(NvshmemWorld(options).Join(Members(1), {}), "it is too old");
  setenv("JAX_EP_NVSHMEM_HEAP_MB", "much", 1);
  CHECK_FAILS(world.Join(Members(1), {}), "JAX_EP_NVSHMEM_HEAP_MB is \"much\"");
  setenv("JAX_EP_NVSHMEM_HEAP_MB", "1", 1);
  setenv("FAKE_NVSHMEM_FAILS", "nvshmemx_get_uniqueid", 1);
  CHECK_FAILS(world.Join(Members(1), {}), "fails in nvshmemx_get_uniqueid with status 7");
  unsetenv("FAKE_NVSHMEM_FAILS");
  CHECK(world.pe() == -1);
}

// A start that has failed is not tried again.
void TestAFailedStart() {
  NvshmemWorld world(Options());
  setenv("FAKE_NVSHMEM_FAILS", "nvshmemx_hostlib_init_attr", 1);
  for (int i = 0; i < 2; ++i) {
    CHECK_FAILS(world.Join(Members(1), {}), "fails in nvshmemx_hostlib_init_attr with status 7");
    unsetenv("FAKE_NVSHMEM_FAILS");
  }
}

// The only one that starts in this process.
void TestNetwork() {
  static NvshmemWorld world(Options());
  CHECK_OK(world.Join(Members(1), {}));
  CHECK_OK(world.Join(Members(1), {}));
  CHECK(world.pe() == 0 && world.id() != 0);
  CHECK(world.heap()->bytes() == 1 << 20);

  std::vector<NvshmemPutParams> puts;
  NvshmemStream stream;
  stream.put = [&](const NvshmemPutParams& params) {
    puts.push_back(params);
    return Status{};
  };
  bool ends = true;
  stream.query = [&](bool* is_idle) {
    *is_idle = ends;
    return Status{};
  };
  NvshmemNetwork network(&world, stream);
  CHECK(network.KernelsPut());
  void* memory = nullptr;
  bool out_of_memory = false;
  CHECK_FAILS(network.Allocate(2 << 20, &memory, &out_of_memory), "JAX_EP_NVSHMEM_HEAP_MB");
  CHECK(out_of_memory);
  CHECK_OK(network.Allocate(8192, &memory, &out_of_memory));
  std::string key, address;
  CHECK_FAILS(network.Register(&puts, 8, &key), "is not in NVSHMEM's heap");
  CHECK_OK(network.Register(memory, 8192, &key));
  CHECK_OK(network.Address(&address));
  int connection = -1, opened = -1;
  CHECK_FAILS(network.Connect("x", &connection), "is not the number of an NVSHMEM process");
  CHECK_OK(network.Connect(address, &connection));
  CHECK_FAILS(network.Open(connection, "short", &opened), "an NVSHMEM key has 5 bytes");
  CHECK_FAILS(network.Open(connection + 1, key, &opened), "is not in the NVSHMEM world");
  CHECK_OK(network.Open(connection, key, &opened));
  const auto base = reinterpret_cast<uint64_t>(memory);
  CHECK(network.TargetOf(opened, base + 8).address == base + 8);
  CHECK(network.Map(opened, base) == base);
  CHECK(network.IsIdle());
  const Put put = {.memory = opened, .to = base, .flag = base + 4096, .value = 3};
  CHECK_OK(network.Start(put));
  CHECK(!network.IsIdle());
  CHECK(puts.size() == 1 && puts[0].flag == base + 4096 && puts[0].value == 3);
  CHECK_OK(network.Progress());
  CHECK(network.IsIdle());
  CHECK_OK(network.Flush(1));
  CHECK(puts.size() == 2 && puts[1].flag == 0);
  ends = false;
  CHECK_FAILS(network.Flush(0.01), "puts by NVSHMEM have not arrived within 0.01 s");
  network.Free(memory);
  CHECK(world.heap()->used_bytes() == 0);
}

}  // namespace
}  // namespace jax_ep

int main(int argc, char** argv) {
  CHECK(argc == 3);
  jax_ep::folder = argv[1];
  jax_ep::partial = argv[2];
  jax_ep::TestHeap();
  jax_ep::TestLibrary();
  jax_ep::TestWhatKeepsAWorldFromStarting();
  jax_ep::TestAFailedStart();
  jax_ep::TestNetwork();
  return jax_ep::testing::Finish();
}
