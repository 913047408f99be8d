// Finds the adapters of rows that are sorted by expert, on the device. The
// result has entries of few rows (lora_table.h) for the kernels of
// lora_few_rows.h.
// Legend: as in expert_rows.h.
#ifndef WEFT_KERNELS_CUDA_LORA_LORA_EXPERT_ROWS_H_
#define WEFT_KERNELS_CUDA_LORA_LORA_EXPERT_ROWS_H_

#include <cuda_runtime_api.h>

#include <cstdint>

#include "kernels/cuda/lora/lora_table.h"

namespace weft::kernels::cuda {

struct LoraExpertRows {
  // The table of the batch. Its entries of few rows are in the order of their
  // rows, which are tokens.
  LoraTable batch;
  // The slots of expert 0's stacked A of gate and up, and of its A of down. An
  // adapter of a layout without both has no LoRA on the experts.
  int64_t slot_of_gate_up = 0;
  int64_t slot_of_down = 0;
  // The slot whose offset is the distance, in elements, between the matrices of
  // one expert and those of the next.
  int64_t slot_of_distance = 0;
  const int64_t* experts_TK = nullptr;
  const int64_t* pairs_N = nullptr;  // As ExpertSort makes it.
  int64_t num_rows = 0;              // N.
  int64_t per_token = 1;             // K.
  // The results, with room for N entries. The weights of an entry are those of
  // the adapter, moved by the distance to its expert. So the slots of expert 0
  // serve every expert.
  LoraFewRows* few = nullptr;
  int64_t* num_few = nullptr;
};

// Writes the entries in the order of their rows, in one launch of one block.
// Threads: any; the work is queued on `stream`, and nothing waits for it.
[[nodiscard]] cudaError_t FindLoraExpertRows(const LoraExpertRows& rows,
                                             cudaStream_t stream);

}  // namespace weft::kernels::cuda

#endif  // WEFT_KERNELS_CUDA_LORA_LORA_EXPERT_ROWS_H_
