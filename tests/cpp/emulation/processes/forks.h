// Processes that a test forks. The parent has no threads, so each child begins afresh.
#ifndef JAX_EP_TESTS_CPP_EMULATION_PROCESSES_FORKS_H_
#define JAX_EP_TESTS_CPP_EMULATION_PROCESSES_FORKS_H_

#include <dirent.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <fstream>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "tests/cpp/unit/check.h"

namespace jax_ep::testing {

// The open descriptors of this process.
inline int CountDescriptors() {
  int count = 0;
  DIR* const folder = opendir("/proc/self/fd");
  while (readdir(folder) != nullptr) ++count;
  closedir(folder);
  return count;
}

// Sockets of jax_ep in this network namespace that belong to one of these processes.
inline int CountSockets(const std::vector<pid_t>& pids) {
  int count = 0;
  std::ifstream file("/proc/net/unix");
  for (std::string line; std::getline(file, line);) {
    for (pid_t pid : pids) count += Contains(line, "@jax_ep-" + std::to_string(pid) + "-");
  }
  return count;
}

class Forks {
 public:
  Forks(int count, const std::function<void(int index)>& child) {
    std::fflush(stdout);
    for (int i = 0; i < count; ++i) {
      const pid_t pid = fork();
      if (pid == 0) {
        failures = 0;
        child(i);
        std::fflush(stdout);
        _exit(failures == 0 ? 0 : 1);
      }
      pids_.push_back(pid);
    }
  }

  const std::vector<pid_t>& pids() const { return pids_; }
  void Kill(int index) { kill(pids_[index], SIGKILL); }

  // Waits until all have ended, and checks that they passed but for one that was killed.
  void Await(double seconds, int killed = -1) {
    const auto deadline = std::chrono::steady_clock::now() + std::chrono::duration<double>(seconds);
    for (size_t i = 0; i < pids_.size(); ++i) {
      int status = 0;
      while (waitpid(pids_[i], &status, WNOHANG) == 0) {
        if (std::chrono::steady_clock::now() > deadline) {
          Report(__FILE__, __LINE__, "a process ends in time", std::to_string(i));
          kill(pids_[i], SIGKILL);
          waitpid(pids_[i], &status, 0);
          break;
        }
        std::this_thread::sleep_for(std::chrono::milliseconds(2));
      }
      if (static_cast<int>(i) != killed) CHECK(status == 0);
    }
    CHECK(CountSockets(pids_) == 0);
  }

 private:
  std::vector<pid_t> pids_;
};

}  // namespace jax_ep::testing

#endif  // JAX_EP_TESTS_CPP_EMULATION_PROCESSES_FORKS_H_
