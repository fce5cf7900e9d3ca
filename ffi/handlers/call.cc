#include "ffi/handlers/call.h"

#include <cstddef>
#include <cstdint>
#include <mutex>
#include <set>
#include <string>

#include "ffi/kernels/matmul/grouped_matmul.h"
#include "ffi/kernels/matmul/launch.h"
#include "ffi/kernels/quantize/quantize.h"
#include "ffi/kernels/quantize/quantize_weights.h"
#include "ffi/kernels/transfer/launch.h"
#include "ffi/runtime/cuda/device_cuda.h"

namespace jax_ep {

namespace {

// Reads attributes one by one, and keeps the first error: an attribute that is missing, or has
// another type.
class AttributeReader {
 public:
  AttributeReader(std::string_view target, const ffi::Dictionary& attributes)
      : target_(target), attributes_(attributes) {}

  template <typename T>
  void Read(const char* name, T* value) {
    ++num_read_;
    if (!status_.ok()) return;
    auto decoded = attributes_.get<T>(name);
    if (decoded.has_value()) {
      *value = *decoded;
    } else {
      status_ = InvalidArgument(target_, ": attribute ", name, " cannot be read (",
                                decoded.error().message(),
                                "); the caller and this build of jax_ep have different versions");
    }
  }

  // Leaves the default if the attribute is absent: programs exported before it existed lack it.
  template <typename T>
  void ReadOptional(const char* name, T* value) {
    if (attributes_.contains(name)) Read(name, value);
  }

  void Read(const char* name, std::vector<int64_t>* values) {
    ffi::Span<const int64_t> span;
    Read(name, &span);
    values->assign(span.begin(), span.end());
  }

  Status Finish() const {
    if (status_.ok() && attributes_.size() != num_read_) {
      return InvalidArgument(target_, ": there are ", attributes_.size(), " attributes; expected ",
                             num_read_,
                             "; the caller and this build of jax_ep have different versions");
    }
    return status_;
  }

  // Checks the config that was read, too.
  template <typename Config>
  Status Finish(const Config& config) const {
    Status status = Finish();
    return status.ok() ? CheckConfig(target_, config) : status;
  }

 private:
  std::string_view target_;
  const ffi::Dictionary& attributes_;
  size_t num_read_ = 0;
  Status status_;
};

ElementType ToElementType(ffi::DataType type) {
  switch (type) {
    case ffi::PRED:
      return kPred;
    case ffi::S32:
      return kS32;
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
    default:
      return kOther;
  }
}

BufferView ToView(const ffi::AnyBuffer& buffer) {
  const ffi::Span<const int64_t> dims = buffer.dimensions();
  return {ToElementType(buffer.element_type()), {dims.begin(), dims.size()}};
}

}  // namespace

namespace {

Status LoadLocalKernels() {
  Status status = LoadMatmulKernels();
  if (status.ok()) status = LoadQuantizeKernels();
  return status.ok() ? LoadQuantizeWeightsKernels() : status;
}

}  // namespace

Status LoadAllKernels() {
  Status status = LoadTransferKernels();
  return status.ok() ? LoadLocalKernels() : status;
}

Status LoadLocalKernelsOnce(int32_t device) {
  static std::mutex mutex;
  static auto& loaded = *new std::set<int32_t>;  // never destroyed: threads may outlive main
  const std::lock_guard lock(mutex);
  if (loaded.contains(device)) return {};
  const CurrentDevice current(device);
  Status status = current.status();
  if (status.ok()) status = LoadLocalKernels();
  if (status.ok()) loaded.insert(device);
  return status;
}

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

Status DecodeConfig(std::string_view target, const ffi::Dictionary& attributes,
                    TransferConfig* config) {
  AttributeReader reader(target, attributes);
  reader.Read("replica_groups", &config->replica_groups);
  reader.Read("group_size", &config->group_size);
  reader.Read("num_sms", &config->num_sms);
  reader.ReadOptional("lane", &config->lane);
  reader.ReadOptional("num_lanes", &config->num_lanes);
  if (target == kBulkCopyCeilingTarget) {
    reader.Read("repeats", &config->repeats);
    config->num_experts = config->group_size;
  } else {
    reader.Read("num_experts", &config->num_experts);
    reader.Read("row_align", &config->row_align);
    reader.Read("zero_tail", &config->zero_tail);
    reader.Read("has_weights", &config->has_weights);
  }
  if (target == kCombineTarget) {
    reader.Read("has_scalars", &config->has_scalars);
  } else {
    reader.ReadOptional("is_quantized", &config->is_quantized);
  }
  return reader.Finish(*config);
}

Status DecodeConfig(std::string_view target, const ffi::Dictionary& attributes,
                    GroupedMatmulConfig* config) {
  AttributeReader reader(target, attributes);
  reader.Read("transpose_rhs", &config->transpose_rhs);
  reader.Read("num_sms", &config->num_sms);
  if (target == kGroupedMatmulTarget) {
    reader.Read("zero_tail", &config->zero_tail);
  } else {
    reader.Read("has_accumulator", &config->has_accumulator);
  }
  return reader.Finish(*config);
}

Status DecodeConfig(std::string_view target, const ffi::Dictionary& attributes,
                    GroupedMatmulQuantizedConfig* config) {
  AttributeReader reader(target, attributes);
  reader.Read("scale_block", &config->scale_block);
  reader.Read("zero_tail", &config->zero_tail);
  reader.Read("num_sms", &config->num_sms);
  return reader.Finish(*config);
}

namespace {

// Reads what both configs with an activation have, after everything else.
template <typename Config>
Status FinishActivation(std::string_view target, AttributeReader* reader, Config* config) {
  std::string_view activation;
  reader->Read("activation", &activation);
  reader->Read("has_row_weights", &config->has_row_weights);
  reader->Read("num_sms", &config->num_sms);
  if (Status status = reader->Finish(); !status.ok()) return status;
  if (!ParseActivation(activation, &config->activation)) {
    return InvalidArgument(target, ": there is no activation ", activation,
                           "; the caller and this build of jax_ep have different versions");
  }
  return CheckConfig(target, *config);
}

}  // namespace

Status DecodeConfig(std::string_view target, const ffi::Dictionary& attributes,
                    GroupedMatmulActivationConfig* config) {
  AttributeReader reader(target, attributes);
  if (target == kGroupedMatmulActivationTarget) {
    reader.Read("has_bias", &config->has_bias);
    reader.Read("keep_pre_activation", &config->keep_pre_activation);
  }
  return FinishActivation(target, &reader, config);
}

Status DecodeConfig(std::string_view target, const ffi::Dictionary& attributes,
                    GroupedMatmulQuantizedActivationConfig* config) {
  AttributeReader reader(target, attributes);
  reader.Read("keep_pre_activation", &config->keep_pre_activation);
  reader.Read("power_of_two_scales", &config->power_of_two_scales);
  return FinishActivation(target, &reader, config);
}

Status DecodeConfig(std::string_view target, const ffi::Dictionary& attributes,
                    QuantizeConfig* config) {
  AttributeReader reader(target, attributes);
  reader.Read("scale_block", &config->scale_block);
  reader.Read("is_e5m2", &config->is_e5m2);
  reader.Read("min_amax", &config->min_amax);
  reader.Read("power_of_two_scales", &config->power_of_two_scales);
  return reader.Finish(*config);
}

Status DecodeConfig(std::string_view target, const ffi::Dictionary& attributes,
                    QuantizeWeightsConfig* config) {
  AttributeReader reader(target, attributes);
  reader.Read("as_given", &config->as_given);
  reader.Read("transposed", &config->transposed);
  reader.Read("min_amax", &config->min_amax);
  reader.Read("power_of_two_scales", &config->power_of_two_scales);
  return reader.Finish(*config);
}

}  // namespace jax_ep
