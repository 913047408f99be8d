// The widths of a base model's linear layers and of one rank's parts, and how
// checkpoints spell the paths of experts.
#ifndef WEFT_SRC_MODEL_CONFIG_MODEL_SHAPE_H_
#define WEFT_SRC_MODEL_CONFIG_MODEL_SHAPE_H_

#include <algorithm>
#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "src/parallel/shard.h"
#include "src/request/adapter.h"

namespace weft::model_config {

// How checkpoints spell the modules of experts.
enum class ExpertNames : uint8_t {
  kMlp,      // mlp.experts.0.gate_proj
  kGlm,      // As kMlp, with mlp.shared_experts in place of mlp.shared_expert.
  kMixtral,  // block_sparse_moe.experts.0.w1
  // mlp.experts.gate_up_proj: one tensor of all experts. PEFT's
  // target_parameters use this name, too. Error messages name a single expert
  // as kMlp does.
  kFused,        // Transposed, and rows of gate and up alternate.
  kFusedHalves,  // Rows of gate, then rows of up.
};

// The experts of a model. A layer with experts has them in place of the MLP.
struct ExpertShape {
  int count = 0;      // 0: the model has no experts.
  int per_token = 0;  // Experts that a token passes through.
  int64_t ffn = 0;
  // Features of the shared expert, which sees every token. 0: there is none.
  // The shared expert is expert number `count`.
  int64_t shared_ffn = 0;
  ExpertNames names = ExpertNames::kMlp;
  std::vector<bool> layers;  // Says for every layer whether it has experts.
  // The experts that this rank (process) has, with `ffn` features each. By
  // default, these are all experts.
  parallel::Range own = {.begin = 0,
                         .end = std::numeric_limits<int64_t>::max()};

  bool InLayer(int layer) const { return count > 0 && layers[layer]; }
  // Returns whether files have no single experts.
  bool is_fused() const {
    return names == ExpertNames::kFused || names == ExpertNames::kFusedHalves;
  }
  // Returns the number of layers with experts that come before `layer`.
  int LayersBefore(int layer) const {
    return static_cast<int>(
        std::count(layers.begin(), layers.begin() + layer, true));
  }
  // Returns the number of layers with experts.
  int num_layers() const {
    return LayersBefore(static_cast<int>(layers.size()));
  }
  // Returns how many experts one token passes through in all layers together.
  int64_t routing_width() const { return int64_t{num_layers()} * per_token; }
  // Returns whether the rank has features of the expert. Every rank has
  // features of the shared expert.
  bool Has(int64_t expert) const {
    return expert >= count || (expert >= own.begin && expert < own.end);
  }
  // Returns the number of experts that the rank has, without the shared one.
  int num_own() const {
    return static_cast<int>(std::min<int64_t>(count, own.end) - own.begin);
  }
  // Returns the number of experts, including the shared one.
  int total() const { return count + (shared_ffn > 0 ? 1 : 0); }
  int64_t FfnOf(int expert) const { return expert < count ? ffn : shared_ffn; }
};

// How PEFT's files spell the paths of the decoder's modules. A wrapped model
// has other parts, such as one for images. Old releases use kOldWrapped.
enum class DecoderNames : uint8_t {
  kPlain,       // model.layers, lm_head
  kWrapped,     // model.language_model.layers, lm_head
  kOldWrapped,  // language_model.model.layers, language_model.lm_head
};

// The layers that compute a gated delta rule in place of attention. Their input
// projections are stacked, with rows of q | k | v | z | b | a. Value head h
// reads key head h / (value_heads / key_heads).
struct DeltaShape {
  std::vector<bool> layers;  // One per layer; empty if there are none.
  int key_heads = 0;
  int value_heads = 0;   // A multiple of key_heads: rows of b, and of a.
  int key_features = 0;  // Of one head.
  int value_features = 0;
  int conv_kernel = 0;  // The rows that an output of the convolution reads.
  // If true, checkpoints and PEFT have q, k, v and z as one module, and b and a
  // as another, each with its rows grouped by key head.
  bool is_fused = false;

  bool InLayer(int layer) const { return !layers.empty() && layers[layer]; }
  int64_t key_width() const { return int64_t{key_heads} * key_features; }
  int64_t value_width() const { return int64_t{value_heads} * value_features; }
  // Returns the features of the convolution: the rows of q, k and v.
  int64_t conv_width() const { return 2 * key_width() + value_width(); }
};

// The widths of the base model's linear layers.
struct ModelShape {
  int num_layers = 0;
  int64_t hidden = 0;
  int64_t q_width = 0;     // query heads * head features
  int64_t gate_width = 0;  // The rows of q_proj that gate attention's output
                           // (ModelConfig::output_gate).
  int64_t kv_width = 0;    // key/value heads * head features
  int64_t ffn = 0;
  int64_t vocab = 0;
  ExpertShape experts;
  DeltaShape delta;
  DecoderNames names = DecoderNames::kPlain;
  // As `names`, for programs that load the whole wrapper of a model whose text
  // part transformers' AutoModelForCausalLM loads alone (Wrapper::loads_text).
  DecoderNames wrapper_names = DecoderNames::kPlain;
  // The order in files of the features of a head of q or k
  // (ModelConfig::head_order).
  std::vector<int> head_order;
  // PEFT's files have q, k and v as one module, qkv_proj, or gate and up as
  // one, gate_up_proj (ModelConfig::fused_qkv).
  bool fused_qkv = false;
  bool fused_gate_up = false;

  // Returns this shape with `ffn` set to the width of the expert.
  ModelShape OfExpert(int expert) const {
    ModelShape shape = *this;
    shape.ffn = experts.FfnOf(expert);
    return shape;
  }
};

// The parts of ModelShape's widths that one rank of tensor parallelism has.
// Every rank has the whole `hidden`.
struct ShapeRanges {
  parallel::Range q;
  parallel::Range kv;
  parallel::Range ffn;
  parallel::Range vocab;
  parallel::Range expert_ffn;
  parallel::Range shared_ffn;
  parallel::Range delta_key;    // Of DeltaShape::key_width.
  parallel::Range delta_value;  // Of DeltaShape::value_width.
  parallel::Range delta_heads;  // Of DeltaShape::value_heads.
  // Of the whole model:
  DeltaShape delta;
  int q_rows = 1;       // Rows of q_proj for each feature: 2 with output gates.
  int num_experts = 0;  // ExpertShape::count.
};

// Returns the number of inputs or of outputs of a module. The embedding's
// inputs are the tokens of the vocabulary.
int64_t InWidth(const ModelShape& shape, TargetModule module);
int64_t OutWidth(const ModelShape& shape, TargetModule module);

// Returns the path of an expert, such as "model.layers.0.mlp.experts.3".
std::string ExpertPath(int layer, int expert, const ExpertShape& experts);
// Returns the last part of the path of an expert's module, such as "w1".
const char* ExpertModuleName(TargetModule module, ExpertNames names);

}  // namespace weft::model_config

#endif  // WEFT_SRC_MODEL_CONFIG_MODEL_SHAPE_H_
