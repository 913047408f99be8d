// The architecture of a base model, as config.json describes it. Torch-free.
// One decoder is described by data; there is no class per model family.
#ifndef WEFT_SRC_MODEL_CONFIG_MODEL_CONFIG_H_
#define WEFT_SRC_MODEL_CONFIG_MODEL_CONFIG_H_

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "src/ops/activation.h"
#include "src/ops/attention_rule.h"
#include "src/peft/adapter_layout.h"

namespace weft::model {

// What differs between layers.
struct LayerAttention {
  ops::AttentionRule rule;
  int rope_table = 0;  // Index into ModelConfig::rope_tables.
};

struct ModelConfig {
  std::string model_type;  // "llama", "qwen3".
  int num_layers = 0;
  int64_t hidden = 0;
  int64_t ffn = 0;
  int64_t vocab = 0;
  int num_heads = 0;
  int num_kv_heads = 0;
  int head_dim = 0;
  int64_t max_positions = 0;
  double rms_norm_eps = 1e-6;
  bool tied_embeddings = false;
  bool qk_norm = false;  // RMS norm of each query and key head.
  bool qkv_bias = false;
  bool o_bias = false;
  bool mlp_bias = false;
  // RMS norms also of the outputs of attention and MLP.
  bool output_norms = false;
  bool norms_from_one = false;  // The checkpoint has norm weights less one.
  ops::Activation activation = ops::Activation::kSilu;
  bool scaled_embeddings = false;  // By sqrt(hidden), in the model dtype.
  double final_softcap = 0;        // Caps the logits; 0: no cap.
  std::vector<LayerAttention> attention;  // One per layer.
  // Rotary frequencies [head_dim / 2], any scaling (llama3) already applied.
  std::vector<std::vector<double>> rope_tables;
  // config.json's eos_token_id joined with generation_config.json's.
  std::vector<int32_t> eos_token_ids;

  [[nodiscard]] lora::ModelShape shape() const;
  // Parameters of the base model, tied embeddings counted once.
  [[nodiscard]] uint64_t num_parameters() const;
};

// Parses config.json (v4 and v5 spellings). Errors name the field, the value
// and what is accepted: INVALID_ARGUMENT for a damaged or inconsistent file,
// UNIMPLEMENTED for an architecture or a field that is not supported.
[[nodiscard]] absl::StatusOr<ModelConfig> ParseModelConfig(
    std::string_view config_json);

// Reads config.json and, if it exists, generation_config.json of a folder.
// Errors: NOT_FOUND if there is no config.json.
[[nodiscard]] absl::StatusOr<ModelConfig> ReadModelConfig(
    const std::string& model_dir);

}  // namespace weft::model

#endif  // WEFT_SRC_MODEL_CONFIG_MODEL_CONFIG_H_
