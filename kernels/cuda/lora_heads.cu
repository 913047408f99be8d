#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/lora_decode_products.cuh"
#include "kernels/cuda/rotary.cuh"

namespace weft::kernels::cuda {
namespace few_rows {
namespace {

static_assert(kLoraMaxHeadFeatures <= kSpan);
constexpr int kProjections = 3;

// The arguments of a launch, with sizes that the host computes.
struct HeadsTask {
  LoraHeads heads;
  HeadGeometry geometry;
  int tile_heads = 0;  // The most heads of a tile.
};

// Blocks per multiprocessor.
constexpr int kPerSm = 2;

struct Memory {
  Slab slabs[1];
  // The expanded heads. Rows are padded, so that they start in different banks.
  alignas(16) Bf16 y[kRows][kSpan + kChunk];
  int64_t slots[kRows];
  int32_t positions[kRows];
};

// A tile: some heads of one projection.
struct HeadTile {
  int which;  // 0: q; 1: k; 2: v.
  int first;  // The first head.
  int count;
};

__device__ const HeadRows& HeadsOf(const LoraHeads& heads, int which) {
  if (which == 0) return heads.rows.q;
  return which == 1 ? heads.rows.k : heads.slots.v;
}

__host__ __device__ inline int TilesOf(const HeadRows& heads, int tile_heads) {
  return static_cast<int>((heads.num_heads + tile_heads - 1) / tile_heads);
}

// Returns a tile by its number. Tiles are numbered projection by projection.
__device__ HeadTile TileAt(const HeadsTask& task, int number) {
  int which = 0;
  int tiles = TilesOf(HeadsOf(task.heads, which), task.tile_heads);
  while (number >= tiles) {
    number -= tiles;
    tiles = TilesOf(HeadsOf(task.heads, ++which), task.tile_heads);
  }
  const int first = number * task.tile_heads;
  const int left =
      static_cast<int>(HeadsOf(task.heads, which).num_heads) - first;
  return {.which = which,
          .first = first,
          .count = left < task.tile_heads ? left : task.tile_heads};
}

// Loads the rows' slots and positions to shared memory. Without slots_T, every
// slot is -1.
__device__ void LoadPlaces(const LoraHeads& heads, const LoraFewRows& rows,
                           Memory* memory) {
  const int row = static_cast<int>(threadIdx.x);
  if (row >= rows.num_rows) return;
  const int64_t* slots = heads.slots.slots_T;
  memory->slots[row] = slots == nullptr ? -1 : slots[rows.row + row];
  memory->positions[row] = heads.rows.positions_T[rows.row + row];
}

// Writes the tile's heads to shared memory. A head is
// factor * (base product + scale S B^T) + bias. FactorOf returns the factor.
template <bool kAligned, typename PrefetchNext>
__device__ void ExpandHeads(const HeadsTask& task, const LoraFewRows& rows,
                            const LoraMatrix& b, const HeadTile& tile,
                            PrefetchNext prefetch_next, Memory* memory) {
  const LoraHeads& heads = task.heads;
  const HeadRows& in = HeadsOf(heads, tile.which);
  const int features = 2 * task.geometry.half;
  const int begin = tile.first * features;
  const int end = begin + tile.count * features;
  const int own = OwnFeature(begin);
  Chunk step[kTiles];
  LoadFirstStep<kAligned>(rows, b, end, own, step);
  FillSlabs<1>(heads.shrunk, rows, &b, memory->slabs);
  LoadPlaces(heads, rows, memory);
  // The previous launches wrote the heads and the squares, so these loads find
  // them in the cache.
  Chunk product[2];
  Squares squares[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int64_t token = rows.row + OwnRow(half);
    const bool exists = OwnRow(half) < rows.num_rows;
    product[half] = Load<kAligned>(
        static_cast<const Bf16*>(in.data) + token * in.token_stride, own, end,
        exists);
    squares[half] = LoadSquares(heads.norm, token, exists);
  }
  const Chunk bias =
      Load<kAligned>(Behind(static_cast<const Bf16*>(heads.bias_W),
                            heads.projections[tile.which].column),
                     own, end, heads.bias_W != nullptr);
  prefetch_next();
  WarpSums sums = {};
  AddExpansion<kAligned>(rows, b, memory->slabs[0], end, own, step, sums);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    if (half * kColumns >= rows.num_rows) break;
    const float factor = FactorOf(heads.norm, rows.row + OwnRow(half),
                                  OwnRow(half) < rows.num_rows, squares[half]);
    Chunk y;
#pragma unroll
    for (int i = 0; i < kChunk; ++i) {
      y.elements[i] = BitsOf(Rounded(factor * (ElementOf(product[half], i) +
                                               b.scale * SumOf(sums, half, i)) +
                                     ElementOf(bias, i)));
    }
    *reinterpret_cast<uint4*>(&memory->y[OwnRow(half)][own - begin]) = y.whole;
  }
}

// Returns where head `head` of the tile is in shared memory, and where
// PrepareHead stores it.
__device__ HeadWork<Bf16, Bf16> WorkOf(const LoraHeads& heads,
                                       const LoraFewRows& rows,
                                       const HeadTile& tile, int row, int head,
                                       int half, const Memory& memory) {
  HeadWork<Bf16, Bf16> work = {.token = row,
                               .from = &memory.y[row][head * 2 * half],
                               .rotates = tile.which < 2};
  head += tile.first;
  if (tile.which == 0) {
    work.to = HeadOf<Bf16>(heads.rows.q, rows.row + row, head);
    work.weight_C = static_cast<const Bf16*>(heads.norms.q_C);
    return work;
  }
  const bool is_k = tile.which == 1;
  work.weight_C = static_cast<const Bf16*>(heads.norms.k_C);
  if (memory.slots[row] >= 0) {
    work.page =
        PageOf<Bf16>(is_k ? heads.slots.k_pages : heads.slots.v_pages,
                     memory.slots[row], heads.rows.k.num_heads, head, half);
  }
  return work;
}

template <int kN, bool kNorm>
__global__ void __launch_bounds__(kDecodeThreads, kPerSm)
    HeadsKernel(HeadsTask task) {
  __shared__ Memory memory;
  const LoraHeads& heads = task.heads;
  int tiles = 0;
#pragma unroll
  for (int i = 0; i < kProjections; ++i) {
    tiles += TilesOf(HeadsOf(heads, i), task.tile_heads);
  }
  // PrepareHead finds the positions in shared memory, by the row's index in the
  // entry.
  RotaryRows angles = heads.rows;
  angles.positions_T = memory.positions;
  const auto slot_of = [&](int number, int /*k*/) {
    return heads.projections[TileAt(task, number).which].slot;
  };
  const auto prefetch = [&](const Place<1>& place, int number, int lines) {
    const HeadTile tile = TileAt(task, number);
    const int features = 2 * task.geometry.half;
    PrefetchB(place.rows, place.matrices[0], tile.first * features,
              (tile.first + tile.count) * features, lines);
  };
  ForItems<1>(
      heads.table, tiles, slot_of, prefetch,
      [&](const Place<1>& place, int number, const auto& prefetch_next) {
        const LoraFewRows& rows = place.rows;
        const LoraMatrix& b = place.matrices[0];
        const HeadTile tile = TileAt(task, number);
        const HeadRows& in = HeadsOf(heads, tile.which);
        const bool is_aligned =
            BIsAligned(rows, b) && task.geometry.half % (kChunk / 2) == 0 &&
            IsAligned(static_cast<const Bf16*>(in.data), in.token_stride) &&
            IsAligned(Behind(static_cast<const Bf16*>(heads.bias_W),
                             heads.projections[tile.which].column),
                      0);
        if (is_aligned) {
          ExpandHeads<true>(task, rows, b, tile, prefetch_next, &memory);
        } else {
          ExpandHeads<false>(task, rows, b, tile, prefetch_next, &memory);
        }
        __syncthreads();
        const int lanes = task.geometry.lanes;
        const int count = rows.num_rows * tile.count * lanes;
        // Whole warps stay in the loop, because PrepareHead sums over lanes.
        for (int i = static_cast<int>(threadIdx.x); i - Lane() < count;
             i += static_cast<int>(kDecodeThreads)) {
          HeadWork<Bf16, Bf16> work;
          if (i < count) {
            work = WorkOf(heads, rows, tile, i / lanes / tile.count,
                          i / lanes % tile.count, task.geometry.half, memory);
          }
          PrepareHead<kNorm, kN>(angles, task.geometry, heads.norms.eps, work);
        }
      });
}

template <int kN>
cudaError_t LaunchHeads(const LoraHeads& heads, cudaStream_t stream) {
  const auto half = static_cast<int>(heads.rows.half_features);
  const HeadsTask task = {
      .heads = heads,
      .geometry = {.lanes = LanesOf(half / kN),
                   .half = half,
                   .share = 0.5F / static_cast<float>(half)},
      .tile_heads = kSpan / (2 * half)};
  int64_t tiles = 0;
  for (const HeadRows* rows : {&heads.rows.q, &heads.rows.k, &heads.slots.v}) {
    tiles += TilesOf(*rows, task.tile_heads);
  }
  const auto kernel = heads.norms.q_C == nullptr ? HeadsKernel<kN, false>
                                                 : HeadsKernel<kN, true>;
  return LaunchEarly(kernel, DecodeGrid<kPerSm>(heads.table, tiles), 1,
                     kDecodeThreads, stream, task);
}

}  // namespace
}  // namespace few_rows

cudaError_t RunLoraHeads(const LoraHeads& heads, cudaStream_t stream) {
  using namespace few_rows;
  if (heads.table.max_few == 0 || heads.rows.half_features == 0) {
    return cudaSuccess;
  }
  const bool has_norms = heads.norms.q_C != nullptr;
  if (2 * heads.rows.half_features > kLoraMaxHeadFeatures ||
      heads.rows.dtype != DType::kBf16 ||
      (has_norms && heads.norms.dtype != DType::kBf16)) {
    return cudaErrorInvalidValue;
  }
  // The alignment of slots.v does not matter: PrepareHead reads the heads from
  // shared memory, and writes v only to the pages.
  const bool is_wide = HeadsTakePacks<Bf16>(heads.rows, heads.norms) &&
                       IsWide<Bf16>(heads.slots.k_pages, 0) &&
                       IsWide<Bf16>(heads.slots.v_pages, 0);
  return is_wide ? LaunchHeads<kWidth<Bf16>>(heads, stream)
                 : LaunchHeads<1>(heads, stream);
}

}  // namespace weft::kernels::cuda
