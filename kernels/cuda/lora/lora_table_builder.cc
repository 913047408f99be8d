#include "kernels/cuda/lora/lora_table_builder.h"

#include <algorithm>
#include <cstring>

namespace weft::kernels::cuda {
namespace {

int64_t NumBlocks(int64_t segment_rows) {
  return (segment_rows + kLoraBlockRows - 1) / kLoraBlockRows;
}

// Returns LoraRowBlock::cuts. A short segment needs small parts to keep the
// device busy. A long segment keeps the device busy anyway, and more parts
// would only add memory traffic.
int32_t CutsOf(int64_t segment_rows) {
  const int64_t cuts = kLoraBlockRows / segment_rows;
  return static_cast<int32_t>(std::clamp<int64_t>(cuts, 1, kLoraMaxCuts));
}

int32_t MaxPartsOf(int64_t segment_rows, int64_t most_parts) {
  const int64_t parts = kLoraEnoughBlocks / NumBlocks(segment_rows);
  return static_cast<int32_t>(std::clamp<int64_t>(parts, 1, most_parts));
}

template <typename T>
size_t NumBytes(const std::vector<T>& array) {
  static_assert(sizeof(T) % 8 == 0);
  return array.size() * sizeof(T);
}

// The size of the table's header. The header holds the number of LoraFewRows
// entries, and padding that aligns the entries.
constexpr size_t kHeaderBytes = 16;

template <typename T>
void Append(const std::vector<T>& array, std::vector<std::byte>* bytes) {
  const auto* begin = reinterpret_cast<const std::byte*>(array.data());
  bytes->insert(bytes->end(), begin, begin + NumBytes(array));
}

// Returns the array at `*bytes` and advances `*bytes` past it.
template <typename T>
const T* Take(const std::vector<T>& array, const std::byte** bytes) {
  const auto* begin = reinterpret_cast<const T*>(*bytes);
  *bytes += NumBytes(array);
  return begin;
}

}  // namespace

void LoraTableBuilder::AddLayout(const std::vector<LoraMatrix>& slots) {
  matrices_.insert(matrices_.end(), slots.begin(), slots.end());
}

void LoraTableBuilder::AddSegment(int64_t row, int64_t num_rows, int layout,
                                  const void* weights, float* gradient) {
  if (num_rows <= 0) return;
  const bool is_few = num_rows <= kLoraFewRows;
  const int32_t cuts = CutsOf(num_rows);
  const int32_t max_parts = MaxPartsOf(num_rows, most_parts_);
  for (int64_t done = 0; done < num_rows; done += kLoraBlockRows) {
    (is_few ? few_blocks_ : blocks_)
        .push_back({.weights = weights,
                    .row = row + done,
                    .num_rows = static_cast<int32_t>(
                        std::min(kLoraBlockRows, num_rows - done)),
                    .layout = layout,
                    .cuts = cuts,
                    .max_parts = max_parts});
  }
  max_cuts_ = std::max(max_cuts_, cuts);
  max_parts_ = std::max(max_parts_, max_parts);
  if (is_few) {
    AddFewRows(row, num_rows, layout, weights);
  } else {
    max_long_cuts_ = std::max(max_long_cuts_, cuts);
  }
  if (gradient != nullptr) AddParts(row, num_rows, layout, gradient);
}

void LoraTableBuilder::AddFewRows(int64_t row, int64_t num_rows, int layout,
                                  const void* weights) {
  for (int64_t done = 0; done < num_rows; done += kLoraFewRows) {
    const auto count =
        static_cast<int32_t>(std::min(kLoraFewRows, num_rows - done));
    few_.push_back({.weights = weights,
                    .row = row + done,
                    .num_rows = count,
                    .layout = layout,
                    .place = num_few_rows_});
    num_few_rows_ += count;
  }
}

void LoraTableBuilder::AddParts(int64_t row, int64_t num_rows, int layout,
                                float* gradient) {
  const auto [known, is_new] =
      gradient_index_.try_emplace(gradient, parts_of_gradients_.size());
  if (is_new) parts_of_gradients_.emplace_back();
  std::vector<LoraRowPart>& parts = parts_of_gradients_[known->second];
  for (int64_t done = 0; done < num_rows; done += kLoraPartRows) {
    parts.push_back({.gradient = gradient,
                     .row = row + done,
                     .num_rows = static_cast<int32_t>(
                         std::min(kLoraPartRows, num_rows - done)),
                     .layout = layout});
  }
}

void LoraTableBuilder::CollectParts() {
  for (std::vector<LoraRowPart>& parts : parts_of_gradients_) {
    const auto count = static_cast<int32_t>(parts.size());
    if (count > 1) {
      for (int32_t i = 0; i < count; ++i) {
        parts[i].partial = i;
        parts[i].sum = static_cast<int32_t>(sums_.size());
      }
      sums_.push_back({.first = num_partials_, .count = count});
      num_partials_ += count;
    }
    parts_.insert(parts_.end(), parts.begin(), parts.end());
  }
}

std::vector<std::byte> LoraTableBuilder::Finish() {
  CollectParts();
  num_long_blocks_ = static_cast<int64_t>(blocks_.size());
  blocks_.insert(blocks_.end(), few_blocks_.begin(), few_blocks_.end());
  std::vector<std::byte> bytes(kHeaderBytes);
  const auto num_few = static_cast<int64_t>(few_.size());
  std::memcpy(bytes.data(), &num_few, sizeof num_few);
  Append(few_, &bytes);
  Append(matrices_, &bytes);
  Append(blocks_, &bytes);
  Append(parts_, &bytes);
  Append(sums_, &bytes);
  return bytes;
}

LoraTable LoraTableBuilder::At(const void* bytes) const {
  const auto* next = static_cast<const std::byte*>(bytes) + kHeaderBytes;
  LoraTable table = {.num_slots = num_slots_,
                     .num_blocks = static_cast<int64_t>(blocks_.size()),
                     .num_long_blocks = num_long_blocks_,
                     .max_cuts = max_cuts_,
                     .max_long_cuts = max_long_cuts_,
                     .max_parts = max_parts_,
                     .num_parts = static_cast<int64_t>(parts_.size()),
                     .num_sums = static_cast<int64_t>(sums_.size()),
                     .num_partials = num_partials_,
                     .num_few = static_cast<const int64_t*>(bytes),
                     .max_few = static_cast<int64_t>(few_.size()),
                     .max_few_rows = num_few_rows_};
  table.few = Take(few_, &next);
  table.matrices = Take(matrices_, &next);
  table.blocks = Take(blocks_, &next);
  table.parts = Take(parts_, &next);
  table.sums = Take(sums_, &next);
  return table;
}

void LoraTableBuilder::WriteTo(const LoraTableCapacity& capacity,
                               std::span<std::byte> bytes) const {
  const auto num_few = static_cast<int64_t>(few_.size());
  std::byte* next = bytes.data();
  std::memcpy(next, &num_few, sizeof num_few);
  next += kHeaderBytes;
  if (num_few > 0) std::memcpy(next, few_.data(), NumBytes(few_));
  next += static_cast<size_t>(capacity.max_rows) * sizeof(LoraFewRows);
  if (!matrices_.empty()) {
    std::memcpy(next, matrices_.data(), NumBytes(matrices_));
  }
}

size_t LoraTableCapacity::num_bytes() const {
  return kHeaderBytes + static_cast<size_t>(max_rows) * sizeof(LoraFewRows) +
         static_cast<size_t>(max_layouts * num_slots) * sizeof(LoraMatrix);
}

LoraTable LoraTableCapacity::At(const void* bytes) const {
  const auto* few = static_cast<const std::byte*>(bytes) + kHeaderBytes;
  const auto* matrices =
      few + static_cast<size_t>(max_rows) * sizeof(LoraFewRows);
  return {.matrices = reinterpret_cast<const LoraMatrix*>(matrices),
          .num_slots = num_slots,
          .few = reinterpret_cast<const LoraFewRows*>(few),
          .num_few = static_cast<const int64_t*>(bytes),
          .max_few = max_rows,
          .max_few_rows = max_rows};
}

}  // namespace weft::kernels::cuda
