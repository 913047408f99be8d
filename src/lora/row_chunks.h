// Splits the rows of segments into chunks for the threads of a CPU.
//
// Only the number of a segment's rows determines its chunks. A gradient adds
// the sums of its chunks in the order of the chunks. So the bits of an
// adapter's results do not depend on other adapters or the number of threads.
#ifndef WEFT_SRC_LORA_ROW_CHUNKS_H_
#define WEFT_SRC_LORA_ROW_CHUNKS_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <vector>

#include "src/lora/lora_linear.h"

namespace weft::lora {

// Rows [begin, end) of the packed batch, which belong to one segment.
struct RowChunk {
  size_t segment = 0;
  int64_t begin = 0;
  int64_t end = 0;
};

// Appends the chunks of a segment to `chunks`, in the order of its rows.
void AddChunks(const LoraRouting& routing, size_t segment,
               std::vector<RowChunk>& chunks);

// Calls work(i) for all i < count, on the available threads.
void ForEachOf(size_t count, const std::function<void(size_t)>& work);

// The functions that ForEachChunk calls. `memory` belongs to the calling
// thread.
struct ChunkWork {
  int64_t num_floats = 0;  // The size of `memory`.
  // Before a thread runs its first chunk of a segment, the thread calls
  // `begin`.
  std::function<void(size_t segment, float* memory)> begin;
  std::function<void(size_t chunk, float* memory)> run;
};

// Calls work.run for the indices of all chunks, on the available threads. The
// chunks of a segment are adjacent in `chunks`.
void ForEachChunk(const std::vector<RowChunk>& chunks, const ChunkWork& work);

}  // namespace weft::lora

#endif  // WEFT_SRC_LORA_ROW_CHUNKS_H_
