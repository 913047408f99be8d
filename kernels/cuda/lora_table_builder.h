// Builds the tables of lora_table.h as bytes on the host, for one upload.
#ifndef WEFT_KERNELS_CUDA_LORA_TABLE_BUILDER_H_
#define WEFT_KERNELS_CUDA_LORA_TABLE_BUILDER_H_

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "kernels/cuda/lora_table.h"

namespace weft::kernels::cuda {

// The capacity of a table of fixed size, which every decode step rewrites at
// the same place.
struct LoraTableCapacity {
  int64_t num_slots = 0;
  int64_t max_layouts = 0;
  int64_t max_rows = 0;

  [[nodiscard]] size_t num_bytes() const;
  // Returns the table whose bytes are at the device address `bytes`; see
  // LoraTableBuilder::At.
  [[nodiscard]] LoraTable At(const void* bytes) const;
};

// Builds a table. The cuts of a segment depend only on its own rows, and the
// parts of a gradient only on the rows of the segments that share it. So the
// bits of a result do not depend on other adapters. Threads: not thread-safe.
class LoraTableBuilder {
 public:
  explicit LoraTableBuilder(int64_t num_slots) : num_slots_(num_slots) {}

  // Adds the next layout; layouts count from 0. `slots` has num_slots entries.
  void AddLayout(const std::vector<LoraMatrix>& slots);
  // Adds a segment. Segments are disjoint. `weights` and `gradient` are on the
  // device. `gradient` may be null, and segments of one layout may share it.
  void AddSegment(int64_t row, int64_t num_rows, int layout,
                  const void* weights, float* gradient);
  // Adds a segment for the forward pass only. It becomes entries of few rows,
  // whatever its length.
  void AddFewRows(int64_t row, int64_t num_rows, int layout,
                  const void* weights);
  // Adds rows without an adapter to the entries of few rows. lora_decode.h
  // needs an entry for every row.
  void AddBaseRows(int64_t row, int64_t num_rows) {
    AddFewRows(row, num_rows, kNoLoraLayout, nullptr);
  }

  // Returns the bytes of all arrays. Nothing may be added after this.
  [[nodiscard]] std::vector<std::byte> Finish();
  // Returns the finished table whose bytes are at the device address `bytes`, a
  // multiple of 16.
  [[nodiscard]] LoraTable At(const void* bytes) const;

  // Writes the layouts and the segments of AddFewRows to the bytes of
  // `capacity`, instead of Finish. REQUIRES: they fit.
  void WriteTo(const LoraTableCapacity& capacity,
               std::span<std::byte> bytes) const;

 private:
  struct Gradient {
    float* data = nullptr;
    std::vector<LoraRowPart> parts;
  };
  void AddParts(int64_t row, int64_t num_rows, int layout, float* gradient);
  // Numbers the partials of gradients that have several parts.
  void CollectParts();

  int64_t num_slots_;
  std::vector<LoraMatrix> matrices_;
  std::vector<LoraRowBlock> blocks_;
  std::vector<LoraRowBlock> few_blocks_;
  std::vector<LoraFewRows> few_;
  std::vector<Gradient> gradients_;
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

#endif  // WEFT_KERNELS_CUDA_LORA_TABLE_BUILDER_H_
