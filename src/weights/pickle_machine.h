// Runs a pickle without importing or calling anything. Torch-free.
//
// A pickle is a program for a stack machine, and may import and call any
// function by name. This machine knows only the opcodes for dicts of plain
// values, protocols 2 to 5. A PickleObjects decides which names and calls are
// allowed, and what they return.
#ifndef WEFT_SRC_WEIGHTS_PICKLE_MACHINE_H_
#define WEFT_SRC_WEIGHTS_PICKLE_MACHINE_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "src/weights/byte_reader.h"

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

  absl::string_view Text(const PickleValue& string) const {
    return pickle_.substr(static_cast<size_t>(string.number), string.size);
  }
  absl::Span<const PickleValue> Items(const PickleValue& tuple) const {
    return absl::MakeConstSpan(items_).subspan(
        static_cast<size_t>(tuple.number), tuple.size);
  }
  const PickleDict& Dict(const PickleValue& dict) const {
    return dicts_[static_cast<size_t>(dict.number)];
  }

  // Counts items that the caller is about to add, against kMaxPickleItems.
  absl::Status Charge(size_t num_items);
  absl::StatusOr<PickleValue> NewTuple(absl::Span<const PickleValue> items);
  absl::StatusOr<PickleValue> NewDict(bool ordered);
  // Adds pairs to the dict: `keys_and_values` has a key, its value, the next
  // key and so on. Errors: also INVALID_ARGUMENT for a key that has no value or
  // is not a string.
  absl::Status Insert(const PickleValue& dict,
                      absl::Span<const PickleValue> keys_and_values);

 private:
  const absl::string_view pickle_;
  size_t num_charged_ = 0;
  std::vector<PickleValue> items_;
  std::vector<PickleDict> dicts_;
};

inline constexpr size_t kMaxPickleString = 4096;
inline constexpr size_t kMaxPickleStack = 65'536;

// Decides which names a pickle may use and what a call returns. Errors are
// INVALID_ARGUMENT. PickleMachine puts "pickle opcode X at byte N" before their
// message.
class PickleObjects {
 public:
  virtual ~PickleObjects() = default;

  virtual absl::StatusOr<PickleValue> Global(absl::string_view module,
                                             absl::string_view name) = 0;
  virtual absl::StatusOr<PickleValue> Persistent(const PickleValue& id) = 0;
  virtual absl::StatusOr<PickleValue> Call(
      const PickleValue& function, absl::Span<const PickleValue> arguments) = 0;
  virtual absl::Status SetState(const PickleValue& target,
                                const PickleValue& state) = 0;
};

// Threads: not thread-safe.
class PickleMachine {
 public:
  // The pickle's bytes, `heap` and `objects` outlive the machine.
  PickleMachine(absl::string_view pickle, PickleHeap& heap,
                PickleObjects& objects)
      : pickle_(pickle), in_(pickle), heap_(heap), objects_(objects) {}

  // Runs the pickle and returns its value. Units: time O(bytes), memory bounded
  // by the limits above and kMaxPickleItems. Errors: DATA_LOSS if the pickle
  // ends early, otherwise INVALID_ARGUMENT naming the opcode and its offset.
  // Never throws.
  absl::StatusOr<PickleValue> Run();

 private:
  using Handler = absl::Status (PickleMachine::*)();
  static std::array<Handler, 256> Handlers();

  // The handlers of opcodes. `kBytes` is the width of the operand in bytes.
  absl::Status Proto();
  absl::Status Frame();
  absl::Status Stop();
  absl::Status Mark();
  template <PickleKind kKind, int kNumber>
  absl::Status Constant();
  template <size_t kBytes>
  absl::Status Unsigned();
  absl::Status BinInt();
  absl::Status Long1();
  absl::Status BinFloat();
  template <size_t kBytes>
  absl::Status String();
  absl::Status Tuple();
  template <size_t kItems>
  absl::Status ShortTuple();
  absl::Status EmptyDict();
  absl::Status Append();
  absl::Status Appends();
  absl::Status SetItem();
  absl::Status SetItems();
  template <size_t kBytes>
  absl::Status Put();
  absl::Status Memoize();
  template <size_t kBytes>
  absl::Status Get();
  absl::Status GlobalByLine();
  absl::Status GlobalByStack();
  absl::Status Persistent();
  absl::Status Reduce();
  absl::Status Build();

  absl::Status Step();
  absl::Status Push(absl::StatusOr<PickleValue> value);
  absl::Status Pop(PickleValue& value);
  // Pops the last mark and all values above it, which become `items`.
  absl::Status PopMark(std::vector<PickleValue>& items);
  // Sets `value` to the top of the stack. Refuses a value of another kind.
  absl::Status Top(PickleKind kind, PickleValue& value) const;
  absl::Status MemoPut(uint64_t index);
  // Returns the stack's height at the last mark, or 0 without a mark.
  size_t Floor() const { return marks_.empty() ? 0 : marks_.back(); }

  const absl::string_view pickle_;
  ByteReader in_;
  PickleHeap& heap_;
  PickleObjects& objects_;
  uint8_t opcode_ = 0;
  size_t opcode_offset_ = 0;
  bool stopped_ = false;
  std::vector<PickleValue> stack_;
  std::vector<size_t> marks_;
  std::vector<PickleValue> memo_;
};

// Returns the opcode's name, such as "GLOBAL", or a number such as "0xff" for a
// byte that is not an opcode.
std::string PickleOpcodeName(uint8_t opcode);

}  // namespace weft::weights

#endif  // WEFT_SRC_WEIGHTS_PICKLE_MACHINE_H_
