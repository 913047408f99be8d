// Gives each block of a kernel of lora_decode.h its items in turn. An item is
// one entry of the table at one tile of features.
#ifndef WEFT_KERNELS_CUDA_LORA_DECODE_ITEMS_CUH_
#define WEFT_KERNELS_CUDA_LORA_DECODE_ITEMS_CUH_

#include "kernels/cuda/launch.cuh"
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

// The most cache lines that a block prefetches for an item. If the launch has
// at most kFewItems items, no block has a second item, and the limit is
// kLinesOfFewItems. Otherwise the limit is kLines. With kLines, all blocks
// together prefetch at most 22 MB for their items and 22 MB for their next
// items. Both stay in the 50 MB cache of an H100 until they are read.
inline constexpr int kLine = 64;  // Elements in a line of 128 bytes.
inline constexpr unsigned kFewItems = 40;
inline constexpr int kLines = 640;
inline constexpr int kLinesOfFewItems = 6144;

// A table entry (up to 16 rows of one adapter or of none), and the matrices
// that an item of it needs.
template <int kMatrices>
struct Place {
  LoraFewRows rows;
  LoraMatrix matrices[kMatrices];
};

// Returns whether any matrix of the place has more ranks than a kernel loads at
// a time.
template <int kMatrices>
__device__ bool HasLaterRanks(const Place<kMatrices>& place) {
  bool has = false;
#pragma unroll
  for (int k = 0; k < kMatrices; ++k) {
    has = has || place.matrices[k].rank > kDepth;
  }
  return has;
}

// `places` holds the places of the block's current item and of its next item.
// Before thread 0 computes the current item, it writes the next item's place.
// Thread 0 loaded the next item's entry into `ahead` one item earlier, so now
// it waits for memory only once, for the matrices.
template <int kMatrices>
struct Places {
  Place<kMatrices> places[2];
  LoraFewRows ahead;
  // The number of items in the launch. In a register, it would be spilled.
  unsigned num_items;
};

// Writes the place of an item: tile `tile` of the entry `rows`.
template <int kMatrices, typename SlotOf>
__device__ void LookUp(const LoraTable& table, const LoraFewRows& rows,
                       int tile, SlotOf slot_of, Place<kMatrices>* place) {
  place->rows = rows;
#pragma unroll
  for (int k = 0; k < kMatrices; ++k) {
    const int64_t slot = slot_of(tile, k);
    place->matrices[k] = slot < 0 ? LoraMatrix() : MatrixOf(table, rows, slot);
  }
}

// Calls run(place, tile, prefetch_next) for each item of the block. `place` is
// in shared memory, because operands need the registers. Matrix k of the place
// is the matrix in slot slot_of(tile, k). If the slot is negative, matrix k has
// rank 0. `run` calls prefetch_next() once, in all threads and after a barrier.
// prefetch_next() calls prefetch(place, tile, lines) for the block's next item,
// so that its matrices arrive while this item is computed. `lines` is the
// number of cache lines that the block may prefetch. For the block's first
// item, ForItems itself calls prefetch() if HasLaterRanks(place). All threads
// of the block call ForItems.
template <int kMatrices, typename SlotOf, typename PrefetchItem, typename Run>
__device__ void ForItems(const LoraTable& table, int tiles, SlotOf slot_of,
                         PrefetchItem prefetch, Run run) {
  // A shared variable cannot have initial values, but the members of Places
  // have some. So the variable is declared as bytes.
  struct Bytes {
    alignas(16) unsigned char bytes[sizeof(Places<kMatrices>)];
  };
  __shared__ Bytes memory;
  auto& places = reinterpret_cast<Places<kMatrices>&>(memory);
  const auto tile_of = [tiles](unsigned item) {
    return static_cast<int>(item % tiles);
  };
  // Loads the block's first table entry before the kernel knows whether the
  // entry is used. The table has memory for max_few entries, so the address is
  // valid.
  const LoraFewRows first = table.few[blockIdx.x / tiles];
  const auto loaded_items = static_cast<unsigned>(*table.num_few * tiles);
  if (blockIdx.x >= loaded_items) {
    WaitForEarlierLaunches();
    return;
  }
  if (threadIdx.x == 0) {
    places.num_items = loaded_items;
    if (blockIdx.x + gridDim.x < loaded_items) {
      places.ahead = table.few[(blockIdx.x + gridDim.x) / tiles];
    }
    LookUp(table, first, tile_of(blockIdx.x), slot_of, &places.places[0]);
  }
  const auto lines = [&] {
    return places.num_items <= kFewItems ? kLinesOfFewItems : kLines;
  };
  int turn = 0;
  unsigned item = blockIdx.x;
  do {
    // Waits until the item's place is complete and no thread reads the place of
    // the previous item.
    __syncthreads();
    const unsigned next_item = item + gridDim.x;
    if (threadIdx.x == 0 && next_item < places.num_items) {
      const LoraFewRows next = places.ahead;
      if (next_item + gridDim.x < places.num_items) {
        places.ahead = table.few[(next_item + gridDim.x) / tiles];
      }
      LookUp(table, next, tile_of(next_item), slot_of,
             &places.places[1 - turn]);
    }
    const Place<kMatrices>& place = places.places[turn];
    if (item == blockIdx.x && HasLaterRanks(place)) {
      prefetch(place, tile_of(item), lines());
    }
    run(place, tile_of(item), [&] {
      if (next_item >= places.num_items) return;
      prefetch(places.places[1 - turn], tile_of(next_item), lines());
    });
    turn = 1 - turn;
    item = next_item;
  } while (item < places.num_items);
}

}  // namespace weft::kernels::cuda::few_rows

#endif  // WEFT_KERNELS_CUDA_LORA_DECODE_ITEMS_CUH_
