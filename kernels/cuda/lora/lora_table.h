// The table that the LoRA kernels read for a batch: which rows belong to which
// adapter, and where each matrix is. One upload serves every linear layer of a
// pass, or all experts of one layer. A launch names matrices by their slots in
// the table.
//
// A segment is consecutive rows of one adapter. A layout gives the places of
// all slots' matrices in an adapter, or in an expert's part of an adapter.
// Adapters of the same shape share a layout.
//
// Kernels may read the table before earlier launches have ended (launch.cuh).
// So after the last write of a table on the device, the stream must run an
// ordinary launch before the first kernel that reads it.
//
// Legend: T packed rows; F features, which are inputs of A or outputs of B; R
// the rank; S the shrunk rows, which are x A^T or their gradient.
#ifndef WEFT_KERNELS_CUDA_LORA_LORA_TABLE_H_
#define WEFT_KERNELS_CUDA_LORA_LORA_TABLE_H_

#include <cstdint>

namespace weft::kernels::cuda {

// The most projections, such as q, k and v, that one launch computes.
inline constexpr int kMaxLoraProjections = 4;
// The most rows of a LoraRowBlock.
inline constexpr int64_t kLoraBlockRows = 128;
// One block of threads computes kLoraTileFeatures features and
// LoraRankTile(max_rank) ranks of a gradient. LoraRankTile returns the smallest
// of 16, 32, 64 and 128 that is at least max_rank, or 128 if none is.
inline constexpr int64_t kLoraTileFeatures = 128;
inline constexpr int64_t kLoraMaxRankTile = 128;
constexpr int64_t LoraRankTile(int64_t max_rank) {
  int64_t tile = 16;
  while (tile < kLoraMaxRankTile && tile < max_rank) tile *= 2;
  return tile;
}
// A sum over features is cut into parts of kLoraSpan features. Parts of short
// segments are up to kLoraMaxCuts times smaller. No sum has more than
// kLoraMaxParts parts, so a sum over very many features has larger parts.
inline constexpr int64_t kLoraSpan = 1024;
inline constexpr int64_t kLoraMaxCuts = 4;
inline constexpr int64_t kLoraMaxParts = 16;
// This many blocks of threads fill a device. A segment of many row blocks has
// fewer parts (LoraRowBlock::max_parts), because each part adds memory traffic.
inline constexpr int64_t kLoraEnoughBlocks = 128;
// A gradient's sum over rows is cut into parts of at most this many rows.
inline constexpr int64_t kLoraPartRows = 2048;
// A segment of at most this many rows uses the kernels of lora_few_rows.h in
// the forward pass.
inline constexpr int64_t kLoraFewRows = 16;

// The place, rank and scale of one matrix A or B. They are the same in all
// adapters of a layout.
struct LoraMatrix {
  int64_t offset = 0;  // Offset in elements, the same in weights and gradient.
  int32_t rank = 0;    // R; 0: there is no matrix.
  int32_t column = 0;  // First column of the matrix's ranks in S.
  float scale = 1;     // Factor of the matrix's products.
};

// Rows [row, row + num_rows) of one segment: at most kLoraBlockRows.
struct LoraRowBlock {
  const void* weights = nullptr;  // bf16; the layout's offsets count from here.
  int64_t row = 0;
  int32_t num_rows = 0;
  int32_t layout = 0;
  int32_t cuts = 1;       // A part has kLoraSpan / cuts features or more.
  int32_t max_parts = 1;  // The most parts of a sum over features.
};

// Up to kLoraPartRows rows of one segment: a part of a gradient's sum over
// rows.
struct LoraRowPart {
  float* gradient = nullptr;  // The layout's offsets count from here.
  int64_t row = 0;
  int32_t num_rows = 0;
  int32_t layout = 0;
  int32_t partial = 0;  // Index of this part among the parts of the gradient.
  int32_t sum = -1;     // Index in LoraTable::sums; -1: this is the only part.
};

// A gradient that has several parts. The workspace holds the parts of all such
// gradients, and this gradient has the parts [first, first + count).
struct LoraPartialSum {
  int32_t first = 0;
  int32_t count = 0;
};

// An entry of few rows: up to kLoraFewRows consecutive rows of one segment.
struct alignas(16) LoraFewRows {
  const void* weights = nullptr;  // bf16; the layout's offsets count from here.
  int64_t row = 0;
  int32_t num_rows = 0;
  int32_t layout = 0;
  int32_t place = 0;  // Index of `row` among the rows of all entries.
};

// A table: sizes, and pointers to arrays on the device.
struct LoraTable {
  const LoraMatrix* matrices = nullptr;  // [layouts, num_slots].
  int64_t num_slots = 0;
  // The row blocks of the segments that AddSegment adds. The blocks of long
  // segments come first. The other segments have at most kLoraFewRows rows, and
  // only the backward pass uses their blocks.
  const LoraRowBlock* blocks = nullptr;
  int64_t num_blocks = 0;
  int64_t num_long_blocks = 0;
  int64_t max_cuts = 0;
  int64_t max_long_cuts = 0;
  int64_t max_parts = 0;  // The largest max_parts of all blocks.
  const LoraRowPart* parts = nullptr;
  int64_t num_parts = 0;
  const LoraPartialSum* sums = nullptr;
  int64_t num_sums = 0;
  int64_t num_partials = 0;
  // The entries of few rows. Their number is on the device. The launches for
  // them depend only on max_few and max_few_rows, so that a recorded launch
  // serves every batch within these limits.
  const LoraFewRows* few = nullptr;
  const int64_t* num_few = nullptr;
  int64_t max_few = 0;
  int64_t max_few_rows = 0;

  // Returns the table without the blocks of segments of few rows. The forward
  // pass uses it for the long segments.
  LoraTable LongSegments() const {
    LoraTable table = *this;
    table.num_blocks = num_long_blocks;
    table.max_cuts = max_long_cuts;
    return table;
  }
};

}  // namespace weft::kernels::cuda

#endif  // WEFT_KERNELS_CUDA_LORA_LORA_TABLE_H_
