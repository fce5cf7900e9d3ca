// Tests messages and descriptors between two processes.
#include "ffi/runtime/transport/local/socket.h"

#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <functional>
#include <string>

#include "ffi/runtime/transport/identity.h"
#include "tests/cpp/unit/check.h"

namespace jax_ep {
namespace {

std::string UniqueName() { return Concatenate("jax_ep-test-", ThisProcess().process); }

// Runs `child` in a process of its own, and returns its exit status.
int RunChild(const std::function<void()>& child, const std::function<void()>& parent) {
  const pid_t pid = fork();
  if (pid == 0) {
    child();
    _exit(testing::failures == 0 ? 0 : 1);
  }
  parent();
  int status = 0;
  waitpid(pid, &status, 0);
  return status;
}

void TestDescriptorsAreShared() {
  const std::string name = UniqueName();
  UniqueFd listener;
  CHECK_OK(Listen(name, &listener));
  const auto child = [&] {
    UniqueFd connection;
    CHECK_OK(Connect(name, &connection));
    Message message;
    bool ended = false;
    CHECK_OK(Receive(connection.get(), &message, &ended));
    CHECK(message.bytes == "two" && message.descriptors.size() == 2);
    auto* const memory = static_cast<char*>(
        mmap(nullptr, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, message.descriptors[1].get(), 0));
    CHECK(memory != MAP_FAILED);
    memory[7] = 'x';
    CHECK_OK(Send(connection.get(), "written"));
  };
  CHECK(RunChild(child, [&] {
          UniqueFd connection;
          CHECK_OK(Accept(listener.get(), &connection));
          const UniqueFd first(memfd_create("first", 0)), second(memfd_create("second", 0));
          CHECK(ftruncate(second.get(), 4096) == 0);
          CHECK_OK(Send(connection.get(), "two", {first.get(), second.get()}));
          Message message;
          bool ended = false;
          CHECK_OK(Receive(connection.get(), &message, &ended));
          CHECK(message.bytes == "written" && message.descriptors.empty() && !ended);
          char byte = 0;
          CHECK(pread(second.get(), &byte, 1, 7) == 1 && byte == 'x');
          CHECK_OK(Receive(connection.get(), &message, &ended));
          CHECK(ended);
          CHECK_OK(Send(connection.get(), "to nobody"));
        }) == 0);
}

void TestMessagesStayApart() {
  const std::string name = UniqueName() + "-apart";
  UniqueFd listener, connection;
  CHECK_OK(Listen(name, &listener));
  CHECK_FAILS(Listen(name, &connection), "naming a socket");
  CHECK_OK(Connect(name, &connection));
  UniqueFd other;
  CHECK_OK(Accept(listener.get(), &other));
  for (int i = 0; i < 50; ++i) CHECK_OK(Send(connection.get(), std::string(i + 1, 'a')));
  Message message;
  bool ended = false;
  for (int i = 0; i < 50; ++i) {
    CHECK_OK(Receive(other.get(), &message, &ended));
    CHECK(message.bytes.size() == size_t(i) + 1);
  }
  CHECK_FAILS(Send(connection.get(), std::string(kMaxMessageBytes + 1, 'a')), "16385 bytes");
}

// A process that ends with messages unread has still sent its last ones.
void TestLastMessages() {
  const std::string name = UniqueName() + "-last";
  UniqueFd listener, connection;
  CHECK_OK(Listen(name, &listener));
  CHECK_OK(Connect(name, &connection));
  {
    UniqueFd other;
    CHECK_OK(Accept(listener.get(), &other));
    CHECK_OK(Send(connection.get(), "never read"));
    CHECK_OK(Send(other.get(), "first"));
    CHECK_OK(Send(other.get(), "last"));
  }
  Message message;
  bool ended = false;
  for (const char* expected : {"first", "last"}) {
    CHECK_OK(Receive(connection.get(), &message, &ended));
    CHECK(message.bytes == expected && !ended);
  }
  CHECK_OK(Receive(connection.get(), &message, &ended));
  CHECK(ended);
}

void TestNobodyListens() {
  UniqueFd connection;
  CHECK_FAILS(Connect(UniqueName() + "-nobody", &connection), "connecting to its socket");
  CHECK_FAILS(Connect(std::string(200, 'n'), &connection), "too long");
}

void TestIdentities() {
  const Identity mine = ThisProcess();
  CHECK(mine.pid == getpid() && mine.process == ThisProcess().process);
  CHECK(std::string(mine.boot_id).size() == 36);
  Identity other = mine;
  other.index = 3;
  CHECK(testing::Contains(Describe(other), Concatenate("process 3 (pid ", getpid())));
  CHECK_OK(CheckVersions({mine, other}));
  other.version[0] = 'x';
  CHECK_FAILS(CheckVersions({mine, other}), other.version);
  CHECK(RunChild([&] { CHECK(ThisProcess().process != mine.process); }, [] {}) == 0);
}

}  // namespace
}  // namespace jax_ep

int main() {
  jax_ep::TestDescriptorsAreShared();
  jax_ep::TestMessagesStayApart();
  jax_ep::TestLastMessages();
  jax_ep::TestNobodyListens();
  jax_ep::TestIdentities();
  return jax_ep::testing::Finish();
}
