// What the kernels of the adapters read about a batch: which rows belong to
// whom, and where each matrix lies. One table, uploaded once, serves every
// linear layer, the forward and the backward pass: a launch only names slots.
//
// Legend: T packed rows; F features, inputs of A or outputs of B; R the rank; S
// the shrunk rows, x A^T, or their gradient.
#ifndef WEFT_KERNELS_CUDA_LORA_TABLE_H_
#define WEFT_KERNELS_CUDA_LORA_TABLE_H_

#include <cstddef>
#include <cstdint>
#include <vector>

namespace weft::kernels::cuda {

// Matrices beside each other in one product at most.
inline constexpr int kMaxLoraProjections = 3;
// Rows of a LoraRowBlock at most.
inline constexpr int64_t kLoraBlockRows = 128;
// Features and ranks of a gradient that one block of threads computes: what the
// largest rank of the launch needs, of 16, 32, 64 and kLoraMaxRankTile.
inline constexpr int64_t kLoraTileFeatures = 128;
inline constexpr int64_t kLoraMaxRankTile = 128;
constexpr int64_t LoraRankTile(int64_t max_rank) {
  int64_t tile = 16;
  while (tile < kLoraMaxRankTile && tile < max_rank) tile *= 2;
  return tile;
}
// Sums over features are cut into parts of so many, or, in segments of few
// rows, into up to kLoraMaxCuts times as many parts; but in all into no more
// than kLoraMaxParts.
inline constexpr int64_t kLoraSpan = 1024;
inline constexpr int64_t kLoraMaxCuts = 4;
inline constexpr int64_t kLoraMaxParts = 16;
// Blocks of threads that fill a device: where a segment has that many, more
// parts only cost the traffic of their sums.
inline constexpr int64_t kLoraEnoughBlocks = 128;
// Sums over rows are cut into parts of so many.
inline constexpr int64_t kLoraPartRows = 2048;

// A or B of one linear layer, the same place in all adapters of a layout.
struct LoraMatrix {
  int64_t offset = 0;  // Elements, in the weights as in the gradient.
  int32_t rank = 0;    // R; 0: there is none.
  int32_t column = 0;  // Of S, where its ranks begin.
  float scale = 1;     // Of its products.
};

// Rows [row, row + num_rows) of one segment.
struct LoraRowBlock {
  const void* weights = nullptr;  // bf16.
  int64_t row = 0;
  int32_t num_rows = 0;
  int32_t layout = 0;
  int32_t cuts = 1;       // The fewer rows the segment has, the more.
  int32_t max_parts = 1;  // The same.
};

// Rows of one segment, for a gradient.
struct LoraRowPart {
  float* gradient = nullptr;
  int64_t row = 0;
  int32_t num_rows = 0;
  int32_t layout = 0;
  int32_t partial = 0;  // Which of its gradient's parts it is.
  int32_t sum = -1;     // Which LoraPartialSum; -1: the gradient's only part.
};

// A gradient of several parts: partials [first, first + count) of a launch.
struct LoraPartialSum {
  int32_t first = 0;
  int32_t count = 0;
};

// Arrays on the device.
struct LoraTable {
  const LoraMatrix* matrices = nullptr;  // [layouts, num_slots].
  int64_t num_slots = 0;
  const LoraRowBlock* blocks = nullptr;
  int64_t num_blocks = 0;
  int64_t max_cuts = 0;
  int64_t max_parts = 0;
  const LoraRowPart* parts = nullptr;
  int64_t num_parts = 0;
  const LoraPartialSum* sums = nullptr;
  int64_t num_sums = 0;
  int64_t num_partials = 0;
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

  // The arrays' bytes, one after the other. Nothing is added after this.
  [[nodiscard]] std::vector<std::byte> Finish();
  // The finished table, given where the device has the bytes.
  // Arguments: a multiple of 16.
  [[nodiscard]] LoraTable At(const void* bytes) const;

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
  std::vector<Gradient> gradients_;
  std::vector<LoraRowPart> parts_;
  std::vector<LoraPartialSum> sums_;
  int32_t max_cuts_ = 0;
  int32_t max_parts_ = 0;
  int32_t num_partials_ = 0;
};

}  // namespace weft::kernels::cuda

#endif  // WEFT_KERNELS_CUDA_LORA_TABLE_H_
