// The experts of a mixture: how many, how large, and in which layers.
#ifndef WEFT_SRC_PEFT_EXPERT_SHAPE_H_
#define WEFT_SRC_PEFT_EXPERT_SHAPE_H_

#include <algorithm>
#include <cstdint>
#include <limits>
#include <vector>

#include "src/parallel/shard.h"

namespace weft::lora {

// How checkpoints spell the modules of experts.
enum class ExpertNames : uint8_t {
  kMlp,      // mlp.experts.0.gate_proj
  kMixtral,  // block_sparse_moe.experts.0.w1
  kFused,    // mlp.experts.gate_up_proj, with all experts. PEFT names them so
             // too. Messages spell single experts as kMlp does.
};

// The experts of a mixture. A layer has them in place of gate, up and down.
struct ExpertShape {
  int count = 0;      // 0: the model has no experts.
  int per_token = 0;  // Experts that a token passes through.
  int64_t ffn = 0;
  // Features of the shared expert, which sees every token; 0: there is none.
  // It is the expert number `count`.
  int64_t shared_ffn = 0;
  ExpertNames names = ExpertNames::kMlp;
  std::vector<bool> layers;  // Says for every layer whether it has experts.
  // The experts that the rank has, with `ffn` features each. By default all.
  parallel::Range own = {.begin = 0,
                         .end = std::numeric_limits<int64_t>::max()};

  [[nodiscard]] bool InLayer(int layer) const {
    return count > 0 && layers[layer];
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
  // Returns the number of experts of one token in all layers.
  [[nodiscard]] int64_t routing_width() const {
    return int64_t{num_layers()} * per_token;
  }
  // Returns whether the rank has features of the expert. The shared expert is
  // not among those that are dealt out.
  [[nodiscard]] bool Has(int64_t expert) const {
    return expert >= count || (expert >= own.begin && expert < own.end);
  }
  // Returns the number of experts that the rank has, without the shared one.
  [[nodiscard]] int num_own() const {
    return static_cast<int>(std::min<int64_t>(count, own.end) - own.begin);
  }
  // Counts the shared expert too.
  [[nodiscard]] int total() const { return count + (shared_ffn > 0 ? 1 : 0); }
  [[nodiscard]] int64_t FfnOf(int expert) const {
    return expert < count ? ffn : shared_ffn;
  }
};

}  // namespace weft::lora

#endif  // WEFT_SRC_PEFT_EXPERT_SHAPE_H_
