// The items of the kernels of lora_decode.h: the entries of the table and the
// tiles of their features, in turn.
#ifndef WEFT_KERNELS_CUDA_LORA_DECODE_ITEMS_CUH_
#define WEFT_KERNELS_CUDA_LORA_DECODE_ITEMS_CUH_

#include "kernels/cuda/lora_few_rows.cuh"

namespace weft::kernels::cuda::few_rows {

// Returns the number of blocks, if a multiprocessor holds kPerSm of them: at
// most as many as an H100 holds at a time. More would only wait for each other,
// also those that find no item, because the table has unused room.
template <int kPerSm>
int64_t DecodeGrid(const LoraTable& table, int64_t tiles) {
  constexpr int64_t kMost = int64_t{132} * kPerSm;
  const int64_t items = table.max_few * tiles;
  return items < kMost ? items : kMost;
}

// Cache lines of 128 bytes. All blocks together prefetch at most about 30 MB,
// because an H100's cache has 50 MB, and no line may be lost before it is read.
// A thread prefetches more lines if there are few items.
inline constexpr int kLine = 64;  // Elements.
inline constexpr unsigned kFewItems = 40;
inline constexpr int kLines = 3;
inline constexpr int kLinesOfFewItems = 24;

// An entry and its matrices.
template <int kMatrices>
struct Place {
  LoraFewRows rows;
  LoraMatrix matrices[kMatrices];
};

// The places of a block's item and of its next item, in turn, and the entry of
// the item after that. So one thread looks up the next item while all compute
// this one, and waits for memory only once.
template <int kMatrices>
struct Places {
  Place<kMatrices> places[2];
  LoraFewRows ahead;
};

// Calls run(place, tile, lines) for the block's items, which are an entry and
// one of its tiles. The place is in shared memory, because operands need the
// registers. Its matrices are those of the slots slot_of(tile, k), or empty if
// the slot is negative. `lines` is the number of lines that each thread may
// prefetch.
template <int kMatrices, typename SlotOf, typename Run>
__device__ void ForItems(const LoraTable& table, int tiles, SlotOf slot_of,
                         Run run) {
  // A shared variable cannot have initial values, so these are its bytes.
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
  // The table has memory for the largest number of entries. So the first entry
  // can be loaded before the kernel knows whether the entry exists.
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
    // Waits for the place, and until no thread reads the one before.
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
