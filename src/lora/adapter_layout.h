// Gives each LoRA matrix of an adapter a place in the adapter's flat buffers.
//
// An adapter has four f32 buffers of the same layout: weights, gradient and two
// moments. So an optimizer step, a copy or a file write is a single pass over a
// buffer. Inside a layer the A matrices of projections that share an input
// (q,k,v; gate,up) are adjacent, so that one GEMM multiplies all of them with
// the input:
//   layer 0: A_q A_k A_v B_q B_k B_v | A_o B_o | A_gate A_up B_gate B_up |
//   A_down B_down, layer 1: ..., A_lm_head B_lm_head, A_embed B_embed
// In a layer of experts each expert has its own gate, up and down. If several
// processes (ranks) share a layer, a rank's layout has only the experts of this
// rank.
//
// A is [LoRA rank, in] and B is [out, LoRA rank], both row-major. Each linear
// layer has its own LoRA rank and scale. Layers that the adapter does not
// target take no room. Torch-free.
#ifndef WEFT_SRC_LORA_ADAPTER_LAYOUT_H_
#define WEFT_SRC_LORA_ADAPTER_LAYOUT_H_

#include <array>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "src/model_config/model_shape.h"
#include "src/parallel/shard.h"
#include "src/request/adapter.h"

namespace weft::lora {

// The value of LoraFactor::expert for a linear layer outside the experts.
inline constexpr int kNoExpert = -1;

// A linear layer with LoRA, or the embedding with LoRA.
struct LoraFactor {
  int layer = 0;  // num_layers for the head and the embedding.
  TargetModule module = TargetModule::kQProj;
  int expert = kNoExpert;
  int64_t rank = 0;
  double scale = 1;  // The layer adds scale (x A^T) B^T to its output.
  int64_t in = 0;
  int64_t out = 0;
  int64_t a_offset = 0;  // Offsets count floats from the start of the buffer.
  int64_t b_offset = 0;

  friend bool operator==(const LoraFactor&, const LoraFactor&) = default;
};

// A group of projections that read the same input. The embedding reads tokens,
// so its A has one column for each token of the vocabulary.
enum class ProjectionGroup : uint8_t {
  kQkv,
  kO,
  kGateUp,
  kDown,
  kLmHead,
  kEmbedTokens,
  // In place of kQkv and kO in a layer with a gated delta rule.
  kDeltaIn,
  kDeltaFusedIn,  // As kDeltaIn, with DeltaShape::is_fused.
  kDeltaOut
};
inline constexpr int kGroupsPerLayer = 4;
using LayerGroups = std::array<ProjectionGroup, kGroupsPerLayer>;
// Returns the groups of a layer, in the order of the buffer.
LayerGroups GroupsOf(const model_config::ModelShape& shape, int layer);
// Returns the index of a group in GroupsOf.
int IndexInLayer(ProjectionGroup group);

// Returns whether the group is kGateUp or kDown, which every expert has.
inline bool IsOfMlp(ProjectionGroup group) {
  return group == ProjectionGroup::kGateUp || group == ProjectionGroup::kDown;
}

// Returns the modules of a group, in the order in which the base model stacks
// their outputs (q, k, v; gate, up).
std::span<const TargetModule> ModulesOf(ProjectionGroup group);
// Returns the group of a module.
ProjectionGroup GroupOf(TargetModule module);
// Returns all modules of the layers that may have LoRA.
std::vector<TargetModule> ProjectionsOf(const model_config::ModelShape& shape);
// The projections of one group that have LoRA. Their A matrices are adjacent in
// the buffer, in the order of `factors`.
struct GroupLayout {
  int expert = kNoExpert;
  std::vector<LoraFactor> factors;
  int64_t total_rank = 0;  // Number of rows of the stacked A.
};

class AdapterLayout {
 public:
  AdapterLayout(const model_config::ModelShape& shape,
                const LoraConfig& config);

  // Returns the config from which the layout was made.
  const LoraConfig& config() const { return config_; }
  // Returns the largest rank of a factor; 0 without factors.
  int max_rank() const { return max_rank_; }
  int64_t num_parameters() const { return num_parameters_; }
  // Returns every adapted layer, in the order of the buffer.
  const std::vector<LoraFactor>& factors() const { return factors_; }
  // Returns the layout of a group. The layout has no factors in three cases:
  // the adapter has no LoRA in the group; `expert` belongs to another rank; or
  // the layer has experts, `group` is kGateUp or kDown, and `expert` is
  // kNoExpert. REQUIRES: `layer` is in [0, num_layers). `expert` is kNoExpert,
  // or an expert of the layer for kGateUp and kDown. kLmHead and kEmbedTokens
  // ignore `layer` and `expert`.
  const GroupLayout& group(int layer, ProjectionGroup group,
                           int expert = kNoExpert) const;

 private:
  void AddGroup(const model_config::ModelShape& shape, const LoraConfig& config,
                int layer, ProjectionGroup group, int expert = kNoExpert);

  LoraConfig config_;
  int max_rank_ = 0;
  int64_t num_parameters_ = 0;
  std::vector<LoraFactor> factors_;
  std::vector<GroupLayout> groups_;
  // The index in groups_ of each layer's first group. The last entry is the
  // index of the head's group.
  std::vector<size_t> layer_groups_;
};

// Returns Hugging Face's path of the module, such as
// "model.layers.0.mlp.up_proj", "model.layers.0.mlp.experts.3.up_proj" or
// "lm_head". `experts` says how the model spells the paths of experts. PEFT
// adds the prefix "base_model.model." and the suffix ".lora_A.weight" or
// ".lora_B.weight". For the embedding the suffix is ".lora_embedding_A" or
// ".lora_embedding_B".
std::string ModulePath(const LoraFactor& factor,
                       const model_config::ExpertShape& experts = {});
// Returns how many modules PEFT's files have as one with `module`, itself
// included: 3 for q_proj if the model has a qkv_proj, 1 for a module of its
// own. Experts are not among them.
int NumFused(TargetModule module, const model_config::ModelShape& shape);
// Returns the last part of the path, in PEFT's files, of a module outside the
// experts, such as "q_proj" or "qkv_proj".
const char* FileModuleName(TargetModule module,
                           const model_config::ModelShape& shape);
// Returns the path of the module in PEFT's files.
std::string FilePath(const LoraFactor& factor,
                     const model_config::ModelShape& shape);
// Returns a path of ModulePath, or one that begins with it, in the spelling
// `names`.
std::string PathInFile(const std::string& path,
                       model_config::DecoderNames names);
}  // namespace weft::lora

#endif  // WEFT_SRC_LORA_ADAPTER_LAYOUT_H_
