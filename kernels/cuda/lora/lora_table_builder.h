// Builds the tables of lora_table.h as bytes on the host, for one upload.
#ifndef WEFT_KERNELS_CUDA_LORA_LORA_TABLE_BUILDER_H_
#define WEFT_KERNELS_CUDA_LORA_LORA_TABLE_BUILDER_H_

#include <cstddef>
#include <cstdint>
#include <span>
#include <unordered_map>
#include <vector>

#include "kernels/cuda/lora/lora_table.h"

namespace weft::kernels::cuda {

// The capacity of a table of fixed size. Each decode step can rewrite such a
// table at the same address.
struct LoraTableCapacity {
  int64_t num_slots = 0;
  int64_t max_layouts = 0;
  int64_t max_rows = 0;

  size_t num_bytes() const;
  // Returns the table whose bytes are at the device address `bytes`, a multiple
  // of 16. LoraTableBuilder::WriteTo makes the bytes.
  LoraTable At(const void* bytes) const;
};

// Builds a table. Long sums are cut into parts. The parts of a sum over
// features depend only on the number of features and the segment's number of
// rows. The parts of a gradient depend only on the rows of the segments that
// share the gradient. So the bits of a result do not depend on other adapters.
// Threads: not thread-safe.
class LoraTableBuilder {
 public:
  // If AddSegment added a segment, its sums over features have at most
  // `max_parts` parts. If max_parts is 1, these sums need no workspace.
  explicit LoraTableBuilder(int64_t num_slots,
                            int64_t max_parts = kLoraMaxParts)
      : num_slots_(num_slots), most_parts_(max_parts) {}

  // Adds a layout: an adapter's matrices by slot. Layouts are numbered from 0.
  // `slots` has num_slots entries.
  void AddLayout(const std::vector<LoraMatrix>& slots);
  // Adds a segment: rows of one adapter. Segments do not overlap. The layout's
  // offsets count from the device addresses `weights` and `gradient`.
  // `gradient` may be null. Segments of one layout may share a gradient.
  void AddSegment(int64_t row, int64_t num_rows, int layout,
                  const void* weights, float* gradient);
  // Adds a segment for the forward pass only. Splits the segment, even a long
  // one, into entries of few rows.
  void AddFewRows(int64_t row, int64_t num_rows, int layout,
                  const void* weights);

  // Returns the table's bytes. Call it once, after everything is added.
  std::vector<std::byte> Finish();
  // Returns the finished table whose bytes are at the device address `bytes`, a
  // multiple of 16.
  LoraTable At(const void* bytes) const;

  // Writes the layouts and the entries of few rows to `bytes`, as a table of
  // `capacity`. Call it instead of Finish.
  // REQUIRES: layouts and entries fit in `capacity`.
  void WriteTo(const LoraTableCapacity& capacity,
               std::span<std::byte> bytes) const;

 private:
  void AddParts(int64_t row, int64_t num_rows, int layout, float* gradient);
  // Fills parts_ and sums_ from parts_of_gradients_. If a gradient has several
  // parts, sets `partial` and `sum` of these parts.
  void CollectParts();

  int64_t num_slots_;
  int64_t most_parts_;
  std::vector<LoraMatrix> matrices_;
  std::vector<LoraRowBlock> blocks_;
  std::vector<LoraRowBlock> few_blocks_;
  std::vector<LoraFewRows> few_;
  std::vector<std::vector<LoraRowPart>> parts_of_gradients_;
  // Maps a gradient to its index in parts_of_gradients_.
  std::unordered_map<float*, size_t> gradient_index_;
  std::vector<LoraRowPart> parts_;
  std::vector<LoraPartialSum> sums_;
  int64_t num_long_blocks_ = 0;
  int32_t max_cuts_ = 0;
  int32_t max_long_cuts_ = 0;
  int32_t max_parts_ = 0;
  int32_t num_few_rows_ = 0;
  int32_t num_partials_ = 0;
};

}  // namespace weft::kernels::cuda

#endif  // WEFT_KERNELS_CUDA_LORA_LORA_TABLE_BUILDER_H_
