// Describes a model's experts: how many, how large, and in which layers.
#ifndef WEFT_SRC_LORA_EXPERT_SHAPE_H_
#define WEFT_SRC_LORA_EXPERT_SHAPE_H_

#include <algorithm>
#include <cstdint>
#include <limits>
#include <vector>

#include "src/parallel/shard.h"

namespace weft::lora {

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

  [[nodiscard]] bool InLayer(int layer) const {
    return count > 0 && layers[layer];
  }
  // Returns whether files have no single experts.
  [[nodiscard]] bool is_fused() const {
    return names == ExpertNames::kFused || names == ExpertNames::kFusedHalves;
  }
  // Returns the number of layers with experts that come before `layer`.
  [[nodiscard]] int LayersBefore(int layer) const {
    return static_cast<int>(
        std::count(layers.begin(), layers.begin() + layer, true));
  }
  // Returns the number of layers with experts.
  [[nodiscard]] int num_layers() const {
    return LayersBefore(static_cast<int>(layers.size()));
  }
  // Returns how many experts one token passes through in all layers together.
  [[nodiscard]] int64_t routing_width() const {
    return int64_t{num_layers()} * per_token;
  }
  // Returns whether the rank has features of the expert. Every rank has
  // features of the shared expert.
  [[nodiscard]] bool Has(int64_t expert) const {
    return expert >= count || (expert >= own.begin && expert < own.end);
  }
  // Returns the number of experts that the rank has, without the shared one.
  [[nodiscard]] int num_own() const {
    return static_cast<int>(std::min<int64_t>(count, own.end) - own.begin);
  }
  // Returns the number of experts, including the shared one.
  [[nodiscard]] int total() const { return count + (shared_ffn > 0 ? 1 : 0); }
  [[nodiscard]] int64_t FfnOf(int expert) const {
    return expert < count ? ffn : shared_ffn;
  }
};

}  // namespace weft::lora

#endif  // WEFT_SRC_LORA_EXPERT_SHAPE_H_
