#include "src/request/step.h"

#include <openssl/evp.h>

#include <algorithm>
#include <cstdlib>
#include <memory>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

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

// Computes the SHA-256 of values. Hashes the length of each string and vector
// before its content, so that different values give different bytes.
class Hasher {
 public:
  Hasher() : context_(EVP_MD_CTX_new()) {
    Require(context_ != nullptr &&
            EVP_DigestInit_ex(context_.get(), EVP_sha256(), nullptr) == 1);
  }

  void Bytes(const void* data, size_t size) {
    Require(EVP_DigestUpdate(context_.get(), data, size) == 1);
  }

  template <typename T>
  requires std::is_arithmetic_v<T> || std::is_enum_v<T> Hasher& operator<<(
      T value) {
    Bytes(&value, sizeof value);
    return *this;
  }

  Hasher& operator<<(std::string_view text) {
    *this << uint64_t{text.size()};
    Bytes(text.data(), text.size());
    return *this;
  }

  template <typename T>
  Hasher& operator<<(const std::vector<T>& values) {
    *this << uint64_t{values.size()};
    Bytes(values.data(), values.size() * sizeof(T));
    return *this;
  }

  std::string Finish() {
    std::string digest(32, '\0');
    Require(EVP_DigestFinal_ex(context_.get(),
                               reinterpret_cast<unsigned char*>(digest.data()),
                               nullptr) == 1);
    return digest;
  }

 private:
  struct Free {
    void operator()(EVP_MD_CTX* context) const { EVP_MD_CTX_free(context); }
  };

  // Ends the process if OpenSSL fails, because a wrong digest could make a step
  // run twice.
  static void Require(bool ok) {
    if (!ok) std::abort();
  }

  std::unique_ptr<EVP_MD_CTX, Free> context_;
};

void HashCustomLoss(const TrainRequest& request, Hasher* hasher) {
  const CustomLoss& custom = request.loss.custom;
  *hasher << std::string_view(custom.graph) << uint64_t{custom.inputs.size()};
  for (const CustomLossInput& input : custom.inputs) {
    *hasher << std::string_view(input.name) << input.rank;
  }
  for (const Datum& datum : request.data) {
    *hasher << uint64_t{datum.custom_inputs.size()};
    for (const auto& [name, input] : datum.custom_inputs) {
      *hasher << std::string_view(name) << input.shape << input.is_int
              << input.floats << input.ints;
    }
  }
}

void HashSupports(const TrainRequest& request, Hasher* hasher) {
  for (const Datum& datum : request.data) {
    *hasher << datum.support.offsets << datum.support.tokens;
  }
}

void HashReplay(const Replay& replay, Hasher* hasher) {
  *hasher << replay.routing << replay.support << replay.logprobs
          << replay.optional;
  for (const std::vector<SampledSpan>& spans : replay.spans) {
    *hasher << uint64_t{spans.size()};
    for (const SampledSpan& span : spans) {
      *hasher << span.sequence_id << span.offset << span.start << span.length;
    }
  }
}

std::string Digest(const TrainRequest& request) {
  if (!request.digest.empty()) return request.digest;
  Hasher hasher;
  const LossConfig& loss = request.loss;
  hasher << std::string_view("train") << request.adapter_id << request.backward
         << loss.function << loss.clip_low << loss.clip_high << loss.beta
         << loss.temperature << loss.return_entropy << loss.gradient_filter
         << loss.score_all << loss.return_routing
         << uint64_t{request.data.size()};
  const bool has_teacher = HasTeacher(loss.function);
  if (has_teacher) {
    const Teacher& teacher = loss.teacher;
    hasher << teacher.base_model << teacher.adapter_id << teacher.snapshot;
  }
  for (const Datum& datum : request.data) {
    hasher << datum.targets_per_token << datum.target_offsets << datum.tokens
           << datum.targets << datum.weights << datum.logprobs
           << datum.advantages << datum.routing;
    if (has_teacher) hasher << datum.teacher_tokens << datum.teacher_offset;
  }
  // A request without these values keeps the digest that earlier versions made.
  if (loss.function == LossFunction::kCustom) HashCustomLoss(request, &hasher);
  if (std::ranges::any_of(request.data, [](const Datum& datum) {
        return !datum.support.offsets.empty();
      })) {
    HashSupports(request, &hasher);
  }
  if (!request.replay.spans.empty()) HashReplay(request.replay, &hasher);
  return hasher.Finish();
}

std::string Digest(const OptimStepRequest& request) {
  const AdamWConfig& adamw = request.adamw;
  Hasher hasher;
  hasher << std::string_view("optim") << request.adapter_id
         << adamw.learning_rate << adamw.beta1 << adamw.beta2 << adamw.eps
         << adamw.weight_decay << adamw.max_grad_norm;
  // A step of AdamW keeps the digest that earlier versions made.
  if (request.muon) {
    const MuonConfig& muon = *request.muon;
    hasher << std::string_view("muon") << muon.learning_rate << muon.momentum
           << muon.nesterov << muon.weight_decay << muon.ns_steps
           << muon.max_grad_norm;
  }
  return hasher.Finish();
}

std::string Digest(const SaveCheckpointRequest& request) {
  Hasher hasher;
  hasher << std::string_view("save") << request.adapter_id << request.name
         << request.overwrite << request.kind << request.ttl_seconds
         << request.keep_newest;
  for (const auto& [key, value] : request.metadata) hasher << key << value;
  return hasher.Finish();
}

std::string Digest(const LoadCheckpointRequest& request) {
  Hasher hasher;
  hasher << std::string_view("load") << request.adapter_id
         << request.source_adapter_id << request.name << request.weights_only;
  return hasher.Finish();
}

std::string Digest(const PublishSnapshotRequest& request) {
  Hasher hasher;
  hasher << std::string_view("publish") << request.adapter_id << request.name;
  return hasher.Finish();
}

std::string Digest(const RefusedStep& request) { return request.digest; }

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
  return std::visit([](const auto& r) { return Digest(r); }, request);
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
