// How threads of a CPU share the rows of segments.
//
// A segment is cut into chunks by its own number of rows, and a sum over its
// rows is the sum of its chunks in order. So the bits of an adapter depend
// neither on other segments nor on the number of threads.
#ifndef WEFT_SRC_LORA_ROW_CHUNKS_H_
#define WEFT_SRC_LORA_ROW_CHUNKS_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <vector>

#include "src/lora/lora_linear.h"

namespace weft::lora {

// Rows [begin, end) of the packed batch.
struct RowChunk {
  size_t segment = 0;
  int64_t begin = 0;
  int64_t end = 0;
};

// Adds the chunks of a segment, in the order of its rows.
void AddChunks(const LoraRouting& routing, size_t segment,
               std::vector<RowChunk>& chunks);

// Calls work(i) for all i < count, on several threads.
void ForEachOf(size_t count, const std::function<void(size_t)>& work);

// What ForEachChunk calls. Each thread has its own memory.
struct ChunkWork {
  int64_t num_floats = 0;  // The size of a thread's memory.
  // A thread calls this before its first chunk of a segment.
  std::function<void(size_t segment, float* memory)> begin;
  std::function<void(size_t chunk, float* memory)> run;
};

// Runs all chunks, on several threads.
void ForEachChunk(const std::vector<RowChunk>& chunks, const ChunkWork& work);

}  // namespace weft::lora

#endif  // WEFT_SRC_LORA_ROW_CHUNKS_H_
