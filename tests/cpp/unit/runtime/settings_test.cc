#include "ffi/runtime/settings.h"

#include <cstdlib>
#include <string>

#include "tests/cpp/unit/check.h"

namespace jax_ep {
namespace {

void TestDefaults() {
  Settings settings;
  CHECK_OK(ReadSettings(&settings));
  CHECK(settings.entry_deadline_ns == 600'000'000'000);
  CHECK(settings.progress_deadline_ns == 30'000'000'000);
  CHECK(settings.warning_ns == 30'000'000'000);
  CHECK(settings.max_delay_ns == 0);
}

void TestGiven() {
  setenv("JAX_EP_ENTRY_TIMEOUT_S", "1.5", 1);
  setenv("JAX_EP_PROGRESS_TIMEOUT_S", "", 1);
  setenv("JAX_EP_TEST_DELAY_US", "20", 1);
  Settings settings;
  CHECK_OK(ReadSettings(&settings));
  CHECK(settings.entry_deadline_ns == 1'500'000'000);
  CHECK(settings.progress_deadline_ns == 30'000'000'000);
  CHECK(settings.max_delay_ns == 20'000);
}

void TestMistakes() {
  for (const char* text : {"soon", "0", "-1", "1s", "nan", "inf", "2e9"}) {
    setenv("JAX_EP_ENTRY_TIMEOUT_S", text, 1);
    Settings settings;
    CHECK_FAILS(ReadSettings(&settings), "JAX_EP_ENTRY_TIMEOUT_S is \"" + std::string(text) + "\"");
  }
}

void TestNetwork() {
  NetworkSettings settings;
  CHECK_OK(ReadNetworkSettings(&settings));
  CHECK(settings.interface_name.empty() && settings.first_port == 0 && settings.last_port == 0);
  CHECK(settings.silence_deadline_ns == 20'000'000'000);
  setenv("JAX_EP_NETWORK_INTERFACE", "eth1", 1);
  setenv("JAX_EP_NETWORK_PORTS", "40000-40100", 1);
  setenv("JAX_EP_NETWORK_TIMEOUT_S", "0.5", 1);
  CHECK_OK(ReadNetworkSettings(&settings));
  CHECK(settings.interface_name == "eth1");
  CHECK(settings.first_port == 40000 && settings.last_port == 40100);
  CHECK(settings.silence_deadline_ns == 500'000'000);
  setenv("JAX_EP_NETWORK_PORTS", "65535", 1);
  CHECK_OK(ReadNetworkSettings(&settings));
  CHECK(settings.first_port == 65535 && settings.last_port == 65535);
  for (const char* text : {"any", "0", "-1", "65536", "2-1", "1-", "1-2-3", "1, 2", "0-9", " 7"}) {
    setenv("JAX_EP_NETWORK_PORTS", text, 1);
    CHECK_FAILS(ReadNetworkSettings(&settings),
                "JAX_EP_NETWORK_PORTS is \"" + std::string(text) + "\"");
  }
}

void TestAbsent() {
  CHECK(!IsAbsent(0));
  setenv("JAX_EP_TEST_ABSENT_DEVICE", "2", 1);
  CHECK(IsAbsent(2) && !IsAbsent(0));
}

}  // namespace
}  // namespace jax_ep

int main() {
  jax_ep::TestDefaults();
  jax_ep::TestGiven();
  jax_ep::TestMistakes();
  jax_ep::TestNetwork();
  jax_ep::TestAbsent();
  return jax_ep::testing::Finish();
}
