// A network of a test's own, whose only cable is loopback.
#ifndef JAX_EP_TESTS_CPP_UNIT_RUNTIME_OWN_NETWORK_H_
#define JAX_EP_TESTS_CPP_UNIT_RUNTIME_OWN_NETWORK_H_

#include <net/if.h>
#include <sched.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <cstring>
#include <functional>

#include "ffi/runtime/transport/unique_fd.h"
#include "tests/cpp/unit/check.h"

namespace jax_ep::testing {

// Plugs the cable in, or pulls it. Only in such a network.
inline void SetLoopback(bool is_up) {
  const UniqueFd any(socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0));
  ifreq request = {};
  std::strcpy(request.ifr_name, "lo");
  request.ifr_flags = static_cast<short>(is_up ? IFF_UP : 0);
  CHECK(ioctl(any.get(), SIOCSIFFLAGS, &request) == 0);
}

// Runs a test in a process with such a network, where the system makes one.
inline void InOwnNetwork(const std::function<void()>& test) {
  std::fflush(stdout);
  const pid_t pid = fork();
  if (pid == 0) {
    failures = 0;
    if (unshare(CLONE_NEWNET) == 0 || unshare(CLONE_NEWUSER | CLONE_NEWNET) == 0) {
      SetLoopback(true);
      test();
    } else {
      std::printf("skipped, as this system makes no networks; ");
    }
    std::fflush(stdout);
    _exit(failures == 0 ? 0 : 1);
  }
  int status = 0;
  waitpid(pid, &status, 0);
  CHECK(status == 0);
}

}  // namespace jax_ep::testing

#endif  // JAX_EP_TESTS_CPP_UNIT_RUNTIME_OWN_NETWORK_H_
