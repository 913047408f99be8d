// Facts about a running engine.
#ifndef WEFT_SRC_REQUEST_ENGINE_INFO_H_
#define WEFT_SRC_REQUEST_ENGINE_INFO_H_

#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "src/request/adapter.h"

namespace weft {

// Facts that do not change while the engine runs.
struct EngineInfo {
  std::string device;        // "cpu" or "cuda".
  std::string dtype;         // "f32", "bf16" or "int8".
  std::string architecture;  // model_type of config.json.
  int num_layers = 0;
  int hidden_size = 0;
  int vocab_size = 0;
  int context_length = 0;
  // The most tokens of a prompt and one of its samples together for which the
  // cache of keys and values has room, however many samples there are.
  int64_t cached_tokens = std::numeric_limits<int64_t>::max();
  std::vector<int32_t> eos_token_ids;
  uint64_t num_parameters = 0;
  // A dense model has 0 in the three fields below.
  int num_experts = 0;
  int experts_per_token = 0;
  int expert_layers = 0;  // Layers that have experts.
  // The modules of the layers that may have LoRA.
  std::vector<TargetModule> projections = DefaultTargetModules();
  int max_adapters = 0;
  int max_adapters_per_tenant = 0;
  uint64_t max_adapter_bytes_per_tenant = 0;  // 0: no limit.
  int max_rank = 0;
  uint64_t replay_window = 0;         // Latest steps whose replies are kept.
  bool has_byte_decoder = false;      // True if StopRule::byte_strings work.
  bool keeps_sample_records = false;  // True if SampleRequest::record works.
  int log = 0;       // The log of the state that the engine has.
  int num_logs = 1;  // Of the state.
};

}  // namespace weft

#endif  // WEFT_SRC_REQUEST_ENGINE_INFO_H_
