// Describes the architecture of a base model, as given by config.json. One
// decoder serves all families of models. The fields of ModelConfig hold the
// differences between them. Torch-free.
#ifndef WEFT_SRC_MODEL_CONFIG_MODEL_CONFIG_H_
#define WEFT_SRC_MODEL_CONFIG_MODEL_CONFIG_H_

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "src/model_config/family_config.h"
#include "src/model_config/model_shape.h"
#include "src/ops/activation.h"
#include "src/ops/attention_rule.h"

namespace weft::model_config {

// The attention settings that may differ between layers. They have no meaning
// in the layers of ModelConfig::delta.
struct LayerAttention {
  ops::AttentionRule rule;
  int rope_table = 0;  // Index into ModelConfig::rope_tables.
};

// The largest DeltaShape::conv_kernel.
inline constexpr int kMaxConvKernel = 8;

// The mixtures of experts that layers have in place of an MLP.
struct MoeConfig {
  ExpertShape shape;
  // If true, a token's router weights are scaled so that they sum to one.
  bool normalizes_weights = false;
  // If true, a token's router weights are the softmax over the logits of only
  // this token's experts. If false, they come from the softmax over all
  // experts.
  bool softmax_of_chosen = false;
  // If true, the scores of experts are the sigmoids of their logits. A learned
  // correction is added to the scores by which experts are chosen, but not to
  // the weights.
  bool sigmoid = false;
  bool wide_logits = false;  // Logits are f32, also of a model in bf16.
  double sum_epsilon = 0;    // Added to the sum by which weights are divided.
  double weight_scale = 1;   // Multiplies the weights of a sigmoid router.
  // A sigmoid router first chooses `chosen_groups` of `groups` groups of
  // adjacent experts, by the sum of each group's two largest scores.
  int groups = 1;
  int chosen_groups = 1;
  bool has_shared_gate = true;  // If false, the shared expert's weight is 1.
  // The number of groups of ranks (processes) among which the experts are dealt
  // out. The ranks of a group split the features of the group's experts.
  int expert_groups = 1;
};

// Multiplies the query at position p by 1 + beta log(1 + floor(p / period)).
struct QueryScale {
  double beta = 0;  // 0: no query is scaled.
  double period = 1;
};

struct ModelConfig {
  std::string model_type;  // Such as "llama" or "qwen3".
  // Another part, such as one for images, is beside the decoder in the class
  // that transformers' AutoModelForCausalLM loads.
  bool is_wrapped = false;
  // As is_wrapped, in the class that config.json names.
  bool has_wrapper = false;
  int num_layers = 0;
  int64_t hidden = 0;
  int64_t ffn = 0;
  int64_t vocab = 0;
  int64_t padding_token = -1;  // LoRA does not learn its embedding. -1: none.
  int num_heads = 0;
  int num_kv_heads = 0;
  int head_dim = 0;
  int64_t max_positions = 0;
  double rms_norm_eps = 1e-6;
  bool tied_embeddings = false;
  QkNorm qk_norm = QkNorm::kNone;
  bool qkv_bias = false;
  bool o_bias = false;
  bool mlp_bias = false;
  // q_proj also makes gates: for each query head, rows of the query, then rows
  // of gates. The head's output is multiplied by their sigmoid.
  bool output_gate = false;
  bool sinks = false;  // Query heads have sinks (Family::sinks).
  NormNames norms;
  // Checkpoints and PEFT's files have one projection for q, k and v, or one for
  // gate and up (Family::fused_qkv).
  bool fused_qkv = false;
  bool fused_gate_up = false;
  bool norms_from_one = false;  // Norms multiply by 1 + the stored weight.
  ops::Activation activation = ops::Activation::kSilu;
  // Embeddings are multiplied by sqrt(hidden). This factor is first rounded to
  // the model's dtype.
  bool scaled_embeddings = false;
  double embedding_multiplier = 1;        // Beside scaled_embeddings.
  double logits_divisor = 1;              // Of the logits before the cap.
  double final_softcap = 0;               // Caps the logits; 0: no cap.
  std::vector<LayerAttention> attention;  // One per layer.
  DeltaShape delta;                       // Zeros without linear layers.
  MoeConfig moe;
  // Rotary frequencies [head_dim / 2] of each table, with all scaling applied.
  // A pair of features that does not rotate has 0.
  std::vector<std::vector<double>> rope_tables;
  double rope_magnitude = 1;  // Multiplies the features that rotate.
  // Feature i of a head of q or k is feature head_order[i] in checkpoints and
  // PEFT's files, so that features i and i + head_dim / 2 rotate together.
  // Scores do not depend on the order. Empty: the order is the same.
  std::vector<int> head_order;
  QueryScale query_scale;
  // The ids of eos_token_id in config.json and generation_config.json.
  std::vector<int32_t> eos_token_ids;

  // Returns whether the outputs of attention and MLP have norms.
  bool has_output_norms() const { return !norms.attention_out.empty(); }
  // Returns whether the model has linear layers.
  bool has_delta() const { return delta.value_heads > 0; }
  ModelShape shape() const;
  // Returns the number of parameters of the base model. Tied embeddings count
  // once.
  uint64_t num_parameters() const;
};

// Parses config.json as transformers 4 or 5 writes it. Errors: INVALID_ARGUMENT
// for a damaged or inconsistent file, UNIMPLEMENTED for an unsupported
// architecture or field. Messages name the field, the value and what is
// accepted.
absl::StatusOr<ModelConfig> ParseModelConfig(std::string_view config_json);

// Reads config.json and, if it exists, generation_config.json of a folder.
// Errors: NOT_FOUND if there is no config.json; those of ParseModelConfig and
// weights::ReadSmallFile.
absl::StatusOr<ModelConfig> ReadModelConfig(const std::string& model_dir);

}  // namespace weft::model_config

#endif  // WEFT_SRC_MODEL_CONFIG_MODEL_CONFIG_H_
