// Makes what lora_table.h describes: bytes on the host, for one upload.
#ifndef WEFT_KERNELS_CUDA_LORA_TABLE_BUILDER_H_
#define WEFT_KERNELS_CUDA_LORA_TABLE_BUILDER_H_

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "kernels/cuda/lora_table.h"

namespace weft::kernels::cuda {

// What a table of a fixed size has room for: one that is written anew for every
// step of decoding, at the same place.
struct LoraTableCapacity {
  int64_t num_slots = 0;
  int64_t max_layouts = 0;
  int64_t max_rows = 0;

  [[nodiscard]] size_t num_bytes() const;
  // The table, given where the device has the bytes.
  // Arguments: as of LoraTableBuilder::At.
  [[nodiscard]] LoraTable At(const void* bytes) const;
};

// Makes a table. How a segment is cut depends on its own rows, and how its
// gradient is on the rows of the segments that share it: the bits of a result
// do not depend on other adapters.
// Threads: one at a time.
class LoraTableBuilder {
 public:
  explicit LoraTableBuilder(int64_t num_slots) : num_slots_(num_slots) {}

  // The next layout, counted from 0. `slots` has num_slots entries.
  void AddLayout(const std::vector<LoraMatrix>& slots);
  // Segments are disjoint. `weights` and `gradient` are on the device;
  // `gradient` may be null, and may be that of an earlier segment of the same
  // layout.
  void AddSegment(int64_t row, int64_t num_rows, int layout,
                  const void* weights, float* gradient);
  // A segment that only goes forwards, as entries of few rows whatever its
  // length.
  void AddFewRows(int64_t row, int64_t num_rows, int layout,
                  const void* weights);

  // The arrays' bytes, one after the other. Nothing is added after this.
  [[nodiscard]] std::vector<std::byte> Finish();
  // The finished table, given where the device has the bytes.
  // Arguments: a multiple of 16.
  [[nodiscard]] LoraTable At(const void* bytes) const;

  // Instead of Finish: writes what layouts and AddFewRows gave to the bytes of
  // `capacity`, which they must fit.
  void WriteTo(const LoraTableCapacity& capacity,
               std::span<std::byte> bytes) const;

 private:
  struct Gradient {
    float* data = nullptr;
    std::vector<LoraRowPart> parts;
  };
  void AddParts(int64_t row, int64_t num_rows, int layout, float* gradient);
  // Numbers the partials of gradients with several parts.
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
