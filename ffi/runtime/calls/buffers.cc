#include "ffi/runtime/calls/buffers.h"

#include <algorithm>
#include <utility>

namespace jax_ep {
namespace {

constexpr std::pair<ElementType, const char*> kTypeNames[] = {
    {kPred, "pred"},        {kS32, "s32"},         {kU32, "u32"},         {kF16, "f16"},
    {kBF16, "bf16"},        {kF32, "f32"},         {kF8E4M3, "f8e4m3fn"}, {kF8E5M2, "f8e5m2"},
    {kF8E8M0, "f8e8m0fnu"}, {kF4E2M1, "f4e2m1fn"},
};

std::string Describe(Types types) {
  std::string text;
  for (const auto& [type, name] : kTypeNames) {
    if (types.set & type) text.append(text.empty() ? "" : "|").append(name);
  }
  return text.empty() ? "another type" : text;
}

std::string Describe(const BufferView& buffer) {
  std::string text;
  for (int64_t size : buffer.dims)
    text.append(text.empty() ? "" : ",").append(std::to_string(size));
  return Concatenate(Describe(Types{buffer.type}), "[", text, "]");
}

std::string Describe(Types types, std::initializer_list<Size*> sizes) {
  std::string text;
  for (const Size* size : sizes) {
    text.append(text.empty() ? "" : ",").append(size->name);
    if (size->value != Size::kUnknown) text.append("=").append(std::to_string(size->value));
  }
  return Concatenate(Describe(types), "[", text, "]");
}

bool Matches(const BufferView& buffer, Types types, std::initializer_list<Size*> sizes) {
  const auto fits = [](int64_t have, const Size* want) {
    return want->value == Size::kUnknown || want->value == have;
  };
  return (buffer.type & types.set) != 0 && buffer.dims.size() == sizes.size() &&
         std::equal(buffer.dims.begin(), buffer.dims.end(), sizes.begin(), fits);
}

}  // namespace

int64_t ElementBits(ElementType type) {
  switch (type) {
    case kOther:
      return 0;
    case kF4E2M1:
      return 4;
    case kPred:
    case kF8E4M3:
    case kF8E5M2:
    case kF8E8M0:
      return 8;
    case kF16:
    case kBF16:
      return 16;
    case kS32:
    case kU32:
    case kF32:
      return 32;
  }
  return 0;
}

void BufferChecker::Check(List& list, const char* name, Types& types,
                          std::initializer_list<Size*> sizes) {
  if (!status_.ok()) return;
  const size_t index = list.next++;
  if (index >= list.buffers.size()) {
    status_ = InvalidArgument(target_, ": ", list.kind, " ", index, " (", name,
                              ") is missing; there are ", list.buffers.size(), " ", list.kind, "s");
    return;
  }
  const BufferView& buffer = list.buffers[index];
  if (!Matches(buffer, types, sizes)) {
    status_ = InvalidArgument(target_, ": ", list.kind, " ", index, " (", name, ") is ",
                              Describe(buffer), "; expected ", Describe(types, sizes));
    return;
  }
  types.set = buffer.type;
  size_t axis = 0;
  for (Size* size : sizes) size->value = buffer.dims[axis++];
}

Status BufferChecker::Finish() {
  for (const List* list : {&operands_, &results_}) {
    if (status_.ok() && list->next != list->buffers.size()) {
      status_ = InvalidArgument(target_, ": ", list->buffers.size(), " ", list->kind,
                                "s are given; expected ", list->next);
    }
  }
  return status_;
}

}  // namespace jax_ep
