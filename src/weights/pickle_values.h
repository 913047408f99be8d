// The values with which a pickle's program works. Torch-free.
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

// Limits the sum of tuple items, dict items, dicts, storages and memo entries.
// A state dict takes about 30 for each tensor.
inline constexpr size_t kMaxPickleItems = 4'000'000;

enum class PickleKind : uint8_t {
  kNone,
  kBool,    // `number` is 0 or 1.
  kInt,     // `number`.
  kFloat,   // Its value is not kept.
  kString,  // `size` bytes of the pickle, from `number` on.
  kTuple,   // `size` items of the heap, from `number` on.
  kList,    // Its items are not kept.
  kDict,    // The dict with index `number` in the heap.
  kGlobal,  // PickleObjects numbers this and the next two.
  kStorage,
  kTensor,
};

// Refers to the heap, so that copies are cheap. Nothing is walked or freed
// recursively, even if a pickle nests deeply or refers to itself.
struct PickleValue {
  PickleKind kind = PickleKind::kNone;
  uint32_t size = 0;
  int64_t number = 0;
};

struct PickleDict {
  bool ordered = false;
  // In the order in which they were set. Keys are strings and may repeat.
  std::vector<std::pair<PickleValue, PickleValue>> entries;
};

// Holds tuples and dicts while the pickle runs. Threads: not thread-safe.
// Errors: INVALID_ARGUMENT beyond kMaxPickleItems.
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

  // Counts items that the caller is about to add.
  [[nodiscard]] absl::Status Charge(size_t num_items);
  [[nodiscard]] absl::StatusOr<PickleValue> NewTuple(
      absl::Span<const PickleValue> items);
  [[nodiscard]] absl::StatusOr<PickleValue> NewDict(bool ordered);
  // Sets keys to values. There is an even number of values: a key, then its
  // value.
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
