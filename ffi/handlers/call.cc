#include "ffi/handlers/call.h"

#include <cstddef>
#include <cstdint>

namespace jax_ep {

namespace {

ElementType ToElementType(ffi::DataType type) {
  switch (type) {
    case ffi::PRED:
      return kPred;
    case ffi::S32:
      return kS32;
    case ffi::U32:
      return kU32;
    case ffi::F16:
      return kF16;
    case ffi::BF16:
      return kBF16;
    case ffi::F32:
      return kF32;
    case ffi::F8E4M3FN:
      return kF8E4M3;
    case ffi::F8E5M2:
      return kF8E5M2;
    case ffi::F8E8M0FNU:
      return kF8E8M0;
    case ffi::F4E2M1FN:
      return kF4E2M1;
    default:
      return kOther;
  }
}

BufferView ToView(const ffi::AnyBuffer& buffer) {
  const ffi::Span<const int64_t> dims = buffer.dimensions();
  return {ToElementType(buffer.element_type()), {dims.begin(), dims.size()}};
}

}  // namespace

ffi::Error ToError(const Status& status) {
  switch (status.code) {
    case StatusCode::kOk:
      return ffi::Error::Success();
    case StatusCode::kInvalidArgument:
      return {ffi::ErrorCode::kInvalidArgument, status.message};
    case StatusCode::kFailedPrecondition:
      return {ffi::ErrorCode::kFailedPrecondition, status.message};
    case StatusCode::kUnimplemented:
      return {ffi::ErrorCode::kUnimplemented, status.message};
  }
  return {ffi::ErrorCode::kInternal, status.message};
}

std::vector<BufferView> Views(const ffi::RemainingArgs& operands) {
  std::vector<BufferView> views;
  for (size_t i = 0; i < operands.size(); ++i) {
    auto buffer = operands.get<ffi::AnyBuffer>(i);
    views.push_back(buffer.has_value() ? ToView(*buffer) : BufferView{});
  }
  return views;
}

std::vector<BufferView> Views(const ffi::RemainingRets& results) {
  std::vector<BufferView> views;
  for (size_t i = 0; i < results.size(); ++i) {
    auto buffer = results.get<ffi::AnyBuffer>(i);
    views.push_back(buffer.has_value() ? ToView(**buffer) : BufferView{});
  }
  return views;
}

std::vector<const void*> ResultsAndOperands(const ffi::RemainingArgs& operands,
                                            const ffi::RemainingRets& results) {
  std::vector<const void*> addresses;
  for (size_t i = 0; i < results.size(); ++i) addresses.push_back(AddressOf(results, i));
  for (size_t i = 0; i < operands.size(); ++i) addresses.push_back(AddressOf(operands, i));
  return addresses;
}

}  // namespace jax_ep
