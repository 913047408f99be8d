#include "src/request/step.h"

#include <array>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <type_traits>
#include <variant>
#include <vector>

#include "src/base/sha256.h"
#include "src/request/step_fields.h"

namespace weft {
namespace {

template <typename T>
int64_t BytesOf(const std::vector<T>& values) {
  return static_cast<int64_t>(values.size() * sizeof(T));
}

int64_t BytesOf(const TrainResult& result) {
  int64_t bytes = BytesOf(result.data);
  for (const DatumResult& datum : result.data) {
    bytes += BytesOf(datum.logprobs) + BytesOf(datum.losses) +
             BytesOf(datum.entropies) + BytesOf(datum.routing);
  }
  for (const auto& [name, value] : result.metrics) {
    bytes += static_cast<int64_t>(name.size() + sizeof(value));
  }
  return bytes;
}

int64_t BytesOf(const LoraConfig& config) {
  return BytesOf(config.target_modules) + BytesOf(config.overrides);
}

// Hashes the fields of a list with SHA-256. The number of entries of a string,
// vector or map comes before its content, so that different values give
// different bytes.
class Hasher {
 public:
  static constexpr bool kReads = false;
  static constexpr bool kDigests = true;

  template <Scalar T>
  void operator()(const char* name, const T& value) const {
    if constexpr (std::is_same_v<T, std::string>) {
      (*this)(name, uint64_t{value.size()});
      Bytes(value.data(), value.size());
    } else {
      Bytes(&value, sizeof value);
    }
  }
  template <typename T>
  void operator()(const char* name, const std::optional<T>& value) const {
    (*this)(name, value.has_value());
    if (value) (*this)(name, *value);
  }
  template <typename T>
  void operator()(const char* name, const std::vector<T>& values) const {
    (*this)(name, uint64_t{values.size()});
    for (const T& value : values) (*this)(name, value);
  }
  template <typename V>
  void operator()(const char* name,
                  const std::map<std::string, V>& values) const {
    (*this)(name, uint64_t{values.size()});
    for (const auto& [key, value] : values) {
      if constexpr (Scalar<V>) {
        (*this)(name, key);
        (*this)(name, value);
      } else {
        Fields(*this, key, value);
      }
    }
  }
  template <typename T>
  void operator()(const char* /*name*/, const T& value) const {
    Fields(*this, value);
  }

  template <typename T>
  void Raw(const char* name, const std::vector<T>& values) const {
    (*this)(name, uint64_t{values.size()});
    Bytes(values.data(), values.size() * sizeof(T));
  }

  template <typename Variant>
  void OneOf(const std::array<const char*, std::variant_size_v<Variant>>& names,
             const Variant& value) const {
    (*this)(names.at(value.index()), uint64_t{value.index()});
    std::visit([this](const auto& fields) { Fields(*this, fields); }, value);
  }

  std::string Finish() const { return sum_.Finish(); }

 private:
  void Bytes(const void* data, size_t size) const {
    sum_.Add({static_cast<const char*>(data), size});
  }

  mutable Sha256Sum sum_;  // A list takes a const Hasher.
};

}  // namespace

const std::string& AdapterIdOf(const StepRequest& request) {
  return std::visit(
      [](const auto& r) -> const std::string& { return r.adapter_id; },
      request);
}

uint64_t StepOf(const StepRequest& request) {
  return std::visit([](const auto& r) { return r.step; }, request);
}

uint64_t EpochOf(const StepRequest& request) {
  return std::visit([](const auto& r) { return r.epoch; }, request);
}

absl::Time DeadlineOf(const StepRequest& request) {
  return std::visit([](const auto& r) { return r.deadline; }, request);
}

const std::shared_ptr<void>& ChargeOf(const StepRequest& request) {
  return std::visit(
      [](const auto& r) -> const std::shared_ptr<void>& { return r.charge; },
      request);
}

absl::StatusOr<StepResult> StoredResult(absl::StatusOr<StepResult> result) {
  if (result.ok() || absl::IsUnavailable(result.status())) return result;
  return StepFailure{.status = result.status()};
}

std::string PayloadDigest(const StepRequest& request) {
  if (const auto* train = std::get_if<TrainRequest>(&request);
      train != nullptr && !train->digest.empty()) {
    return train->digest;
  }
  if (const auto* refused = std::get_if<RefusedStep>(&request)) {
    return refused->digest;
  }
  const Hasher hasher;
  Fields(hasher, request);
  return static_cast<char>(request.index()) + hasher.Finish();
}

int64_t NumBytes(const StepResult& result) {
  int64_t bytes = sizeof(StepResult);
  if (const auto* train = std::get_if<TrainResult>(&result)) {
    bytes += BytesOf(*train);
  } else if (const auto* checkpoint = std::get_if<CheckpointInfo>(&result)) {
    bytes += BytesOf(checkpoint->config) +
             static_cast<int64_t>(MetadataBytes(checkpoint->metadata));
  } else if (const auto* adapter = std::get_if<AdapterInfo>(&result)) {
    bytes += BytesOf(adapter->config) + BytesOf(adapter->snapshots);
  } else if (const auto* failure = std::get_if<StepFailure>(&result)) {
    bytes += static_cast<int64_t>(failure->status.message().size());
  }
  return bytes;
}

}  // namespace weft
