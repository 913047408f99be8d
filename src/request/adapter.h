// Adapters: their LoRA configuration, what clients see of them, and requests
// for operations on them. The server validates a request before the engine gets
// it (server/*_validation.cc).
#ifndef WEFT_SRC_REQUEST_ADAPTER_H_
#define WEFT_SRC_REQUEST_ADAPTER_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/time/time.h"

namespace weft {

// The modules of the model that can have LoRA. Checkpoints and logs store these
// numbers.
enum class TargetModule : uint8_t {
  kQProj,
  kKProj,
  kVProj,
  kOProj,
  kGateProj,
  kUpProj,
  kDownProj,
  kLmHead,
  kEmbedTokens,
  // The projections of layers with a gated delta rule. A model has either the
  // first four of them or, in two fused matrices, the last two.
  kInProjQkv,
  kInProjZ,
  kInProjB,
  kInProjA,
  kOutProj,
  kInProjQkvz,
  kInProjBa,
};

inline constexpr std::array kAllTargetModules = {
    TargetModule::kQProj,       TargetModule::kKProj,
    TargetModule::kVProj,       TargetModule::kOProj,
    TargetModule::kGateProj,    TargetModule::kUpProj,
    TargetModule::kDownProj,    TargetModule::kLmHead,
    TargetModule::kEmbedTokens, TargetModule::kInProjQkv,
    TargetModule::kInProjZ,     TargetModule::kInProjB,
    TargetModule::kInProjA,     TargetModule::kOutProj,
    TargetModule::kInProjQkvz,  TargetModule::kInProjBa};

// Returns the projections of attention and MLP. (A request that lists no
// modules means all projections of the model: EngineInfo::projections.)
std::vector<TargetModule> DefaultTargetModules();

// Returns Hugging Face's name of the module, such as "q_proj".
const char* TargetModuleName(TargetModule module);

// LoRA of one module. With rank 0 the module has no LoRA.
struct LoraShape {
  int rank = 0;
  double alpha = 0;

  double scale() const { return alpha / rank; }
  friend bool operator==(const LoraShape&, const LoraShape&) = default;
};

// A module whose LoRA shape differs from LoraConfig's rank and alpha. `layer`
// counts from 0. For a module outside the layers, `layer` is the number of
// layers.
struct LoraOverride {
  int layer = 0;
  TargetModule module = TargetModule::kQProj;
  LoraShape shape;

  friend bool operator==(const LoraOverride&, const LoraOverride&) = default;
};

struct LoraConfig {
  int rank = 32;
  double alpha = 32;
  std::vector<TargetModule> target_modules = DefaultTargetModules();
  uint64_t seed = 0;
  // In a CreateAdapterRequest: the rank of LoRA on experts; 0 means `rank`
  // divided by the experts per token, at least 1. For an existing adapter, this
  // field is 0. If the experts' rank differs from `rank`, `overrides` has it.
  int expert_rank = 0;
  // Ordered by layer and module. target_modules lists every module that has an
  // override.
  std::vector<LoraOverride> overrides;

  LoraShape ShapeOf(int layer, TargetModule module) const;
  friend bool operator==(const LoraConfig&, const LoraConfig&) = default;
};

// Where an adapter's tensors are; during a move, where they come from.
enum class AdapterLocation : uint8_t { kDevice, kHost, kDisk };
inline constexpr int kNumAdapterLocations = 3;

// The optimizer that made an adapter's steps, or, before the first one, for
// which the adapter is made (CreateAdapterRequest). Logs store these numbers,
// and checkpoints the names.
enum class Optimizer : uint8_t { kAdamW, kMuon };
inline constexpr int kNumOptimizers = 2;

// Returns "adamw" or "muon".
const char* OptimizerName(Optimizer optimizer);

// The accumulated tokens of a state that an earlier version of the server
// wrote, which did not count them: a gradient may be there.
inline constexpr uint64_t kUncountedTokens = 1;

// What a restarted server restores of an adapter without a request. kMemory:
// nothing. kStep: every answered step. kDefault occurs only in requests and
// means kStep with --state-dir, otherwise kMemory.
enum class Durability : uint8_t { kDefault, kMemory, kStep };
inline constexpr int kNumDurabilities = 3;

struct AdapterInfo {
  std::string adapter_id;
  std::string tenant;
  LoraConfig config;
  Durability durability = Durability::kMemory;
  uint64_t epoch = 0;  // Tells the adapter from others of the same name.
  // Counts the steps that made the adapter's state. A load takes the count of
  // the checkpoint, so the count of a later step may differ from its number.
  uint64_t last_step = 0;
  uint64_t next_step = 0;  // The number of the next new step.
  uint64_t durable_step = 0;
  uint64_t optim_steps = 0;
  Optimizer optimizer = Optimizer::kAdamW;  // That of optim_steps.
  // Of the ForwardBackwards whose gradients the accumulator has.
  uint64_t accumulated_tokens = 0;
  uint64_t version = 0;
  uint64_t num_parameters = 0;
  uint64_t resident_bytes = 0;  // Bytes on the device.
  AdapterLocation location = AdapterLocation::kDevice;
  std::vector<std::string> snapshots;
  absl::Time created_at;
  absl::Time last_used_at;
  bool restoring = false;  // A start has not restored the adapter yet.
};

// Asks for the first `size` adapters whose ids come after `after`, in the order
// of ids. `after` begins with `prefix`.
struct ListAdaptersRequest {
  size_t size = 100;
  std::string after;
  std::string prefix;   // Lists the ids that begin with it.
  bool others = false;  // Returns AdapterPage::others.
};

struct AdapterPage {
  std::vector<AdapterInfo> adapters;  // By id.
  bool more = false;                  // More adapters follow.
  // HOST:PORT of each server that has adapters of the same store.
  std::vector<std::string> others;
};

struct CreateAdapterRequest {
  std::string adapter_id;
  std::string tenant;
  LoraConfig config;
  Durability durability = Durability::kDefault;
  // For which the adapter is made. Its first step may be of the other one.
  Optimizer optimizer = Optimizer::kAdamW;
};

struct PublishSnapshotRequest {
  std::string adapter_id;
  std::string name;
  uint64_t step = 0;
  uint64_t epoch = 0;
  absl::Time deadline = absl::InfiniteFuture();
  std::shared_ptr<void> charge = nullptr;  // See step.h.
};

struct ReleaseSnapshotRequest {
  std::string adapter_id;
  std::string name;
};

// A program that loads exported adapters. Each reads PEFT's folders by rules of
// its own (src/lora/loader_rules.h).
enum class Loader : uint8_t { kPeft, kVllm, kLlamaCpp };

struct ExportAdapterRequest {
  std::string adapter_id;
  std::string snapshot;  // Empty: the latest weights.
  Loader loader = Loader::kPeft;
};

struct MoveAdapterRequest {
  std::string adapter_id;
  int log = 0;  // Where the adapter goes.
};

// The files of a PEFT folder, as pairs of name (without folder) and contents.
using PeftFiles = std::vector<std::pair<std::string, std::string>>;

struct ImportAdapterRequest {
  std::string adapter_id;
  std::string tenant;
  Durability durability = Durability::kDefault;
  PeftFiles files;
};

}  // namespace weft

#endif  // WEFT_SRC_REQUEST_ADAPTER_H_
