#include "src/model/store_rows.h"

#include <ATen/ATen.h>

#include <cstdint>
#include <optional>

#include "absl/strings/str_cat.h"
#include "src/ops/int8_weight.h"
#include "src/weights/tensor_types.h"

namespace weft::model {

absl::Status StoreRows(const WeightEntry& entry, const at::Tensor& rows,
                       const at::Tensor& destination) {
  if (!ops::IsInt8(destination)) {
    destination.copy_(rows);
    return absl::OkStatus();
  }
  if (!ops::QuantizeRows(rows, destination).has_value()) {
    return absl::OkStatus();
  }
  return absl::InvalidArgumentError(
      absl::StrCat(weights::QuotedTensor(entry.name),
                   " has a number that is not finite, which --weights=int8 "
                   "cannot hold"));
}

weights::RowFormat FormatOf(const WeightEntry& entry,
                            const at::Tensor& destination) {
  if (!ops::IsInt8(destination)) return {};
  return {.columns = entry.part_shape[1],
          .store = [&entry](const at::Tensor& rows, const at::Tensor& stored) {
            return StoreRows(entry, rows, stored);
          }};
}

}  // namespace weft::model
