// A network that only takes note of the puts.
#ifndef JAX_EP_TESTS_CPP_UNIT_RUNTIME_NOTED_NETWORK_H_
#define JAX_EP_TESTS_CPP_UNIT_RUNTIME_NOTED_NETWORK_H_

#include <cstddef>
#include <string>
#include <vector>

#include "ffi/runtime/network/network.h"

namespace jax_ep::testing {

class NotedNetwork : public Network {
 public:
  Status Register(void*, size_t, std::string*) override { return {}; }
  Status Unregister(void*) override { return {}; }
  Status Address(std::string*) override { return {}; }
  Status Connect(const std::string&, int*) override { return {}; }
  Status Open(int, const std::string&, int*) override { return {}; }
  void Close(int) override {}
  Status Start(const Put& put) override {
    puts.push_back(put);
    return {};
  }
  Status Progress() override { return failure; }
  bool IsIdle() const override { return is_idle; }
  std::string Describe(int) const override { return "notes"; }

  std::vector<Put> puts;
  Status failure;
  bool is_idle = true;
};

}  // namespace jax_ep::testing

#endif  // JAX_EP_TESTS_CPP_UNIT_RUNTIME_NOTED_NETWORK_H_
