// Shapes and dtypes of operands and results, compared with an expectation that names its sizes.
#ifndef JAX_EP_RUNTIME_CALLS_BUFFERS_H_
#define JAX_EP_RUNTIME_CALLS_BUFFERS_H_

#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <span>
#include <string>
#include <string_view>

#include "ffi/runtime/status.h"

namespace jax_ep {

// Each is one bit, so that a set of types is a bit mask.
enum ElementType : uint16_t {
  kOther = 0,
  kPred = 1,
  kS32 = 2,
  kF16 = 4,
  kBF16 = 8,
  kF32 = 16,
  kF8E4M3 = 32,
  kF8E5M2 = 64,
  kF8E8M0 = 128,  // powers of two, of scales only
  kU32 = 256,
  kF4E2M1 = 512,  // two in a byte
};

int64_t ElementBits(ElementType type);
// The type is one of whole bytes.
inline int64_t ElementBytes(ElementType type) { return ElementBits(type) / 8; }

// A buffer as XLA passes it, without the address.
struct BufferView {
  ElementType type = kOther;
  std::span<const int64_t> dims;
};

// A set of element types. A buffer that matches narrows it to the buffer's own type, so that a
// later buffer that names the same set must have that type too.
struct Types {
  uint16_t set;

  ElementType type() const { return static_cast<ElementType>(set); }
};

// A size with a name. Unknown sizes take the value of the first buffer that has them.
struct Size {
  static constexpr int64_t kUnknown = -1;

  const char* name;
  int64_t value = kUnknown;
};

// Checks operands and results in their order, and keeps the first mismatch.
class BufferChecker {
 public:
  BufferChecker(std::string_view target, std::span<const BufferView> operands,
                std::span<const BufferView> results)
      : target_(target), operands_{"operand", operands}, results_{"result", results} {}

  void Operand(const char* name, Types& types, std::initializer_list<Size*> sizes) {
    Check(operands_, name, types, sizes);
  }
  void Result(const char* name, Types& types, std::initializer_list<Size*> sizes) {
    Check(results_, name, types, sizes);
  }

  // Call it last. Returns the first mismatch, or an error about superfluous buffers.
  Status Finish();

 private:
  struct List {
    const char* kind;
    std::span<const BufferView> buffers;
    size_t next = 0;
  };

  void Check(List& list, const char* name, Types& types, std::initializer_list<Size*> sizes);

  std::string_view target_;
  List operands_;
  List results_;
  Status status_;
};

}  // namespace jax_ep

#endif  // JAX_EP_RUNTIME_CALLS_BUFFERS_H_
