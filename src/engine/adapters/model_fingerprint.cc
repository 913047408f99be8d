#include "src/engine/adapters/model_fingerprint.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <vector>

#include "absl/strings/escaping.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "src/base/sha256.h"
#include "src/base/status_macros.h"
#include "src/model_config/checkpoint_report.h"
#include "src/model_config/model_config.h"
#include "src/model_config/stored_weights.h"
#include "src/model_config/weight_list.h"
#include "src/weights/checkpoint.h"

namespace weft::engine {
namespace {

using weights::DiskTensor;

// A sample of a tensor is kBlocks blocks, spread evenly from its first to its
// last byte. Models with thousands of tensors get fewer blocks for each, so
// that about kMostBlocks places of the files are read.
constexpr uint64_t kBlockBytes = 4096;
constexpr size_t kBlocks = 16;
constexpr size_t kMostBlocks = 8192;
// Digits of the digest of a part. They need only tell one change from none.
constexpr size_t kPartDigits = 8;

// The name and the value of each part of the fingerprint.
using Parts = std::map<std::string, std::string>;

std::string Digest(const std::string& bytes) {
  return absl::BytesToHexString(Sha256(bytes)).substr(0, kPartDigits);
}

std::string Exact(double value) { return absl::StrFormat("%.17g", value); }

std::string AttentionDigest(const model_config::ModelConfig& config) {
  std::string text;
  for (const model_config::LayerAttention& layer : config.attention) {
    absl::StrAppend(&text, Exact(layer.rule.scale), " ", layer.rule.window, " ",
                    Exact(layer.rule.softcap), " ", layer.rope_table, "\n");
  }
  return Digest(text);
}

std::string RopeDigest(const model_config::ModelConfig& config) {
  std::string text;
  for (const std::vector<double>& table : config.rope_tables) {
    for (const double frequency : table) {
      absl::StrAppend(&text, Exact(frequency), " ");
    }
    text += "\n";
  }
  return Digest(text);
}

void AddDelta(const model_config::ModelConfig& config, Parts& parts) {
  const model_config::DeltaShape& delta = config.delta;
  if (!config.has_delta()) return;
  std::string layers;
  for (const bool is_linear : delta.layers) layers += is_linear ? "1" : "0";
  parts["delta_layers"] = Digest(layers);
  parts["delta_heads"] = absl::StrCat(delta.key_heads, " ", delta.value_heads);
  parts["delta_features"] =
      absl::StrCat(delta.key_features, " ", delta.value_features);
  parts["delta_conv_kernel"] = absl::StrCat(delta.conv_kernel);
  parts["output_gate"] = absl::StrCat(config.output_gate);
}

void AddExperts(const model_config::MoeConfig& moe, Parts& parts) {
  if (moe.shape.count == 0) return;
  std::string layers;
  for (const bool has_experts : moe.shape.layers) {
    layers += has_experts ? "1" : "0";
  }
  parts["experts"] = absl::StrCat(moe.shape.count);
  parts["experts_per_token"] = absl::StrCat(moe.shape.per_token);
  parts["expert_ffn"] = absl::StrCat(moe.shape.ffn);
  parts["expert_layers"] = Digest(layers);
  parts["shared_expert_ffn"] = absl::StrCat(moe.shape.shared_ffn);
  parts["router_normalizes"] = absl::StrCat(moe.normalizes_weights);
  parts["router_softmax_of_chosen"] = absl::StrCat(moe.softmax_of_chosen);
  if (!moe.sigmoid) return;
  parts["router_sigmoid"] =
      absl::StrCat(Exact(moe.weight_scale), " ", moe.groups, " ",
                   moe.chosen_groups, " ", moe.has_shared_gate);
}

// Adds what few families have. Others have no such parts.
void AddUnusual(const model_config::ModelConfig& config, Parts& parts) {
  const auto add = [&](const char* name, double value, double usual) {
    if (value != usual) parts[name] = Exact(value);
  };
  add("input_norms", config.norms.attention_in.empty() ? 0 : 1, 1);
  add("embedding_multiplier", config.embedding_multiplier, 1);
  add("logits_divisor", config.logits_divisor, 1);
  add("rope_magnitude", config.rope_magnitude, 1);
  add("query_scale", config.query_scale.beta, 0);
  if (config.query_scale.beta != 0) {
    parts["query_period"] = Exact(config.query_scale.period);
  }
  if (!config.head_order.empty()) {
    parts["head_order"] = Digest(absl::StrJoin(config.head_order, " "));
  }
}

// Adds what the decoder computes with. The end-of-sequence tokens and the
// longest context are not among it.
void AddConfig(const model_config::ModelConfig& config, Parts& parts) {
  parts["num_layers"] = absl::StrCat(config.num_layers);
  parts["hidden"] = absl::StrCat(config.hidden);
  parts["ffn"] = absl::StrCat(config.ffn);
  parts["vocab"] = absl::StrCat(config.vocab);
  parts["num_heads"] = absl::StrCat(config.num_heads);
  parts["num_kv_heads"] = absl::StrCat(config.num_kv_heads);
  parts["head_dim"] = absl::StrCat(config.head_dim);
  parts["rms_norm_eps"] = Exact(config.rms_norm_eps);
  parts["tied_embeddings"] = absl::StrCat(config.tied_embeddings);
  parts["qk_norm"] = absl::StrCat(static_cast<int>(config.qk_norm));
  parts["qkv_bias"] = absl::StrCat(config.qkv_bias);
  parts["o_bias"] = absl::StrCat(config.o_bias);
  parts["mlp_bias"] = absl::StrCat(config.mlp_bias);
  parts["sinks"] = absl::StrCat(config.sinks);
  parts["output_norms"] = absl::StrCat(config.has_output_norms());
  parts["norms_from_one"] = absl::StrCat(config.norms_from_one);
  parts["activation"] = absl::StrCat(static_cast<int>(config.activation));
  parts["scaled_embeddings"] = absl::StrCat(config.scaled_embeddings);
  parts["final_softcap"] = Exact(config.final_softcap);
  parts["attention"] = AttentionDigest(config);
  parts["rope"] = RopeDigest(config);
  AddDelta(config, parts);
  AddUnusual(config, parts);
  AddExperts(config.moe, parts);
}

// A tensor that the decoder reads.
struct ReadTensor {
  std::string name;  // Without the prefixes that files use.
  DiskTensor stored;
};

// Returns each tensor once, even if several entries are parts of it.
absl::StatusOr<std::vector<ReadTensor>> TensorsOf(
    const weights::Checkpoint& checkpoint,
    const model_config::ModelConfig& config) {
  std::map<std::string, DiskTensor> found;
  for (const model_config::WeightEntry& entry :
       model_config::ListWeights(config)) {
    for (const model_config::StoredPart& part :
         model_config::PartsOf(model_config::PlaceIn(checkpoint, entry))) {
      if (found.contains(part.name)) continue;
      WEFT_ASSIGN_OR_RETURN(const DiskTensor stored,
                            checkpoint.Find(part.name));
      found.emplace(part.name, stored);
    }
  }
  std::vector<ReadTensor> tensors;
  tensors.reserve(found.size());
  for (const auto& [name, stored] : found) tensors.push_back({name, stored});
  return tensors;
}

// Returns dtype, shape and a sample of the tensor.
absl::StatusOr<std::string> SampleBlocks(const DiskTensor& tensor,
                                         size_t blocks) {
  std::string sample = absl::StrCat(weights::ScalarTypeName(tensor.dtype()),
                                    weights::ShapeString(tensor.shape()), ":");
  const uint64_t size = tensor.size_bytes();
  if (size <= blocks * kBlockBytes) blocks = 1;
  const uint64_t length = blocks == 1 ? size : kBlockBytes;
  for (size_t i = 0; i < blocks; ++i) {
    const uint64_t begin = blocks == 1 ? 0 : (size - length) / (blocks - 1) * i;
    const size_t filled = sample.size();
    sample.resize(filled + length);
    WEFT_RETURN_IF_ERROR(tensor.ReadBytes(
        begin,
        absl::MakeSpan(reinterpret_cast<std::byte*>(sample.data()) + filled,
                       length)));
  }
  return sample;
}

// Returns "layer.3" for a tensor of layer 3, and "" for others.
std::string LayerOf(const std::string& name) {
  constexpr absl::string_view kLayers = "model.layers.";
  if (!absl::StartsWith(name, kLayers)) return "";
  return absl::StrCat(
      "layer.", name.substr(kLayers.size(),
                            name.find('.', kLayers.size()) - kLayers.size()));
}

// Adds a digest for each name of a tensor without its numbers, and one for each
// layer. Together they name a tensor that differs, and are few.
absl::Status AddTensors(const weights::Checkpoint& checkpoint,
                        const model_config::ModelConfig& config, Parts& parts) {
  WEFT_ASSIGN_OR_RETURN(const std::vector<ReadTensor> tensors,
                        TensorsOf(checkpoint, config));
  const size_t blocks =
      std::clamp(kMostBlocks / tensors.size(), size_t{2}, kBlocks);
  Parts digests;
  for (const ReadTensor& tensor : tensors) {
    WEFT_ASSIGN_OR_RETURN(const std::string sample,
                          SampleBlocks(tensor.stored, blocks));
    const std::string digest = Sha256(sample);
    digests[model_config::WithoutNumbers(tensor.name)] += digest;
    const std::string layer = LayerOf(tensor.name);
    if (!layer.empty()) digests[layer] += digest;
  }
  for (const auto& [name, all] : digests) parts[name] = Digest(all);
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<std::string> ModelFingerprint(const EngineOptions& options) {
  WEFT_ASSIGN_OR_RETURN(const model_config::ModelConfig config,
                        model_config::ReadModelConfig(options.model_dir));
  Parts parts;
  AddConfig(config, parts);
  if (options.load_format == LoadFormat::kDummy) {
    parts["weights"] = "random";
  } else {
    WEFT_ASSIGN_OR_RETURN(const std::unique_ptr<weights::Checkpoint> checkpoint,
                          weights::Checkpoint::Open(options.model_dir));
    WEFT_RETURN_IF_ERROR(AddTensors(*checkpoint, config, parts));
  }
  std::string text;
  for (const auto& [name, value] : parts) {
    absl::StrAppend(&text, " ", name, "=", value);
  }
  return absl::BytesToHexString(Sha256(text)) + text;
}

}  // namespace weft::engine
