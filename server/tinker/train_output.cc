// Converts the result of forward_backward to Tinker's message (train_wire.h).
#include "server/tinker/train_wire.h"

namespace weft::tinker {
namespace {

// Fills `out` with the field `list` of result.data[begin, end), one datum after
// the other. `shape` is the number of targets per token of all these data.
void FillField(const TrainResult& result, size_t begin, size_t end,
               int64_t shape, std::vector<float> DatumResult::*list,
               BatchedTensor* out) {
  out->set_dtype(DTYPE_FLOAT32);
  if (shape > 0) out->add_trailing_shape(shape);
  const auto add_offset = [out] {
    const auto offset = static_cast<int64_t>(out->data().size());
    out->mutable_offsets()->append(reinterpret_cast<const char*>(&offset),
                                   sizeof(offset));
  };
  add_offset();
  for (size_t i = begin; i < end; ++i) {
    const std::vector<float>& values = result.data[i].*list;
    out->mutable_data()->append(reinterpret_cast<const char*>(values.data()),
                                values.size() * sizeof(float));
    add_offset();
  }
}

}  // namespace

std::string TrainOutput(const TrainResult& result) {
  ForwardBackwardOutput out;
  out.set_loss_fn_output_type("ArrayRecord");
  // Each record holds adjacent data whose targets have the same shape.
  const std::vector<DatumResult>& data = result.data;
  for (size_t begin = 0; begin < data.size();) {
    const int shape = data[begin].targets_per_token;
    size_t end = begin + 1;
    while (end < data.size() && data[end].targets_per_token == shape) ++end;
    ArrayRecord* const record = out.add_loss_fn_outputs();
    record->set_type_tag("ArrayRecord");
    record->set_num_datums(static_cast<int64_t>(end - begin));
    auto* const fields = record->mutable_fields();
    FillField(result, begin, end, shape, &DatumResult::logprobs,
              &(*fields)["logprobs"]);
    FillField(result, begin, end, shape, &DatumResult::losses,
              &(*fields)["elementwise_loss"]);
    begin = end;
  }
  out.mutable_metrics()->insert(result.metrics.begin(), result.metrics.end());
  return out.SerializeAsString();
}

}  // namespace weft::tinker
