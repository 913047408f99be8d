#include "src/model/token_experts.h"

#include <ATen/ATen.h>

#include <cstdint>

namespace weft::model {
namespace {

// Returns the first column of a layer in experts_TE and experts_PSE.
int64_t ColumnOf(int layer, const lora::ExpertShape& experts) {
  return experts.LayersBefore(layer) * int64_t{experts.per_token};
}

// Does the work of KeepExperts row by row. For the rows of a decode step, this
// takes less time than LibTorch needs to set up an indexed copy.
void KeepRowsCpu(const at::Tensor& experts_TK, const at::Tensor& slots_T,
                 int64_t column, const at::Tensor& experts_PSE) {
  const int64_t per_token = experts_TK.size(1);
  const int64_t width = experts_PSE.size(2);
  const int64_t num_slots = experts_PSE.size(0) * experts_PSE.size(1);
  const auto* slots = slots_T.const_data_ptr<int64_t>();
  const auto* from = experts_TK.const_data_ptr<int64_t>();
  auto* to = experts_PSE.mutable_data_ptr<int16_t>();
  for (int64_t t = 0; t < experts_TK.size(0); ++t) {
    TORCH_CHECK(slots[t] >= 0 && slots[t] < num_slots, "slots_T names slot ",
                slots[t], " of ", num_slots);
    for (int64_t k = 0; k < per_token; ++k) {
      to[slots[t] * width + column + k] =
          static_cast<int16_t>(from[t * per_token + k]);
    }
  }
}

}  // namespace

at::Tensor GivenExperts(const PackedBatch& batch, int layer,
                        const lora::ExpertShape& experts) {
  if (!batch.experts_TE.defined() || !experts.InLayer(layer)) return {};
  return batch.experts_TE
      .narrow(-1, ColumnOf(layer, experts), experts.per_token)
      .to(at::kLong);
}

void KeepExperts(const at::Tensor& experts_TK, int layer,
                 const lora::ExpertShape& experts, const KvAccess& kv) {
  const at::Tensor& experts_PSE = kv.store->experts_PSE;
  const int64_t column = ColumnOf(layer, experts);
  if (experts_PSE.is_cpu() && experts_TK.is_contiguous() &&
      kv.slots_T.is_contiguous()) {
    KeepRowsCpu(experts_TK, kv.slots_T, column, experts_PSE);
    return;
  }
  experts_PSE.flatten(0, 1)
      .narrow(-1, column, experts.per_token)
      .index_copy_(0, kv.slots_T, experts_TK.to(at::kShort));
}

}  // namespace weft::model
