// The values that a pickle's program makes. Torch-free.
#ifndef WEFT_SRC_WEIGHTS_PICKLE_VALUES_H_
#define WEFT_SRC_WEIGHTS_PICKLE_VALUES_H_

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"

namespace weft::weights {

// Limits the total number of tuple items, dict keys, dict values, dicts,
// storages and memo entries. A state dict has about 30 of them for each tensor.
inline constexpr size_t kMaxPickleItems = 4'000'000;

enum class PickleKind : uint8_t {
  kNone,
  kBool,    // `number` is 0 or 1.
  kInt,     // `number` is the value.
  kFloat,   // The value is not kept.
  kString,  // The pickle's bytes [number, number + size).
  kTuple,   // The heap's items [number, number + size).
  kList,    // The items are not kept.
  kDict,    // The dict with index `number` in the heap.
  // For kGlobal, kStorage and kTensor, PickleObjects sets `number`.
  kGlobal,
  kStorage,
  kTensor,
};

// A value. Strings, tuples and dicts only refer to data in a PickleHeap, so
// copies are cheap. No code walks or frees values recursively, so deep or
// circular pickles are harmless.
struct PickleValue {
  PickleKind kind = PickleKind::kNone;
  uint32_t size = 0;
  int64_t number = 0;
};

struct PickleDict {
  bool ordered = false;
  // Keys and values in the order in which the pickle sets them. Keys are
  // strings and may repeat.
  std::vector<std::pair<PickleValue, PickleValue>> entries;
};

// Holds the tuples and dicts of a pickle. Threads: not thread-safe. Errors:
// INVALID_ARGUMENT beyond kMaxPickleItems.
class PickleHeap {
 public:
  // `pickle` outlives the heap.
  explicit PickleHeap(absl::string_view pickle) : pickle_(pickle) {}

  [[nodiscard]] absl::string_view Text(const PickleValue& string) const {
    return pickle_.substr(static_cast<size_t>(string.number), string.size);
  }
  [[nodiscard]] absl::Span<const PickleValue> Items(
      const PickleValue& tuple) const {
    return absl::MakeConstSpan(items_).subspan(
        static_cast<size_t>(tuple.number), tuple.size);
  }
  [[nodiscard]] const PickleDict& Dict(const PickleValue& dict) const {
    return dicts_[static_cast<size_t>(dict.number)];
  }

  // Counts items that the caller is about to add, against kMaxPickleItems.
  [[nodiscard]] absl::Status Charge(size_t num_items);
  [[nodiscard]] absl::StatusOr<PickleValue> NewTuple(
      absl::Span<const PickleValue> items);
  [[nodiscard]] absl::StatusOr<PickleValue> NewDict(bool ordered);
  // Adds pairs to the dict: `keys_and_values` has a key, its value, the next
  // key and so on. Errors: also INVALID_ARGUMENT for a key that has no value or
  // is not a string.
  [[nodiscard]] absl::Status Insert(
      const PickleValue& dict, absl::Span<const PickleValue> keys_and_values);

 private:
  const absl::string_view pickle_;
  size_t num_charged_ = 0;
  std::vector<PickleValue> items_;
  std::vector<PickleDict> dicts_;
};

}  // namespace weft::weights

#endif  // WEFT_SRC_WEIGHTS_PICKLE_VALUES_H_
