#include "src/weights/pickle_values.h"

#include "absl/strings/str_cat.h"
#include "src/base/status_macros.h"

namespace weft::weights {

absl::Status PickleHeap::Charge(size_t num_items) {
  num_charged_ += num_items;
  if (num_charged_ <= kMaxPickleItems) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("makes more than ", kMaxPickleItems, " items"));
}

absl::StatusOr<PickleValue> PickleHeap::NewTuple(
    absl::Span<const PickleValue> items) {
  WEFT_RETURN_IF_ERROR(Charge(items.size()));
  const auto first = static_cast<int64_t>(items_.size());
  items_.insert(items_.end(), items.begin(), items.end());
  return PickleValue{.kind = PickleKind::kTuple,
                     .size = static_cast<uint32_t>(items.size()),
                     .number = first};
}

absl::StatusOr<PickleValue> PickleHeap::NewDict(bool ordered) {
  WEFT_RETURN_IF_ERROR(Charge(1));
  const auto index = static_cast<int64_t>(dicts_.size());
  dicts_.push_back({.ordered = ordered});
  return PickleValue{.kind = PickleKind::kDict, .number = index};
}

absl::Status PickleHeap::Insert(const PickleValue& dict,
                                absl::Span<const PickleValue> keys_and_values) {
  if (keys_and_values.size() % 2 != 0) {
    return absl::InvalidArgumentError("has a key without a value");
  }
  WEFT_RETURN_IF_ERROR(Charge(keys_and_values.size()));
  auto& entries = dicts_[static_cast<size_t>(dict.number)].entries;
  for (size_t i = 0; i < keys_and_values.size(); i += 2) {
    if (keys_and_values[i].kind != PickleKind::kString) {
      return absl::InvalidArgumentError("has a key that is not a string");
    }
    entries.emplace_back(keys_and_values[i], keys_and_values[i + 1]);
  }
  return absl::OkStatus();
}

}  // namespace weft::weights
