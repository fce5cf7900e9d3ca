// Tests messages over TCP: their format, which strangers try to break, and ends of the other side.
#include "ffi/runtime/transport/tcp/stream.h"

#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <random>
#include <string>
#include <thread>

#include "ffi/runtime/transport/tcp/address.h"
#include "tests/cpp/unit/check.h"
#include "tests/cpp/unit/runtime/own_network.h"

namespace jax_ep {
namespace {

using namespace std::chrono_literals;

constexpr auto kLong = 60s;
const std::string kSecret = "sixteen bytes...";

NetworkSettings Loopback() { return {.interface_name = "lo"}; }

// Both ends of a stream, one of which takes any bytes.
struct Ends {
  explicit Ends(const std::string& secret, std::chrono::nanoseconds timeout = kLong) {
    int fds[2];
    CHECK(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, fds) == 0);
    raw = UniqueFd(fds[0]);
    stream = std::make_shared<Stream>(UniqueFd(fds[1]), secret, timeout);
  }

  void Write(std::string_view bytes) {
    CHECK(write(raw.get(), bytes.data(), bytes.size()) == static_cast<ssize_t>(bytes.size()));
  }

  UniqueFd raw;
  std::shared_ptr<Stream> stream;
};

std::string Encode(std::string_view message) {
  const auto size = static_cast<uint32_t>(message.size());
  return std::string(reinterpret_cast<const char*>(&size), sizeof size).append(message);
}

// Receives messages until there are so many, or an error.
Status ReceiveAll(Connection& connection, size_t count, std::vector<std::string>* all) {
  std::vector<Message> messages;
  Status status;
  for (int i = 0; i < 5000 && status.ok() && all->size() < count; ++i) {
    status = connection.Receive(&messages);
    for (Message& message : messages) all->push_back(std::move(message.bytes));
    if (messages.empty()) std::this_thread::sleep_for(1ms);
  }
  return status;
}

void Connect(const StreamListener& listener, std::shared_ptr<Connection>* one,
             std::shared_ptr<Connection>* other, std::chrono::nanoseconds timeout = kLong) {
  CHECK_OK(ConnectStream(listener.address(), listener.secret(), timeout, one));
  CHECK_OK(listener.Accept(other));
}

void TestMessages() {
  StreamListener listener;
  CHECK_OK(listener.Open(Loopback()));
  CHECK(listener.address().starts_with("127.0.0.1:") && listener.secret().size() == 16);
  std::shared_ptr<Connection> one, other;
  Connect(listener, &one, &other);
  std::vector<std::string> sent, received;
  for (size_t size : {size_t{1}, size_t{0}, size_t{100}, kMaxMessageBytes, size_t{7}}) {
    sent.emplace_back(size, static_cast<char>('a' + sent.size()));
    CHECK_OK(one->Send(sent.back(), {}));
  }
  CHECK_OK(ReceiveAll(*other, sent.size(), &received));
  CHECK(received == sent);
  received.clear();
  CHECK_OK(other->Send("back", {}));
  CHECK_OK(ReceiveAll(*one, 1, &received));
  CHECK(received == std::vector<std::string>{"back"});
  CHECK_FAILS(one->Send(std::string(kMaxMessageBytes + 1, 'a'), {}), "16385 bytes");
  CHECK_FAILS(one->Send("", {0}), "1 descriptors");
  // The last message arrives before the end.
  CHECK_OK(one->Send("last", {}));
  one.reset();
  received.clear();
  CHECK_FAILS(ReceiveAll(*other, 2, &received), "has died: it has closed its socket");
  CHECK(received == std::vector<std::string>{"last"});
  CHECK_OK(other->Send("to nobody", {}));
  CHECK_OK(other->Send("to nobody", {}));
  CHECK_FAILS(ReceiveAll(*other, 2, &received), "has died: it has closed its socket");
}

// Any split of the bytes gives the same messages.
void TestSplits() {
  const std::string bytes = kSecret + Encode("one") + Encode("") + Encode(std::string(300, 'x'));
  for (size_t first = 0; first <= bytes.size(); ++first) {
    Ends ends(kSecret);
    std::vector<std::string> received;
    std::vector<Message> messages;
    for (const std::string& part : {bytes.substr(0, first), bytes.substr(first)}) {
      if (!part.empty()) ends.Write(part);
      CHECK_OK(ends.stream->Receive(&messages));
      for (Message& message : messages) received.push_back(std::move(message.bytes));
    }
    CHECK((received == std::vector<std::string>{"one", "", std::string(300, 'x')}));
    CHECK(ends.stream->deadline() == Connection::Clock::time_point::max());
  }
}

void TestBrokenFormat() {
  std::vector<Message> messages;
  {
    Ends ends("");
    ends.Write(Encode("good") + "\xff\xff\xff\xff");
    CHECK_FAILS(ends.stream->Receive(&messages), "has begun a message of 4294967295 bytes");
    CHECK(messages.size() == 1);
  }
  {
    Ends ends("");
    ends.Write(Encode(std::string(kMaxMessageBytes + 1, 'a')).substr(0, 5));
    CHECK_FAILS(ends.stream->Receive(&messages), "16385 bytes; there may be 16384");
  }
  {
    Ends ends("", 10ms);
    ends.Write(Encode("slow").substr(0, 5));
    CHECK_OK(ends.stream->Receive(&messages));
    std::this_thread::sleep_until(ends.stream->deadline());
    CHECK_FAILS(ends.stream->Receive(&messages), "not the rest within 0.01 s");
  }
  {
    Ends ends(kSecret, 10ms);  // says nothing
    std::this_thread::sleep_until(ends.stream->deadline());
    CHECK_FAILS(ends.stream->Receive(&messages), "not the rest");
  }
}

// Nothing is read of a stream before the whole secret.
void TestStrangers() {
  std::vector<Message> messages;
  for (size_t i = 0; i < kSecret.size(); ++i) {
    std::string wrong = kSecret;
    wrong[i] = static_cast<char>(wrong[i] ^ 1);
    Ends ends(kSecret);
    ends.Write(wrong + Encode("never"));
    CHECK_FAILS(ends.stream->Receive(&messages), "secret");
    CHECK(messages.empty());
    Ends truncated(kSecret);
    truncated.Write(kSecret.substr(0, i) + (i == 0 ? "x" : ""));
    CHECK_OK(truncated.stream->Receive(&messages));
    truncated.raw = {};
    CHECK_FAILS(truncated.stream->Receive(&messages), "has died");
    CHECK(messages.empty());
  }
}

// Random bytes, and streams of which bytes are changed, removed or cut off: what comes before the
// fault is right, and all ends.
void TestRandomFaults() {
  std::mt19937 random(std::random_device{}());
  const auto below = [&](size_t n) { return random() % n; };
  for (int repeat = 0; repeat < 20'000; ++repeat) {
    const bool knows_secret = below(4) != 0;
    std::string bytes = knows_secret ? kSecret : "";
    std::vector<std::string> sent;
    for (size_t i = below(4); i > 0; --i) {
      sent.emplace_back(below(8) == 0 ? below(2000) : below(40), static_cast<char>(random()));
      bytes += Encode(sent.back());
    }
    for (size_t i = below(60); i > 0; --i) bytes += static_cast<char>(random());
    if (knows_secret && below(2) == 0) bytes.resize(below(bytes.size()) + 1);
    size_t intact = bytes.size();
    if (!bytes.empty() && below(2) == 0) {
      intact = below(bytes.size());
      bytes[intact] = static_cast<char>(bytes[intact] ^ (1 + below(255)));
    }
    Ends ends(kSecret);
    std::vector<std::string> received;
    std::vector<Message> messages;
    Status status;
    for (size_t at = 0; at < bytes.size() && status.ok();) {
      const size_t count = std::min(bytes.size() - at, 1 + below(300));
      ends.Write(std::string_view(bytes).substr(at, count));
      at += count;
      status = ends.stream->Receive(&messages);
      for (Message& message : messages) received.push_back(std::move(message.bytes));
    }
    ends.raw = {};
    for (int i = 0; i < 3 && status.ok(); ++i) status = ends.stream->Receive(&messages);
    CHECK(!status.ok());
    if (!bytes.starts_with(kSecret)) CHECK(received.empty());
    size_t end = kSecret.size();
    for (size_t i = 0; knows_secret && i < sent.size(); ++i) {
      end += 4 + sent[i].size();
      if (end <= std::min(intact, bytes.size())) {
        CHECK(received.size() > i && received[i] == sent[i]);
      }
    }
    for (const std::string& message : received) CHECK(message.size() <= kMaxMessageBytes);
  }
}

// Sending does not wait for ever, and the other side learns that no more comes.
void TestNeverReads() {
  StreamListener listener;
  CHECK_OK(listener.Open(Loopback()));
  std::shared_ptr<Connection> one, other;
  Connect(listener, &one, &other, 200ms);
  const std::string message(kMaxMessageBytes, 'a');
  Status status;
  int num_sent = 0;
  for (; num_sent < 10'000 && status.ok(); ++num_sent) status = one->Send(message, {});
  CHECK_FAILS(status, "sending a message: Connection timed out");
  CHECK_OK(one->Send(message, {}));  // is not sent
  std::vector<std::string> received;
  CHECK_FAILS(ReceiveAll(*one, 1, &received), "the network to its host is cut: ");
  CHECK_FAILS(ReceiveAll(*other, 10'000, &received), "has died");
  CHECK(!received.empty() && received.size() < static_cast<size_t>(num_sent));
}

// A pulled cable gives neither an end nor an error.
void TestPulledCable() {
  testing::InOwnNetwork([] {
    NetworkSettings settings = Loopback();
    settings.silence_deadline_ns = 500'000'000;
    StreamListener listener;
    CHECK_OK(listener.Open(settings));
    std::shared_ptr<Connection> idle, busy, other, another;
    const std::chrono::nanoseconds timeout(settings.silence_deadline_ns);
    Connect(listener, &idle, &other, timeout);
    Connect(listener, &busy, &another, timeout);
    std::vector<std::string> received;
    CHECK_OK(idle->Send("before", {}));
    CHECK_OK(ReceiveAll(*other, 1, &received));
    testing::SetLoopback(false);
    CHECK_OK(busy->Send("lost", {}));
    for (Connection* connection : {idle.get(), busy.get()}) {
      received.clear();
      CHECK_FAILS(ReceiveAll(*connection, 1, &received),
                  "has died, or the network to its host is cut: 127.0.0.1:");
    }
  });
}

void TestPorts() {
  StreamListener any, first, second, third;
  CHECK_OK(any.Open(Loopback()));
  SocketAddress address;
  CHECK_OK(SocketAddress::Parse(any.address(), &address));
  const int taken = std::stoi(any.address().substr(any.address().rfind(':') + 1));
  NetworkSettings settings = Loopback();
  settings.first_port = settings.last_port = static_cast<uint16_t>(taken);
  CHECK_FAILS(first.Open(settings), Concatenate("listening at 127.0.0.1:", taken));
  CHECK_FAILS(first.Open(settings), "JAX_EP_NETWORK_PORTS");
  settings.last_port = static_cast<uint16_t>(std::min(taken + 20, 65535));
  if (settings.last_port > taken) {
    CHECK_OK(second.Open(settings));
    CHECK(second.address() != any.address());
  }
  std::shared_ptr<Connection> connection;
  CHECK_OK(ConnectStream(any.address(), any.secret(), kLong, &connection));
  CHECK_FAILS(ConnectStream("127.0.0.1:1", "", kLong, &connection), "connecting to 127.0.0.1:1: ");
}

void TestAddresses() {
  SocketAddress address;
  for (const char* text : {"10.0.0.1:4711", "[fd00::1]:65535", "[::1]:0"}) {
    CHECK_OK(SocketAddress::Parse(text, &address));
    CHECK(address.ToString() == text);
  }
  for (const char* text :
       {"", ":", "10.0.0.1", "10.0.0.1:", "10.0.0.1:65536", "10.0.0.1:-1", "host:1", "fd00::1:1",
        "[fd00::1]", "[fd00::1:1", "[]:1", "[:1", "]:1", "[10.0.0.1]:1", "10.0.0.1:1 "}) {
    CHECK_FAILS(SocketAddress::Parse(text, &address), "expected one as 10.0.0.1:4711");
  }
  CHECK_OK(FindOwnAddress("lo", &address));
  CHECK(address.ToString() == "127.0.0.1:0");
  CHECK_FAILS(FindOwnAddress("none7", &address), "JAX_EP_NETWORK_INTERFACE is \"none7\"");
  CHECK_FAILS(FindOwnAddress("none7", &address), "one of ");
  CHECK_FAILS(FindOwnAddress("none7", &address), "lo");
  CHECK_OK(FindOwnAddress("", &address));
  StreamListener listener;
  CHECK_OK(listener.Open({}));
  CHECK(
      listener.address().starts_with(address.ToString().substr(0, address.ToString().size() - 1)));
}

}  // namespace
}  // namespace jax_ep

int main() {
  jax_ep::TestMessages();
  jax_ep::TestSplits();
  jax_ep::TestBrokenFormat();
  jax_ep::TestStrangers();
  jax_ep::TestRandomFaults();
  jax_ep::TestNeverReads();
  jax_ep::TestPulledCable();
  jax_ep::TestPorts();
  jax_ep::TestAddresses();
  return jax_ep::testing::Finish();
}
