// Gives each block of a kernel of lora_decode.h its items in turn. An item is
// one entry of the table at one tile of features.
#ifndef WEFT_KERNELS_CUDA_LORA_DECODE_ITEMS_CUH_
#define WEFT_KERNELS_CUDA_LORA_DECODE_ITEMS_CUH_

#include "kernels/cuda/lora_few_rows.cuh"

namespace weft::kernels::cuda::few_rows {

// Returns the number of blocks of a launch: at most as many as an H100 holds at
// a time, with kPerSm on each multiprocessor. More blocks would only wait for a
// multiprocessor, even if they find no item because entries of the table are
// unused.
template <int kPerSm>
int64_t DecodeGrid(const LoraTable& table, int64_t tiles) {
  constexpr int64_t kMost = int64_t{132} * kPerSm;
  const int64_t items = table.max_few * tiles;
  return items < kMost ? items : kMost;
}

// The number of cache lines that a thread prefetches for an item:
// kLinesOfFewItems if the launch has at most kFewItems items, otherwise kLines.
// All blocks together prefetch at most about 30 MB. An H100's cache has 50 MB,
// and no line may be lost before it is read.
inline constexpr int kLine = 64;  // Elements in a line of 128 bytes.
inline constexpr unsigned kFewItems = 40;
inline constexpr int kLines = 3;
inline constexpr int kLinesOfFewItems = 24;

// A table entry (up to 16 rows of one adapter), and the matrices that its items
// need.
template <int kMatrices>
struct Place {
  LoraFewRows rows;
  LoraMatrix matrices[kMatrices];
};

// The places of a block's present item and of its next item, which take turns,
// and the entry of the item after these. While all threads compute an item, one
// thread looks up the next item. `ahead` already holds that item's entry, so
// the thread waits for memory only once.
template <int kMatrices>
struct Places {
  Place<kMatrices> places[2];
  LoraFewRows ahead;
};

// Calls run(place, tile, lines) for each item of the block. `place` is in
// shared memory, because operands need the registers. Its matrix k is that of
// slot slot_of(tile, k), or has rank 0 if the slot is negative. `lines` is the
// number of lines that each thread may prefetch for each item.
template <int kMatrices, typename SlotOf, typename Run>
__device__ void ForItems(const LoraTable& table, int tiles, SlotOf slot_of,
                         Run run) {
  // A shared variable cannot have initial values, but the members of Places
  // have some. So the variable is declared as bytes.
  struct Bytes {
    alignas(16) unsigned char bytes[sizeof(Places<kMatrices>)];
  };
  __shared__ Bytes memory;
  auto& places = reinterpret_cast<Places<kMatrices>&>(memory);
  const auto look_up = [&](const LoraFewRows& rows, unsigned item, int turn) {
    places.places[turn].rows = rows;
#pragma unroll
    for (int k = 0; k < kMatrices; ++k) {
      const int64_t slot = slot_of(static_cast<int>(item % tiles), k);
      places.places[turn].matrices[k] =
          slot < 0 ? LoraMatrix() : MatrixOf(table, rows, slot);
    }
  };
  // Loads the block's first table entry before the kernel knows whether it
  // exists. The table has memory for max_few entries, so the address is valid.
  const LoraFewRows first = table.few[blockIdx.x / tiles];
  const auto num_items = static_cast<unsigned>(*table.num_few * tiles);
  if (blockIdx.x >= num_items) return;
  if (threadIdx.x == 0) {
    if (blockIdx.x + gridDim.x < num_items) {
      places.ahead = table.few[(blockIdx.x + gridDim.x) / tiles];
    }
    look_up(first, blockIdx.x, 0);
  }
  int turn = 0;
  for (unsigned item = blockIdx.x; item < num_items; item += gridDim.x) {
    // Waits until the item's place is complete and no thread reads the place of
    // the item before.
    __syncthreads();
    if (threadIdx.x == 0 && item + gridDim.x < num_items) {
      const LoraFewRows next = places.ahead;
      if (item + 2 * gridDim.x < num_items) {
        places.ahead = table.few[(item + 2 * gridDim.x) / tiles];
      }
      look_up(next, item + gridDim.x, 1 - turn);
    }
    run(places.places[turn], static_cast<int>(item % tiles),
        num_items <= kFewItems ? kLinesOfFewItems : kLines);
    turn = 1 - turn;
  }
}

}  // namespace weft::kernels::cuda::few_rows

#endif  // WEFT_KERNELS_CUDA_LORA_DECODE_ITEMS_CUH_
