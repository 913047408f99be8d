// Gives each block of a kernel of lora_decode.h its items in turn. An item is
// one entry of the table at one tile of features.
#ifndef WEFT_KERNELS_CUDA_LORA_DECODE_ITEMS_CUH_
#define WEFT_KERNELS_CUDA_LORA_DECODE_ITEMS_CUH_

#include "kernels/cuda/lora_few_rows.cuh"

namespace weft::kernels::cuda::few_rows {

// Returns the number of blocks of a launch: at most as many as an H100 holds at
// a time, with kPerSm on each multiprocessor. More blocks would only wait for a
// multiprocessor.
template <int kPerSm>
int64_t DecodeGrid(const LoraTable& table, int64_t tiles) {
  constexpr int64_t kMost = int64_t{132} * kPerSm;
  const int64_t items = table.max_few * tiles;
  return items < kMost ? items : kMost;
}

// The most cache lines that a thread prefetches for an item: kLinesOfFewItems
// if the launch has at most kFewItems items, otherwise kLines. All blocks
// together then prefetch at most about 30 MB, which stay in the 50 MB cache of
// an H100 until they are read.
inline constexpr int kLine = 64;  // Elements in a line of 128 bytes.
inline constexpr unsigned kFewItems = 40;
inline constexpr int kLines = 3;
inline constexpr int kLinesOfFewItems = 24;

// A table entry (up to 16 rows of one adapter or of none), and the matrices
// that an item of it needs.
template <int kMatrices>
struct Place {
  LoraFewRows rows;
  LoraMatrix matrices[kMatrices];
};

// `places` holds the block's present item and its next item, which take turns.
// While all threads compute the present item, thread 0 writes the place of the
// next one. It has loaded the next item's entry into `ahead` one item earlier,
// so it waits for memory only once.
template <int kMatrices>
struct Places {
  Place<kMatrices> places[2];
  LoraFewRows ahead;
};

// Calls run(place, tile, lines) for each item of the block. `place` is in
// shared memory, because operands need the registers. Its matrix k is that of
// slot slot_of(tile, k), or has rank 0 if the slot is negative. `lines` is the
// number of cache lines that each thread may prefetch for the item. All threads
// of the block call ForItems.
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
  // Loads the block's first table entry before the kernel knows whether the
  // entry is used. The table has memory for max_few entries, so the address is
  // valid.
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
    // the previous item.
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
