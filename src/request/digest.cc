#include "src/request/digest.h"

#include <openssl/evp.h>

#include <cstdint>
#include <cstdlib>
#include <memory>
#include <type_traits>
#include <vector>

namespace weft {
namespace {

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

}  // namespace

std::string PayloadDigest(const TrainRequest& request) {
  Hasher hasher;
  const LossConfig& loss = request.loss;
  hasher << std::string_view("train") << request.adapter_id << request.backward
         << loss.function << loss.clip_low << loss.clip_high << loss.beta
         << loss.temperature << loss.return_entropy << loss.gradient_filter
         << uint64_t{request.data.size()};
  // Hashes score_all, return_routing and routing only if they are set. So
  // digests in logs that are older than these fields stay valid.
  if (loss.score_all) hasher << std::string_view("score_all");
  if (loss.return_routing) hasher << std::string_view("return_routing");
  for (const Datum& datum : request.data) {
    hasher << datum.targets_per_token << datum.target_offsets << datum.tokens
           << datum.targets << datum.weights << datum.logprobs
           << datum.advantages;
    if (!datum.routing.empty()) {
      hasher << std::string_view("routing") << datum.routing;
    }
  }
  return hasher.Finish();
}

std::string PayloadDigest(const OptimStepRequest& request) {
  const AdamWConfig& adamw = request.adamw;
  Hasher hasher;
  hasher << std::string_view("optim") << request.adapter_id
         << adamw.learning_rate << adamw.beta1 << adamw.beta2 << adamw.eps
         << adamw.weight_decay << adamw.max_grad_norm;
  return hasher.Finish();
}

std::string PayloadDigest(const SaveCheckpointRequest& request) {
  Hasher hasher;
  hasher << std::string_view("save") << request.adapter_id << request.name
         << request.overwrite;
  // Hashes a field below only if it is not at its default. So digests in old
  // logs, made before the field existed, stay valid.
  if (request.kind != CheckpointKind::kTrain) {
    hasher << std::string_view("kind") << request.kind;
  }
  if (!request.metadata.empty()) {
    hasher << std::string_view("metadata") << uint64_t{request.metadata.size()};
    for (const auto& [key, value] : request.metadata) hasher << key << value;
  }
  if (request.ttl_seconds > 0) {
    hasher << std::string_view("ttl") << request.ttl_seconds;
  }
  if (request.keep_newest > 0) {
    hasher << std::string_view("keep") << request.keep_newest;
  }
  return hasher.Finish();
}

std::string PayloadDigest(const LoadCheckpointRequest& request) {
  Hasher hasher;
  hasher << std::string_view("load") << request.adapter_id
         << request.source_adapter_id << request.name << request.weights_only;
  return hasher.Finish();
}

std::string PayloadDigest(const PublishSnapshotRequest& request) {
  Hasher hasher;
  hasher << std::string_view("publish") << request.adapter_id << request.name;
  return hasher.Finish();
}

}  // namespace weft
