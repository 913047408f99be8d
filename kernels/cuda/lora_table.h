// The table of a batch that the adapters' kernels read: which rows belong to
// which adapter, and where each matrix is. The table is uploaded once and
// serves every linear layer of a pass. A launch only names slots.
//
// Legend: T packed rows; F features, which are inputs of A or outputs of B; R
// the rank; S the shrunk rows, which are x A^T or their gradient.
#ifndef WEFT_KERNELS_CUDA_LORA_TABLE_H_
#define WEFT_KERNELS_CUDA_LORA_TABLE_H_

#include <cstdint>

namespace weft::kernels::cuda {

// The most projections that one product computes side by side.
inline constexpr int kMaxLoraProjections = 3;
// The most rows of a LoraRowBlock.
inline constexpr int64_t kLoraBlockRows = 128;
// The numbers of features and of ranks in the part of a gradient that one block
// of threads computes. The number of ranks is the smallest of 16, 32, 64 and
// kLoraMaxRankTile that holds the launch's largest rank.
inline constexpr int64_t kLoraTileFeatures = 128;
inline constexpr int64_t kLoraMaxRankTile = 128;
constexpr int64_t LoraRankTile(int64_t max_rank) {
  int64_t tile = 16;
  while (tile < kLoraMaxRankTile && tile < max_rank) tile *= 2;
  return tile;
}
// Sums over features are cut into parts of this many features. Segments of few
// rows are cut into up to kLoraMaxCuts times as many parts. No sum has more
// than kLoraMaxParts parts.
inline constexpr int64_t kLoraSpan = 1024;
inline constexpr int64_t kLoraMaxCuts = 4;
inline constexpr int64_t kLoraMaxParts = 16;
// This many blocks of threads fill a device. If a segment already has so many,
// more parts only add traffic for their sums.
inline constexpr int64_t kLoraEnoughBlocks = 128;
// Sums over rows are cut into parts of this many rows.
inline constexpr int64_t kLoraPartRows = 2048;
// The forward pass of a segment uses lora_few_rows.h if the segment has at most
// this many rows.
inline constexpr int64_t kLoraFewRows = 16;

// The largest R of a B that the kernels of lora_decode.h take.
inline constexpr int64_t kLoraMaxDecodeRank = 128;

// A or B of one linear layer. It has the same place in all adapters of a
// layout.
struct LoraMatrix {
  int64_t offset = 0;  // Offset in elements, the same in weights and gradient.
  int32_t rank = 0;    // R; 0: there is no matrix.
  int32_t column = 0;  // First column of the matrix's ranks in S.
  float scale = 1;     // Factor of its products.
};

// Rows [row, row + num_rows) of one segment.
struct LoraRowBlock {
  const void* weights = nullptr;  // bf16.
  int64_t row = 0;
  int32_t num_rows = 0;
  int32_t layout = 0;
  int32_t cuts = 1;       // Larger for segments of fewer rows.
  int32_t max_parts = 1;  // Larger for segments of fewer rows.
};

// Some rows of one segment, over which a part of a gradient is summed.
struct LoraRowPart {
  float* gradient = nullptr;
  int64_t row = 0;
  int32_t num_rows = 0;
  int32_t layout = 0;
  int32_t partial = 0;  // Index of this part among the parts of the gradient.
  int32_t sum = -1;     // Index of the gradient's LoraPartialSum; -1 if there
                        // is only one part.
};

// A gradient that has several parts: the launch's partials [first, first +
// count).
struct LoraPartialSum {
  int32_t first = 0;
  int32_t count = 0;
};

// The layout of rows without an adapter.
inline constexpr int32_t kNoLoraLayout = -1;

// Up to kLoraFewRows rows of one segment, or of rows without an adapter.
struct alignas(16) LoraFewRows {
  const void* weights = nullptr;  // bf16.
  int64_t row = 0;
  int32_t num_rows = 0;
  int32_t layout = 0;
  int32_t place = 0;  // Index of `row` among the rows of all entries.
};

// The table's arrays, on the device.
struct LoraTable {
  const LoraMatrix* matrices = nullptr;  // [layouts, num_slots].
  int64_t num_slots = 0;
  // The blocks of all segments: first the long segments, then those of few
  // rows, which run as tiles only in the backward pass.
  const LoraRowBlock* blocks = nullptr;
  int64_t num_blocks = 0;
  int64_t num_long_blocks = 0;
  int64_t max_cuts = 0;
  int64_t max_long_cuts = 0;
  int64_t max_parts = 0;  // The largest of all blocks.
  const LoraRowPart* parts = nullptr;
  int64_t num_parts = 0;
  const LoraPartialSum* sums = nullptr;
  int64_t num_sums = 0;
  int64_t num_partials = 0;
  // Entries of few rows. Their number is on the device, and grids depend only
  // on the two limits, so that a recorded launch serves other batches.
  const LoraFewRows* few = nullptr;
  const int64_t* num_few = nullptr;
  int64_t max_few = 0;
  int64_t max_few_rows = 0;

  // Returns the table without segments of few rows, for the forward pass by
  // tiles.
  [[nodiscard]] LoraTable LongOnes() const {
    LoraTable table = *this;
    table.num_blocks = num_long_blocks;
    table.max_cuts = max_long_cuts;
    return table;
  }
};

}  // namespace weft::kernels::cuda

#endif  // WEFT_KERNELS_CUDA_LORA_TABLE_H_
