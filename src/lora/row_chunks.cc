#include "src/lora/row_chunks.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>

#include <algorithm>
#include <atomic>

namespace weft::lora {
namespace {

// A segment is cut into the fewest chunks of at most this many rows. With
// smaller chunks, copying matrices and storing sums would take too much of the
// time. A segment of over 1024 rows has larger chunks, because kMaxChunks
// limits their number.
constexpr int64_t kChunkRows = 64;
// The largest number of chunks of a segment. It limits the memory for sums.
constexpr int64_t kMaxChunks = 16;

int64_t NumWorkers(size_t count) {
  const int threads = at::in_parallel_region() ? 1 : at::get_num_threads();
  return std::min<int64_t>(threads, static_cast<int64_t>(count));
}

// Calls work(worker, i) for all i < count. A free worker takes the next i, so
// each worker sees ascending values of i.
template <typename Work>
void RunWorkers(size_t count, const Work& work) {
  std::atomic<size_t> next = 0;
  at::parallel_for(0, NumWorkers(count), 1, [&](int64_t worker, int64_t) {
    for (size_t i = next++; i < count; i = next++) work(worker, i);
  });
}

}  // namespace

void AddChunks(const LoraRouting& routing, size_t segment,
               std::vector<RowChunk>& chunks) {
  const int64_t begin = routing[segment].begin;
  const int64_t rows = routing[segment].end - begin;
  const int64_t count =
      std::clamp<int64_t>((rows + kChunkRows - 1) / kChunkRows, 1, kMaxChunks);
  for (int64_t i = 0; i < count; ++i) {
    chunks.push_back({.segment = segment,
                      .begin = begin + rows * i / count,
                      .end = begin + rows * (i + 1) / count});
  }
}

void ForEachOf(size_t count, const std::function<void(size_t)>& work) {
  RunWorkers(count, [&work](int64_t, size_t i) { work(i); });
}

void ForEachChunk(const std::vector<RowChunk>& chunks, const ChunkWork& work) {
  struct Worker {
    size_t segment = SIZE_MAX;
    float* memory = nullptr;
  };
  std::vector<Worker> workers(NumWorkers(chunks.size()));
  const at::Tensor memory_WF =
      at::empty({static_cast<int64_t>(workers.size()), work.num_floats});
  for (size_t i = 0; i < workers.size(); ++i) {
    workers[i].memory =
        memory_WF.mutable_data_ptr<float>() + i * work.num_floats;
  }
  RunWorkers(chunks.size(), [&](int64_t index, size_t i) {
    Worker& worker = workers[index];
    if (worker.segment != chunks[i].segment) {
      worker.segment = chunks[i].segment;
      work.begin(worker.segment, worker.memory);
    }
    work.run(i, worker.memory);
  });
}

}  // namespace weft::lora
